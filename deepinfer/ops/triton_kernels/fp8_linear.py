"""`y = x W^T` for FP8 weights, with activations that are quantised (`fp8_linear`) or stay bfloat16 (`fp8_linear_bf16`, wo_a).

The plain twins are `ops.matmul.block_matmul` of `round_fp8(x)` and `ops.matmul.matmul`. A program computes ROWS rows of W for
TOKENS tokens: it loads packed words, decodes them to an operand, multiplies with wgmma, and applies the exponents of rows and
tokens to the float32 sums at the end.

Few rows would leave most of the GPU idle, so the channels may be split over programs (`split_of`). Their partial sums are added
in ascending order: with few tokens by the program that arrives last, else by a second kernel, with the same bits.

Bits depend on the weight's shape only, through the split; except that calls which need not be batch-invariant split less where
many tokens make programs enough. TOKENS, ROWS and the launch options follow the batch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import ShapeError
from deepinfer.ops.triton_kernels.decode import fp8_tile, power_of_two, wait_for_product
from deepinfer.ops.triton_kernels.launch import launch_options
from deepinfer.ops.triton_kernels.packing import FP8_CHANNELS, FP8_ROWS

ENOUGH_PROGRAMS = 256  # two for each of an H200's 132 processors
LEAST_RUNS = 5  # of 128 channels in a split: shorter ones do not pay for their partial sums
LAST_ARRIVAL_TOKENS = 16  # up to here the last program adds the partial sums
MOST_TOKENS = 128  # of a program
LARGEST_INDEX = 2**31


class Tiling(NamedTuple):
    """How a product is cut into programs; measured, without influence on the result."""

    tokens: int
    rows: int
    unroll: int  # runs of 64 channels in a step of the loop
    warps: int
    stages: int


def tiling_of(t: int, n: int) -> Tiling:
    """The best measured cut for `t` tokens and `n` rows (of a group, if there are groups) on an H200."""
    if t <= 16:
        return Tiling(16, 64, 2, 4, 4)
    if t <= 32:
        return Tiling(32, 64, 2, 4, 3)
    if t <= 64:
        return Tiling(64, 128, 2, 8, 3) if n >= 16384 and n % 128 == 0 else Tiling(64, 64, 2, 4, 3)
    return Tiling(MOST_TOKENS, 128, 1, 8, 4) if n % 128 == 0 else Tiling(MOST_TOKENS, 64, 1, 4, 4)


def split_of(n: int, k: int, token_tiles: int = 1) -> int:
    """Into how many parts the channels of an `[n, k]` matrix are split. Decides bits: batch-invariant calls have one token tile."""
    runs, tiles = k // FP8_CHANNELS, n // FP8_ROWS * token_tiles
    splits = [s for s in range(1, runs + 1) if runs % s == 0 and (s == 1 or runs // s >= LEAST_RUNS)]
    return next((s for s in splits if tiles * s >= ENOUGH_PROGRAMS), splits[-1])


@triton.jit
def fp8_linear_kernel(
    x_ptr,  # [M, K], or [M, groups, K]: float16 or bfloat16 in channel order
    factor_ptr,  # float32 [M]
    words_ptr,  # int32 [N/64, K/64, 1024]
    scales_ptr,  # int32 [N/32, K/32]
    exponents_ptr,  # uint8 [N]
    y_ptr,  # [M, N]
    partial_ptr,  # float32 [SPLIT, M, N]
    arrivals_ptr,  # int32 [N/ROWS], zero before and after
    M,
    N,
    K,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    SPLIT: tl.constexpr,
    WARPS: tl.constexpr,
    BF16: tl.constexpr,
    GROUP_ROWS: tl.constexpr,  # rows n belong to group n // GROUP_ROWS of the input, a multiple of ROWS; 0: no groups
    LAST_ADDS: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, part, token_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    N16: tl.constexpr = ROWS // 16
    REPEAT: tl.constexpr = N16 // WARPS
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    is_token = token < M
    row = tile * ROWS + tl.arange(0, ROWS)
    steps = K // (64 * UNROLL)
    steps_of_part = steps // SPLIT
    scale_columns = K // 32

    # Words of this tile in the order (v, rr, n16, g, q) of operand threads; ROWS / 64 packed tiles lie K * 16 words apart.
    r = tl.arange(0, UNROLL * ROWS * 4)
    n16 = (r // 32) % N16
    word = (n16 // 4) * (K * 16) + (r // (64 * N16)) * 1024 + ((r // (32 * N16)) % 2) * 512 + (n16 % 4) * 128 + (r % 32) * 4
    words = words_ptr + tile.to(tl.int64) * (ROWS // 64) * (K * 16) + word[:, None] + tl.arange(0, 4)[None, :]
    lane = tl.arange(0, WARPS * 32)
    scales = scales_ptr + ((tile * ROWS + (lane // 32) * 16) // 32) * scale_columns + lane % 4
    channel = tl.arange(0, 64 * UNROLL)
    if GROUP_ROWS:
        x = x_ptr + ((tile * ROWS) // GROUP_ROWS) * K + token[None, :] * (N // GROUP_ROWS * K) + channel[:, None]
    else:
        x = x_ptr + token[None, :] * K + channel[:, None]
    exponent = tl.load(exponents_ptr + row).to(tl.int32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in range(part * steps_of_part, (part + 1) * steps_of_part):
        w = tl.load(words + step * (UNROLL * 1024))
        run = step if UNROLL == 2 else step // 2
        if REPEAT == 1:
            s = tl.load(scales + run * 4)
        else:
            s = tl.join(tl.load(scales + run * 4), tl.load(scales + run * 4 + (WARPS // 2) * scale_columns))
            s = tl.reshape(tl.permute(s, (1, 0)), (N16 * 32,))
        activations = tl.load(x + step * (64 * UNROLL), mask=is_token[None, :], other=0.0)
        acc = tl.dot(fp8_tile(w, s, N16, UNROLL, BF16), activations, acc)
        acc = wait_for_product(acc)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()

    acc = acc * power_of_two(exponent)[:, None]
    if not BF16:
        acc = acc * tl.load(factor_ptr + token, mask=is_token, other=0.0)[None, :]
    place = token[None, :] * N + row[:, None]
    if SPLIT == 1:
        tl.store(y_ptr + place, acc.to(y_ptr.dtype.element_ty), mask=is_token[None, :])
    else:
        tl.store(partial_ptr + part * M * N + place, acc, mask=is_token[None, :])
        if LAST_ADDS:
            tl.debug_barrier()
            if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
                # Past the first-level cache, which may hold what another program has overwritten.
                total = tl.load(partial_ptr + place, mask=is_token[None, :], other=0.0, cache_modifier=".cg")
                for i in tl.static_range(1, SPLIT):
                    total += tl.load(partial_ptr + i * M * N + place, mask=is_token[None, :], other=0.0, cache_modifier=".cg")
                tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=is_token[None, :])
                tl.store(arrivals_ptr + tile, 0)


@triton.jit
def add_parts_kernel(partial_ptr, y_ptr, count, SPLIT: tl.constexpr, ELEMENTS: tl.constexpr, PDL: tl.constexpr):
    place = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.load(partial_ptr + place, mask=place < count, other=0.0)
    for i in tl.static_range(1, SPLIT):
        total += tl.load(partial_ptr + i * count + place, mask=place < count, other=0.0)
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=place < count)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def launch(
    x: Tensor,
    factor: Tensor | None,
    words: Tensor,
    scales: Tensor,
    exponents: Tensor,
    arrivals: Tensor,
    group_rows: int,
    invariant: bool,
    pdl: bool,
    tiling: Tiling | None = None,
    split: int | None = None,
) -> Tensor:
    """Both forms: without `factor` the activations are bfloat16 and the weights were packed for that.

    `tiling` and `split` are for measurements; another split gives other bits.
    """
    m, n, k = x.shape[0], words.shape[0] * FP8_ROWS, words.shape[1] * 64
    cut = tiling or tiling_of(m, group_rows or n)
    split = split or split_of(n, k, 1 if invariant else triton.cdiv(m, MOST_TOKENS))
    if split * m * n >= LARGEST_INDEX or x.numel() >= LARGEST_INDEX:
        raise ShapeError(f"a product of {m} tokens with {n} x {k} weights is too large for one call; give it in parts")
    if not m:
        return x.new_empty(m, n, dtype=torch.bfloat16)
    last_adds = split > 1 and m <= LAST_ARRIVAL_TOKENS
    y = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    partial = torch.empty(split, m, n, dtype=torch.float32, device=x.device) if split > 1 else y
    options = launch_options(pdl)
    fp8_linear_kernel[(n // cut.rows, split, triton.cdiv(m, cut.tokens))](
        x,
        x if factor is None else factor,
        words,
        scales,
        exponents,
        y,
        partial,
        arrivals,
        m,
        n,
        k,
        cut.tokens,
        cut.rows,
        cut.unroll,
        split,
        cut.warps,
        factor is None,
        group_rows,
        last_adds,
        pdl,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **options,
    )
    if split > 1 and not last_adds:
        add_parts_kernel[(triton.cdiv(m * n, 1024),)](partial, y, m * n, split, 1024, pdl, num_warps=4, **options)
    return y


def new_arrivals(n: int, device: torch.device) -> Tensor:
    """Counters of programs that have stored their partial sums, for one matrix; every call leaves them at zero."""
    return torch.zeros(n // FP8_ROWS, dtype=torch.int32, device=device)


# `arrivals` is written but holds zeros before and after each call, so callers may take it for a constant.
@torch.library.custom_op("deepinfer::fp8_linear", mutates_args=(), device_types="cuda")
def fp8_linear(
    x16: Tensor,
    factor: Tensor,
    words: Tensor,
    scales: Tensor,
    exponents: Tensor,
    arrivals: Tensor,
    invariant: bool = True,
    pdl: bool = True,
) -> Tensor:
    """`x W^T` in bfloat16 `[T, N]`.

    Args:
        x16, factor: activations from `quantize_activations(x, WGMMA)`.
        words, scales, exponents: `packing.pack_fp8(...)`.
        arrivals: `new_arrivals(N)`; calls that may run at the same time need one each.
        invariant: a row's bits depend on no other row.
    """
    return launch(x16, factor, words, scales, exponents, arrivals, 0, invariant, pdl)


@fp8_linear.register_fake
def _(
    x16: Tensor,
    factor: Tensor,
    words: Tensor,
    scales: Tensor,
    exponents: Tensor,
    arrivals: Tensor,
    invariant: bool = True,
    pdl: bool = True,
) -> Tensor:
    return x16.new_empty(x16.shape[0], words.shape[0] * FP8_ROWS, dtype=torch.bfloat16)


@torch.library.custom_op("deepinfer::fp8_linear_bf16", mutates_args=(), device_types="cuda")
def fp8_linear_bf16(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    exponents: Tensor,
    arrivals: Tensor,
    groups: int,
    invariant: bool = True,
    pdl: bool = True,
) -> Tensor:
    """Group g of the input times rows `[g R, (g + 1) R)` of W, activations not rounded: bfloat16 `[T, N]`.

    Args:
        x: bfloat16 `[T, groups, K]`, through `packing.permute_channels(x, WGMMA)`.
        words, scales, exponents: `packing.pack_fp8(..., bf16=True)`.
    """
    n = words.shape[0] * FP8_ROWS
    return launch(x.contiguous(), None, words, scales, exponents, arrivals, n // groups if groups > 1 else 0, invariant, pdl)


@fp8_linear_bf16.register_fake
def _(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    exponents: Tensor,
    arrivals: Tensor,
    groups: int,
    invariant: bool = True,
    pdl: bool = True,
) -> Tensor:
    return x.new_empty(x.shape[0], words.shape[0] * FP8_ROWS, dtype=torch.bfloat16)
