"""The transaction around a prefill: what is withdrawn leaves no trace, and what was aborted meanwhile is not launched."""

import random
from dataclasses import replace

from deepinfer.parallel.simulator import Arrival, sequence_of
from deepinfer.runtime.plan import SequenceResult, StepKind, StepResult
from deepinfer.runtime.scheduler import Scheduler
from tests.parallel.test_simulator import limits, traffic


def filled(seed: int, arrivals: list[Arrival], *, is_tight: bool) -> Scheduler:
    scheduler = Scheduler(limits(random.Random(seed), is_tight=is_tight))
    for index, arrival in enumerate(arrivals):
        scheduler.add(sequence_of(arrival, str(index), index))
    return scheduler


def advance(scheduler: Scheduler) -> None:
    """One plain step with fixed tokens."""
    plan = scheduler.schedule()
    if plan is not None:
        results = tuple(SequenceResult((7,) if seq.is_sampling else ()) for seq in plan.sequences)
        scheduler.apply(StepResult(step_seq=plan.step_seq, sequences=results))


def state(scheduler: Scheduler) -> object:
    """Everything that reserving for a prompt may change."""
    queue = [s.seq_id for s in scheduler.waiting]
    running = [(s.seq_id, s.slot, s.blocks, s.confirmed, s.epoch, list(s.tickets)) for s in scheduler.running]
    return queue, running, list(scheduler.blocks._free), list(scheduler.slots._free)


def test_a_withdrawn_prefill_leaves_pools_and_queue_as_they_were() -> None:
    exercised = chunks = 0
    for seed in range(200):
        rng = random.Random(seed)
        scheduler = filled(seed, traffic(rng, 1, 8), is_tight=True)
        for _ in range(rng.randint(0, 12)):
            advance(scheduler)
        before, preemptions = state(scheduler), scheduler.counters.preemptions
        planned = scheduler.plan()
        is_only_prefill = planned.has_prefill and all(plan.is_chunk for _, plan in planned.running)
        scheduler.withdraw_prefill(planned)
        scheduler.check_integrity()
        assert not planned.has_prefill
        if is_only_prefill and scheduler.counters.preemptions == preemptions:
            assert state(scheduler) == before
            exercised += 1
            chunks += bool(scheduler.running)
    assert exercised > 20
    assert chunks > 5


def test_the_decoding_part_of_a_withdrawn_step_is_the_decode_step() -> None:
    compared = 0
    for seed in range(100):
        arrivals = traffic(random.Random(seed), 1, 6)
        one, other = (filled(seed, arrivals, is_tight=False) for _ in range(2))
        for scheduler in (one, other):
            scheduler.limits = replace(scheduler.limits, max_num_batched_tokens=16)
            for _ in range(2):
                advance(scheduler)
        planned = one.plan()
        one.withdraw_prefill(planned)
        decode = other.plan(allow_prefill=False)
        assert [plan for _, plan in planned.rows] == [plan for _, plan in decode.rows]
        compared += bool(decode.rows)
    assert compared > 20


def test_planned_rows_of_an_aborted_sequence_are_not_launched() -> None:
    scheduler = filled(0, [Arrival(0, 0, 5, 6), Arrival(0, 0, 5, 6)], is_tight=False)
    planned = scheduler.plan()
    scheduler.abort(planned.admitted[0][0])
    step = scheduler.commit(planned, StepKind.PREFILL)
    assert step is not None
    assert [seq.seq_id for seq in step.sequences] == [1]
    scheduler.check_integrity()


def test_an_aborted_sequence_is_not_withdrawn_into_the_queue() -> None:
    scheduler = filled(0, [Arrival(0, 0, 5, 6), Arrival(0, 0, 5, 6)], is_tight=False)
    planned = scheduler.plan()
    scheduler.abort(planned.admitted[1][0])
    scheduler.withdraw_prefill(planned)
    scheduler.check_integrity()
    assert [s.seq_id for s in scheduler.waiting] == [0]


def test_a_step_without_rows_has_the_kind_of_its_peers() -> None:
    scheduler = filled(0, [], is_tight=False)
    kinds = []
    for kind in (StepKind.PREFILL, StepKind.DECODE):
        step = scheduler.commit(scheduler.plan(), kind)
        assert step is not None
        kinds.append(step.kind)
        scheduler.apply(StepResult(step_seq=step.step_seq))
    assert kinds == [StepKind.EMPTY_PREFILL, StepKind.IDLE]
    assert scheduler.schedule() is None
