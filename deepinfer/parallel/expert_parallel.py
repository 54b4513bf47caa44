"""Experts on other ranks: send each (token, expert) pair to a rank that holds the expert, and its output back.

The result does not depend on the number of ranks or on the placement. A pair's output is computed from its token alone (to the
bit in batch-invariant arithmetic), and a token's outputs are summed where the token lives, in ascending expert id
(`deepinfer.model.plain_forms.combine`): nothing is reduced on the way.

Legend: T tokens of this rank, K experts of a token, n pairs sent, m pairs received.
"""

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.moe import Experts, MoE
from deepinfer.model.transformer import Transformer
from deepinfer.parallel.load_counter import LoadCounter
from deepinfer.parallel.placement import Placement
from deepinfer.parallel.ranks import Ranks


class ExpertParallel:
    """The exchange of one layer; an `ExpertExchange`.

    Within a rank, experts are addressed by slot: `Experts.expert_ids` are then `0 .. slots_per_rank - 1`.
    """

    def __init__(self, layer: int, ranks: Ranks, placement: Placement, counter: LoadCounter, device: torch.device) -> None:
        self.layer, self.ranks, self.counter, self.device = layer, ranks, counter, device
        self.switch(placement)

    def switch(self, placement: Placement) -> None:
        """Address experts by this placement from now on, between two steps and on all ranks. Mutates the table."""
        slots = placement.slots_of_experts(self.layer)
        self.slots_per_rank = placement.slots_per_rank
        longest = max(len(of_expert) for of_expert in slots)
        table = [[of_expert[i % len(of_expert)] for i in range(longest)] for of_expert in slots]
        self._slots = torch.tensor(table, device=self.device)
        self._num_replicas = torch.tensor([len(of_expert) for of_expert in slots], device=self.device)

    def __call__(
        self, experts: Experts, x: Float[Tensor, "T D"], weights: Float[Tensor, "T K"], ids: Int[Tensor, "T K"]
    ) -> Float[Tensor, "T K D"]:
        """Collective: every rank calls it once for each layer of a step, also without tokens."""
        self.counter.record(self.layer, ids)
        slots_TK = self.choose_slots(ids)
        rank_n, order_n = (slots_TK.flatten() // self.slots_per_rank).sort(stable=True)
        token_n = order_n // ids.shape[1]
        counts = torch.bincount(rank_n, minlength=self.ranks.size)
        received: list[int] = self.ranks.exchange_counts(counts).tolist()
        sent: list[int] = counts.tolist()
        # The weight travels as the bits of a float32 beside the slot.
        labels_n = torch.stack((slots_TK.flatten()[order_n].int(), weights.flatten()[order_n].float().view(torch.int32)), dim=1)
        x_m = self.ranks.exchange(x[token_n], sent, received)
        labels_m = self.ranks.exchange(labels_n, sent, received)
        local_m = labels_m[:, :1].long() % self.slots_per_rank
        out_m = experts(x_m, labels_m[:, 1:].contiguous().view(torch.float32), local_m).squeeze(1)
        out_n = self.ranks.exchange(out_m, received, sent)
        out = torch.empty_like(out_n)
        out[order_n] = out_n
        return out.unflatten(0, tuple(ids.shape))

    def choose_slots(self, ids: Int[Tensor, "T K"]) -> Int[Tensor, "T K"]:
        """A slot for each pair: an expert's replicas take turns from token to token, and ranks start at different ones."""
        turn = torch.arange(ids.shape[0], device=ids.device)[:, None] + self.ranks.rank
        return self._slots[ids, turn % self._num_replicas[ids]]


def distribute_experts(model: Transformer, ranks: Ranks, placement: Placement, counter: LoadCounter) -> list[ExpertParallel]:
    """Let the backbone's layers of a model that was loaded with `placement.experts_of(.., rank)` use the experts of all ranks.

    Draft blocks keep all their experts on every rank. Mutates the model; the result is one exchange for each layer.
    """
    exchanges = []
    for index, ffn in enumerate(feed_forwards(model)):
        experts = ffn.experts
        assert experts.expert_ids == placement.experts_of(index, ranks.rank)
        experts.address_by_slot()
        ffn.exchange = ExpertParallel(index, ranks, placement, counter, model.device)
        exchanges.append(ffn.exchange)
    return exchanges


def feed_forwards(model: Transformer) -> list[MoE]:
    """The feed-forward part of each backbone layer."""
    return [layer.ffn for layer in model.layers]  # type: ignore[misc]
