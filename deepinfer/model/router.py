"""Routing: which experts a token visits and how much each counts.

Source: specification section 9, steps 1 to 3, and `router` of the recorded units.
"""

from typing import NamedTuple

import torch
from torch import nn

from deepinfer.config import MoEConfig
from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.linear import Float32Linear
from deepinfer.model.numerics import Numerics
from deepinfer.ops.elementwise import sqrt_softplus
from deepinfer.ops.select import topk_stable

SUM_FLOOR = 1e-20


class RouterOutput(NamedTuple):
    """Chosen experts, best biased score first."""

    weights: Float[Tensor, "T K"]  # float32, routing scale included
    ids: Int[Tensor, "T K"]


class Router(Float32Linear):
    """Scores `sqrt(softplus(x W^T))`; the bias takes part in the choice only, never in the weights (`noaux_tc`).

    Equal biased scores go to the lower expert id. `gate.bias_vl` of the checkpoint serves image tokens and is not loaded.
    """

    def __init__(self, dim: int, moe: MoEConfig, numerics: Numerics) -> None:
        super().__init__(dim, moe.n_routed_experts, numerics)
        self.moe = moe
        self.bias = nn.Parameter(torch.empty(moe.n_routed_experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Float[Tensor, "T D"]) -> RouterOutput:  # type: ignore[override]
        logits = super().forward(x)
        if (fast := self.numerics.ops.route) is not None:
            return RouterOutput(*fast(logits, self))
        scores = self.numerics.ops.pointwise(sqrt_softplus, logits)
        _, ids = topk_stable(scores + self.bias, self.moe.n_activated_experts)
        weights = scores.gather(1, ids)
        # A single expert keeps its raw score.
        if self.moe.n_activated_experts > 1:
            weights = weights / (weights.sum(dim=1, keepdim=True) + SUM_FLOOR)
        return RouterOutput(weights * self.moe.route_scale, ids)
