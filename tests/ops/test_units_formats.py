import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.ops.formats import (
    decode_e2m1,
    decode_e8m0,
    dequantize_fp4,
    dequantize_fp8,
    dequantize_rows_fp8,
    encode_e8m0,
    quantize_fp4,
    quantize_fp8,
    quantize_rows_fp8,
)
from tests.golden import recorded_unit

FP8_NAN_CODES = (0x7F, 0xFF)

seeds = st.integers(0, 2**32 - 1)


def draw_fp8_matrix(seed: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random codes without NaN, and a random power of two for each tile."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator).to(torch.uint8)
    for nan in FP8_NAN_CODES:
        codes[codes == nan] = 0x40
    codes[::32, ::32] = 0x7E  # the largest code, so that a tile keeps its scale
    exponents = torch.randint(113, 140, (-(-rows // 32), -(-columns // 32)), generator=generator)
    return codes.view(torch.float8_e4m3fn), exponents.to(torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.golden
def test_fp8_weights_decode_to_the_recorded_values_up_to_the_ragged_edge() -> None:
    unit = recorded_unit("gemm_fp8")
    weight, scale = unit["w"].view(torch.float8_e4m3fn), unit["w_scale_e8m0"].view(torch.float8_e8m0fnu)
    assert unit["w"].shape[0] % 32, "the last row of tiles is cut"
    assert torch.equal(dequantize_fp8(weight, scale), unit["w_dequant"])


@pytest.mark.golden
def test_fp4_weights_decode_to_the_recorded_values() -> None:
    unit = recorded_unit("gemm_fp4")
    scale = unit["w_scale_e8m0"].view(torch.float8_e8m0fnu)
    assert torch.equal(dequantize_fp4(unit["w_packed_i8"], scale), unit["w_dequant"])


@pytest.mark.golden
def test_recorded_fp4_weights_survive_encoding() -> None:
    values = recorded_unit("gemm_fp4")["w_dequant"]
    assert torch.equal(dequantize_fp4(*quantize_fp4(values)), values)


@pytest.mark.golden
def test_recorded_activation_codes_are_what_encoding_gives() -> None:
    unit = recorded_unit("act_fp4_g32")
    codes, scale = quantize_fp4(unit["x"].float())
    assert torch.equal(codes.view(torch.uint8), unit["packed"])
    assert torch.equal(scale.view(torch.uint8), unit["scale_e8m0"])
    unit = recorded_unit("act_fp8")
    codes, scale = quantize_rows_fp8(unit["x"].float())
    assert torch.equal(codes.view(torch.uint8), unit["codes"])
    assert torch.equal(scale.view(torch.uint8), unit["scale_e8m0"])


def test_first_published_weights_decode_to_the_published_values() -> None:
    """Row 0 of the release's `layers.0.attn.wkv.weight` (specification section 12)."""
    expected = [-0.00390625, 0.03515625, -0.0390625, 0.0703125]
    weight = torch.tensor([[0xD8, 0x71, 0xF2, 0x79]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor([[0x73]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert dequantize_fp8(weight, scale)[0].tolist() == expected


def test_scale_bytes_mean_powers_of_two() -> None:
    codes = torch.arange(255, dtype=torch.uint8)
    decoded = decode_e8m0(codes.view(torch.float8_e8m0fnu))
    assert decoded.double().tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert torch.equal(encode_e8m0(decoded[1:]).view(torch.uint8), codes[1:])


def test_low_nibble_is_the_even_channel() -> None:
    codes = torch.tensor([[0x71, 0x9F]], dtype=torch.uint8).view(torch.int8)
    assert decode_e2m1(codes)[0].tolist() == [0.5, 6.0, -6.0, -0.5]


@given(seeds, st.integers(1, 3), st.integers(1, 3))
def test_fp8_matrix_survives_decoding_and_encoding(seed: int, row_tiles: int, column_tiles: int) -> None:
    weight, scale = draw_fp8_matrix(seed, 32 * row_tiles, 32 * column_tiles)
    values = dequantize_fp8(weight, scale)
    again_weight, again_scale = quantize_fp8(values)
    assert torch.equal(again_scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(dequantize_fp8(again_weight, again_scale), values)
    assert torch.equal(values.bfloat16().float(), values), "every decoded value is exact in bfloat16"


@given(seeds, st.integers(1, 5), st.integers(1, 3))
def test_fp8_rows_survive_decoding_and_encoding(seed: int, rows: int, groups: int) -> None:
    weight, _ = draw_fp8_matrix(seed, rows, 32 * groups)
    weight.view(torch.uint8)[:, ::32] = 0xFE
    scale = torch.randint(113, 140, (rows, groups), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    values = dequantize_rows_fp8(weight, scale.view(torch.float8_e8m0fnu))
    again_weight, again_scale = quantize_rows_fp8(values)
    assert torch.equal(again_weight.view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(again_scale.view(torch.uint8), scale)


@given(seeds, st.integers(1, 3), st.integers(1, 3))
def test_fp4_stack_survives_decoding_and_encoding(seed: int, rows: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (2, rows, 16 * groups), generator=generator).to(torch.int8)
    weight[..., ::16] = 0x71  # a 6 in every group, so that it keeps its scale
    scale = torch.randint(2, 250, (2, rows, groups), generator=generator).to(torch.uint8)
    values = dequantize_fp4(weight, scale.view(torch.float8_e8m0fnu))
    again_weight, again_scale = quantize_fp4(values)
    assert torch.equal(again_weight, weight)
    assert torch.equal(again_scale.view(torch.uint8), scale)


@given(seeds, st.floats(1e-3, 1e3))
def test_encoding_loses_at_most_half_a_step(seed: int, magnitude: float) -> None:
    values = magnitude * torch.randn(64, 96, generator=torch.Generator().manual_seed(seed))
    decoded = dequantize_fp8(*quantize_fp8(values))
    scale = decode_e8m0(quantize_fp8(values)[1]).repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert ((decoded - values).abs() <= torch.maximum(values.abs() * 2.0**-4, scale * 2.0**-10)).all()
    decoded, scale = dequantize_fp4(*quantize_fp4(values)), decode_e8m0(quantize_fp4(values)[1]).repeat_interleave(32, 1)
    assert ((decoded - values).abs() <= scale).all()


def test_zeros_encode_to_zeros() -> None:
    zeros = torch.zeros(32, 64)
    for decoded in (dequantize_fp8(*quantize_fp8(zeros)), dequantize_fp4(*quantize_fp4(zeros))):
        assert torch.equal(decoded, zeros)
