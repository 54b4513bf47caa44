"""Hyper-connections: M parallel residual streams, mixed by coefficients that are computed from the streams themselves.

Each sub-layer reads one vector (`collapse`), and its output is spread back over the streams while they are mixed (`spread`).
The coefficients computed before a sub-layer give its own `post` and `comb`; their `pre` serves the *next* sub-layer. (V4
used the same sub-layer's `pre`; V4.1 shifted it by one.)
Source: specification section 4.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from deepinfer.config import ModelConfig
from deepinfer.dims import Float, Tensor
from deepinfer.model.numerics import Numerics
from deepinfer.ops.sinkhorn import sinkhorn, sum_in_order


class Mixes(NamedTuple):
    """Coefficients of one sub-layer, all float32."""

    pre: Float[Tensor, "T M"]  # collapses the streams for the next sub-layer
    post: Float[Tensor, "T M"]  # how much of this sub-layer's output each stream takes
    comb: Float[Tensor, "T M M"]  # [from, to]


class HyperConnection(nn.Module):
    """Computes the coefficients of one sub-layer from the streams."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        self.config, self.norm_eps, self.numerics = config.hyper_connection, config.norm_eps, numerics
        m = self.config.mult
        rows = 2 * m + m * m
        self.fn = nn.Parameter(torch.empty(rows, m * config.dim, dtype=torch.float32), requires_grad=False)
        self.base = nn.Parameter(torch.empty(rows, dtype=torch.float32), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32), requires_grad=False)

    def forward(self, streams: Float[Tensor, "T M D"]) -> Mixes:
        if (fast := self.numerics.ops.hyper_mix) is not None:
            return Mixes(*fast(streams, self))
        m, eps = self.config.mult, self.config.eps
        flat = streams.flatten(1).float()
        # The projection is taken first and multiplied by the reciprocal RMS afterwards.
        rms = torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + self.norm_eps)
        raw = self.numerics.ops.matmul(flat, self.fn) * rms
        sigmoid = partial(self.numerics.ops.pointwise, torch.sigmoid)
        pre = sigmoid(raw[:, :m] * self.scale[0] + self.base[:m]) + eps
        post = 2 * sigmoid(raw[:, m : 2 * m] * self.scale[1] + self.base[m : 2 * m])
        logits = (raw[:, 2 * m :] * self.scale[2] + self.base[2 * m :]).unflatten(1, (m, m))
        return Mixes(pre, post, sinkhorn(logits, self.config.sinkhorn_iters, eps))


def first_stream(streams: Float[Tensor, "T M D"]) -> Float[Tensor, "T M"]:
    """The `pre` of the very first sub-layer: one-hot on stream 0."""
    pre = torch.zeros(streams.shape[:2], dtype=torch.float32, device=streams.device)
    pre[:, 0] = 1.0
    return pre


def enter(embedded: Float[Tensor, "T D"], mult: int) -> tuple[Float[Tensor, "T M D"], Float[Tensor, "T M"]]:
    """The streams that a model begins with, all alike, and the `pre` of the very first sub-layer."""
    streams = embedded[:, None].expand(-1, mult, -1).contiguous()
    return streams, first_stream(streams)


def mean_stream(streams: Float[Tensor, "T M D"]) -> Float[Tensor, "T D"]:
    """The features of a layer for the draft blocks: float32 inside, the streams' dtype outside."""
    return streams.float().mean(dim=1).to(streams.dtype)


def collapse(streams: Float[Tensor, "T M D"], pre: Float[Tensor, "T M"]) -> Float[Tensor, "T D"]:
    """The sub-layer's input, `sum_m pre_m * stream_m`: float32 inside, the streams' dtype outside."""
    return sum_in_order(pre[:, :, None] * streams.float(), 1).squeeze(1).to(streams.dtype)


def spread(y: Float[Tensor, "T D"], streams: Float[Tensor, "T M D"], mixes: Mixes) -> Float[Tensor, "T M D"]:
    """New streams: `out_to = post_to * y + sum_from comb[from, to] * stream_from`, float32 inside."""
    mixed = sum_in_order(mixes.comb[:, :, :, None] * streams.float()[:, :, None, :], 1).squeeze(1)
    return (mixes.post[:, :, None] * y.float()[:, None, :] + mixed).to(y.dtype)
