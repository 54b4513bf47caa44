"""Mixture of experts: route, compute the chosen experts, combine, add the shared expert.

Source: specification section 9. w1 is the gate, w3 the up and w2 the down projection.
"""

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import nn

from deepinfer.config import ModelConfig, MoEConfig
from deepinfer.dims import Bool, Float, Int, Tensor
from deepinfer.model.linear import Linear, StoredMatrix
from deepinfer.model.numerics import Numerics
from deepinfer.model.plain_forms import STATIC_ROWS
from deepinfer.model.router import Router
from deepinfer.ops.elementwise import swiglu


class Chosen(NamedTuple):
    """What a layer knows before its routed experts have run."""

    weights: Float[Tensor, "T K"]
    ids: Int[Tensor, "T K"]
    shared: Float[Tensor, "T D"]  # of the shared expert, for `Ops.combine` alone


class MoE(nn.Module):
    """The feed-forward sub-layer of every block."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, numerics: Numerics, expert_ids: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.numerics = numerics
        self.gate = Router(config.dim, moe, numerics)
        self.experts = Experts(config, moe, numerics, expert_ids)
        self.shared_experts = SharedExpert(config, moe, numerics)
        self.exchange: ExpertExchange = here

    def forward(
        self, x: Float[Tensor, "T D"], is_padding: Bool[Tensor, " T"] | None = None, is_even: bool = False
    ) -> Float[Tensor, "T D"]:
        """`is_padding`: see `choose`; `is_even`: see `Rows`."""
        chosen = self.choose(x, is_padding)
        outputs = self.exchange(self.experts, x, chosen.weights, chosen.ids, is_even=is_even)
        return self.finish(x, chosen, outputs)

    def choose(self, x: Float[Tensor, "T D"], is_padding: Bool[Tensor, " T"] | None) -> Chosen:
        """Everything before the exchange.

        Rows marked as padding visit no expert where pairs can be skipped, so that none is read, sent or counted for them.
        """
        # First, because fast forms compute it beside the routed experts.
        shared = self.shared_experts(x)
        weights, ids = self.gate(x)
        if is_padding is not None and self.experts.can_skip_pairs:
            ids = ids.masked_fill(is_padding[:, None], self.experts.nobody)
        return Chosen(weights, ids, shared)

    def finish(self, x: Float[Tensor, "T D"], chosen: Chosen, outputs: Float[Tensor, "T K D"]) -> Float[Tensor, "T D"]:
        """Everything behind the exchange."""
        return self.numerics.ops.combine(outputs, chosen.ids, chosen.shared, x)

    def forward_without_rows(self, like: Float[Tensor, "0 D"]) -> None:
        """Take part in the exchange of a step in which this process has no rows."""
        pairs = (0, self.gate.moe.n_activated_experts)
        weights = torch.zeros(pairs, dtype=torch.float32, device=like.device)
        self.exchange(self.experts, like, weights, torch.zeros(pairs, dtype=torch.int64, device=like.device))


class ExpertExchange(Protocol):
    """Brings (token, expert) pairs to the experts, wherever those are, and their outputs back; zeros for pairs of nobody.

    `is_even`: every process has this many rows in this call.
    """

    def __call__(
        self,
        experts: "Experts",
        x: Float[Tensor, "T D"],
        weights: Float[Tensor, "T K"],
        ids: Int[Tensor, "T K"],
        *,
        is_even: bool = False,
    ) -> Float[Tensor, "T K D"]: ...


def here(
    experts: "Experts",
    x: Float[Tensor, "T D"],
    weights: Float[Tensor, "T K"],
    ids: Int[Tensor, "T K"],
    *,
    is_even: bool = False,
) -> Float[Tensor, "T K D"]:
    """All experts are in this process."""
    return experts(x, weights, ids)


class SharedExpert(nn.Module):
    """The expert that every token passes through."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, numerics: Numerics) -> None:
        super().__init__()
        self.numerics, self.activate, self.swiglu_limit = numerics, partial(swiglu, limit=moe.swiglu_limit), moe.swiglu_limit
        fmt = "fp8" if config.quantized else "bf16"
        self.w1 = Linear(config.dim, moe.inter_dim, fmt, numerics)
        self.w2 = Linear(moe.inter_dim, config.dim, fmt, numerics)
        self.w3 = Linear(config.dim, moe.inter_dim, fmt, numerics)

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """The result of a fast form may still be in the making: it goes to `Ops.combine` and nowhere else."""
        if (fast := self.numerics.ops.shared_expert) is not None:
            return fast(x, self)
        return self.plain(x)

    def plain(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """The definition."""
        ops = self.numerics.ops
        gate, up = ops.linears(x, (self.w1, self.w3), self.numerics)
        return self.w2(ops.pointwise(self.activate, gate, up).to(x.dtype))


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
        self.swiglu_limit = moe.swiglu_limit
        # Weights are shares of the scale, unless there is one, which is a raw score.
        self.largest_weight = moe.route_scale if moe.n_activated_experts > 1 else float("inf")
        self.nobody = moe.n_routed_experts  # an expert id that no process holds
        self.static_rows = STATIC_ROWS
        places = torch.full((moe.n_routed_experts + 1,), len(self.expert_ids), device="cpu")
        places[list(self.expert_ids)] = torch.arange(len(self.expert_ids), device="cpu")
        self.register_buffer("place_of_expert", places, persistent=False)
        self.place_of_expert: Tensor

    def forward(self, x: Float[Tensor, "T D"], weights: Float[Tensor, "T K"], ids: Int[Tensor, "T K"]) -> Float[Tensor, "T K D"]:
        """Output of each (token, expert) pair, its routing weight applied before w2."""
        return self.numerics.ops.experts(x, weights, ids, self)

    def local_ids(self, ids: Int[Tensor, "T K"]) -> Int[Tensor, "T K"]:
        """Place of each chosen expert in the stack; the number of experts held for one that is not."""
        return ids if self.holds_all else self.place_of_expert[ids]

    @property
    def can_skip_pairs(self) -> bool:
        """Whether an id may be that of `nobody`."""
        return self.w1.packed is not None or not self.holds_all

    def address_by_slot(self, num_ranks: int) -> None:
        """From now on ids are places in the stack, and the number of places for no expert: the caller knows which expert is where.

        Tokens come from `num_ranks` processes. Mutates what ids mean, no weight.
        """
        count = len(self.expert_ids)
        self.expert_ids, self.holds_all = tuple(range(count)), False
        self.place_of_expert = torch.arange(count + 1, device=self.place_of_expert.device)
        self.static_rows = num_ranks * STATIC_ROWS
