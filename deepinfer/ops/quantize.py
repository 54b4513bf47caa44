"""Rounding to the block-scaled formats: FP8 and FP4 values with one scale for each small group of channels.

All functions return the *rounded values* (code times scale) in the input's dtype; every such value is exact in bfloat16.
Source: specification section 6 and `act_fp8`, `act_fp4_g32`, `act_fp4_g16`, `e2m1_round` of the recorded units.
"""

import torch
from einops import rearrange

from deepinfer.dims import Float, Tensor

FLOAT8_E4M3_MAX = 448.0
FLOAT4_E2M1_MAX = 6.0
FP8_AMAX_FLOOR = 1e-4
FP4_UE8M0_AMAX_FLOOR = 6.0 * 2.0**-126
FP4_E4M3_AMAX_FLOOR = 6.0 * 2.0**-9


def ue8m0_scale(amax: Float[Tensor, "..."], largest: float) -> Float[Tensor, "..."]:
    """The smallest power of two s with `amax * fl32(1 / largest) <= s`, read off the float32 bit pattern.

    The reciprocal is rounded to float32 first (a Python number is, beside a float32 tensor), as the published kernels do; an
    exact power of two is kept.
    """
    ratio = amax.float() * (1.0 / largest)
    bits = ratio.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def round_e2m1(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Round to {0, .5, 1, 1.5, 2, 3, 4, 6} with sign, ties to the even code, clamped to +-6; same dtype."""
    a = x.abs()
    half_steps = (a > 0.25).to(a.dtype) + (a >= 0.75) + (a > 1.25) + (a >= 1.75)
    magnitude = 0.5 * half_steps + (a > 2.5) + (a >= 3.5) + 2.0 * (a > 5.0)
    return torch.copysign(magnitude, x)


def round_fp8(x: Float[Tensor, "... D"], group: int = 32) -> Float[Tensor, "... D"]:
    """Round to e4m3 with one UE8M0 scale for each `group` channels: activations and window rows ("FP8-32")."""
    grouped = rearrange(x.float(), "... (g c) -> ... g c", c=group)
    amax = grouped.abs().amax(dim=-1, keepdim=True).clamp(min=FP8_AMAX_FLOOR)
    scale = ue8m0_scale(amax, FLOAT8_E4M3_MAX)
    codes = (grouped / scale).clamp(-FLOAT8_E4M3_MAX, FLOAT8_E4M3_MAX).to(torch.float8_e4m3fn)
    return rearrange(codes.float() * scale, "... g c -> ... (g c)").to(x.dtype)


def round_fp4_ue8m0(x: Float[Tensor, "... D"], group: int = 32) -> Float[Tensor, "... D"]:
    """Round to e2m1 with one UE8M0 scale for each `group` channels: index queries and keys ("FP4-32")."""
    grouped = rearrange(x.float(), "... (g c) -> ... g c", c=group)
    amax = grouped.abs().amax(dim=-1, keepdim=True).clamp(min=FP4_UE8M0_AMAX_FLOOR)
    scale = ue8m0_scale(amax, FLOAT4_E2M1_MAX)
    codes = round_e2m1((grouped / scale).clamp(-FLOAT4_E2M1_MAX, FLOAT4_E2M1_MAX))
    return rearrange(codes * scale, "... g c -> ... (g c)").to(x.dtype)


def round_fp4_e4m3(x: Float[Tensor, "... D"], group: int = 16) -> Float[Tensor, "... D"]:
    """Round to e2m1 with one e4m3 scale for each `group` channels: compressed entries ("FP4-16")."""
    grouped = rearrange(x.float(), "... (g c) -> ... g c", c=group)
    amax = grouped.abs().amax(dim=-1, keepdim=True).clamp(min=FP4_E4M3_AMAX_FLOOR)
    scale = (amax / FLOAT4_E2M1_MAX).clamp(max=FLOAT8_E4M3_MAX).to(torch.float8_e4m3fn).float()
    codes = round_e2m1((grouped / scale).clamp(-FLOAT4_E2M1_MAX, FLOAT4_E2M1_MAX))
    return rearrange(codes * scale, "... g c -> ... (g c)").to(x.dtype)
