"""Activations for the kernels: FP8 with one scale for 32 channels, written as float16 in the kernels' channel order.

The plain twins are `ops.quantize.round_fp8` and, in front of it, `ops.elementwise.rms_norm`; the values are the same bits. A
float16 activation is `code * 2^(scale - ref)` with one `2^ref` for the token, its `factor`. That is exact for blocks down to
2^-22 of the token's largest, which by the floor of 1e-4 is every block of a token whose values stay within 448; what lies
lower is rounded to a multiple of 2^-24 of what the largest block can hold.

A token with NaN or an infinity gets the factor NaN, so that its results are NaN and nobody else's are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton_kernels.decode import channel_place, fp8_code, fp8_scale, is_finite, power_of_two
from deepinfer.ops.triton_kernels.launch import launch_options


@triton.jit
def store_quantized(v, k, token, x16_ptr, factor_ptr, K, INSTRUCTION: tl.constexpr):
    """Quantise one token: float32 `v` `[blocks, 32]` with channels `k`, zero behind the last channel."""
    scale = fp8_scale(tl.max(tl.abs(v), 1))
    ref = tl.max(scale, 0) - 7
    operand = fp8_code(v, scale[:, None]) * power_of_two(tl.maximum(scale - ref, -100) + 127)[:, None]
    tl.store(x16_ptr + token * K + channel_place(k, INSTRUCTION), operand.to(tl.float16), mask=k < K)
    broken = tl.sum(tl.sum((is_finite(v) == 0).to(tl.int32), 1), 0)
    tl.store(factor_ptr + token, tl.where(broken > 0, float("nan"), power_of_two(ref)))


@triton.jit
def quantize_kernel(x_ptr, x16_ptr, factor_ptr, K, BLOCKS: tl.constexpr, INSTRUCTION: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCKS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
    store_quantized(v, k, token, x16_ptr, factor_ptr, K, INSTRUCTION)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def norm_quantize_kernel(
    x_ptr,
    gain_ptr,
    y_ptr,
    x16_ptr,
    factor_ptr,
    K,
    one_over_k,
    eps,
    BLOCKS: tl.constexpr,
    INSTRUCTION: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCKS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    gain = tl.load(gain_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(v * v, 1), 0) * one_over_k
    y = (v * tl.rsqrt(mean + eps) * gain).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token * K + k, y, mask=k < K)
    store_quantized(y.to(tl.float32), k, token, x16_ptr, factor_ptr, K, INSTRUCTION)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


NORM_WARPS = 8  # whatever the batch: they decide the order of the norm's sum


def warps_of(t: int) -> int:
    """Few tokens leave the GPU idle, so each gets more threads."""
    return 16 if t <= 64 else 8


def blocks_of(k: int) -> int:
    """Blocks of 32 channels that one program holds."""
    return triton.next_power_of_2(triton.cdiv(k, 32))


def quantize(x: Tensor, instruction: int, pdl: bool) -> tuple[Tensor, Tensor]:
    """`quantize_activations`, for launches out of another operation."""
    t, k = x.shape
    x16 = torch.empty(t, k, dtype=torch.float16, device=x.device)
    factor = torch.empty(t, dtype=torch.float32, device=x.device)
    if t:
        quantize_kernel[(t,)](
            x.contiguous(), x16, factor, k, blocks_of(k), instruction, pdl, num_warps=warps_of(t), **launch_options(pdl)
        )
    return x16, factor


@torch.library.custom_op("deepinfer::quantize_activations", mutates_args=(), device_types="cuda")
def quantize_activations(x: Tensor, instruction: int, pdl: bool = True) -> tuple[Tensor, Tensor]:
    """`[T, K]` activations of any float dtype to float16 `[T, K]` in channel order and float32 factors `[T]`."""
    return quantize(x, instruction, pdl)


@quantize_activations.register_fake
def _(x: Tensor, instruction: int, pdl: bool = True) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float16), x.new_empty(x.shape[:1], dtype=torch.float32)


@torch.library.custom_op("deepinfer::norm_quantize_activations", mutates_args=(), device_types="cuda")
def norm_quantize_activations(
    x: Tensor, gain: Tensor, eps: float, instruction: int, pdl: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of `[T, K]` in its dtype, and what `quantize_activations` makes of the rounded result.

    The norm's mean is summed in another order than PyTorch's, so now and then a normalised value is the neighbouring number.
    """
    t, k = x.shape
    y = torch.empty(t, k, dtype=x.dtype, device=x.device)
    x16 = torch.empty(t, k, dtype=torch.float16, device=x.device)
    factor = torch.empty(t, dtype=torch.float32, device=x.device)
    if not t:
        return y, x16, factor
    norm_quantize_kernel[(t,)](
        x.contiguous(),
        gain,
        y,
        x16,
        factor,
        k,
        1.0 / k,
        eps,
        blocks_of(k),
        instruction,
        pdl,
        num_warps=NORM_WARPS,
        **launch_options(pdl),
    )
    return y, x16, factor


@norm_quantize_activations.register_fake
def _(x: Tensor, gain: Tensor, eps: float, instruction: int, pdl: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    x16, factor = x.new_empty(x.shape, dtype=torch.float16), x.new_empty(x.shape[:1], dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), x16, factor
