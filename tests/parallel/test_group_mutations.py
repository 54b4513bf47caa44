"""Each mechanism of a group is needed: taken out, one of these checks no longer finds what one process gives."""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepinfer.errors import PeerLost
from deepinfer.model.cache import CacheSizes
from deepinfer.model.linear import StoredMatrix
from deepinfer.model.moe import MoE
from deepinfer.model.transformer import Transformer
from deepinfer.ops.sinkhorn import sum_in_order
from deepinfer.parallel import simulator
from deepinfer.parallel.agreement import AgreedStep, StepAgreement
from deepinfer.parallel.config import ParallelConfig
from deepinfer.parallel.context_parallel import ContextParallel, prefill_context
from deepinfer.parallel.expert_moves import move_experts
from deepinfer.parallel.expert_parallel import ExpertParallel, distribute_experts
from deepinfer.parallel.load_counter import LoadCounter
from deepinfer.parallel.placement import Placement, place_evenly
from deepinfer.parallel.ranks import Ranks
from deepinfer.parallel.simulator import Arrival, simulate
from deepinfer.parallel.voting import Ballot
from deepinfer.runtime.device import InlineDevice
from deepinfer.runtime.plan import GroupShape, SchedulerOutputs, StepKind
from deepinfer.runtime.static_decode import StaticDecode
from deepinfer.runtime.worker import Worker
from tests.parallel.in_process import ThreadRanks, run_threads
from tests.parallel.test_expert_parallel import MODELS, load, random_placement, tokens
from tests.parallel.test_simulator import check, limits

SIZE = 2
Patch = pytest.MonkeyPatch


# ---- checks: what is wrong, or nothing -----------------------------------------------------------------------------------


