"""Packing loses nothing, and a reading of the packed words by the decoder's rules gives the checkpoint's values."""

import pytest
import torch

from deepinfer.errors import ShapeError
from deepinfer.ops.formats import dequantize_fp4, dequantize_fp8
from deepinfer.ops.triton_kernels import packing
from deepinfer.ops.triton_kernels.packing import (
    MMA_SYNC,
    WGMMA,
    channel_places,
    fp4_obstacle,
    fp8_obstacle,
    interleave_rows,
    pack_fp4,
    pack_fp8,
    permute_channels,
    separate_rows,
    unpack_fp4,
    unpack_fp8,
)
from tests.kernels import random_fp4, random_fp8


@pytest.mark.parametrize("instruction", [MMA_SYNC, WGMMA])
def test_places_of_channels_are_a_permutation_within_each_128(instruction: int) -> None:
    places, x = channel_places(384, instruction), torch.arange(384)
    assert torch.equal(places.sort().values, x)
    assert torch.equal(places // 128, x // 128)
    assert torch.equal(permute_channels(x, instruction)[places], x)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (192, 384)])
def test_fp8_packing_and_its_inverse_give_the_same_bytes(n: int, k: int, bf16: bool) -> None:
    weight, scale = random_fp8(n, k, spread=22)
    again, scale_again = unpack_fp8(pack_fp8(weight, scale, bf16), bf16)
    assert torch.equal(again.view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(scale_again.view(torch.uint8), scale.view(torch.uint8))


@pytest.mark.parametrize("stack", [(), (3,)])
@pytest.mark.parametrize(("n", "k"), [(128, 256), (256, 768)])
def test_fp4_packing_and_its_inverse_give_the_same_bytes(n: int, k: int, stack: tuple[int, ...]) -> None:
    weight, scale = random_fp4(n, k, stack, spread=26)
    again, scale_again = unpack_fp4(pack_fp4(weight, scale))
    assert torch.equal(again, weight)
    assert torch.equal(scale_again.view(torch.uint8), scale.view(torch.uint8))


def test_a_row_of_experts_packs_like_each_expert_alone() -> None:
    weight, scale = random_fp4(128, 256, (2,))
    together = pack_fp4(weight, scale)
    for i in range(2):
        alone = pack_fp4(weight[i], scale.view(torch.uint8)[i].view(scale.dtype))
        assert all(torch.equal(a[i], b) for a, b in zip(together, alone, strict=True))


def test_interleaved_rows_alternate_by_eight() -> None:
    gate, up = torch.arange(32).view(1, 16, 2), torch.arange(32).view(1, 16, 2) + 100
    both = interleave_rows(gate, up)
    assert torch.equal(both[0, :, 0], torch.tensor([*range(0, 16, 2), *range(100, 116, 2), *range(16, 32, 2), *range(116, 132, 2)]))
    assert all(torch.equal(a, b) for a, b in zip(separate_rows(both), (gate, up), strict=True))


def operand_fp8(packed: packing.PackedMatrix, bf16: bool) -> torch.Tensor:
    """What a kernel multiplies with, `[N, K]` in its channel order (wgmma): thread by thread, by the decoder's own rules."""
    tiles, runs = packed.words.shape[:2]
    operand = torch.empty(tiles * 64, runs * 64, dtype=torch.float64)
    for tile in range(tiles):
        for run in range(runs):
            words = packed.words[tile, run].view(2, 4, 8, 4, 4)  # rr n16 g q jl
            for rr in range(2):
                for n16 in range(4):
                    row = tile * 64 + n16 * 16 + rr * 8
                    block = packed.scales[row // 32, (run // 2) * 4 : (run // 2) * 4 + 4]  # one word for each q
                    halves = (block & 0xFFFF).to(torch.int16).view(torch.bfloat16 if bf16 else torch.float16).double()
                    codes = words[rr, n16].contiguous().view(torch.float8_e4m3fn).double().view(8, 4, 4, 2, 2)  # g q jl h i
                    scaled = codes * halves.view(4, 1, 1, 1) * (2.0**-packing.BF16_SHIFT if bf16 else 1.0)
                    operand[row : row + 8, run * 64 : run * 64 + 64] = scaled.permute(0, 2, 3, 1, 4).reshape(8, 64)
    return operand * torch.exp2(packed.exponents.double() - 127)[:, None]


@pytest.mark.parametrize("bf16", [False, True])
def test_the_fp8_operand_holds_the_exact_values_in_the_order_of_the_activations(bf16: bool) -> None:
    weight, scale = random_fp8(128, 256, spread=22)
    expected = permute_channels(dequantize_fp8(weight, scale), WGMMA).double()
    assert torch.equal(operand_fp8(pack_fp8(weight, scale, bf16), bf16), expected)


def operand_fp4(packed: packing.PackedMatrix, instruction: int) -> torch.Tensor:
    """The same for FP4, with the decoder's byte table: one order of words serves both instructions."""
    order = (0, 2, 3, 1, 4, 5) if instruction == MMA_SYNC else (0, 2, 3, 4, 1, 5)  # g j h0 then q h i, or h q i
    tiles, runs = packed.words.shape[:2]
    table = torch.tensor([0x00, 0x04, 0x08, 0x0A, 0x0C, 0x0E, 0x10, 0x12])  # high bytes of float16 e2m1 * 2^-13
    operand = torch.empty(tiles * 128, runs * 256, dtype=torch.float64)
    for tile in range(tiles):
        for run in range(runs):
            words = packed.words[tile, run].view(2, 2, 8, 8, 4, 4)  # u rr n16 g q j
            scales = packed.scales[tile, run].view(4, 8, 4, 2)  # warp g q rep
            for u, rr, n16 in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(8)).tolist():
                raised = (scales[n16 % 4, :, :, n16 // 4] >> (8 * (2 * u + rr))) & 0xFF  # g q
                w = words[u, rr, n16]  # g q j
                magnitude = torch.stack([(w >> (4 * e)) & 7 for e in range(8)], -1)
                # The decoder or-s the word to the bytes of codes 0 to 3, and the word moved up by 4 to those of 4 to 7.
                sign = torch.stack([(w >> (8 * (e % 4) + (7 if e < 4 else 3))) & 1 for e in range(8)], -1)
                high = torch.where(magnitude > 0, table[magnitude] + raised[:, :, None, None], 0) | (sign << 7)
                value = (high << 8).to(torch.int16).view(torch.float16).double().view(8, 4, 4, 2, 2, 2)  # g q j h0 h i
                row = tile * 128 + n16 * 16 + rr * 8
                channels = slice(run * 256 + u * 128, run * 256 + u * 128 + 128)
                operand[row : row + 8, channels] = value.permute(order).reshape(8, 128)
    return operand * torch.exp2(packed.exponents.double() - 127)[:, None]


@pytest.mark.parametrize("instruction", [MMA_SYNC, WGMMA])
def test_the_fp4_operand_holds_the_exact_values_in_the_order_of_the_activations(instruction: int) -> None:
    weight, scale = random_fp4(128, 512, spread=26)
    expected = permute_channels(dequantize_fp4(weight, scale), instruction).double()
    assert torch.equal(operand_fp4(pack_fp4(weight, scale), instruction), expected)


def test_scales_too_spread_for_the_operands_are_refused_with_the_reason() -> None:
    assert fp8_obstacle(*random_fp8(64, 128, spread=22)) is None
    weight, scale = random_fp8(64, 128, spread=23)
    assert "spread over 23" in str(fp8_obstacle(weight, scale))
    assert fp8_obstacle(weight, scale, bf16=True) is None
    with pytest.raises(ShapeError, match="cannot be packed: the scales of a row spread over 23"):
        pack_fp8(weight, scale)
    assert fp4_obstacle(*random_fp4(128, 256, spread=26)) is None
    with pytest.raises(ShapeError, match="spread over 27"):
        pack_fp4(*random_fp4(128, 256, spread=27))


def test_other_obstacles_are_named() -> None:
    weight, scale = random_fp8(64, 128)
    assert "multiple" in str(fp8_obstacle(weight[:32], scale[:1]))
    small = torch.full_like(scale.view(torch.uint8), 7).view(scale.dtype)
    assert "too small" in str(fp8_obstacle(weight, small))
    assert "too extreme" in str(fp8_obstacle(weight, small, bf16=True))
    weight.view(torch.uint8)[3, 5] = 0xFF
    assert "NaN" in str(fp8_obstacle(weight, scale))
    fp4, fp4_scale = random_fp4(128, 256)
    assert "multiple" in str(fp4_obstacle(fp4[:64], fp4_scale.view(torch.uint8)[:64].view(fp4_scale.dtype)))


def test_blocks_of_zeros_may_have_any_scale() -> None:
    weight, scale = random_fp8(64, 128)
    weight.view(torch.uint8)[:32, 32:64] = 0x80  # minus zero
    scale.view(torch.uint8)[0, 1] = 0
    again, scale_again = unpack_fp8(pack_fp8(weight, scale))
    assert torch.equal(again.view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(dequantize_fp8(again, scale_again), dequantize_fp8(weight, scale))
    fp4, fp4_scale = random_fp4(128, 256)
    fp4[5], fp4[6, :16] = 0, 0
    fp4_scale.view(torch.uint8)[5:7, 0] = 0
    fp4_scale.view(torch.uint8)[5] = 1
    again, scale_again = unpack_fp4(pack_fp4(fp4, fp4_scale))
    assert torch.equal(again, fp4)
    assert torch.equal(dequantize_fp4(again, scale_again), dequantize_fp4(fp4, fp4_scale))
