"""What the hyper-connection coefficients are for: the streams collapsed to a normalised input, and an output spread over them.

The plain twins are `collapse` and `spread` of `model/hyper_connection.py` and `rms_norm` of `ops/elementwise.py`. Products and sums
stay separate (no fused multiply-add), so `spread` has the plain twin's bits, `collapse_norm` up to the order of the norm's mean.

The coefficients of a sub-layer are needed when it has finished, so `hyper_mix` computes them beside it and `spread` waits for them.

Legend: T tokens, M streams, D channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton_kernels.beside import rejoin
from deepinfer.ops.triton_kernels.launch import launch_options
from deepinfer.ops.triton_kernels.quantize import NORM_WARPS, blocks_of

COLUMNS = 1024  # channels of a program that spreads


@triton.jit
def collapse_norm_kernel(
    streams_ptr,
    pre_ptr,
    gain_ptr,
    y_ptr,
    D,
    one_over_d,
    eps,
    M: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCKS * 32)
    gain = tl.load(gain_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    streams = streams_ptr + token * M * D + d
    total = tl.load(pre_ptr + token * M) * tl.load(streams, mask=d < D, other=0.0).to(tl.float32)
    for m in tl.static_range(1, M):
        total += tl.load(pre_ptr + token * M + m) * tl.load(streams + m * D, mask=d < D, other=0.0).to(tl.float32)
    x = total.to(y_ptr.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) * one_over_d + eps)
    tl.store(y_ptr + token * D + d, (x * scale * gain).to(y_ptr.dtype.element_ty), mask=d < D)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def spread_kernel(y_ptr, streams_ptr, post_ptr, comb_ptr, out_ptr, D, M: tl.constexpr, COLUMNS: tl.constexpr):
    """One token and some channels: `post_to * y + sum_from comb[from, to] * stream_from`, sums from left to right."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    y = tl.load(y_ptr + token * D + d, mask=d < D, other=0.0).to(tl.float32)
    streams = streams_ptr + token * M * D + d
    comb = comb_ptr + token * M * M
    for to in tl.static_range(M):
        mixed = tl.load(comb + to) * tl.load(streams, mask=d < D, other=0.0).to(tl.float32)
        for origin in tl.static_range(1, M):
            mixed += tl.load(comb + origin * M + to) * tl.load(streams + origin * D, mask=d < D, other=0.0).to(tl.float32)
        out = tl.load(post_ptr + token * M + to) * y + mixed
        tl.store(out_ptr + (token * M + to) * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


@torch.library.custom_op("deepinfer::collapse_norm", mutates_args=(), device_types="cuda")
def collapse_norm(streams: Tensor, pre: Tensor, gain: Tensor, eps: float, pdl: bool = True) -> Tensor:
    """`rms_norm(collapse(streams, pre))`: `[T, D]` in the dtype of the streams `[T, M, D]`; pre float32 `[T, M]`, gain `[D]`."""
    t, m, d = streams.shape
    y = torch.empty(t, d, dtype=streams.dtype, device=streams.device)
    if t:
        collapse_norm_kernel[(t,)](
            streams.contiguous(),
            pre.contiguous(),
            gain,
            y,
            d,
            1.0 / d,
            eps,
            m,
            blocks_of(d),
            pdl,
            num_warps=NORM_WARPS,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
    return y


@collapse_norm.register_fake
def _(streams: Tensor, pre: Tensor, gain: Tensor, eps: float, pdl: bool = True) -> Tensor:
    return streams.new_empty(streams.shape[0], streams.shape[2])


@torch.library.custom_op("deepinfer::spread", mutates_args=(), device_types="cuda")
def spread(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams `[T, M, D]` of an output `[T, D]`. Waits for `hyper_mix`, where post `[T, M]` and comb `[T, M, M]` come from."""
    t, m, d = streams.shape
    rejoin(streams.device)
    out = torch.empty(t, m, d, dtype=streams.dtype, device=streams.device)
    if t:
        # Launched behind two streams: not before the end of either.
        spread_kernel[(t, triton.cdiv(d, COLUMNS))](
            y.contiguous(), streams.contiguous(), post, comb, out, d, m, COLUMNS, num_warps=4, enable_fp_fusion=False
        )
    return out


@spread.register_fake
def _(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return streams.new_empty(streams.shape)
