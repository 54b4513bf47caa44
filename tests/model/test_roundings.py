"""Roundings survive the compiler, with the pass alone and with all options that the package compiles with."""

import pytest
import torch
from torch import Tensor

from deepinfer.model.compiled import INDUCTOR_OPTIONS
from deepinfer.model.roundings import KeepRoundings, round_bits

pytestmark = [
    # The compiler's own imports and settings.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
]


def values() -> Tensor:
    """Numbers of all sizes, ties in both directions, and what is no number."""
    numbers = torch.randn(64, 33, generator=torch.Generator().manual_seed(0)) * torch.logspace(-42, 38, 33)
    ties = (torch.arange(33 * 2, dtype=torch.int32) * 0x8000 + 0x3F800000).view(torch.float32).view(2, 33)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 1e-45, 1.0] * 4)[None, :33]
    return torch.cat((numbers, ties, -ties, special))


def test_bits_are_rounded_as_the_conversion_rounds() -> None:
    x = values()
    observed, expected = round_bits(x), x.bfloat16().float()
    assert torch.equal(observed.isnan(), expected.isnan())
    assert torch.equal(observed.nan_to_num(7.0), expected.nan_to_num(7.0))


def scaled_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    """A number that is rounded, stored and used again."""
    once = (x * 1.37).to(torch.bfloat16)
    return once, once.float() - (once.float() * 0.7).to(torch.bfloat16).float()


def twice_in_bfloat16(x: Tensor) -> Tensor:
    """Two operations on bfloat16 numbers, each of which rounds."""
    return x * 3 + x * x


@pytest.mark.parametrize("options", [{"joint_custom_pre_pass": KeepRoundings()}, INDUCTOR_OPTIONS], ids=["pass", "all"])
def test_compiled_code_rounds_where_the_model_does(options: dict[str, object]) -> None:
    torch.compiler.reset()
    x = values()[:64].clamp(-1e30, 1e30)
    compiled = torch.compile(scaled_twice, fullgraph=True, dynamic=True, options=options)
    for observed, expected in zip(compiled(x), scaled_twice(x), strict=True):
        assert torch.equal(observed, expected)


def test_operations_in_bfloat16_round_one_by_one() -> None:
    torch.compiler.reset()
    x = values()[:64].clamp(-1e15, 1e15).bfloat16()
    compiled = torch.compile(twice_in_bfloat16, fullgraph=True, dynamic=True, options=INDUCTOR_OPTIONS)
    assert torch.equal(compiled(x), twice_in_bfloat16(x))
