"""Sinkhorn normalisation of the matrix that mixes the residual streams.

Source: specification section 4 and `sinkhorn` of the recorded units.
"""

import torch

from deepinfer.dims import Float, Tensor


def sum_in_order(x: Float[Tensor, "..."], dim: int) -> Float[Tensor, "..."]:
    """Sum over `dim` from left to right, keeping it as size 1. A reduction may pair terms otherwise, which moves the last bit."""
    parts = x.split(1, dim=dim)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def sinkhorn(logits: Float[Tensor, "T M M"], iters: int, eps: float) -> Float[Tensor, "T M M"]:
    """A nearly doubly stochastic matrix from logits: softmax over columns, then alternate column and row normalisation.

    Indices are [from, to]. `iters` counts the softmax as the first row step: `iters` column steps and `iters - 1` further row
    steps follow, each dividing by its sum plus `eps`. The softmax is `exp(x - max)` over its left-to-right sum;
    `torch.softmax` differs in the last bit, enough to move bfloat16 logits by whole units.
    """
    e = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    mix = e / sum_in_order(e, -1) + eps
    mix = mix / (sum_in_order(mix, -2) + eps)
    for _ in range(iters - 1):
        mix = mix / (sum_in_order(mix, -1) + eps)
        mix = mix / (sum_in_order(mix, -2) + eps)
    return mix
