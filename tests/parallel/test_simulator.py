"""Many ranks under random traffic: identical collectives, bounded waits, nothing lost or doubled."""

import asyncio
import random
from itertools import count
from typing import Any

import pytest

from deepinfer.errors import AgreementError
from deepinfer.parallel import agreement
from deepinfer.parallel.config import ParallelConfig, PrefillVote
from deepinfer.parallel.simulator import Arrival, FakeGroup, RankTrace, simulate
from deepinfer.parallel.voting import Decision, Motion, decide
from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.plan import StepKind

BLOCK_SIZE = 4


def traffic(rng: random.Random, ranks: int, requests: int, longest: int = 24) -> list[Arrival]:
    """Requests at random ranks and times; some ranks get none."""
    owners = rng.choices(range(ranks), k=max(1, ranks // 2)) if rng.random() < 0.3 else range(ranks)
    arrivals = []
    for _ in range(requests):
        max_tokens = rng.randint(1, longest)
        ends_at = rng.randint(1, max_tokens + 4) if rng.random() < 0.5 else None
        at = rng.choice((0, rng.randint(0, 60)))
        arrivals.append(Arrival(rng.choice(list(owners)), at, rng.randint(1, longest), max_tokens, ends_at))
    return arrivals


def limits(rng: random.Random, *, is_tight: bool, longest: int = 24) -> SchedulerLimits:
    """Tight: hardly more memory than one request needs, so that reservations fail and sequences are preempted."""
    least = 2 * longest // BLOCK_SIZE + 1
    return SchedulerLimits(
        max_num_seqs=rng.randint(1, 6) if is_tight else 64,
        max_num_batched_tokens=rng.choice((3, 8, 32)) if is_tight else 4096,
        max_model_len=2 * longest,
        block_size=BLOCK_SIZE,
        num_blocks=least + rng.randint(1, 6) if is_tight else 4096,
    )


def check(arrivals: list[Arrival], traces: list[RankTrace]) -> None:
    """Every rank saw the same steps, and every request ended once, with its own tokens."""
    assert all(trace.agreed == traces[0].agreed for trace in traces)
    ran = [(StepKind.PREFILL, StepKind.EMPTY_PREFILL), (StepKind.DECODE, StepKind.IDLE)]
    for trace in traces:
        assert trace.shapes == traces[0].shapes
        assert len(trace.kinds) == len(traces[0].kinds)
        for kind, other in zip(trace.kinds, traces[0].kinds, strict=True):
            assert any(kind in pair and other in pair for pair in ran), "a prefill here, a decode step there"
    for rank, trace in enumerate(traces):
        own = [a for a in arrivals if a.rank == rank]
        expected = {f"{rank}.{i}": a.expected for i, a in enumerate(own)}
        assert len(trace.outputs) == len(own)
        assert dict(trace.outputs) == expected


def run_patterns(patterns: int, first: int = 0) -> dict[str, int]:
    """Random patterns under every vote; what happened over all of them."""
    seen = dict.fromkeys(("preemptions", "withdrawals", "empty_prefills", "idle", "drains", "prefill_all", "prefill_any"), 0)
    for seed in range(first, first + patterns):
        rng = random.Random(seed)
        ranks = rng.randint(1, 5)
        interval = rng.randint(1, 4)
        config = ParallelConfig(
            ep_size=ranks,
            prefill_vote=rng.choice(list(PrefillVote)),
            prefill_interval_all=interval,
            prefill_interval_any=interval + rng.randint(0, 10),
        )
        arrivals = traffic(rng, ranks, rng.randint(1, 14))
        bounds = limits(rng, is_tight=rng.random() < 0.7)
        traces = simulate(arrivals, config, bounds, async_scheduling=rng.randint(0, 1), max_iterations=5000)
        check(arrivals, traces)
        seen["preemptions"] += sum(t.preemptions for t in traces)
        seen["withdrawals"] += sum(t.withdrawals for t in traces)
        seen["empty_prefills"] += sum(t.kinds.count(StepKind.EMPTY_PREFILL) for t in traces)
        seen["idle"] += sum(t.kinds.count(StepKind.IDLE) for t in traces)
        motions = [motion for _, motion, _ in traces[0].agreed]
        seen["drains"] += motions.count(Motion.DRAIN)
        seen["prefill_all"] += motions.count(Motion.PREFILL_ALL)
        seen["prefill_any"] += motions.count(Motion.PREFILL_ANY)
    return seen


def test_random_traffic_keeps_ranks_together_and_loses_nothing() -> None:
    seen = run_patterns(300)
    assert min(seen.values()) > 0, f"something never happened: {seen}"


@pytest.mark.slow
def test_thousands_of_traffic_patterns() -> None:
    seen = run_patterns(5000, first=10_000)
    assert min(seen.values()) > 100, seen


def test_no_request_waits_longer_than_the_any_interval() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        config = ParallelConfig(ep_size=4, prefill_interval_all=2, prefill_interval_any=rng.randint(2, 9))
        arrivals = traffic(rng, 4, 12)
        traces = simulate(arrivals, config, limits(rng, is_tight=False))
        check(arrivals, traces)
        for trace in traces:
            waits = {name: trace.admitted_at.get(name, at) - at for name, at in trace.queued_at.items()}
            assert max(waits.values(), default=0) <= config.prefill_interval_any, waits


def test_prefills_keep_their_distance_while_anybody_decodes() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        config = ParallelConfig(ep_size=3, prefill_interval_all=4, prefill_interval_any=6)
        arrivals = traffic(rng, 3, 16)
        traces = simulate(arrivals, config, limits(rng, is_tight=False))
        last = None
        for iteration, motion, groups in traces[0].agreed:
            if motion in (Motion.PREFILL_ALL, Motion.PREFILL_ANY):
                assert last is None or groups == 0 or iteration - last > config.prefill_interval_all
                last = iteration


@pytest.mark.parametrize("ranks", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_groups_of_the_published_size(ranks: int) -> None:
    rng = random.Random(ranks)
    config = ParallelConfig(ep_size=ranks, prefill_interval_any=8)
    arrivals = traffic(rng, ranks, ranks)
    traces = simulate(arrivals, config, limits(rng, is_tight=True))
    check(arrivals, traces)


def test_a_rank_that_decides_by_something_of_its_own_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count()

    def own_mind(*args: Any) -> Decision:
        decision = decide(*args)
        return Decision(Motion.DRAIN, 0) if next(calls) == 21 else decision

    arrivals = [Arrival(0, 0, 5, 6), Arrival(1, 9, 5, 6), Arrival(0, 12, 5, 6)]
    config, bounds = ParallelConfig(ep_size=2), limits(random.Random(0), is_tight=False)
    check(arrivals, simulate(arrivals, config, bounds))
    monkeypatch.setattr(agreement, "decide", own_mind)
    with pytest.raises((AgreementError, AssertionError)):
        check(arrivals, simulate(arrivals, config, bounds, max_iterations=200))


def test_a_rank_that_skips_a_collective_is_noticed() -> None:
    async def run() -> None:
        group = FakeGroup(2)
        async with asyncio.timeout(5):
            await asyncio.gather(group.gather(0, "vote", (1, 2)), group.gather(1, "confirm", (1,)))

    with pytest.raises(AgreementError, match="collective 0: rank 1 calls confirm of 1, others vote of 2"):
        asyncio.run(run())
