"""Attention over each row's own list of key-value rows: chunks of the list in parallel, then one merge.

The plain twin is `ops/attend.py`. There the running maximum moves every 64 places, here every chunk has its own and the chunks are
merged in order; probabilities are rounded to the activations' dtype before the value product in both. Chunks are fixed, so a
row's bits do not depend on its company.

Legend: T rows, H heads, S places, D channels, C chunks of places.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 128  # places of one program
PLACES = 64  # places of one product
HEADS = 16  # heads of one program
ROWS_AT_ONCE = 256  # bounds the memory of the chunks' results


@triton.jit
def chunk_kernel(
    q_ptr,
    kv_ptr,
    visible_ptr,
    out_ptr,
    maximum_ptr,
    sum_ptr,
    S,
    scale,
    chunks,
    H: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    PLACES: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Unnormalised values, maximum and sum of one row, some heads and one chunk."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    chunk = tl.program_id(2)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + (row * H + head[:, None]) * D + d[None, :], mask=head[:, None] < H, other=0.0)
    maximum = tl.full((HEADS,), -1e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    values = tl.zeros((HEADS, D), tl.float32)
    for start in range(0, CHUNK, PLACES):
        place = chunk * CHUNK + start + tl.arange(0, PLACES)
        seen = tl.load(visible_ptr + row * S + place, mask=place < S, other=0) != 0
        kv = tl.load(kv_ptr + (row * S + place[:, None]) * D + d[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(kv), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        decay = tl.exp(maximum - higher)
        probabilities = tl.exp(scores - higher[:, None])
        total = total * decay + tl.sum(probabilities, 1)
        values = values * decay[:, None] + tl.dot(probabilities.to(kv.dtype), kv, input_precision="ieee")
        maximum = higher
    place = (row * chunks + chunk) * H + head
    tl.store(out_ptr + place[:, None] * D + d[None, :], values, mask=head[:, None] < H)
    tl.store(maximum_ptr + place, maximum, mask=head < H)
    tl.store(sum_ptr + place, total, mask=head < H)


@triton.jit
def merge_kernel(out_ptr, maximum_ptr, sum_ptr, sink_ptr, result_ptr, chunks, H: tl.constexpr, D: tl.constexpr):
    """One row and head: add the chunks in order, then the sink to the denominator."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    maximum = -1e30
    total = 0.0
    values = tl.zeros((D,), tl.float32)
    for chunk in range(chunks):
        place = (row * chunks + chunk) * H + head
        own = tl.load(maximum_ptr + place)
        higher = tl.maximum(maximum, own)
        decay, gain = tl.exp(maximum - higher), tl.exp(own - higher)
        total = total * decay + tl.load(sum_ptr + place) * gain
        values = values * decay + tl.load(out_ptr + place * D + d) * gain
        maximum = higher
    total += tl.exp(tl.load(sink_ptr + head) - maximum)
    tl.store(result_ptr + (row * H + head) * D + d, (values / total).to(result_ptr.dtype.element_ty))


@torch.library.custom_op("deepinfer::attend", mutates_args=(), device_types="cuda")
def attend(q: Tensor, kv: Tensor, visible: Tensor, sink: Tensor, scale: float) -> Tensor:
    """As `deepinfer.ops.attend.attend`: q `[T, H, D]`, kv `[T, S, D]`, visible `[T, S]`, sink `[H]`; D is a power of two."""
    t, h, d = q.shape
    s = kv.shape[1]
    result = torch.empty(t, h, d, dtype=q.dtype, device=q.device)
    chunks = triton.cdiv(s, CHUNK)
    q, kv, visible = q.contiguous(), kv.contiguous(), visible.contiguous()
    most = min(t, ROWS_AT_ONCE)
    out = torch.empty(most, chunks, h, d, device=q.device)
    maximum, total = (torch.empty(most, chunks, h, device=q.device) for _ in range(2))
    for start in range(0, t, ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        rows = q[part].shape[0]
        grid = (rows, triton.cdiv(h, HEADS), chunks)
        chunk_kernel[grid](
            q[part],
            kv[part],
            visible[part],
            out,
            maximum,
            total,
            s,
            scale,
            chunks,
            h,
            d,
            CHUNK,
            PLACES,
            HEADS,
            num_warps=4,
            num_stages=1,
        )
        merge_kernel[(rows, h)](out, maximum, total, sink, result[part], chunks, h, d, num_warps=4)
    return result


@attend.register_fake
def _(q: Tensor, kv: Tensor, visible: Tensor, sink: Tensor, scale: float) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)
