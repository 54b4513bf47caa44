"""Attention over each row's own list of key-value rows, read where they lie: chunks of the list in parallel, then one merge.

The plain twin is `ops/attend.py` over a gathered copy of the list. There the running maximum moves every 64 places, here every
chunk has its own and the chunks are merged in order; probabilities are rounded to the activations' dtype before the value product
in both. Chunks are fixed, so a row's bits do not depend on its company.

Where bits may depend on it, many rows get a program each for all heads and the whole list, which reads the list once and merges
nothing: a few rows could not fill the device so.

A place of the window is a row of this step (`own`) or of the ring, every other place a row of the pool of entries.

Legend: T rows, H heads, S places, W places of the window, D channels, C chunks of places.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton_kernels.launch import launch_options

ROWS_AT_ONCE = 256  # bounds the memory of the chunks' results


class Cut(NamedTuple):
    """How attention is cut into programs. `chunk` and `places` decide the order of sums, so one cut serves every batch."""

    chunk: int  # places of one program
    places: int  # of one product
    heads: int  # of one program: more need more shared memory than two programs of a processor have
    warps: int
    stages: int


CUT = Cut(chunk=128, places=64, heads=16, warps=4, stages=1)
WIDE_ROWS = 64  # from here on the wide cut is faster
WIDE_CHANNELS = 512  # more do not fit into shared memory


def wide_cut(capability: tuple[int, int]) -> Cut:
    """All heads and the whole list in one program. Blackwell needs more shared memory for it, so loads are not a stage ahead."""
    return Cut(chunk=2**20, places=64, heads=64, warps=8, stages=2 if capability[0] < 10 else 1)


@triton.jit
def chunk_kernel(
    q_ptr,  # [T, H, D]
    own_ptr,
    ring_ptr,
    pool_ptr,  # [*, D] each
    places_ptr,  # int32 [T, S], rows of one of the three
    is_own_ptr,  # bool [T, W]
    visible_ptr,  # bool [T, S]
    sink_ptr,
    result_ptr,  # [T, H, D]
    out_ptr,  # float32 [T, C, H, D]
    maximum_ptr,
    sum_ptr,  # float32 [T, C, H]
    S,
    W,
    scale,
    chunks,
    H: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    PLACES: tl.constexpr,
    HEADS: tl.constexpr,
    SINGLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Unnormalised values, maximum and sum of one row, some heads and one chunk; the result itself if the chunk is the only one."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    chunk = tl.program_id(2)
    d = tl.arange(0, D)
    if PDL:
        tl.extra.cuda.gdc_wait()
    q = tl.load(q_ptr + (row * H + head[:, None]) * D + d[None, :], mask=head[:, None] < H, other=0.0)
    maximum = tl.full((HEADS,), -1e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    values = tl.zeros((HEADS, D), tl.float32)
    for start in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, S), PLACES):
        place = start + tl.arange(0, PLACES)
        seen = tl.load(visible_ptr + row * S + place, mask=place < S, other=0) != 0
        is_own = tl.load(is_own_ptr + row * W + place, mask=place < W, other=0) != 0
        at = tl.load(places_ptr + row * S + place, mask=seen, other=0).to(tl.int64) * D
        source = tl.where(place < W, tl.where(is_own, own_ptr + at, ring_ptr + at), pool_ptr + at)
        kv = tl.load(source[:, None] + d[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(kv), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        decay = tl.exp(maximum - higher)
        probabilities = tl.exp(scores - higher[:, None])
        total = total * decay + tl.sum(probabilities, 1)
        values = values * decay[:, None] + tl.dot(probabilities.to(kv.dtype), kv, input_precision="ieee")
        maximum = higher
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if SINGLE:
        total += tl.exp(tl.load(sink_ptr + head, mask=head < H, other=0.0) - maximum)
        result = (values / total[:, None]).to(result_ptr.dtype.element_ty)
        tl.store(result_ptr + (row * H + head[:, None]) * D + d[None, :], result, mask=head[:, None] < H)
    else:
        part = (row * chunks + chunk) * H + head
        tl.store(out_ptr + part[:, None] * D + d[None, :], values, mask=head[:, None] < H)
        tl.store(maximum_ptr + part, maximum, mask=head < H)
        tl.store(sum_ptr + part, total, mask=head < H)


@triton.jit
def merge_kernel(out_ptr, maximum_ptr, sum_ptr, sink_ptr, result_ptr, chunks, H: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr):
    """One row and head: add the chunks in order, then the sink to the denominator."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    maximum = -1e30
    total = 0.0
    values = tl.zeros((D,), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
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
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def launch(
    q: Tensor,
    own: Tensor,
    ring: Tensor,
    pool: Tensor,
    places: Tensor,
    is_own: Tensor,
    visible: Tensor,
    sink: Tensor,
    scale: float,
    pdl: bool,
    cut: Cut = CUT,
) -> Tensor:
    """`attend_in_place`; another cut is for measurements."""
    t, h, d = q.shape
    s, w = places.shape[1], is_own.shape[1]
    result = torch.empty(t, h, d, dtype=q.dtype, device=q.device)
    chunks = max(triton.cdiv(s, cut.chunk), 1)
    q, own, ring, pool = (x.contiguous() for x in (q, own, ring, pool))
    places, is_own, visible = (x.contiguous() for x in (places, is_own, visible))
    most = min(t, ROWS_AT_ONCE) if chunks > 1 else 0
    out = torch.empty(most, chunks, h, d, device=q.device)
    maximum, total = (torch.empty(most, chunks, h, device=q.device) for _ in range(2))
    rows_at_once = ROWS_AT_ONCE if chunks > 1 else max(t, 1)
    for start in range(0, t, rows_at_once):
        part = slice(start, start + rows_at_once)
        rows = q[part].shape[0]
        chunk_kernel[(rows, triton.cdiv(h, cut.heads), chunks)](
            q[part],
            own,
            ring,
            pool,
            places[part],
            is_own[part],
            visible[part],
            sink,
            result[part],
            out,
            maximum,
            total,
            s,
            w,
            scale,
            chunks,
            h,
            d,
            cut.chunk,
            cut.places,
            cut.heads,
            chunks == 1,
            pdl,
            num_warps=cut.warps,
            num_stages=cut.stages,
            **launch_options(pdl),
        )
        if chunks > 1:
            merge_kernel[(rows, h)](out, maximum, total, sink, result[part], chunks, h, d, pdl, num_warps=4, **launch_options(pdl))
    return result


@torch.library.custom_op("deepinfer::attend_in_place", mutates_args=(), device_types="cuda")
def attend_in_place(
    q: Tensor,
    own: Tensor,
    ring: Tensor,
    pool: Tensor,
    places: Tensor,
    is_own: Tensor,
    visible: Tensor,
    sink: Tensor,
    scale: float,
    invariant: bool = True,
    pdl: bool = True,
) -> Tensor:
    """As `deepinfer.ops.attend.attend` over a list that is not gathered: `[T, H, D]` in the dtype of `q`; D is a power of two.

    Args:
        own, ring, pool: `[*, D]` each, in the dtype of `q`.
        places: int32 `[T, S]`: of the first W places rows of `own` or of `ring`, of the others rows of `pool`.
        is_own: bool `[T, W]`.
        visible: bool `[T, S]`; what is not may stand anywhere.
        invariant: a row's bits depend on no other row. With False many rows have the wide cut.
    """
    fits = q.shape[2] <= WIDE_CHANNELS and q.dtype != torch.float32
    is_wide = fits and not invariant and q.shape[0] >= WIDE_ROWS
    cut = wide_cut(torch.cuda.get_device_capability(q.device)) if is_wide else CUT
    return launch(q, own, ring, pool, places, is_own, visible, sink, scale, pdl, cut)


@attend_in_place.register_fake
def _(
    q: Tensor,
    own: Tensor,
    ring: Tensor,
    pool: Tensor,
    places: Tensor,
    is_own: Tensor,
    visible: Tensor,
    sink: Tensor,
    scale: float,
    invariant: bool = True,
    pdl: bool = True,
) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def attend(q: Tensor, kv: Tensor, visible: Tensor, sink: Tensor, scale: float) -> Tensor:
    """As `deepinfer.ops.attend.attend`: q `[T, H, D]`, kv `[T, S, D]`, visible `[T, S]`, sink `[H]`; D is a power of two."""
    t, s, _ = kv.shape
    places = torch.arange(t * s, dtype=torch.int32, device=kv.device).view(t, s)
    flat = kv.flatten(0, 1)
    return attend_in_place(q, flat, flat, flat, places, visible[:, :0], visible, sink, scale)
