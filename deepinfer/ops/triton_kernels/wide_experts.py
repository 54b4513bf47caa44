"""The routed experts for prompts, where an expert has dozens of tokens: what `fp4_experts.py` computes, in wide tiles.

There 8 tokens at a time read the weights as fast as memory gives them. With many tokens that is no longer what takes the time:
every 8 tokens go through registers of their own, and weights are decoded again for every 32. Here a program computes 64 tokens at
once with wgmma, which reads its tokens from shared memory itself. Sums of wgmma and of mma.sync differ in their last bits, so
batch-invariant arithmetic has the narrow tiles alone.

Weights are the same words. Activations and what stands between the products lie in the channel order of wgmma.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton_kernels.decode import fp4_run, wait_for_product
from deepinfer.ops.triton_kernels.expert_outputs import store_outputs
from deepinfer.ops.triton_kernels.packing import FP4_CHANNELS, FP4_ROWS, WGMMA
from deepinfer.ops.triton_kernels.quantize import quantize

LEAST_TOKENS = 24  # of an expert, on average: with fewer the narrow tiles are faster
MOST_WIDE_PAIRS = 65_536  # at once: bounds the memory between the products, and places in it fit 32 bits


class Tiling(NamedTuple):
    """How a product is cut into programs; without influence on the result."""

    rows: int
    tokens: int
    warps: int
    stages: int


TILING = Tiling(rows=128, tokens=64, warps=4, stages=3)


@triton.jit
def wide_experts_kernel(
    x_ptr,  # float16 in channel order: [T, K] (UP), or [P, K] in the pairs' order
    factor_ptr,  # float32 [T]
    words_ptr,  # int32 [E, N/128, K/256, 4096]
    scales_ptr,  # int32 [E, N/128, K/256, 256]
    exponents_ptr,  # uint8 [E, N]
    y_ptr,  # UP: float16 [P, N/2] in the pairs' order; else bfloat16 [P, N] by pair
    bounds_ptr,  # int64 [E + 1]: where each expert's pairs begin in the order
    order_ptr,  # int64 [P]
    weight_ptr,  # float32 [P] by pair
    N,
    K,
    LIMIT: tl.constexpr,
    UP: tl.constexpr,
    TOPK: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
):
    tile, expert = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin = tl.load(bounds_ptr + expert).to(tl.int32)
    end = tl.load(bounds_ptr + expert + 1).to(tl.int32)
    N16: tl.constexpr = ROWS // 16
    REPEAT: tl.constexpr = N16 // WARPS
    row = tile * ROWS + tl.arange(0, ROWS)
    runs = K // 128

    # Words of a run in the order (rr, n16, g, q) of operand threads; the packed tiles of 8 n16 lie K * 16 words apart.
    r = tl.arange(0, ROWS * 4)
    n16 = (r // 32) % N16
    word = (n16 // 8) * (K * 16) + (r // (32 * N16)) * 1024 + (n16 % 8) * 128 + (r % 32) * 4
    words = words_ptr + expert * N * (K // 8) + tile * (ROWS * (K // 8)) + word[:, None] + tl.arange(0, 4)[None, :]
    lane = tl.arange(0, WARPS * 32)
    scales = scales_ptr + expert * N * (K // 128) + tile * (ROWS * (K // 128))
    channel = tl.arange(0, 128)
    for start in range(begin, end, TOKENS):
        place = start + tl.arange(0, TOKENS)
        is_token = place < end
        pair = tl.load(order_ptr + place, mask=is_token, other=0).to(tl.int32)
        x = x_ptr + (pair // TOPK if UP else place)[None, :] * K + channel[:, None]
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
        for run in range(runs):
            w = tl.load(words + run * 2048)
            s = tl.load(scales + scale_place(lane // 32, lane % 32, K) + (run // 2) * 256)
            if REPEAT == 2:
                more = tl.load(scales + scale_place(lane // 32 + WARPS, lane % 32, K) + (run // 2) * 256)
                s = tl.reshape(tl.permute(tl.join(s, more), (1, 0)), (N16 * 32,))
            activations = tl.load(x + run * 128, mask=is_token[None, :], other=0.0)
            acc = tl.dot(fp4_run(w, s >> (run % 2) * 16, N16), activations, acc)
            acc = wait_for_product(acc)
        exponent = tl.load(exponents_ptr + expert * N + row).to(tl.int32)
        store_outputs(acc, exponent, tile, row, place, is_token, pair, factor_ptr, y_ptr, weight_ptr, N, LIMIT, UP, TOPK, 3)


@triton.jit
def scale_place(n16, lane, K):
    """Where the scale word of an operand thread lies: (tile, run of 256, n16 % 4, lane, n16 / 4 % 2), see `packing.pack_fp4`."""
    return (n16 // 8) * K + ((n16 % 4) * 32 + lane) * 2 + (n16 % 8) // 4


def fills_wide_tiles(pairs: int, num_experts: int) -> bool:
    """Whether so many pairs of a token and an expert are computed faster here, on an H200."""
    return pairs >= LEAST_TOKENS * num_experts


def launch(
    up: bool,
    x16: Tensor,
    factor: Tensor,
    packed: tuple[Tensor, Tensor, Tensor],
    bounds: Tensor,
    order: Tensor,
    weights: Tensor,
    y: Tensor,
    limit: float,
    topk: int,
    tiling: Tiling,
) -> None:
    """One of the two products, into `y`."""
    words, scales, exponents = packed
    experts, n, k = words.shape[0], words.shape[1] * FP4_ROWS, words.shape[2] * FP4_CHANNELS
    rows = tiling.rows if n % tiling.rows == 0 else FP4_ROWS
    wide_experts_kernel[(n // rows, experts)](
        x16,
        factor,
        words,
        scales,
        exponents,
        y,
        bounds,
        order,
        weights,
        n,
        k,
        limit,
        up,
        topk,
        rows,
        tiling.tokens,
        tiling.warps,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


def wide_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: tuple[Tensor, Tensor, Tensor],
    down: tuple[Tensor, Tensor, Tensor],
    limit: float,
    holds_all: bool,
    tiling: Tiling = TILING,
) -> Tensor:
    """As `fp4_experts.fp4_experts`, for calls out of another operation."""
    (t, topk), experts = ids.shape, up[0].shape[0]
    by_expert, order = ids.flatten().sort(stable=True)
    bounds = torch.searchsorted(by_expert, torch.arange(experts + 1, dtype=ids.dtype, device=ids.device))
    x16, factor = quantize(x, WGMMA, False)
    hidden = torch.empty(t * topk, up[0].shape[1] * FP4_ROWS // 2, dtype=torch.float16, device=x.device)
    allocate = torch.empty if holds_all else torch.zeros
    y = allocate((t, topk, down[0].shape[1] * FP4_ROWS), dtype=torch.bfloat16, device=x.device)
    launch(True, x16, factor, up, bounds, order, weights, hidden, limit, topk, tiling)
    launch(False, hidden, factor, down, bounds, order, weights, y, limit, topk, tiling)
    return y
