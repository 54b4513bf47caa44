"""The best entries of each row in one launch: a threshold found bit by bit, then every score above it in ascending order.

The plain twin is `ops/select.py`, where scores are sorted. A program holds all scores of a row. It turns them into whole numbers of
the same order and builds the k-th largest from its highest bit down; ties at the threshold go to the lower index. Rows that are too
long for one program take the plain way, with integer keys.

Legend: T rows, C scores of each, K wanted.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops import select as plain

MOST_SCORES = 32768  # of one program
SCORES_OF_WARP = 1024


@triton.jit
def ordered_keys(x, BITS: tl.constexpr):
    """Whole numbers that are ordered as the float32 numbers `x` are: NaN is the largest, -0 and 0 are one. 16 bits of bfloat16."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(x != x, 0x7FC00000, bits)
    # Flips the magnitude of negative numbers, then the sign of all.
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return key >> (32 - BITS)


@triton.jit
def is_among_best(key, k, BITS: tl.constexpr):
    """Which keys are the k largest, the lower index first among equal ones."""
    threshold = tl.full((), 0, tl.uint32)
    for i in tl.static_range(BITS):
        higher = threshold | tl.full((), 1 << (BITS - 1 - i), tl.uint32)
        threshold = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= k, higher, threshold)
    is_equal = key == threshold
    left = k - tl.sum((key > threshold).to(tl.int32), 0)
    return (key > threshold) | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= left))


@triton.jit
def select_kernel(scores_ptr, ids_ptr, C, K, PADDED: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED)
    x = tl.load(scores_ptr + row * C + e, mask=e < C, other=0.0).to(tl.float32)
    key = tl.where(e < C, ordered_keys(x, BITS), 0)
    is_taken = is_among_best(key, K, BITS) & (e < C) & (x > float("-inf"))
    place = tl.cumsum(is_taken.to(tl.int32), 0) - 1
    tl.store(ids_ptr + row * K + place, e.to(tl.int64), mask=is_taken)
    k = tl.arange(0, WIDTH)
    nothing = (k >= tl.sum(is_taken.to(tl.int32), 0)) & (k < K)
    tl.store(ids_ptr + row * K + k, tl.full((WIDTH,), -1, tl.int64), mask=nothing)


@triton.jit
def candidates_kernel(scores_ptr, visible_ptr, mask_ptr, C, K, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    e = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(scores_ptr + row * C + e, mask=e < C, other=float("-inf")).to(tl.float32)
    is_broken = tl.sum((x != x).to(tl.int32), 1) > 0
    best = tl.where(is_broken, float("nan"), tl.max(tl.where(x == x, x, float("-inf")), 1))
    visible = tl.load(visible_ptr + row)
    # The block with the newest entry is always kept; a row that sees nothing has none.
    best = tl.where((visible > 0) & (block == (visible - 1) // BLOCK), float("inf"), best)
    key = tl.where(block * BLOCK < C, ordered_keys(best, BITS), 0)
    is_kept = is_among_best(key, K, BITS) & (best > float("-inf"))
    tl.store(mask_ptr + row * C + e, tl.broadcast_to(is_kept[:, None], (BLOCKS, BLOCK)), mask=e < C)


def bits_of(scores: Tensor) -> int:
    """Bits that order the scores."""
    return 16 if scores.dtype == torch.bfloat16 else 32


def launch_of(count: int) -> tuple[int, int]:
    """Padded number of scores, and warps."""
    padded = max(triton.next_power_of_2(count), 32)
    return padded, min(max(padded // SCORES_OF_WARP, 4), 32)


@torch.library.custom_op("deepinfer::select_entries", mutates_args=(), device_types="cuda")
def select_entries(scores: Tensor, k: int) -> Tensor:
    """As `deepinfer.ops.select.select_entries` of `[T, C]`, always `[T, k]` wide: int64, ascending, -1 behind them."""
    t, count = scores.shape
    if count > MOST_SCORES:
        found = plain.select_entries(scores, k)
        return F.pad(found, (0, k - found.shape[1]), value=-1)
    ids = torch.empty(t, k, dtype=torch.int64, device=scores.device)
    if t and k:
        padded, warps = launch_of(count)
        width = triton.next_power_of_2(k)
        select_kernel[(t,)](scores.contiguous(), ids, count, k, padded, width, bits_of(scores), num_warps=warps)
    return ids


@select_entries.register_fake
def _(scores: Tensor, k: int) -> Tensor:
    return scores.new_empty(scores.shape[0], k, dtype=torch.int64)


@torch.library.custom_op("deepinfer::candidate_mask", mutates_args=(), device_types="cuda")
def candidate_mask(scores: Tensor, visible: Tensor, block_size: int, topk_blocks: int) -> Tensor:
    """As `deepinfer.ops.select.candidate_mask` of `[T, C]` and `[T]`: bool `[T, C]`. `block_size` is a power of two."""
    t, count = scores.shape
    if count > MOST_SCORES or block_size & (block_size - 1):
        return plain.candidate_mask(scores, visible, block_size, topk_blocks)
    mask = torch.empty(t, count, dtype=torch.bool, device=scores.device)
    if t and count:
        padded, warps = launch_of(count)
        blocks = max(padded // block_size, 2)
        candidates_kernel[(t,)](
            scores.contiguous(),
            visible.contiguous(),
            mask,
            count,
            topk_blocks,
            blocks,
            block_size,
            bits_of(scores),
            num_warps=warps,
        )
    return mask


@candidate_mask.register_fake
def _(scores: Tensor, visible: Tensor, block_size: int, topk_blocks: int) -> Tensor:
    return scores.new_empty(scores.shape, dtype=torch.bool)
