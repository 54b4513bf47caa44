"""The routed experts of a MoE layer with FP4 weights: route, up with SwiGLU and quantisation, down. No host synchronisation.

The plain twin is `experts` of `model/plain_forms.py`. Three launches:

* `routing.prepare`: activations quantised, pairs sorted by expert;
* up: w1 and w3, interleaved by 8 rows so that gate and up of a channel meet in one thread. After the loop: the roundings to
  bfloat16, the clamp, SwiGLU, the routing weight, and the FP8 quantisation in front of w2;
* down: w2, each pair's bfloat16 result at the pair's own place.

A program computes 128 rows of one expert for all its tokens, 8 at a time (mma.sync), so a row's bits do not depend on the batch.
An expert with more tokens decodes its weights again for each 8. With `split`, such experts go to a second launch that decodes once
for four tiles of tokens; its registers would cost the common case half its occupancy. Prompts have `wide_experts.py`.

What stands between up and down is kept as float16 `value * 2^8`, which is exact while |value| < 256: see `packing.hidden_bound`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton_kernels.decode import fp4_tile
from deepinfer.ops.triton_kernels.expert_outputs import store_outputs
from deepinfer.ops.triton_kernels.launch import launch_options
from deepinfer.ops.triton_kernels.packing import FP4_CHANNELS, FP4_ROWS, FP4_WARPS
from deepinfer.ops.triton_kernels.routing import LARGE_TILES, Prepared, prepare
from deepinfer.ops.triton_kernels.wide_experts import MOST_WIDE_PAIRS, fills_wide_tiles, wide_experts

STAGES = 3  # loads in flight; more or fewer measured slower
SPLIT_TOKENS = 256  # from here on some expert usually has more than 8 tokens
MOST_PAIRS = 12_288  # at once, 2,048 tokens of six: each is compared with every other one to find its place


@triton.jit
def finish(
    acc,
    exponent,
    tile,
    row,
    place,
    end,
    factor_ptr,
    y_ptr,
    order_ptr,
    weight_ptr,
    N,
    LIMIT: tl.constexpr,
    UP: tl.constexpr,
    TOPK: tl.constexpr,
):
    """Store the sums of the tokens at `place` in the order."""
    is_token = place < end
    pair = tl.load(order_ptr + place, mask=is_token, other=0)
    store_outputs(acc, exponent, tile, row, place, is_token, pair, factor_ptr, y_ptr, weight_ptr, N, LIMIT, UP, TOPK, 2)


@triton.jit
def pointers(x_ptr, order_ptr, place, end, channel, K, UP: tl.constexpr, TOPK: tl.constexpr):
    """Where the activations `[256, 8]` of a token tile begin: up reads tokens, down reads pairs in their order."""
    source = tl.load(order_ptr + place, mask=place < end, other=0) // TOPK if UP else place
    return x_ptr + source[None, :] * K + channel[:, None]


@triton.jit
def token_pass(
    start,
    end,
    tile,
    row,
    weights,
    tensors,
    N,
    K,
    LIMIT: tl.constexpr,
    UP: tl.constexpr,
    TOPK: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    TILES: tl.constexpr,  # 1, 2 or 4
    PDL: tl.constexpr,
):
    """The rows of a program for up to 8 * TILES tokens; the tiles are spelled out, because Triton has no lists in loops."""
    words, scales, exponent = weights
    x_ptr, factor_ptr, y_ptr, order_ptr, weight_ptr = tensors
    N16: tl.constexpr = ROWS // 16
    channel = tl.arange(0, 256)
    place = start + tl.arange(0, 8)
    x0 = pointers(x_ptr, order_ptr, place, end, channel, K, UP, TOPK)
    is0 = (place < end)[None, :]
    acc0 = tl.zeros((ROWS, 8), tl.float32)
    if TILES >= 2:
        x1 = pointers(x_ptr, order_ptr, place + 8, end, channel, K, UP, TOPK)
        is1 = (place + 8 < end)[None, :]
        acc1 = acc0
    if TILES == 4:
        x2 = pointers(x_ptr, order_ptr, place + 16, end, channel, K, UP, TOPK)
        x3 = pointers(x_ptr, order_ptr, place + 24, end, channel, K, UP, TOPK)
        is2 = (place + 16 < end)[None, :]
        is3 = (place + 24 < end)[None, :]
        acc2 = acc0
        acc3 = acc0
    for step in range(K // 256):
        w = tl.load(words + step * (ROWS * 32))
        s = tl.load(scales + step * (ROWS * 2))
        if N16 > WARPS:
            s = tl.permute(s, (1, 0))
        a = fp4_tile(w, tl.reshape(s, (N16 * 32,)), N16)
        acc0 = tl.dot(a, tl.load(x0 + step * 256, mask=is0, other=0.0), acc0)
        if TILES >= 2:
            acc1 = tl.dot(a, tl.load(x1 + step * 256, mask=is1, other=0.0), acc1)
        if TILES == 4:
            acc2 = tl.dot(a, tl.load(x2 + step * 256, mask=is2, other=0.0), acc2)
            acc3 = tl.dot(a, tl.load(x3 + step * 256, mask=is3, other=0.0), acc3)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    finish(acc0, exponent, tile, row, place, end, factor_ptr, y_ptr, order_ptr, weight_ptr, N, LIMIT, UP, TOPK)
    if TILES >= 2:
        finish(acc1, exponent, tile, row, place + 8, end, factor_ptr, y_ptr, order_ptr, weight_ptr, N, LIMIT, UP, TOPK)
    if TILES == 4:
        finish(acc2, exponent, tile, row, place + 16, end, factor_ptr, y_ptr, order_ptr, weight_ptr, N, LIMIT, UP, TOPK)
        finish(acc3, exponent, tile, row, place + 24, end, factor_ptr, y_ptr, order_ptr, weight_ptr, N, LIMIT, UP, TOPK)


@triton.jit
def fp4_experts_kernel(
    x_ptr,  # float16 in channel order: [T, K] (UP), or [P, K] in the pairs' order
    factor_ptr,  # float32 [T]
    words_ptr,  # int32 [E, N/128, K/256, 4096]
    scales_ptr,  # int32 [E, N/128, K/256, 256]
    exponents_ptr,  # uint8 [E, N]
    y_ptr,  # UP: float16 [P, N/2] in the pairs' order; else bfloat16 [P, N] by pair
    list_ptr,
    order_ptr,
    weight_ptr,  # float32 [P] by pair
    N,
    K,
    P,
    LIMIT: tl.constexpr,
    UP: tl.constexpr,
    TOPK: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    TILES: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    slot = tl.program_id(1) if TILES == 1 else P - 1 - tl.program_id(1)
    if PDL and UP:
        tl.extra.cuda.gdc_wait()
    expert = tl.load(list_ptr + slot * 4).to(tl.int64)
    begin = tl.load(list_ptr + slot * 4 + 1)
    end = tl.load(list_ptr + slot * 4 + 2)
    if PDL and not UP:
        # The list is older than the kernel before this one, which waited for it; only the activations are news. Programs
        # without work wait as well: were all of them without, the kernel behind this one would run before that one's end.
        tl.extra.cuda.gdc_wait()
    if expert < 0:
        return
    if SPLIT and ((end - begin > 8) == (TILES == 1)):
        return
    REPEAT: tl.constexpr = ROWS // 16 // WARPS
    row = tile * ROWS + tl.arange(0, ROWS)
    exponent = tl.load(exponents_ptr + expert * N + row).to(tl.int32)
    steps = K // 256
    words = (
        words_ptr
        + expert * N * (K // 8)
        + tile * (steps * ROWS * 32)
        + tl.arange(0, ROWS * 8)[:, None] * 4
        + tl.arange(0, 4)[None, :]
    )
    scales = scales_ptr + expert * N * (steps * 2) + tile * (steps * ROWS * 2)
    if REPEAT == 1:
        scales = scales + tl.arange(0, WARPS * 32)
    else:
        scales = scales + tl.arange(0, WARPS * 32)[:, None] * REPEAT + tl.arange(0, REPEAT)[None, :]
    weights = (words, scales, exponent)
    tensors = (x_ptr, factor_ptr, y_ptr, order_ptr, weight_ptr)
    for start in range(begin, end, 8 * TILES):
        if TILES == 1:
            token_pass(start, end, tile, row, weights, tensors, N, K, LIMIT, UP, TOPK, ROWS, WARPS, 1, PDL)
        else:
            # No products for tiles that the last tokens leave empty.
            if end - start <= 8:
                token_pass(start, end, tile, row, weights, tensors, N, K, LIMIT, UP, TOPK, ROWS, WARPS, 1, PDL)
            elif end - start <= 16:
                token_pass(start, end, tile, row, weights, tensors, N, K, LIMIT, UP, TOPK, ROWS, WARPS, 2, PDL)
            else:
                token_pass(start, end, tile, row, weights, tensors, N, K, LIMIT, UP, TOPK, ROWS, WARPS, 4, PDL)


def launch(
    up: bool,
    x16: Tensor,
    packed: tuple[Tensor, Tensor, Tensor],
    prepared: Prepared,
    weights: Tensor,
    y: Tensor,
    limit: float,
    topk: int,
    split: bool,
    pdl: bool,
) -> None:
    """One of the two products, into `y`."""
    words, scales, exponents = packed
    experts, n, k = words.shape[0], words.shape[1] * FP4_ROWS, words.shape[2] * FP4_CHANNELS
    pairs = prepared.order.shape[0]
    passes = [(1, min(pairs, experts))]
    if split and pairs > 8:
        # At most every ninth pair begins an expert with more than 8.
        passes.append((LARGE_TILES, pairs // 9))
    for tiles, slots in passes:
        fp4_experts_kernel[(n // FP4_ROWS, slots)](
            x16,
            prepared.factor,
            words,
            scales,
            exponents,
            y,
            prepared.active,
            prepared.order,
            weights,
            n,
            k,
            pairs,
            limit,
            up,
            topk,
            FP4_ROWS,
            FP4_WARPS,
            tiles,
            split,
            pdl,
            num_warps=FP4_WARPS,
            num_stages=STAGES,
            **launch_options(pdl),
        )


@torch.library.custom_op("deepinfer::fp4_experts", mutates_args=(), device_types="cuda")
def fp4_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up_words: Tensor,
    up_scales: Tensor,
    up_exponents: Tensor,
    down_words: Tensor,
    down_scales: Tensor,
    down_exponents: Tensor,
    limit: float,
    holds_all: bool = True,
    invariant: bool = True,
    pdl: bool = True,
) -> Tensor:
    """Output of each pair of token and expert, routing weight applied before w2: bfloat16 `[T, K, D]`.

    Args:
        x: `[T, D]` in any float dtype.
        ids, weights: int32 or int64 and float32 `[T, K]`. An id of the number of experts marks an expert that is not held.
        up_*: `packing.pack_fp4` of the interleaved rows of w1 and w3; down_*: of w2.
        limit: of the clamp, above 0; `packing.hidden_bound` of it must not exceed LARGEST_HIDDEN.
        holds_all: no id marks an expert that is not held; with False such pairs give zeros.
        invariant: a row's bits depend on no other row. With False many tokens go through `wide_experts`.
    """
    up, down = (up_words, up_scales, up_exponents), (down_words, down_scales, down_exponents)
    (t, topk), d = ids.shape, down_words.shape[1] * FP4_ROWS
    pairs, split = t * topk, t >= SPLIT_TOKENS
    if not pairs:
        return x.new_empty(t, topk, d, dtype=torch.bfloat16)
    is_wide = not invariant and fills_wide_tiles(pairs, up_words.shape[0])
    most = MOST_WIDE_PAIRS if is_wide else MOST_PAIRS
    if pairs > most:
        pieces = zip(*(tensor.split(most // topk) for tensor in (x, ids, weights)), strict=True)
        return torch.cat([fp4_experts(*piece, *up, *down, limit, holds_all, invariant, pdl) for piece in pieces])
    ids, weights = ids.contiguous(), weights.contiguous()
    if is_wide:
        return wide_experts(x, ids, weights, up, down, limit, holds_all)
    prepared = prepare(x.contiguous(), ids, up_words.shape[0], split, pdl)
    hidden = torch.empty(pairs, up_words.shape[1] * FP4_ROWS // 2, dtype=torch.float16, device=x.device)
    allocate = torch.empty if holds_all else torch.zeros
    y = allocate((pairs, d), dtype=torch.bfloat16, device=x.device)
    launch(True, prepared.x16, up, prepared, weights, hidden, limit, topk, split, pdl)
    launch(False, hidden, down, prepared, weights, y, limit, topk, split, pdl)
    return y.view(t, topk, d)


@fp4_experts.register_fake
def _(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up_words: Tensor,
    up_scales: Tensor,
    up_exponents: Tensor,
    down_words: Tensor,
    down_scales: Tensor,
    down_exponents: Tensor,
    limit: float,
    holds_all: bool = True,
    invariant: bool = True,
    pdl: bool = True,
) -> Tensor:
    return x.new_empty(*ids.shape, down_words.shape[1] * FP4_ROWS, dtype=torch.bfloat16)
