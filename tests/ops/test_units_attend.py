import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.ops.attend import BLOCK, attend
from tests.golden import check_bits, recorded_unit
from tests.tolerances import check_close

TILE = 16


def listed_rows(unit: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, their lists of rows and which places are taken, packed."""
    ids = unit["idx"].long()
    kv = torch.stack([rows[chosen.clamp(min=0)] for rows, chosen in zip(unit["kv"], ids, strict=True)])
    return unit["q"].flatten(0, 1), kv.flatten(0, 1), (ids >= 0).flatten(0, 1)


def exact_attention(q: Tensor, kv: Tensor, visible: Tensor, sink: Tensor, scale: float) -> Tensor:
    """The formula in float64, all places at once."""
    scores = (torch.einsum("thd,tsd->ths", q.double(), kv.double()) * scale).masked_fill(~visible[:, None], float("-inf"))
    largest = torch.maximum(scores.amax(dim=-1, keepdim=True), sink.double()[None, :, None])
    weights, rest = torch.exp(scores - largest), torch.exp(sink.double()[None, :, None] - largest)
    return torch.einsum("ths,tsd->thd", weights, kv.double()) / (weights.sum(dim=-1, keepdim=True) + rest)


@pytest.mark.golden
@pytest.mark.parametrize("row_tile", [0, TILE])
def test_attention_in_float32_gives_the_recorded_values(row_tile: int) -> None:
    unit = recorded_unit("sparse_attn")
    q, kv, visible = listed_rows(unit)
    out = attend(q, kv, visible, unit["sink"], float(unit["scale"]), row_tile)
    check_close(out, unit["out_f32"].flatten(0, 1), "attention", "float32")


@pytest.mark.golden
@pytest.mark.parametrize("row_tile", [0, TILE])
def test_attention_in_bfloat16_has_the_recorded_bits(row_tile: int) -> None:
    unit = recorded_unit("sparse_attn")
    q, kv, visible = listed_rows(unit)
    out = attend(q.bfloat16(), kv.bfloat16(), visible, unit["sink"], float(unit["scale"]), row_tile)
    check_bits(out, unit["out_bf16"].flatten(0, 1), "attention")


@given(seed=st.integers(0, 2**32 - 1), places=st.sampled_from([1, 2, 63, 64, 65, 130]), hidden=st.floats(0, 1))
def test_attention_agrees_with_the_formula_in_float64(seed: int, places: int, hidden: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, kv = 3 * torch.randn(3, 2, 32, generator=generator), torch.randn(3, places, 32, generator=generator)
    visible = torch.rand(3, places, generator=generator) >= hidden
    sink = torch.randn(2, generator=generator)
    out = attend(q, kv, visible, sink, 32**-0.5)
    torch.testing.assert_close(out.double(), exact_attention(q, kv, visible, sink, 32**-0.5), rtol=0, atol=3e-6)


def test_invisible_places_may_hold_anything() -> None:
    q, kv, visible = torch.randn(2, 3, 32), torch.randn(2, 70, 32), torch.rand(2, 70) < 0.5
    poisoned = kv.masked_fill(~visible[:, :, None], float("nan"))
    sink = torch.zeros(3)
    assert torch.equal(attend(q, poisoned, visible, sink, 0.2), attend(q, kv, visible, sink, 0.2))


def test_row_that_sees_nothing_gives_zeros() -> None:
    nothing = torch.zeros(1, BLOCK + 1, dtype=torch.bool)
    out = attend(torch.randn(1, 2, 32), torch.full((1, BLOCK + 1, 32), float("nan")), nothing, torch.zeros(2), 0.2)
    assert torch.equal(out, torch.zeros(1, 2, 32))


def test_sink_takes_weight_but_gives_no_value() -> None:
    q, kv = torch.zeros(1, 1, 32), torch.ones(1, 1, 32)
    seen = torch.ones(1, 1, dtype=torch.bool)
    # Score 0 against a sink of log 3: the value keeps a quarter.
    out = attend(q, kv, seen, torch.tensor([3.0]).log(), 0.2)
    torch.testing.assert_close(out, kv / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_tiles_have_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    q, kv, visible = torch.randn(37, 4, 32).to(dtype), torch.randn(37, 70, 32).to(dtype), torch.rand(37, 70) < 0.7
    sink = torch.randn(4)
    together = attend(q, kv, visible, sink, 0.2, TILE)
    for row in (0, 15, 16, 36):
        alone = attend(q[row : row + 1], kv[row : row + 1], visible[row : row + 1], sink, 0.2, TILE)
        assert torch.equal(alone[0], together[row])
