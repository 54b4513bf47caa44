"""Root-mean-square normalisation with a gain."""

import torch
from torch import nn

from deepinfer.dims import Float, Tensor
from deepinfer.ops.elementwise import rms_norm


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`; see `deepinfer.ops.elementwise.rms_norm` for the rounding."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return rms_norm(x, self.weight, self.eps)
