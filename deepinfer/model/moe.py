"""Mixture of experts: route, compute the chosen experts, combine, add the shared expert.

Source: specification section 9. w1 is the gate, w3 the up and w2 the down projection.
"""

from functools import partial

import torch
from torch import nn

from deepinfer.config import ModelConfig, MoEConfig
from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.linear import Linear, StoredMatrix, product
from deepinfer.model.numerics import Numerics
from deepinfer.model.router import Router
from deepinfer.ops.elementwise import swiglu
from deepinfer.ops.sinkhorn import sum_in_order

STATIC_ROWS = 256  # more rows are a prefill, whose shapes need not be fixed


class MoE(nn.Module):
    """The feed-forward sub-layer of every block."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, numerics: Numerics, expert_ids: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.gate = Router(config.dim, moe, numerics)
        self.experts = Experts(config, moe, numerics, expert_ids)
        self.shared_experts = SharedExpert(config, moe, numerics)

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        weights, ids = self.gate(x)
        routed = combine(self.experts(x, weights, ids), ids)
        return (routed + self.shared_experts(x).float()).to(x.dtype)


def combine(outputs: Float[Tensor, "T K D"], ids: Int[Tensor, "T K"]) -> Float[Tensor, "T D"]:
    """Sum each token's expert outputs in float32 in ascending expert id: an order that no batch, rank or placement changes."""
    order = ids.argsort(dim=1)
    ascending = outputs.gather(1, order[:, :, None].expand_as(outputs)).float()
    return sum_in_order(ascending, 1).squeeze(1)


class SharedExpert(nn.Module):
    """The expert that every token passes through."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, numerics: Numerics) -> None:
        super().__init__()
        self.numerics, self.activate = numerics, partial(swiglu, limit=moe.swiglu_limit)
        fmt = "fp8" if config.quantized else "bf16"
        self.w1 = Linear(config.dim, moe.inter_dim, fmt, numerics)
        self.w2 = Linear(moe.inter_dim, config.dim, fmt, numerics)
        self.w3 = Linear(config.dim, moe.inter_dim, fmt, numerics)

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        return self.w2(self.numerics.ops.pointwise(self.activate, self.w1(x), self.w3(x)).to(x.dtype))


class Experts(nn.Module):
    """The routed experts, stacked: parameter `w1.weight[i]` is the checkpoint's `experts.{expert_ids[i]}.w1.weight`.

    With `expert_ids` a process holds some of the experts; pairs routed to the others then give zeros.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, numerics: Numerics, expert_ids: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.numerics, self.activate = numerics, partial(swiglu, limit=moe.swiglu_limit)
        self.expert_ids = tuple(range(moe.n_routed_experts)) if expert_ids is None else expert_ids
        self.holds_all = len(self.expert_ids) == moe.n_routed_experts
        fmt, stack = "fp4" if config.quantized else "bf16", (len(self.expert_ids),)
        self.w1 = StoredMatrix(config.dim, moe.inter_dim, fmt, stack)
        self.w2 = StoredMatrix(moe.inter_dim, config.dim, fmt, stack)
        self.w3 = StoredMatrix(config.dim, moe.inter_dim, fmt, stack)

    def forward(self, x: Float[Tensor, "T D"], weights: Float[Tensor, "T K"], ids: Int[Tensor, "T K"]) -> Float[Tensor, "T K D"]:
        """Output of each (token, expert) pair, its routing weight applied before w2."""
        if not (self.numerics.ops.static_shapes and x.shape[0] <= STATIC_ROWS):
            return self._one_by_one(x, weights, ids)
        if self.holds_all and ids.numel() <= len(self.expert_ids):
            return self._gathered(x, weights, ids)
        return self._every_expert(x, weights, ids)

    def _one_by_one(self, x: Tensor, weights: Tensor, ids: Tensor) -> Float[Tensor, "T K D"]:
        """Visit each expert that got a token with all its tokens. Reads counts on the host, so it cannot be captured."""
        out = x.new_zeros((*ids.shape, x.shape[1]))
        chosen = set(ids.unique().tolist())
        for local, expert in enumerate(self.expert_ids):
            if expert in chosen:
                token, slot = torch.where(ids == expert)
                out[token, slot] = self._expert(x[token], weights[token, slot, None], local)
        return out

    def _expert(self, x: Float[Tensor, "n D"], weight: Float[Tensor, "n 1"], local: int) -> Float[Tensor, "n D"]:
        quantized, dtype = self.w1.is_quantized, torch.float32
        gate = product(x, self.w1.values(dtype, local), quantized, self.numerics)
        up = product(x, self.w3.values(dtype, local), quantized, self.numerics)
        hidden = (self.numerics.ops.pointwise(self.activate, gate, up) * weight).to(x.dtype)
        return product(hidden, self.w2.values(dtype, local), quantized, self.numerics)

    def _every_expert(self, x: Tensor, weights: Tensor, ids: Tensor) -> Float[Tensor, "T K D"]:
        """The same with every expert computing every token: fixed shapes, for more pairs than experts."""
        out = x.new_zeros((*ids.shape, x.shape[1]))
        for local, expert in enumerate(self.expert_ids):
            is_chosen = ids == expert
            weight = (weights * is_chosen).sum(dim=1, keepdim=True)
            out = torch.where(is_chosen[:, :, None], self._expert(x, weight, local)[:, None], out)
        return out

    def _gathered(self, x: Tensor, weights: Tensor, ids: Tensor) -> Float[Tensor, "T K D"]:
        """The same with the chosen experts' matrices gathered for each pair: fixed shapes, for few tokens."""
        assert self.holds_all
        t, k = ids.shape
        pairs = ids.flatten()
        per_pair = x[:, None].expand(t, k, -1).flatten(0, 1)
        gate = self._pair_product(per_pair, self.w1, pairs)
        up = self._pair_product(per_pair, self.w3, pairs)
        hidden = (self.numerics.ops.pointwise(self.activate, gate, up) * weights.flatten()[:, None]).to(x.dtype)
        return self._pair_product(hidden, self.w2, pairs).unflatten(0, (t, k))

    def _pair_product(self, x: Float[Tensor, "P K"], matrix: StoredMatrix, pairs: Int[Tensor, " P"]) -> Float[Tensor, "P N"]:
        rows = [
            product(x[i : i + 1], w, matrix.is_quantized, self.numerics)
            for i, w in enumerate(matrix.values(torch.float32, pairs).unbind(0))
        ]
        return torch.cat(rows)
