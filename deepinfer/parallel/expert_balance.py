"""EPLB: once a period, compute a placement from the loads of the last window and move the experts.

Every rank computes the same placement from the same sums, and compares its digest with the others in the next vote.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from deepinfer.model.transformer import Transformer
from deepinfer.parallel.config import ParallelConfig
from deepinfer.parallel.expert_moves import move_experts
from deepinfer.parallel.expert_parallel import distribute_experts
from deepinfer.parallel.load_counter import LoadCounter
from deepinfer.parallel.placement import Placement, imbalance, place_experts
from deepinfer.parallel.ranks import Ranks

logger = logging.getLogger(__name__)

# A rearrangement must be expected to lower the mean imbalance of the layers by this much, or it is not worth its traffic.
LEAST_IMPROVEMENT = 0.01


class Rearrangement(NamedTuple):
    """One move of experts.

    Attributes:
        before, after: load of the fullest rank over the mean, averaged over layers, both for the loads of the window.
    """

    step: int
    before: float
    after: float
    num_moves: int
    sent_bytes: int


class ExpertBalance:
    """The placement of a group's experts and its one writer."""

    def __init__(self, model: Transformer, ranks: Ranks, config: ParallelConfig, placement: Placement) -> None:
        self.model, self.ranks, self.config, self.placement = model, ranks, config, placement
        moe = model.config.moe
        self.counter = LoadCounter(
            model.config.n_layers, moe.n_routed_experts, config.eplb_window, config.eplb_period, model.device
        )
        self.exchanges = distribute_experts(model, ranks, placement, self.counter)
        self.rearrangements: list[Rearrangement] = []

    async def end_step(self, flush: Callable[[], Awaitable[None]]) -> None:
        """Count a step; at the end of a period wait for the device (`flush`) and rearrange. Collective."""
        if not self.counter.end_step():
            return
        await flush()
        loads = (await self.ranks.sum("expert loads", self.counter.take())).tolist()
        num_slots = len(self.placement.layers[0])
        new = place_experts(loads, num_slots, self.placement)
        before, after = mean_imbalance(loads, self.placement), mean_imbalance(loads, new)
        if before - after < LEAST_IMPROVEMENT:
            return
        cost = move_experts(self.model, self.ranks, self.placement, new)
        for exchange in self.exchanges:
            exchange.switch(new)
        self.placement = new
        self.rearrangements.append(Rearrangement(self.counter.num_steps, before, after, *cost))
        logger.info("step %d: moved %d experts, imbalance %.3f -> %.3f", self.counter.num_steps, cost.num_moves, before, after)


def mean_imbalance(loads: Sequence[Sequence[float]], placement: Placement) -> float:
    """Load of the fullest rank over the mean, averaged over layers."""
    ratios = [imbalance(of_layer, placement.layers[i], placement.num_ranks) for i, of_layer in enumerate(loads)]
    return sum(ratios) / len(ratios)
