"""Experts on other ranks: send each (token, expert) pair to a rank that holds the expert, and its output back.

The result does not depend on the number of ranks or on the placement. A pair's output is computed from its token alone (to the
bit in batch-invariant arithmetic), and a token's outputs are summed where the token lives, in ascending expert id
(`deepinfer.model.plain_forms.combine`): nothing is reduced on the way.

There are two forms. A prefill step sends each pair where it belongs, and reads on the host how many come. In a step whose rows are
as many on every rank (`is_even`) shapes are fixed and nothing is read, so that a graph can hold it: each token goes to every rank,
which is room for all pairs, and a rank computes the pairs that are its own. The others have the id of nobody, which costs no
expert anything.

Legend: T tokens of this rank, K experts of a token, R ranks, n pairs sent, m pairs received.
"""

import torch
import torch.nn.functional as F

from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.compiled import LEAST_ROWS
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
        self.layer, self.ranks, self.counter, self.slots_per_rank = layer, ranks, counter, placement.slots_per_rank
        self.num_slots = placement.num_ranks * placement.slots_per_rank  # the slot of nobody
        n_experts = len(placement.slots_of_experts(layer))
        # Wide enough for any placement: captured graphs read the tables where they are.
        most = self.num_slots - n_experts + 1
        self._slots = torch.empty(n_experts + 1, most, dtype=torch.int64, device=device)
        self._num_replicas = torch.empty(n_experts + 1, dtype=torch.int64, device=device)
        self.switch(placement)

    def switch(self, placement: Placement) -> None:
        """Address experts by this placement from now on, between two steps and on all ranks. Mutates the tables in place."""
        slots = [*placement.slots_of_experts(self.layer), [self.num_slots]]
        most = self._slots.shape[1]
        self._slots.copy_(torch.tensor([[of_expert[i % len(of_expert)] for i in range(most)] for of_expert in slots]))
        self._num_replicas.copy_(torch.tensor([len(of_expert) for of_expert in slots]))

    def __call__(
        self,
        experts: Experts,
        x: Float[Tensor, "T D"],
        weights: Float[Tensor, "T K"],
        ids: Int[Tensor, "T K"],
        *,
        is_even: bool = False,
    ) -> Float[Tensor, "T K D"]:
        """Collective: every rank calls it once for each layer of a step, also without tokens."""
        self.counter.record(self.layer, ids)
        # The weight travels as the bits of a float32 beside the slot.
        labels = torch.stack((self.choose_slots(ids).int(), weights.float().view(torch.int32)), dim=-1)
        return (self._evenly if is_even else self._by_count)(experts, x, labels)

    def _by_count(self, experts: Experts, x: Float[Tensor, "T D"], labels: Int[Tensor, "T K 2"]) -> Float[Tensor, "T K D"]:
        """Pairs sorted by rank, those of nobody left out. Waits for the device."""
        slots_TK = labels[..., 0]
        rank_n, order_n = (slots_TK.flatten() // self.slots_per_rank).sort(stable=True)
        counts = torch.bincount(rank_n, minlength=self.ranks.size)[: self.ranks.size]
        received: list[int] = self.ranks.exchange_evenly(counts).tolist()
        sent: list[int] = counts.tolist()
        order_n = order_n[: sum(sent)]
        x_m = self.ranks.exchange(x[order_n // slots_TK.shape[1]], sent, received)
        labels_m = self.ranks.exchange(labels.flatten(0, 1)[order_n], sent, received)
        local_m = labels_m[:, :1].long() % self.slots_per_rank
        if (missing := LEAST_ROWS - sum(received)) > 0:
            # Compiled experts have no code for a single row: it gets company of nobody.
            x_m, labels_m = F.pad(x_m, (0, 0, 0, missing)), F.pad(labels_m, (0, 0, 0, missing))
            local_m = F.pad(local_m, (0, 0, 0, missing), value=self.slots_per_rank)
        out_m = experts(x_m, labels_m[:, 1:].contiguous().view(torch.float32), local_m).squeeze(1)[: sum(received)]
        out_n = self.ranks.exchange(out_m, received, sent)
        out = out_n.new_zeros(slots_TK.numel(), x.shape[1])
        out[order_n] = out_n
        return out.unflatten(0, tuple(slots_TK.shape))

    def _evenly(self, experts: Experts, x: Float[Tensor, "T D"], labels: Int[Tensor, "T K 2"]) -> Float[Tensor, "T K D"]:
        """Tokens of all ranks, in rank order, to every rank; what each computed of its pairs, back to the tokens."""
        (t, k), size = labels.shape[:2], self.ranks.size
        x_all = self.ranks.exchange_evenly(x.repeat(size, 1))
        labels_all = self.ranks.exchange_evenly(labels.repeat(size, 1, 1))
        local = labels_all[..., 0].long() - self.ranks.rank * self.slots_per_rank
        local = torch.where((local >= 0) & (local < self.slots_per_rank), local, self.slots_per_rank)
        out_all = experts(x_all, labels_all[..., 1].contiguous().view(torch.float32), local)
        # From each rank its share of this rank's pairs: zeros but for those that it holds.
        shares = self.ranks.exchange_evenly(out_all).view(size, t * k, -1)
        rank_n = (labels[..., 0].flatten().long() // self.slots_per_rank).clamp(max=size - 1)
        return shares[rank_n, torch.arange(t * k, device=x.device)].unflatten(0, (t, k))

    def choose_slots(self, ids: Int[Tensor, "T K"]) -> Int[Tensor, "T K"]:
        """A slot for each pair: an expert's replicas take turns from token to token, and ranks start at different ones.

        A pair of nobody gets the number of all slots.
        """
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
        experts.address_by_slot(ranks.size)
        ffn.exchange = ExpertParallel(index, ranks, placement, counter, model.device)
        exchanges.append(ffn.exchange)
    return exchanges


def feed_forwards(model: Transformer) -> list[MoE]:
    """The feed-forward part of each backbone layer."""
    return [layer.ffn for layer in model.layers]  # type: ignore[misc]
