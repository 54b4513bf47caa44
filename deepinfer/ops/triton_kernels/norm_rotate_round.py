"""The last steps of a vector before it is stored or compared, in one launch: norm, rotation of the last channels, rounding.

The plain twin is `norm_rotate_round` of `model/plain_forms.py`. A program has one vector, so its bits do not depend on company.
Products and sums of the rotation stay separate (no fused multiply-add), and divisions are IEEE's, as in the plain twin.

Legend: T rows, H vectors of a row, D channels, R rotated pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.quantize import FP4_E4M3_AMAX_FLOOR, FP4_UE8M0_AMAX_FLOOR
from deepinfer.ops.triton_kernels.decode import fp8_code, fp8_scale, power_of_two
from deepinfer.ops.triton_kernels.launch import launch_options

NOT, FP8, FP4_UE8M0, FP4_E4M3 = 0, 1, 2, 3  # roundings; the kernel tells them apart by these numbers
UE8M0_FLOOR = tl.constexpr(FP4_UE8M0_AMAX_FLOOR)
E4M3_FLOOR = tl.constexpr(FP4_E4M3_AMAX_FLOOR)
SIXTH = tl.constexpr(1.0 / 6.0)
LEAST_CHANNELS = 32  # of the largest group with one scale


@triton.jit
def e2m1(units):
    """Rounded to the values of FP4, ties to the even code, at most 6 in magnitude; NaN becomes zero, as in `round_e2m1`."""
    a = tl.abs(units)
    steps = (a > 0.25).to(tl.float32) + (a >= 0.75).to(tl.float32) + (a > 1.25).to(tl.float32) + (a >= 1.75).to(tl.float32)
    size = 0.5 * steps + (a > 2.5).to(tl.float32) + (a >= 3.5).to(tl.float32) + 2.0 * (a > 5.0).to(tl.float32)
    return tl.where(units < 0, -size, size)


@triton.jit
def rounded(v, ROUNDING: tl.constexpr):
    """Float32 `[groups, channels of a group]` rounded to a block-scaled format; a group with NaN is NaN.

    So is one with an infinity, but for FP4 in scales of E4M3, which end at 448.
    """
    largest = tl.max(tl.abs(v), 1)
    broken = tl.max((v != v).to(tl.int32), 1) > 0
    if ROUNDING != 3:
        broken = broken | (largest == float("inf"))
    if ROUNDING == 1:
        biased = fp8_scale(largest)
        scale = power_of_two(biased)
        codes = fp8_code(v, biased[:, None])
    elif ROUNDING == 2:
        bits = (tl.maximum(largest, UE8M0_FLOOR) * SIXTH).to(tl.int32, bitcast=True)
        biased = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        scale = power_of_two(biased)
        codes = e2m1(v * power_of_two(254 - biased)[:, None])
    else:
        units = tl.minimum(tl.div_rn(tl.maximum(largest, E4M3_FLOOR), tl.full(largest.shape, 6.0, tl.float32)), 448.0)
        scale = units.to(tl.float8e4nv).to(tl.float32)
        codes = e2m1(tl.div_rn(v, tl.broadcast_to(scale[:, None], v.shape)))
    return codes * tl.where(broken, float("nan"), scale)[:, None]


@triton.jit
def norm_rotate_round_kernel(
    x_ptr,  # [T, H, D]
    gain_ptr,  # [D]
    rotation_ptr,  # float32 [T, R, 2], cosine and sine
    y_ptr,  # [T, H, D]
    H,
    R,
    D,
    one_over_d,
    eps,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDING: tl.constexpr,
    PDL: tl.constexpr,
):
    vector = tl.program_id(0).to(tl.int64)
    token = vector // H
    d = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_real = d < D
    first = D - 2 * R
    is_turned = is_real & (d >= first)
    pair = (token * R + (d - first) // 2) * 2
    if PDL:
        tl.extra.cuda.gdc_wait()
    cos = tl.load(rotation_ptr + pair, mask=is_turned, other=1.0)
    sin = tl.load(rotation_ptr + pair + 1, mask=is_turned, other=0.0)
    dtype = x_ptr.dtype.element_ty
    v = tl.load(x_ptr + vector * D + d, mask=is_real, other=0.0).to(tl.float32)
    # The other channel of each pair.
    other = tl.load(x_ptr + vector * D + (d ^ 1), mask=is_real, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(v * v, 1), 0) * one_over_d + eps)
        v = (v * scale * tl.load(gain_ptr + d, mask=is_real, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        other = (other * scale * tl.load(gain_ptr + (d ^ 1), mask=is_real, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    turned = tl.where(d % 2 == 0, v * cos - other * sin, other * sin + v * cos)
    y = tl.where(is_turned, turned, v).to(dtype)
    if ROUNDING:
        y = rounded(y.to(tl.float32), ROUNDING).to(dtype)
    tl.store(y_ptr + vector * D + d, y, mask=is_real)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@torch.library.custom_op("deepinfer::norm_rotate_round", mutates_args=(), device_types="cuda")
def norm_rotate_round(x: Tensor, rotation: Tensor, gain: Tensor | None, eps: float, rounding: int, pdl: bool = True) -> Tensor:
    """`x` `[T, D]` or `[T, H, D]`, each vector normalised if there is a `gain`, rotated and rounded; same shape and dtype.

    Args:
        rotation: float32 `[T, R, 2]`, as `ops.rotate.rotation` gives it; the last `2 R` channels are turned.
        gain: `[D]` of an RMS norm with `eps`.
        rounding: NOT, FP8, FP4_UE8M0 or FP4_E4M3; D is a multiple of its group.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    vectors, d = x.numel() // x.shape[-1], x.shape[-1]
    if vectors:
        group = 16 if rounding == FP4_E4M3 else 32
        norm_rotate_round_kernel[(vectors,)](
            x.contiguous(),
            x if gain is None else gain,
            rotation.contiguous(),
            y,
            vectors // x.shape[0],
            rotation.shape[1],
            d,
            1.0 / d,
            eps,
            triton.next_power_of_2(triton.cdiv(d, group)),
            group,
            gain is not None,
            rounding,
            pdl,
            num_warps=1,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
    return y


@norm_rotate_round.register_fake
def _(x: Tensor, rotation: Tensor, gain: Tensor | None, eps: float, rounding: int, pdl: bool = True) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
