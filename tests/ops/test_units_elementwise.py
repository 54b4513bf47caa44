from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from deepinfer.ops.elementwise import rms_norm, sqrt_softplus, swiglu, without_tail
from tests.golden import recorded_unit
from tests.tolerances import check_close


@pytest.mark.golden
def test_rms_norm_gives_the_recorded_values() -> None:
    unit = recorded_unit("rmsnorm")
    check_close(rms_norm(unit["x"], unit["w"], 1e-20), unit["y"], "rms norm", "float32")


@pytest.mark.golden
def test_a_larger_epsilon_is_seen() -> None:
    """`rms_norm_eps` is below what logits show: the unit holds rows that are small enough."""
    unit = recorded_unit("rmsnorm")
    assert (rms_norm(unit["x"], unit["w"], 1e-6) - unit["y"]).abs().max() > 0.1


def test_rms_norm_rounds_once() -> None:
    x, gain = torch.randn(5, 96).bfloat16(), torch.randn(96).bfloat16()
    assert torch.equal(rms_norm(x, gain, 1e-20), rms_norm(x.float(), gain.float(), 1e-20).bfloat16())


def test_limit_clamps_up_on_both_sides_and_gate_from_above_only() -> None:
    big = torch.tensor([100.0, -100.0])
    assert torch.equal(swiglu(torch.full((2,), 2.0), big, 3.0), nn.functional.silu(torch.tensor(2.0)) * big.clamp(-3, 3))
    assert torch.equal(swiglu(big, torch.ones(2), 3.0), nn.functional.silu(torch.tensor([3.0, -100.0])))
    assert torch.equal(swiglu(big, big, 0.0), nn.functional.silu(big) * big)


@pytest.mark.parametrize("fn", [torch.sigmoid, nn.functional.silu, sqrt_softplus], ids=lambda fn: fn.__name__)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 300), start=st.integers(0, 299))
def test_without_a_tail_a_value_does_not_depend_on_its_place(
    fn: Callable[[Tensor], Tensor], seed: int, count: int, start: int
) -> None:
    x = 5 * torch.randn(count, generator=torch.Generator().manual_seed(seed))
    start = min(start, count - 1)
    together = without_tail(fn, x)
    assert torch.equal(without_tail(fn, x[start:]), together[start:])
    assert torch.equal(without_tail(fn, x[start : start + 1].clone()), together[start : start + 1])
    torch.testing.assert_close(together, fn(x), rtol=1e-6, atol=0)
