"""Weights in operand order: checkpoint tensors to the words that the kernels load, and back. Pure PyTorch.

A row's scales go into float16 operands, which hold `code * 2^d` exactly for a limited range of d. `fp8_obstacle` and
`fp4_obstacle` say why a matrix does not fit; such a matrix stays in its checkpoint layout and takes a slower exact path.
Blocks of zeros fit any range: their scale is replaced by one that others have.

Letters of the layouts, outermost first where they are combined into a row or channel:
row = (tile, n16, rr, g) with 16 rows in an operand, rr their upper or lower half, g one of 8 rows;
channel = (T, q, j, ...) with T a run of 128 (FP8) or 256 (FP4, two runs u), q the block of 32, j its words.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from deepinfer.dims import Int, Shaped, Tensor, UInt8
from deepinfer.errors import ShapeError
from deepinfer.ops.formats import BLOCK

FP8_ROWS, FP8_CHANNELS = 64, 128  # a packed FP8 matrix consists of tiles of this size
FP4_ROWS, FP4_CHANNELS = 128, 256
FP4_WARPS = 4  # of the kernel: scale words that one thread needs lie together
SCALE_BIAS = 127
# The largest scale of a row becomes 2^7 (448 * 2^7 is below float16's 65504); 2^-15 still keeps the least code, 2^-9.
FP8_TOP, FP8_SPREAD = 7, 22
# e2m1 values from 0.5 * 2^-13 (the least normal float16) to 6 * 2^13.
FP4_TOP, FP4_SPREAD = 13, 26
# e4m3 bits moved into a bfloat16 give the value times 2^-120; the scale word puts that right.
BF16_SHIFT = 120
E4M3_NAN = 0x7F
# Place of the sign of code e in a packed FP4 word: where the decoder needs it after one shift.
SIGN_BITS = (7, 15, 23, 31, 3, 11, 19, 27)
FP4_SIGNS = tuple(range(3, 32, 4))  # their places in the checkpoint
MAGNITUDES = 0x77777777

LAYOUTS = OPERAND_ORDER, CHECKPOINT_ORDER = "operand order", "checkpoint order"

MMA_SYNC, WGMMA = 2, 3  # the instructions that multiply tiles of 8 tokens, and of 16 and more

# Between the products of an expert values are kept as float16 times 2^8.
LARGEST_HIDDEN = 255.0


class PackedMatrix(NamedTuple):
    """A matrix `[N, K]`, or a stack of them, as the kernels load it."""

    words: Int[Tensor, "*stack tiles"]  # int32, codes
    scales: Int[Tensor, "*stack more"]  # int32, what the decoder needs of each block's scale
    exponents: UInt8[Tensor, "*stack N"]  # biased exponent that is applied to a row's sum


def layout_for(capability: tuple[int, int]) -> str:
    """How weights lie in memory for the kernels of a device, one of `LAYOUTS`.

    Tensor cores of compute capability 10 multiply block-scaled codes themselves and take them as the checkpoint has them.
    """
    return CHECKPOINT_ORDER if capability[0] == 10 else OPERAND_ORDER


def hidden_bound(swiglu_limit: float, largest_weight: float) -> float:
    """Largest |silu(gate) * up * weight| behind a clamp to `swiglu_limit`; infinite without a clamp."""
    return swiglu_limit**2 * largest_weight if swiglu_limit > 0 else float("inf")


def channel_places(k: int, instruction: int) -> Int[Tensor, " K"]:
    """Place of each channel in an activation row as the kernels read it; int64."""
    c = torch.arange(k)
    if instruction == MMA_SYNC:
        return (c & -128) | ((c & 28) << 2) | ((c & 96) >> 3) | (c & 3)
    return (c & -128) | ((c & 28) << 2) | ((c & 2) << 2) | ((c & 96) >> 4) | (c & 1)


def permute_channels(x: Shaped[Tensor, "... K"], instruction: int = WGMMA) -> Shaped[Tensor, "... K"]:
    """Activations in the kernels' channel order: channel k goes to `channel_places(K)[k]`. K must be a multiple of 128."""
    v = x.unflatten(-1, (-1, 4, 8, 2, 2))  # T q j h i
    tail = (-4, -2, -1) if instruction == MMA_SYNC else (-2, -4, -1)
    return v.permute(*range(v.ndim - 5), -5, -3, *tail).flatten(-5)


