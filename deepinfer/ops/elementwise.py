"""Activations and normalisation, float32 inside.

`torch.sigmoid`, `softplus` and `silu` are used as they are, because the recordings were made with them and other spellings
differ in the last bit. In the scalar tail of a CPU tensor they take another code path than in its vector part; `without_tail`
keeps every value out of a tail where a result must not depend on its place in a tensor.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from deepinfer.dims import Float, Tensor

VECTOR_ELEMENTS = 64  # a multiple of every CPU vector loop's step
SINGLE_THREAD_ELEMENTS = 32768  # more elements are split over threads, at places that may leave a tail in the middle


def plain(fn: Callable[..., Tensor], *inputs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`fn(*inputs)`."""
    return fn(*inputs)


def without_tail(fn: Callable[..., Tensor], *inputs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`fn(*inputs)` for an elementwise function of equally shaped inputs, each element computed by the vector loop."""
    flat = [x.reshape(-1) for x in inputs]
    count = flat[0].shape[0]
    padded = [F.pad(x, (0, -count % VECTOR_ELEMENTS)) for x in flat]
    pieces = [fn(*parts) for parts in zip(*(x.split(SINGLE_THREAD_ELEMENTS) for x in padded), strict=True)]
    return torch.cat(pieces)[:count].view(inputs[0].shape)


def sqrt_softplus(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`sqrt(log(1 + exp(x)))`, with x itself for the logarithm above torch's threshold of 20: the router's scores."""
    return torch.sqrt(F.softplus(x))


def swiglu(gate: Float[Tensor, "... F"], up: Float[Tensor, "... F"], limit: float) -> Float[Tensor, "... F"]:
    """`silu(gate) * up` in float32, `up` clamped to +-limit and `gate` from above; a limit of 0 means no clamp (section 9)."""
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def rms_norm(x: Float[Tensor, "... D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "... D"]:
    """`x * rsqrt(mean(x^2) + eps) * weight` in float32, one rounding to the input's dtype at the end (section 5)."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)
