"""Index scores of every row against the keys of its own sequence, read through the block table.

The plain twin is `Indexer._scores` in `model/indexer.py`: it gathers keys for each row first. Here a program reads one tile of keys
where it lies, and tiles behind the last visible entry are not read at all. Each step is rounded to the activations' dtype as
published (specification U2).

Legend: T rows, H index heads, D channels, C entries, B sequences.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ENTRIES = 64  # of one program


@triton.jit
def index_scores_kernel(
    q_ptr,
    weights_ptr,
    keys_ptr,
    tables_ptr,
    seq_ids_ptr,
    n_visible_ptr,
    out_ptr,
    C,
    table_width,
    per_block,
    H: tl.constexpr,
    D: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    out = out_ptr + row * C + entry
    n_visible = tl.load(n_visible_ptr + row)
    if tl.program_id(1) * ENTRIES >= n_visible:
        tl.store(out, tl.full((ENTRIES,), float("-inf"), tl.float32).to(out_ptr.dtype.element_ty), mask=entry < C)
        return
    is_visible = (entry < n_visible) & (entry < C)
    sequence = tl.load(seq_ids_ptr + row)
    block = tl.load(tables_ptr + sequence * table_width + entry // per_block, mask=is_visible, other=0)
    address = block * per_block + entry % per_block
    d = tl.arange(0, D)
    h = tl.arange(0, H)
    keys = tl.load(keys_ptr + address[:, None] * D + d[None, :], mask=is_visible[:, None], other=0.0)
    q = tl.load(q_ptr + (row * H + h[:, None]) * D + d[None, :])
    dots = tl.dot(q, tl.trans(keys), input_precision="ieee").to(q.dtype).to(tl.float32)
    weights = tl.load(weights_ptr + row * H + h).to(tl.float32)
    terms = (tl.maximum(dots, 0.0) * weights[:, None]).to(q.dtype).to(tl.float32)
    # A key that is not a number stays one.
    scores = tl.where(tl.sum((dots != dots).to(tl.int32), 0) > 0, float("nan"), tl.sum(terms, 0))
    scores = tl.where(is_visible, scores, float("-inf"))
    tl.store(out, scores.to(out_ptr.dtype.element_ty), mask=entry < C)


@torch.library.custom_op("deepinfer::index_scores", mutates_args=(), device_types="cuda")
def index_scores(
    q: Tensor, weights: Tensor, keys: Tensor, block_tables: Tensor, seq_ids: Tensor, n_visible: Tensor, per_block: int
) -> Tensor:
    """Scores `[T, C]` in the dtype of `q`, -inf from each row's `n_visible` on; C covers the whole block tables.

    q `[T, H, D]` and weights `[T, H]`, keys `[pool rows, D]`, tables int64 `[B, W]`; H and D are powers of two of at least 16.
    """
    t, h, d = q.shape
    width = block_tables.shape[1]
    c = width * per_block
    out = torch.empty(t, c, dtype=q.dtype, device=q.device)
    if t and c:
        index_scores_kernel[(t, triton.cdiv(c, ENTRIES))](
            q.contiguous(),
            weights.contiguous(),
            keys,
            block_tables.contiguous(),
            seq_ids,
            n_visible,
            out,
            c,
            width,
            per_block,
            h,
            d,
            ENTRIES,
            num_warps=4,
        )
    return out


@index_scores.register_fake
def _(q: Tensor, weights: Tensor, keys: Tensor, block_tables: Tensor, seq_ids: Tensor, n_visible: Tensor, per_block: int) -> Tensor:
    return q.new_empty(q.shape[0], block_tables.shape[1] * per_block)
