from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.ops.matmul import batched_matmul, block_matmul, by_row_tiles, matmul
from deepinfer.ops.quantize import round_fp8
from tests.golden import check_bits, recorded_unit

TILE = 16


@pytest.mark.golden
@pytest.mark.parametrize("group", ["gemm_fp8", "gemm_fp4"])
@pytest.mark.parametrize("row_tile", [0, TILE])
def test_quantised_product_has_the_recorded_bits(group: str, row_tile: int) -> None:
    unit = recorded_unit(group)
    product = block_matmul(round_fp8(unit["x"]).float(), unit["w_dequant"], row_tile)
    check_bits(product.bfloat16(), unit["y"], "linear")


@pytest.mark.golden
@pytest.mark.parametrize("group", ["gemm_fp8", "gemm_fp4"])
def test_scales_may_be_applied_before_or_after_a_block_is_summed(group: str) -> None:
    """The published kernel multiplies each block's sum by both scales; powers of two make the order irrelevant."""
    unit = recorded_unit(group)
    x, w = round_fp8(unit["x"]).float(), unit["w_dequant"]
    for power in (-20, 9):
        assert torch.equal(block_matmul(x * 2.0**power, w) * 2.0**-power, block_matmul(x, w))


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 33])
def test_row_tiles_cover_every_row_once(rows: int) -> None:
    x = torch.arange(rows * 3.0).view(rows, 3)
    seen = []

    def double(tile: Tensor) -> Tensor:
        seen.append(tile.shape[0])
        return tile * 2

    assert torch.equal(by_row_tiles(double, TILE, x), x * 2)
    assert set(seen) <= ({TILE} if rows else {0})


WEIGHT = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))
TILED: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda x: matmul(x, WEIGHT, TILE),
    "bfloat16": lambda x: matmul(x.bfloat16(), WEIGHT.bfloat16(), TILE),
    "in blocks": lambda x: block_matmul(x, WEIGHT, TILE),
    "batched": lambda x: batched_matmul(x.unflatten(1, (3, 32)), x.unflatten(1, (32, 3)), TILE),
}


@pytest.mark.parametrize("kind", TILED)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40), start=st.integers(0, 39))
def test_rows_in_tiles_have_the_same_bits_in_any_company(kind: str, seed: int, rows: int, start: int) -> None:
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(seed))
    together, start = TILED[kind](x), min(start, rows - 1)
    assert torch.equal(TILED[kind](x[start : start + 1]), together[start : start + 1])
    assert torch.equal(TILED[kind](x[start:]), together[start:])


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 63])
def test_products_agree_with_float64(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, 96, generator=generator), torch.randn(40, 96, generator=generator)
    exact = x.double() @ w.double().T
    for result in (matmul(x, w), matmul(x, w, TILE), block_matmul(x, w), block_matmul(x, w, TILE)):
        torch.testing.assert_close(result.double(), exact, rtol=0, atol=2e-5)
