"""The scheduler driven by hand: a device of dictionaries instead of tensors, and books that must balance after every call."""

import random
from collections import deque
from dataclasses import dataclass

import pytest

from deepinfer.errors import CapacityError
from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.plan import NOT_IN_LAST_STEP, SchedulerOutputs, SequenceResult, StepKind, StepResult
from deepinfer.runtime.request import Request
from deepinfer.runtime.scheduler import Scheduler, SequenceEvent
from deepinfer.runtime.sequence import Sequence, Status
from deepinfer.sampling_params import SamplingParams

EOS, FIRST_TOKEN, VOCAB = 1, 2, 60
MODEL_LEN = 64


def next_token(history: list[int], salt: int) -> int:
    """The toy model: every token of the history and its place matter, and one token in twenty ends the text."""
    state = salt + 1
    for place, token in enumerate(history):
        state = (state * 1_000_003 + token * 31 + place + 1) % (2**61 - 1)
    return EOS if state % 20 == 0 else FIRST_TOKEN + state % (VOCAB - FIRST_TOKEN)


def allowed(token: int, num_output_tokens: int, request: Request) -> int:
    if num_output_tokens >= request.params.min_tokens or token not in request.stop_token_ids:
        return token
    return next(other for other in range(FIRST_TOKEN, VOCAB) if other not in request.stop_token_ids)


def reference(request: Request, salt: int) -> list[int]:
    """What a request alone gives, without any scheduler."""
    history, output = list(request.prompt_token_ids), []
    while len(output) < request.max_new_tokens:
        token = allowed(next_token(history, salt), len(output), request)
        history.append(token)
        output.append(token)
        if token in request.stop_token_ids:
            break
    return output


def make_request(name: str, prompt: list[int], max_tokens: int, min_tokens: int = 0, stop: tuple[int, ...] = ()) -> Request:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop, seed=0)
    return Request(
        request_id=name,
        prompt=None,
        prompt_token_ids=tuple(prompt),
        params=params,
        max_new_tokens=max_tokens,
        seed=0,
        eos_token_id=EOS,
        stop_token_ids=frozenset({EOS, *stop}),
        arrival_s=0.0,
    )


@dataclass
class Submitted:
    plan: SchedulerOutputs
    sampled: list[int | None]


