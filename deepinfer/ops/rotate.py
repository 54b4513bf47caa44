"""Rotary position embedding on the last channels of a vector; pairs are adjacent channels.

Source: specification section 7 and `rope` of the recorded units.
"""

import math

import torch

from deepinfer.dims import Float, Int, Tensor


def rope_frequencies(dim: int, theta: float) -> Float[Tensor, " half"]:
    """`theta^(-2i/dim)` for each pair i, float32."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))


def yarn_frequencies(
    dim: int, theta: float, factor: float, beta_fast: float, beta_slow: float, original_seq_len: int
) -> Float[Tensor, " half"]:
    """Frequencies blended between `f / factor` (slow pairs) and `f` (fast pairs), at all positions."""
    freqs = rope_frequencies(dim, theta)

    def correction(rotations: float) -> float:
        return dim * math.log(original_seq_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 1e-3)).clamp(0, 1)
    smooth = 1 - ramp
    return freqs / factor * (1 - smooth) + freqs * smooth


def rotation(positions: Int[Tensor, " T"], freqs: Float[Tensor, " half"]) -> Float[Tensor, "T half 2"]:
    """(cos, sin) of position times frequency, in float32.

    Taken from `torch.polar`: `torch.cos` and `torch.sin` differ from it by one ulp at some angles, which is enough to move a
    rounding of the cached rows (the recordings were made with `polar`).
    """
    angle = positions.float()[:, None] * freqs
    return torch.view_as_real(torch.polar(torch.ones_like(angle), angle))


def rotate_last(x: Float[Tensor, "T ... D"], rot: Float[Tensor, "T half 2"], *, inverse: bool = False) -> Float[Tensor, "T ... D"]:
    """Rotate the last `2 * half` channels of `x` by `rot` (by its conjugate if `inverse`); float32 inside, dtype kept.

    Written with separate real products: a complex multiply may fuse them and round differently.
    """
    half = rot.shape[1]
    kept, turned = x[..., : x.shape[-1] - 2 * half], x[..., x.shape[-1] - 2 * half :]
    pairs = turned.float().unflatten(-1, (half, 2))
    re, im = pairs[..., 0], pairs[..., 1]
    shape = (x.shape[0], *([1] * (x.dim() - 2)), half)
    cos, sin = rot[..., 0].view(shape), rot[..., 1].view(shape)
    if inverse:
        sin = -sin
    out = torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1).flatten(-2)
    return torch.cat((kept, out.to(x.dtype)), dim=-1)