def pad_to_tiles(
    weight: Shaped[Tensor, "*s N w"], scale: UInt8[Tensor, "*s Nb Kb"], rows: int, channels: int
) -> tuple[Shaped[Tensor, "*s Np wp"], UInt8[Tensor, "*s Nbp Kbp"]]:
    """Weight and scale bytes with zeros behind them, up to whole multiples of `rows` and `channels`.

    Zeros add nothing to any sum; `used_exponents` gives them a scale that fits. `scale` tells how many rows and channels the
    bytes stand for: one of its columns for 32 channels, one of its rows for 1 (FP4) or 32 (FP8).
    """
    is_fp4 = weight.dtype != torch.float8_e4m3fn
    n, k = weight.shape[-2], weight.shape[-1] * (2 if is_fp4 else 1)
    more_rows, more_channels = -n % rows, -k % channels
    if not more_rows and not more_channels:
        return weight, scale
    padded = F.pad(weight.view(torch.uint8), (0, more_channels // (2 if is_fp4 else 1), 0, more_rows)).view(weight.dtype)
    per_scale = 1 if is_fp4 else BLOCK
    missing = (k + more_channels) // BLOCK - scale.shape[-1], (n + more_rows) // per_scale - scale.shape[-2]
    return padded, F.pad(scale, (0, missing[0], 0, missing[1]))


def interleave_rows(gate: Shaped[Tensor, "*s F w"], up: Shaped[Tensor, "*s F w"]) -> Shaped[Tensor, "*s two_F w"]:
    """8 rows of one, 8 of the other, and so on: gate and up of a channel then meet in one thread."""
    return torch.stack([gate.unflatten(-2, (-1, 8)), up.unflatten(-2, (-1, 8))], dim=-3).flatten(-4, -2)


def separate_rows(both: Shaped[Tensor, "*s two_F w"]) -> tuple[Shaped[Tensor, "*s F w"], Shaped[Tensor, "*s F w"]]:
    """Undo `interleave_rows`."""
    gate, up = both.unflatten(-2, (-1, 2, 8)).unbind(-3)
    return gate.flatten(-3, -2), up.flatten(-3, -2)


def used_exponents(scale: Shaped[Tensor, "*s R Kb"], is_zero: Shaped[Tensor, "*s R Kb"]) -> Int[Tensor, "*s R Kb"]:
    """Scale bytes as int32, where a block of zeros gets the largest scale of its row (that of 1 in a row of zeros)."""
    stored = scale.view(torch.uint8).to(torch.int32)
    top = torch.where(is_zero, -1, stored).amax(dim=-1, keepdim=True)
    return torch.where(is_zero, torch.where(top < 0, SCALE_BIAS, top), stored)


def fp8_exponents(weight: Shaped[Tensor, "N K"], scale: Shaped[Tensor, "Nb Kb"]) -> Int[Tensor, "Nb Kb"]:
    """`used_exponents` of an FP8 matrix."""
    n, k = weight.shape
    blocks = (weight.view(torch.uint8) & E4M3_NAN).view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    return used_exponents(scale, (blocks == 0).all(dim=3).all(dim=1))


def fp4_exponents(weight: Shaped[Tensor, "*s N half"], scale: Shaped[Tensor, "*s N Kb"]) -> Int[Tensor, "*s N Kb"]:
    """`used_exponents` of an FP4 matrix."""
    magnitudes = weight.view(torch.int32).unflatten(-1, (-1, BLOCK // 8)) & MAGNITUDES
    return used_exponents(scale, (magnitudes == 0).all(dim=-1))


def fp8_obstacle(weight: Shaped[Tensor, "N K"], scale: Shaped[Tensor, "Nb Kb"], bf16: bool = False) -> str | None:
    """Why `pack_fp8` with these arguments would not be exact, or None."""
    n, k = weight.shape
    if n % FP8_ROWS or k % FP8_CHANNELS:
        return f"its shape {n} x {k} is not a multiple of {FP8_ROWS} x {FP8_CHANNELS}"
    if bool(((weight.view(torch.uint8) & E4M3_NAN) == E4M3_NAN).any()):
        return "it contains NaN"
    exponents = fp8_exponents(weight, scale)
    if bf16:
        low, high = (int(e) - SCALE_BIAS for e in exponents.aminmax())
        # Factor and least operand (2^-9 times the scale) are normal bfloat16 numbers.
        is_normal = low - 9 >= -126 and high + BF16_SHIFT <= 127
        return None if is_normal else f"its scales from 2^{low} to 2^{high} are too extreme"
    return spread_obstacle(exponents, FP8_SPREAD, FP8_TOP)


def fp4_obstacle(weight: Shaped[Tensor, "*s N half"], scale: Shaped[Tensor, "*s N Kb"]) -> str | None:
    """Why `pack_fp4` would not be exact, or None."""
    n, k = weight.shape[-2], 2 * weight.shape[-1]
    if n % FP4_ROWS or k % FP4_CHANNELS:
        return f"its shape {n} x {k} is not a multiple of {FP4_ROWS} x {FP4_CHANNELS}"
    return spread_obstacle(fp4_exponents(weight, scale), FP4_SPREAD, FP4_TOP)


def spread_obstacle(exponents: Int[Tensor, "*s R Kb"], spread: int, top: int) -> str | None:
    """What is wrong with scales of which each row has to fit into `spread` powers of two below its largest."""
    largest = exponents.amax(dim=-1)
    found = int((largest - exponents.amin(dim=-1)).max())
    if found > spread:
        return f"the scales of a row spread over {found} powers of two, more than {spread}"
    return None if int(largest.min()) > top else "its scales are too small"


def pack_fp8(weight: Shaped[Tensor, "N K"], scale: Shaped[Tensor, "Nb Kb"], bf16: bool = False) -> PackedMatrix:
    """Pack a float8_e4m3fn matrix with e8m0 scales of 32x32 tiles: words `[N/64, K/64, 1024]`, scales `[N/32, K/32]`.

    A tile's words lie in the order (n16, g) of threads within (T, jh, rr), so that a load of a warp is contiguous. A scale word
    holds the factor twice, because two weights are scaled at once.

    Args:
        bf16: the activations will be bfloat16, and weights become bfloat16 operands; any scale fits then.
    Raises: ShapeError if the matrix has an obstacle.
    """
    if obstacle := fp8_obstacle(weight, scale, bf16):
        raise ShapeError(f"an FP8 matrix cannot be packed: {obstacle}")
    n, k = weight.shape
    words = weight.contiguous().view(torch.int32).view(n // 64, 4, 2, 8, k // 128, 4, 2, 4)  # tile n16 rr g T q jh jl
    words = words.permute(0, 4, 6, 2, 1, 3, 5, 7).reshape(n // 64, k // 64, 1024)  # tile T jh rr n16 g q jl
    exponents = fp8_exponents(weight, scale)
    if bf16:
        unit = torch.full((n,), SCALE_BIAS, dtype=torch.uint8, device=weight.device)
        return PackedMatrix(words, ((exponents + BF16_SHIFT) << 7) * 0x00010001, unit)
    top = exponents.amax(dim=1, keepdim=True)
    power = exponents - top + FP8_TOP
    # The high byte of float16 2^power; 2^-15 is subnormal.
    high_byte = torch.where(power >= -14, (power + 15) << 2, 2)
    rows = (top[:, 0] - FP8_TOP).repeat_interleave(BLOCK).to(torch.uint8)
    return PackedMatrix(words, high_byte * 0x01000100, rows)


def unpack_fp8(packed: PackedMatrix, bf16: bool = False) -> tuple[Shaped[Tensor, "N K"], UInt8[Tensor, "Nb Kb"]]:
    """The checkpoint's weight and scale bytes again, bit for bit except for the scales of blocks of zeros."""
    tiles, runs = packed.words.shape[:2]
    n, k = tiles * 64, runs * 64
    words = packed.words.view(tiles, k // 128, 2, 2, 4, 8, 4, 4).permute(0, 4, 3, 5, 1, 6, 2, 7)  # tile n16 rr g T q jh jl
    weight = words.reshape(n, k // 4).view(torch.float8_e4m3fn)
    if bf16:
        exponents = ((packed.scales & 0xFFFF) >> 7) - BF16_SHIFT
    else:
        high_byte = (packed.scales >> 8) & 0xFF
        power = torch.where(high_byte == 2, -15, (high_byte >> 2) - 15)
        exponents = power + packed.exponents[::BLOCK, None].to(torch.int32)
    return weight, exponents.to(torch.uint8)


def pack_fp4(weight: Shaped[Tensor, "*s N half"], scale: Shaped[Tensor, "*s N Kb"]) -> PackedMatrix:
    """Pack int8 pairs of e2m1 codes with e8m0 scales of 32 channels: words `[*s, N/128, K/256, 4096]`, scales `[.., 256]`.

    The stored bytes already hold eight consecutive codes a word, lowest nibble first; only the signs move (`SIGN_BITS`).
    A scale word serves the four blocks (u, rr) that a thread decodes together, one byte of `4 * power` each: that is what the
    float16 exponent of every entry of the decoder's table is raised by.

    Raises: ShapeError if the matrix has an obstacle.
    """
    if obstacle := fp4_obstacle(weight, scale):
        raise ShapeError(f"an FP4 matrix cannot be packed: {obstacle}")
    *stack, n, half = weight.shape
    k, tiles = 2 * half, n // FP4_ROWS
    codes = weight.contiguous().view(torch.int32).view(-1, tiles, 8, 2, 8, k // 256, 2, 4, 4)  # s tile n16 rr g T u q j
    words = move_bits(codes, FP4_SIGNS, SIGN_BITS).permute(0, 1, 5, 6, 3, 2, 4, 7, 8)  # s tile T u rr n16 g q j
    exponents = fp4_exponents(weight, scale)
    top = exponents.amax(dim=-1, keepdim=True)
    raised = ((exponents - top + FP4_SPREAD) * 4).view(-1, tiles, 8, 2, 8, k // 256, 2, 4)  # s tile n16 rr g T u q
    raised = raised.permute(0, 1, 2, 4, 5, 7, 6, 3).reshape(-1, tiles, 8, 8, k // 256, 4, 4)  # s tile n16 g T q (u rr)
    scales = sum((raised[..., i] << (8 * i) for i in range(1, 4)), raised[..., 0])
    # n16 = (rep, warp): the words that one thread needs side by side.
    scales = scales.unflatten(2, (-1, FP4_WARPS)).permute(0, 1, 5, 3, 4, 6, 2)  # s tile T warp g q rep
    return PackedMatrix(
        words.reshape(*stack, tiles, k // 256, 4096),
        scales.reshape(*stack, tiles, k // 256, 256),
        (top[..., 0] - FP4_TOP).to(torch.uint8),
    )


def unpack_fp4(packed: PackedMatrix) -> tuple[Shaped[Tensor, "*s N half"], UInt8[Tensor, "*s N Kb"]]:
    """The checkpoint's weight and scale bytes again, bit for bit except for the scales of blocks of zeros."""
    *stack, tiles, runs, _ = packed.words.shape
    n, k = tiles * FP4_ROWS, runs * FP4_CHANNELS
    words = packed.words.view(-1, tiles, runs, 2, 2, 8, 8, 4, 4)  # s tile T u rr n16 g q j
    codes = move_bits(words, SIGN_BITS, FP4_SIGNS).permute(0, 1, 5, 4, 6, 2, 3, 7, 8)  # s tile n16 rr g T u q j
    scales = packed.scales.view(-1, tiles, runs, FP4_WARPS, 8, 4, 8 // FP4_WARPS)  # s tile T warp g q rep
    scales = scales.permute(0, 1, 6, 3, 4, 2, 5)  # s tile rep warp g T q
    raised = torch.stack([(scales >> (8 * i)) & 0xFF for i in range(4)], dim=-1).view(*scales.shape, 2, 2)  # .. u rr
    raised = raised.flatten(2, 3).permute(0, 1, 2, 7, 3, 4, 6, 5)  # s tile n16 rr g T u q
    power = raised.reshape(*stack, n, k // BLOCK) // 4 - FP4_SPREAD + FP4_TOP
    exponents = power + packed.exponents[..., None].to(torch.int32)
    weight = codes.reshape(*stack, n, k // 8).view(torch.int8)
    return weight, exponents.to(torch.uint8)


def move_bits(words: Int[Tensor, "..."], sources: tuple[int, ...], places: tuple[int, ...]) -> Int[Tensor, "..."]:
    """int32 words whose bits at `sources` stand at `places` instead; those places held other moved bits."""
    moved = words & MAGNITUDES
    for source, place in zip(sources, places, strict=True):
        moved = moved | (((words >> source) & 1) << place)
    return moved
