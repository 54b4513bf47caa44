"""The expert that every token passes through, beside the routed ones: four launches on a second stream.

The plain twin is `SharedExpert` of `model/moe.py`. At few tokens neither it nor the routed experts keep the memory busy, so they
run at the same time; `combine_with_shared` waits for both.

Legend: T tokens, F channels between the products.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton_kernels import fp8_linear, routing
from deepinfer.ops.triton_kernels.beside import beside, rejoin
from deepinfer.ops.triton_kernels.launch import launch_options
from deepinfer.ops.triton_kernels.packing import FP8_ROWS, WGMMA
from deepinfer.ops.triton_kernels.quantize import blocks_of, quantize, store_quantized, warps_of

MOST_BESIDE = 256  # tokens; more fill the device by themselves, and a second stream has memory of its own


@triton.jit
def swiglu_quantize_kernel(
    gate_up_ptr,  # [T, N]: gate from column 0 on, up from UP_FIRST on
    x16_ptr,  # float16 [T, K]
    factor_ptr,  # float32 [T]
    N,
    UP_FIRST,
    F,
    K,
    LIMIT: tl.constexpr,  # of the clamp; 0: none
    BLOCKS: tl.constexpr,
    INSTRUCTION: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCKS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up_ptr + token * N + k, mask=k < F, other=0.0)
    up = tl.load(gate_up_ptr + token * N + UP_FIRST + k, mask=k < F, other=0.0)
    dtype = gate.dtype
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    hidden = (gate / (1.0 + tl.exp(-gate)) * up).to(dtype).to(tl.float32)
    store_quantized(hidden, k, token, x16_ptr, factor_ptr, K, INSTRUCTION)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def swiglu_quantize(gate_up: Tensor, up_first: int, width: int, channels: int, limit: float, pdl: bool) -> tuple[Tensor, Tensor]:
    """SwiGLU of columns `[0, width)` and `[up_first, up_first + width)`, as `quantize_activations` gives it, `channels` wide."""
    t = gate_up.shape[0]
    x16 = torch.empty(t, channels, dtype=torch.float16, device=gate_up.device)
    factor = torch.empty(t, dtype=torch.float32, device=gate_up.device)
    swiglu_quantize_kernel[(t,)](
        gate_up,
        x16,
        factor,
        gate_up.shape[1],
        up_first,
        width,
        channels,
        limit,
        blocks_of(channels),
        WGMMA,
        pdl,
        num_warps=warps_of(t),
        **launch_options(pdl),
    )
    return x16, factor


@torch.library.custom_op("deepinfer::shared_expert", mutates_args=(), device_types="cuda")
def shared_expert(
    x: Tensor,
    up_words: Tensor,
    up_scales: Tensor,
    up_exponents: Tensor,
    up_arrivals: Tensor,
    down_words: Tensor,
    down_scales: Tensor,
    down_exponents: Tensor,
    down_arrivals: Tensor,
    up_first: int,
    width: int,
    limit: float,
    invariant: bool = True,
    pdl: bool = True,
) -> Tensor:
    """`w2(swiglu(w1 x, w3 x))` in bfloat16 `[T, N]`, being computed beside the current stream: for `combine_with_shared` alone.

    Args:
        x: `[T, K]`, of any float dtype; to be kept alive until then.
        up_*: `packing.pack_fp8` of w1 and w3 behind each other, w3 from row `up_first` on; down_*: of w2.
        width: rows of w1 and of w3 that are not padding.
        limit: of the clamp; 0 means none.
        invariant: see `fp8_linear`.
    """
    if not x.shape[0]:
        return x.new_empty(0, down_words.shape[0] * FP8_ROWS, dtype=torch.bfloat16)
    with beside(x.device) if x.shape[0] <= MOST_BESIDE else nullcontext():
        # The first launch of a branch begins when the kernels in front of the fork have ended.
        up = fp8_linear.launch(*quantize(x, WGMMA, False), up_words, up_scales, up_exponents, up_arrivals, 0, invariant, pdl)
        hidden = swiglu_quantize(up, up_first, width, down_words.shape[1] * 64, limit, pdl)
        return fp8_linear.launch(*hidden, down_words, down_scales, down_exponents, down_arrivals, 0, invariant, pdl)


@shared_expert.register_fake
def _(
    x: Tensor,
    up_words: Tensor,
    up_scales: Tensor,
    up_exponents: Tensor,
    up_arrivals: Tensor,
    down_words: Tensor,
    down_scales: Tensor,
    down_exponents: Tensor,
    down_arrivals: Tensor,
    up_first: int,
    width: int,
    limit: float,
    invariant: bool = True,
    pdl: bool = True,
) -> Tensor:
    return x.new_empty(x.shape[0], down_words.shape[0] * FP8_ROWS, dtype=torch.bfloat16)


@torch.library.custom_op("deepinfer::combine_with_shared", mutates_args=(), device_types="cuda")
def combine_with_shared(outputs: Tensor, ids: Tensor, shared: Tensor, x: Tensor) -> Tensor:
    """`combine_experts(outputs, ids) + shared` in the dtype of `x` `[T, D]`, which the shared expert reads until here."""
    rejoin(outputs.device)
    return routing.combine(outputs, ids, shared, x.dtype, False)


@combine_with_shared.register_fake
def _(outputs: Tensor, ids: Tensor, shared: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