def serve_steps(ranks: ThreadRanks, precision: str, folder: str) -> list[str]:
    """Steps with rows everywhere and on one rank alone, then both again with other experts."""
    whole, wrong = load(precision, folder), []
    n_experts, n_layers = whole.config.moe.n_routed_experts, whole.config.n_layers
    placement = place_evenly(n_layers, n_experts, min(-(-n_experts // SIZE) + 1, n_experts) * SIZE, SIZE)
    part = load(precision, folder, placement.experts_of(0, ranks.rank))
    exchanges = distribute_experts(part, ranks, placement, LoadCounter(n_layers, n_experts, 1, 1))  # type: ignore[arg-type]
    ids = tokens(ranks.rank, 1, 9 + ranks.rank)
    for new in (placement, random_placement(placement, n_experts, seed=3)):
        move_experts(part, ranks, placement, new)  # type: ignore[arg-type]
        for exchange in exchanges:
            exchange.switch(new)
        if not torch.equal(part(ids), whole(ids)):
            wrong.append(f"logits of rank {ranks.rank}")
        if ranks.rank == 0:
            part.forward_without_rows()
        elif not torch.equal(part(ids), whole(ids)):
            wrong.append("logits of the only rank with rows")
    return wrong


def wrong_experts() -> list[str]:
    # The last of them adds four outputs for each token, and rounds so little that their order shows.
    models = (*MODELS, ("float32", "smooth_full"))
    return [wrong for model in models for of_rank in run_threads(serve_steps, SIZE, *model) for wrong in of_rank]


def prefill_parts(ranks: ThreadRanks) -> list[str]:
    model, ids = load(*MODELS[0]), tokens(5, 40)
    result = prefill_context(model, ranks, ids, block_size=4)  # type: ignore[arg-type]
    return [] if torch.equal(model.logits(result.final), model(ids)[result.positions]) else [f"logits of rank {ranks.rank}"]


def wrong_context() -> list[str]:
    return [wrong for of_rank in run_threads(prefill_parts, SIZE) for wrong in of_rank]


def wrong_votes() -> list[str]:
    """Memory is short on rank 0, and rank 1 has little to do."""
    for seed in range(8):
        rng = random.Random(seed)
        arrivals = [Arrival(0, rng.randint(0, 9), rng.randint(1, 24), rng.randint(1, 24)) for _ in range(6)]
        arrivals += [Arrival(1, 4 * i, 5, 6) for i in range(4)]
        config = ParallelConfig(ep_size=SIZE, prefill_interval_all=2, prefill_interval_any=5)
        check(arrivals, simulate(arrivals, config, limits(rng, is_tight=True), max_iterations=2000))
    return []


def wrong_exchanges() -> list[str]:
    """A step without rows has to call what its peers call, layer by layer."""
    model, calls = load(*MODELS[0]), []
    for layer in model.layers:
        original = layer.ffn.exchange

        def counted(*args: Any, is_even: bool = False, call: Any = original) -> Tensor:
            calls.append(is_even)
            return call(*args, is_even=is_even)

        layer.ffn.exchange = counted
    worker = Worker(model, CacheSizes(num_slots=3, num_blocks=9, block_size=4), InlineDevice(), decode_buckets=(1, 2))
    wrong = []
    for kind, shape in ((StepKind.IDLE, GroupShape(2, 3)), (StepKind.EMPTY_PREFILL, None)):
        calls.clear()
        worker.submit_forward(SchedulerOutputs(step_seq=0, kind=kind, sequences=(), group_shape=shape), None)
        if calls != [shape is not None] * model.config.n_layers:
            wrong.append(f"{kind}: {calls}")
    return wrong


def wrong_message() -> list[str]:
    """What a rank says of two others, one alive and one that never was."""
    store = dist.HashStore()
    store.set("life/1", "7 step 6 (decode)")
    ranks: Any = SimpleNamespace(rank=0, size=3, _store=store, _beat_s=1e-3, doing="step 7 (decode)")
    ranks._signs, ranks._sign = partial(Ranks._signs, ranks), partial(Ranks._sign, ranks)
    message = str(Ranks.lost(ranks, "no answer to 'vote' within 60 s"))
    needed = ("rank 0 at step 7 (decode)", "rank 1: no sign of life since step 6 (decode)", "rank 2: ")
    return [f"{part!r} is not in {message!r}" for part in needed if part not in message]


CHECKS = [wrong_experts, wrong_context, wrong_votes, wrong_exchanges, wrong_message]


def failures(find: Callable[[], list[str]]) -> list[str]:
    try:
        return find()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


@pytest.mark.parametrize("find", CHECKS, ids=lambda f: f.__name__)
def test_a_group_gives_what_one_process_gives(find: Callable[[], list[str]]) -> None:
    assert find() == []


# ---- mutations ---------------------------------------------------------------------------------------------------------


def no_halo(patch: Patch) -> None:
    def without(self: ContextParallel, kv: Tensor, ring: Tensor) -> None:
        self.ranks.exchange(kv[self._rows], self._sent, self._received)

    patch.setattr(ContextParallel, "fill_halo", without)


def scales_stay_behind(patch: Patch) -> None:
    original = StoredMatrix._stored
    patch.setattr(StoredMatrix, "_stored", lambda self, member: original(self, member)[:1])


def one_rank_does_not_switch(patch: Patch) -> None:
    original = ExpertParallel.switch

    def switch(self: ExpertParallel, placement: Placement) -> None:
        if self.ranks.rank == 0 or not hasattr(self, "is_open"):
            original(self, placement)
        self.is_open = True  # type: ignore[attr-defined]

    patch.setattr(ExpertParallel, "switch", switch)


def one_rank_keeps_its_experts(patch: Patch) -> None:
    from deepinfer.parallel import expert_moves

    original = expert_moves.store_record

    def store(experts: Any, slot: int, record: Tensor) -> None:
        if experts.expert_ids[0] == 0 and slot == 0:
            original(experts, slot, record)

    patch.setattr(expert_moves, "store_record", store)


def counter_of_own_prefills(patch: Patch) -> None:
    class Stale(StepAgreement):
        async def next_step(self, digest: int, has_work: bool) -> AgreedStep:
            before = self.since_prefill
            step = await super().next_step(digest, has_work)
            if step.plan is not None and step.plan.kind is StepKind.EMPTY_PREFILL:
                self.since_prefill = before + 1
            return step

    patch.setattr(simulator, "StepAgreement", Stale)


def no_second_confirmation(patch: Patch) -> None:
    class Hasty(StepAgreement):
        def __init__(self, scheduler: Any, gather: Any, config: ParallelConfig) -> None:
            async def without(what: str, row: tuple[int, ...]) -> list[tuple[int, ...]]:
                rows: list[tuple[int, ...]] = [row] * config.ep_size
                return rows if what == "confirm" else await gather(what, row)

            super().__init__(scheduler, without, config)

    patch.setattr(simulator, "StepAgreement", Hasty)


def blocks_of_own_rows(patch: Patch) -> None:
    class Selfish(StepAgreement):
        def __init__(self, scheduler: Any, gather: Any, config: ParallelConfig) -> None:
            async def own(what: str, row: tuple[int, ...]) -> list[tuple[int, ...]]:
                rows = await gather(what, row)
                return [Ballot(*r)._replace(num_blocks=Ballot(*row).num_blocks) for r in rows] if what == "vote" else rows

            super().__init__(scheduler, own, config)

    patch.setattr(simulator, "StepAgreement", Selfish)


def outputs_in_order_of_arrival(patch: Patch) -> None:
    def forward(self: MoE, x: Tensor, is_padding: Tensor | None = None, is_even: bool = False) -> Tensor:
        weights, ids = self.gate(x)
        order, outputs = ids, self.exchange(self.experts, x, weights, ids, is_even=is_even)
        if isinstance(self.exchange, ExpertParallel):
            order = self.exchange.choose_slots(ids)
        arrived = outputs.gather(1, order.argsort(dim=1)[:, :, None].expand_as(outputs))
        return (sum_in_order(arrived.float(), 1).squeeze(1) + self.shared_experts(x).float()).to(x.dtype)

    patch.setattr(MoE, "forward", forward)


def no_exchange_without_rows(patch: Patch) -> None:
    patch.setattr(Transformer, "forward_without_rows", lambda self: None)


def no_idle_step(patch: Patch) -> None:
    original = StaticDecode.run

    def run(self: StaticDecode, staged: Any, before: Any, outputs: Any) -> Any:
        return original(self, staged, before, outputs) if staged.num_logits else None

    patch.setattr(StaticDecode, "run", run)


def no_rank_in_the_message(patch: Patch) -> None:
    patch.setattr(Ranks, "lost", lambda self, why: PeerLost(why, self.rank, ()))


MUTATIONS: list[tuple[Callable[[Patch], None], Callable[[], list[str]]]] = [
    (no_halo, wrong_context),
    (scales_stay_behind, wrong_experts),
    (one_rank_does_not_switch, wrong_experts),
    (one_rank_keeps_its_experts, wrong_experts),
    (counter_of_own_prefills, wrong_votes),
    (no_second_confirmation, wrong_votes),
    (blocks_of_own_rows, wrong_votes),
    (outputs_in_order_of_arrival, wrong_experts),
    (no_exchange_without_rows, wrong_experts),
    (no_exchange_without_rows, wrong_exchanges),
    (no_idle_step, wrong_exchanges),
    (no_rank_in_the_message, wrong_message),
]


@pytest.mark.parametrize(("mutation", "find"), MUTATIONS, ids=lambda f: f.__name__)
def test_taking_a_mechanism_out_is_noticed(
    mutation: Callable[[Patch], None], find: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    assert failures(find), "nothing failed without it"