class Bench:
    """A scheduler with a device that keeps each token in the block and place where the plan says it belongs.

    A token is drawn from what the blocks hold, so memory that two sequences share, that is missing, or that was given away too
    early changes the text.
    """

    def __init__(
        self, *, depth: int, usable_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8, budget: int = 32
    ) -> None:
        self.limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MODEL_LEN,
            block_size=block_size,
            num_blocks=usable_blocks + 1,
        )
        self.depth, self.scheduler = depth, Scheduler(self.limits)
        self.memory: dict[tuple[int, int], int] = {}
        self.in_flight: deque[Submitted] = deque()
        self.sequences: list[Sequence] = []
        self.plans: list[SchedulerOutputs] = []
        self.events: list[SequenceEvent] = []

    def add(self, request: Request) -> Sequence:
        sequence = Sequence(request, 0, len(self.sequences), list(request.prompt_token_ids))
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        self.check()
        return sequence

    def plan_next(self) -> SchedulerOutputs | None:
        plan = self.scheduler.schedule()
        self.check()
        if plan is not None:
            self.check_plan(plan)
            self.plans.append(plan)
            self.in_flight.append(self.run_on_device(plan))
            self.check_memory_in_flight()
        return plan

    def apply_oldest(self) -> list[SequenceEvent]:
        done = self.in_flight.popleft()
        results = tuple(SequenceResult(token_ids=() if token is None else (token,)) for token in done.sampled)
        events = self.scheduler.apply(StepResult(step_seq=done.plan.step_seq, sequences=results))
        self.check()
        self.events += events
        return events

    def step(self) -> bool:
        """What the loop does at this depth; False if there was nothing to do."""
        num_before = len(self.in_flight)
        plan = self.plan_next()
        for _ in range(num_before if self.depth else len(self.in_flight)):
            self.apply_oldest()
        return plan is not None or num_before > 0

    def run(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if not self.step():
                break
        else:
            pytest.fail(f"no end after {most_steps} steps")
        assert not self.scheduler.has_work

    def run_on_device(self, plan: SchedulerOutputs) -> Submitted:
        before = self.in_flight[-1] if self.in_flight else None
        sampled: list[int | None] = []
        for seq in plan.sequences:
            tokens = list(seq.token_ids)
            if not tokens:
                assert before is not None
                assert before.plan.sequences[seq.remap].seq_id == seq.seq_id
                assert before.plan.sequences[seq.remap].epoch == seq.epoch
                drawn = before.sampled[seq.remap]
                assert drawn is not None, "fed a token that nobody draws"
                tokens = [drawn]
            for offset, token in enumerate(tokens):
                self.memory[self.address(seq.blocks, seq.start + offset)] = token
            if not seq.is_sampling:
                sampled.append(None)
                continue
            history = [self.memory[self.address(seq.blocks, i)] for i in range(seq.start + seq.q_cap)]
            sampled.append(allowed(next_token(history, seq.seq_id), seq.num_output_tokens, seq.request))
        return Submitted(plan, sampled)

    def address(self, blocks: tuple[int, ...], position: int) -> tuple[int, int]:
        return blocks[position // self.limits.block_size], position % self.limits.block_size

    def check_plan(self, plan: SchedulerOutputs) -> None:
        limits = self.limits
        assert 0 < plan.num_rows <= limits.max_num_batched_tokens
        assert 0 < len(plan.sequences) <= limits.max_num_seqs
        slots = [seq.slot for seq in plan.sequences]
        assert len(set(slots)) == len(slots)
        assert min(slots) > 0
        blocks = [block for seq in plan.sequences for block in seq.blocks]
        assert len(set(blocks)) == len(blocks)
        assert min(blocks) > 0
        remaps = [seq.remap for seq in plan.sequences if seq.remap != NOT_IN_LAST_STEP]
        assert len(set(remaps)) == len(remaps)
        assert (plan.kind is StepKind.DECODE) == all(seq.q_cap == 1 and seq.is_sampling for seq in plan.sequences)
        for seq in plan.sequences:
            assert seq.q_cap >= 1
            assert len(seq.token_ids) == (0 if seq.remap != NOT_IN_LAST_STEP else seq.q_cap)
            assert (seq.start + seq.q_cap - 1) // limits.block_size < len(seq.blocks)
            assert seq.start + seq.q_cap <= MODEL_LEN

    def check_memory_in_flight(self) -> None:
        """What a step in flight may touch belongs to one stay of one sequence."""
        owners: dict[tuple[str, int], tuple[int, int]] = {}
        for submitted in self.in_flight:
            for seq in submitted.plan.sequences:
                for place in [("slot", seq.slot), *(("block", block) for block in seq.blocks)]:
                    assert owners.setdefault(place, (seq.seq_id, seq.epoch)) == (seq.seq_id, seq.epoch)

    def check(self) -> None:
        self.scheduler.check_integrity()
        for sequence in self.sequences:
            assert 0 <= sequence.confirmed <= len(sequence.token_ids)
            assert 0 <= sequence.total_inflight_tokens <= self.limits.max_num_batched_tokens * (self.depth + 1)
            if sequence.status is not Status.RUNNING:
                assert not sequence.blocks
                assert sequence.slot is None
                assert sequence.total_inflight_tokens == 0

    def check_empty(self) -> None:
        """Nothing is left of any request."""
        scheduler = self.scheduler
        assert scheduler.blocks.num_free == scheduler.blocks.num_usable
        assert scheduler.slots.num_free == scheduler.slots.num_usable
        assert not scheduler.running
        assert not any(sequence.tickets for sequence in self.sequences)

    def check_texts(self, aborted: frozenset[int] | set[int] = frozenset()) -> None:
        for sequence in self.sequences:
            expected = reference(sequence.request, sequence.seq_id)
            assert sequence.status is Status.FINISHED
            if sequence.seq_id in aborted:
                assert sequence.finish_reason == "abort"
                assert sequence.output_token_ids == expected[: sequence.num_output_tokens]
            else:
                assert sequence.output_token_ids == expected
                is_stop = expected[-1] in sequence.request.stop_token_ids
                assert sequence.finish_reason == ("stop" if is_stop else "length")


def some_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * length + seed)
    return [rng.randrange(FIRST_TOKEN, VOCAB) for _ in range(length)]


def endless(name: str, prompt: list[int], max_tokens: int) -> Request:
    """A request that stops by its length only."""
    return make_request(name, prompt, max_tokens, min_tokens=max_tokens)


both_depths = pytest.mark.parametrize("depth", [0, 1])


@both_depths
@pytest.mark.parametrize("budget", [1, 3, 7, 32])
def test_rows_of_a_request_that_ends_by_length_are_prompt_plus_output_minus_one(depth: int, budget: int) -> None:
    bench = Bench(depth=depth, budget=budget)
    bench.add(endless("a", some_prompt(13), 9))
    bench.run()
    bench.check_texts()
    assert bench.scheduler.counters.scheduled_tokens == 13 + 9 - 1


@both_depths
def test_a_stop_costs_one_row_more_where_the_host_runs_ahead(depth: int) -> None:
    stopping = next(s for s in range(100) if 2 < len(reference(make_request("a", some_prompt(6), 30), s)) < 30)
    bench = Bench(depth=depth)
    request = make_request("a", some_prompt(6), 30)
    bench.sequences = [Sequence(request, 0, -1, []) for _ in range(stopping)]  # so that the added one gets this id
    sequence = bench.add(request)
    bench.sequences = [sequence]
    bench.run()
    bench.check_texts()
    assert sequence.finish_reason == "stop"
    assert sequence.stop_reason is None
    assert bench.scheduler.counters.scheduled_tokens == 6 + sequence.num_output_tokens - 1 + depth
    assert bench.scheduler.counters.stale_results == depth


@both_depths
def test_a_stop_at_the_last_permitted_token_costs_nothing_more(depth: int) -> None:
    expected = reference(make_request("a", some_prompt(6), 40, stop=tuple(range(FIRST_TOKEN, VOCAB))), 0)
    assert len(expected) == 1
    bench = Bench(depth=depth)
    sequence = bench.add(make_request("a", some_prompt(6), 1, stop=tuple(range(FIRST_TOKEN, VOCAB))))
    bench.run()
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", expected[0])
    assert bench.scheduler.counters.scheduled_tokens == 6


@both_depths
def test_a_step_never_exceeds_its_budget_and_long_prompts_come_in_chunks(depth: int) -> None:
    bench = Bench(depth=depth, budget=8)
    for i, length in enumerate((30, 1, 17, 8, 9)):
        bench.add(make_request(str(i), some_prompt(length), 6))
    bench.run()
    bench.check_texts()
    assert max(plan.num_rows for plan in bench.plans) == 8
    assert bench.scheduler.counters.chunked_prefills >= 2


@both_depths
def test_a_budget_below_the_number_of_running_sequences_starves_nobody_for_ever(depth: int) -> None:
    bench = Bench(depth=depth, budget=2, max_num_seqs=6)
    for i in range(6):
        bench.add(endless(str(i), some_prompt(3, i), 7))
    bench.run()
    bench.check_texts()
    bench.check_empty()


@both_depths
def test_sequences_start_in_the_order_in_which_they_came(depth: int) -> None:
    bench = Bench(depth=depth, max_num_seqs=2)
    for i in range(7):
        bench.add(endless(str(i), some_prompt(5, i), 4))
    bench.run()
    first_seen = list(dict.fromkeys(seq.seq_id for plan in bench.plans for seq in plan.sequences))
    assert first_seen == list(range(7))
    assert max(len(plan.sequences) for plan in bench.plans) == 2


@both_depths
def test_preemption_takes_the_sequence_that_came_last(depth: int) -> None:
    # Three sequences of two blocks each fill the pool; the third blocks are wanted at the same step.
    bench = Bench(depth=depth, usable_blocks=6)
    old, middle, young = (bench.add(endless(name, some_prompt(7, i), 12)) for i, name in enumerate("abc"))
    while not bench.scheduler.counters.preemptions:
        assert bench.step()
    assert (old.num_preemptions, middle.num_preemptions, young.num_preemptions) == (0, 0, 1)
    assert bench.scheduler.running == [old, middle]
    assert bench.scheduler.waiting[0] is young
    bench.run()
    bench.check_texts()
    assert old.num_preemptions == 0


@both_depths
def test_a_preempted_sequence_goes_before_queued_ones_and_keeps_its_tokens(depth: int) -> None:
    bench = Bench(depth=depth, usable_blocks=6, max_num_seqs=2)
    first, second, queued = (bench.add(endless(name, some_prompt(7, i), 16)) for i, name in enumerate("abc"))
    while not second.num_preemptions:
        known = list(second.token_ids)
        assert bench.step()
    assert second.token_ids[: len(known)] == known
    assert list(bench.scheduler.waiting) == [second, queued]
    bench.run()
    bench.check_texts()
    assert first.num_preemptions == 0


def test_results_of_an_older_epoch_are_dropped() -> None:
    bench = Bench(depth=1)
    sequence = bench.add(endless("a", some_prompt(5), 10))
    for _ in range(4):
        bench.step()
    before = (list(sequence.token_ids), sequence.num_output_tokens)
    assert len(bench.in_flight) == 1
    bench.scheduler._preempt(sequence)
    bench.check()
    assert bench.apply_oldest() == []
    assert (sequence.token_ids, sequence.num_output_tokens) == before
    assert (sequence.confirmed, sequence.status) == (0, Status.WAITING)
    assert bench.scheduler.counters.stale_results == 1
    bench.run()
    bench.check_texts()


def test_a_sequence_preempted_twice_with_results_of_both_epochs_in_flight_keeps_its_text() -> None:
    bench = Bench(depth=1)
    sequence = bench.add(endless("a", some_prompt(5), 10))
    for _ in range(3):
        bench.step()
    bench.scheduler._preempt(sequence)
    # Resumed while the result of the first epoch is still on its way.
    assert bench.plan_next() is not None
    assert [ticket.epoch for ticket in sequence.tickets] == [0, 1]
    bench.scheduler._preempt(sequence)
    bench.check()
    for _ in range(2):
        assert bench.apply_oldest() == []
    assert bench.scheduler.counters.stale_results == 2
    bench.run()
    bench.check_texts()


@both_depths
def test_results_of_an_aborted_sequence_change_nothing(depth: int) -> None:
    bench = Bench(depth=depth)
    kept, gone = bench.add(endless("a", some_prompt(5), 8)), bench.add(endless("b", some_prompt(6), 8))
    for _ in range(3):
        bench.step()
    plan = bench.plan_next()
    assert plan is not None
    bench.scheduler.abort(gone)
    bench.check()
    tokens, held = list(gone.token_ids), bench.scheduler.release.held_blocks
    assert held, "a step in flight may still write there"
    while bench.in_flight:
        assert all(event.sequence is not gone for event in bench.apply_oldest())
    assert gone.token_ids == tokens
    assert (gone.finish_reason, gone.status) == ("abort", Status.FINISHED)
    assert bench.scheduler.release.held_blocks == []
    bench.run()
    bench.check_texts({gone.seq_id})
    assert kept.finish_reason == "length"
    bench.check_empty()


@both_depths
def test_aborting_twice_or_after_the_end_does_nothing(depth: int) -> None:
    bench = Bench(depth=depth)
    running, ended, queued = (bench.add(endless(str(i), some_prompt(4, i), 2 + 8 * i)) for i in range(3))
    while ended.status is not Status.FINISHED and running.status is not Status.FINISHED:
        bench.step()
    bench.scheduler.abort(running)
    assert running.finish_reason == "length"
    for _ in range(2):
        bench.scheduler.abort(ended)
        bench.scheduler.abort(queued)
        bench.check()
    bench.run()
    bench.check_empty()


@both_depths
def test_a_scheduler_whose_requests_were_all_aborted_has_no_work(depth: int) -> None:
    bench = Bench(depth=depth, max_num_seqs=2)
    for i in range(6):
        bench.add(endless(str(i), some_prompt(4, i), 9))
    for _ in range(3):
        bench.step()
    for sequence in bench.sequences:
        bench.scheduler.abort(sequence)
        bench.check()
    while bench.in_flight:
        bench.apply_oldest()
    assert not bench.scheduler.has_work
    assert bench.plan_next() is None
    bench.check_empty()


def test_a_request_that_can_never_fit_is_refused_with_the_sizes() -> None:
    bench = Bench(depth=0, usable_blocks=4)
    bench.add(endless("fits", some_prompt(10), 7))
    with pytest.raises(CapacityError, match=r"request big: .*11 tokens and 7 new ones need 5 cache blocks of 4 tokens, .*has 4"):
        bench.scheduler.add(Sequence(endless("big", some_prompt(11), 7), 0, 9, some_prompt(11)))
    bench.run()
    bench.check_texts()


@both_depths
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_the_tightest_pool_serves_everybody(depth: int, block_size: int) -> None:
    rng = random.Random(block_size)
    requests = [make_request(str(i), some_prompt(rng.randint(1, 20), i), rng.randint(1, 20)) for i in range(12)]
    longest = max(len(r.prompt_token_ids) + r.max_new_tokens - 1 for r in requests)
    bench = Bench(depth=depth, block_size=block_size, usable_blocks=-(-longest // block_size), max_num_seqs=5, budget=9)
    for request in requests:
        bench.add(request)
    bench.run()
    bench.check_texts()
    bench.check_empty()
    assert bench.scheduler.counters.preemptions > 0


def test_memory_of_a_finished_sequence_waits_for_the_step_that_still_touches_it() -> None:
    bench = Bench(depth=1, usable_blocks=5)
    first = bench.add(make_request("a", some_prompt(4), 5, stop=tuple(range(FIRST_TOKEN, VOCAB))))
    bench.add(endless("b", some_prompt(9), 7))
    bench.step()
    bench.step()
    # The first sequence stopped at once, but the step that runs ahead has a row of it.
    assert first.finish_reason == "stop"
    assert len(bench.scheduler.release.held_blocks) == 2
    third = bench.add(endless("c", some_prompt(3), 2))
    bench.step()
    assert third.slot is None, "planned while the memory was still in use"
    bench.step()
    assert third.slot is not None
    bench.run()
    bench.check_texts()


@both_depths
@pytest.mark.parametrize("seed", range(40))
def test_random_operations_keep_the_books_and_the_texts(depth: int, seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(
        depth=depth,
        block_size=rng.choice([2, 4, 8]),
        usable_blocks=rng.randint(20, 40),
        max_num_seqs=rng.randint(1, 6),
        budget=rng.choice([1, 2, 5, 16, 64]),
    )
    aborted: set[int] = set()
    for i in range(rng.randint(20, 80)):
        choice = rng.random()
        if choice < 0.25:
            length, max_tokens = rng.randint(1, 24), rng.randint(1, 16)
            stop = tuple(rng.sample(range(FIRST_TOKEN, VOCAB), rng.choice([0, 0, 3])))
            bench.add(make_request(str(i), some_prompt(length, i), max_tokens, rng.randint(0, max_tokens), stop))
        elif choice < 0.32 and bench.sequences:
            sequence = rng.choice(bench.sequences)
            if sequence.status is not Status.FINISHED:
                aborted.add(sequence.seq_id)
            bench.scheduler.abort(sequence)
            bench.check()
        elif choice < 0.40 and bench.scheduler.running:
            bench.scheduler._preempt(rng.choice(bench.scheduler.running))
            bench.check()
        else:
            bench.step()
    bench.run()
    bench.check_texts(aborted)
    bench.check_empty()


def test_the_same_calls_give_the_same_plans() -> None:
    def trace() -> list[SchedulerOutputs]:
        bench = Bench(depth=1, usable_blocks=9, max_num_seqs=4, budget=8)
        for i in range(8):
            bench.add(make_request(str(i), some_prompt(2 + 2 * i, i), 10))
        bench.run()
        return bench.plans

    assert trace() == trace()


@both_depths
def test_tokens_drawn_behind_a_stop_in_the_same_step_are_not_appended(depth: int) -> None:
    scheduler = Bench(depth=depth).scheduler
    request = make_request("a", some_prompt(3), 5, stop=(12,))
    for drawn, kept, reason in (
        ((10, 11, 12, 20, 21, 22), [10, 11, 12], "stop"),
        ((10, 11, 13, 14, 15, 12), [10, 11, 13, 14, 15], "length"),
        ((10, 11, 13, 14, 12, 16), [10, 11, 13, 14, 12], "stop"),
    ):
        sequence = Sequence(request, 0, 0, list(request.prompt_token_ids))
        scheduler.add(sequence)
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.apply(StepResult(step_seq=plan.step_seq, sequences=(SequenceResult(token_ids=drawn),)))
        assert (sequence.output_token_ids, sequence.finish_reason) == (kept, reason)
        scheduler.check_integrity()
