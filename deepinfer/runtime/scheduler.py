"""Continuous batching: admit, cut prompts into chunks, preempt, plan the next step, apply the last one's result.

Pure decisions: no clock, no torch, no device. The same scheduler serves the plain loop and the overlapped one; the only
difference is whether the result of step N has been applied when step N + 1 is planned.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deepinfer.errors import GrammarError
from deepinfer.outputs import FinishReason
from deepinfer.runtime.admission import Admission
from deepinfer.runtime.counters import SchedulerCounters
from deepinfer.runtime.draft_budget import DraftBudget
from deepinfer.runtime.ending import finish_reason, observe
from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.next_rows import NextRows
from deepinfer.runtime.plan import GroupShape, SchedulerOutputs, SequencePlan, SequenceResult, StepKind, StepResult
from deepinfer.runtime.recovery import CacheNames, Recovery
from deepinfer.runtime.replay import ReplayPolicy
from deepinfer.runtime.sequence import Sequence, Status, Ticket
from deepinfer.runtime.sequence_memory import SequenceMemory


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """Something to tell the user: what a sequence gained, and whether it is over (`sequence.finish_reason`)."""

    sequence: Sequence
    result: SequenceResult


@dataclass(slots=True)
class PlannedStep:
    """Rows with their memory reserved, not yet a step: `Scheduler.commit` makes it one, `withdraw_prefill` takes prompts out."""

    running: list[tuple[Sequence, SequencePlan]]
    admitted: list[tuple[Sequence, SequencePlan]]

    @property
    def rows(self) -> list[tuple[Sequence, SequencePlan]]:
        return self.running + self.admitted

    @property
    def has_prefill(self) -> bool:
        return bool(self.admitted) or any(plan.is_chunk for _, plan in self.running)


class Scheduler:
    """Owns every `Sequence`; its memory and its waiting are `SequenceMemory`'s and `Admission`'s.

    Without a `draft_budget` every draft is verified.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        draft_budget: DraftBudget | None = None,
        policy: ReplayPolicy | None = None,
        names: CacheNames | None = None,
    ) -> None:
        self.limits, self.draft_budget = limits, draft_budget
        self.recovery = Recovery(limits.num_blocks, limits.num_slots, limits.block_size, policy, names)
        self.blocks, self.slots, self.release = self.recovery.blocks, self.recovery.slots, self.recovery.release
        self.memory = SequenceMemory(self.recovery, limits)
        self.next_rows = NextRows(limits)
        self.running: list[Sequence] = []
        self.admission = Admission(self.memory, self.running)
        self.waiting = self.admission.waiting
        self.counters = SchedulerCounters()
        # Told of a sequence that ends by itself while it still owns its memory.
        self.on_finish: Callable[[Sequence], None] | None = None
        self._in_flight: deque[tuple[SchedulerOutputs, list[Sequence]]] = deque()
        self._next_step = 0

    # ---- adding and removing ------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, followers: Iterable[Sequence] = ()) -> None:
        """Queue a sequence, and completions of the same new request that start from its prompt's rows.

        Raises `CapacityError` if it could never run, naming the sizes.
        """
        self.limits.check_fits(sequence.request, f"request {sequence.request.request_id}")
        others = list(followers)
        for each in (sequence, *others):
            if each.grammar is None:  # one that is queued anew keeps its tokens, and its place in the grammar with them
                each.grammar = each.request.start_grammar()
        self.admission.add(sequence, others)

    def adopt(self, sequence: Sequence, confirmed: int) -> bool:
        """Start a sequence whose first `confirmed` tokens come with their cache rows, if there is memory; whether there was.

        On success the caller fills the memory before the next step is launched. It must not be in the queue.
        """
        if self.admission.free_places <= 0 or not self.memory.reserve(sequence, confirmed):
            return False
        self.memory.start(sequence)
        sequence.confirmed = confirmed
        self.running.append(sequence)
        return True

    def abort(self, sequence: Sequence) -> None:
        """End a sequence now. Later results for it are stale. Aborting twice, or after the end, does nothing."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        self.admission.forget(sequence)
        sequence.finish_reason = "abort"
        self._retire(sequence, Status.FINISHED)

    @property
    def has_work(self) -> bool:
        """Whether a sequence still has something to plan or a step is in flight."""
        return bool(self.running or self._in_flight or self.waiting)

    # ---- planning -----------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutputs | None:
        """Plan the next step from confirmed state and in-flight bounds alone; None if nothing can run now."""
        return self.commit(self.plan())

    def demand(self) -> tuple[bool, GroupShape]:
        """Whether a prompt waits, whole or in part, and what the running sequences that could decode need."""
        wants_prefill, num_decodable, num_blocks = bool(self.waiting), 0, 0
        for sequence in self.running:
            start = sequence.next_position
            if self.next_rows.is_chunk(sequence, start):
                wants_prefill = True
            elif wanted := self.next_rows.wanted(sequence, start):
                num_decodable += 1
                num_blocks = max(num_blocks, self.limits.blocks_for(start + wanted))
        return wants_prefill, GroupShape(num_decodable, num_blocks)

    def plan(self, *, allow_prefill: bool = True) -> PlannedStep:
        """Reserve memory for the next step. Without `allow_prefill`, for running sequences that decode only.

        Preempts as `schedule` does, and a preemption stands even if the rows it made room for are withdrawn.
        """
        budget = self.limits.max_num_batched_tokens
        planned: list[tuple[Sequence, SequencePlan]] = []
        everyone_fits = allow_prefill  # else memory that comes free belongs to those who run
        for sequence in tuple(self.running):
            if sequence.status is not Status.RUNNING:
                continue  # preempted for an older one in this very call
            start = sequence.next_position
            count = self.admission.cut(sequence, start, min(self.next_rows.wanted(sequence, start), budget))
            if count == 0 or (not allow_prefill and self.next_rows.is_chunk(sequence, start)):
                continue
            reserved = self.memory.reserve(sequence, start + count)
            while not reserved and not self.memory.shortfall_is_on_its_way(sequence, start + count):
                victim, everyone_fits = self.running[-1], False
                self._preempt(victim)
                if victim is sequence:
                    break
                reserved = self.memory.reserve(sequence, start + count)
            if reserved:
                planned.append((sequence, self._plan(sequence, start, count)))
                budget -= count
            else:
                everyone_fits = False
        for leader, row in tuple(planned):
            for follower in self.admission.fork(leader, row.start, budget if everyone_fits else 0):
                self.running.append(follower)
                follower.confirmed = row.start
                self.counters.forks += 1
                planned.append((follower, self._plan(follower, row.start, 1)))
                budget -= 1
        admitted: list[tuple[Sequence, SequencePlan]] = []
        for sequence, start, count in self.admission.admit(budget if everyone_fits else 0, self._next_step):
            self.running.append(sequence)
            admitted.append((sequence, self._plan(sequence, start, count)))
        return PlannedStep(planned, admitted)

    def _plan(self, sequence: Sequence, start: int, count: int) -> SequencePlan:
        self.recovery.planned(sequence, start + count, self._next_step)
        return self.next_rows.plan(sequence, start, count, self.recovery.context(sequence, start))

    def withdraw_prefill(self, step: PlannedStep) -> None:
        """Undo what a planned step reserved for prompts; the queue and the pools are as before. Mutates `step`.

        Nothing may have been taken from a cache of prefixes, and nobody may have forked: copies would be on their way.
        """
        # In reverse, so that the pools hand out the same ids again.
        for sequence, plan in reversed(step.admitted):
            if plan.epoch != sequence.epoch:
                continue  # aborted since
            self.running.remove(sequence)
            self.memory.take_back(sequence)
            self.admission.put_back(sequence)
        for sequence, plan in reversed(step.running):
            if plan.is_chunk and plan.epoch == sequence.epoch:
                self.memory.shorten(sequence, plan.start)
        step.running, step.admitted = [row for row in step.running if not row[1].is_chunk], []

    def commit(
        self, planned_step: PlannedStep, kind: StepKind | None = None, group_shape: GroupShape | None = None
    ) -> SchedulerOutputs | None:
        """Make a planned step the next one.

        Args:
            kind: PREFILL or DECODE as agreed with other ranks; a step without rows is then an EMPTY_PREFILL or IDLE. None: what
                the rows are, and no step without rows.
            group_shape: goes with a decode step that was agreed on.
        """
        # A sequence may have been aborted since; its memory has gone.
        planned = [(sequence, plan) for sequence, plan in planned_step.rows if plan.epoch == sequence.epoch]
        if kind is None:
            if not planned:
                return None
            is_decode = not any(plan.is_chunk or plan.replay is not None for _, plan in planned)
            kind = StepKind.DECODE if is_decode else StepKind.PREFILL
        elif not planned:
            kind = StepKind.EMPTY_PREFILL if kind is StepKind.PREFILL else StepKind.IDLE
        before, after = self.recovery.take_copies()
        draft_rows, proposes = sum(plan.n_drafts for _, plan in planned), self._can_propose(planned)
        if self.draft_budget is not None and draft_rows + proposes > 0:
            each = self.draft_budget.drafts_each([sequence.survival for sequence, _ in planned])
            draft_rows, proposes = min(draft_rows, each * len(planned)), proposes and each > 0
        step = SchedulerOutputs(
            step_seq=self._next_step,
            kind=kind,
            sequences=tuple(plan for _, plan in planned),
            draft_rows=draft_rows,
            proposes=proposes,
            copies_before=before,
            copies_after=after,
            group_shape=group_shape,
        )
        self._next_step += 1
        for sequence, plan in planned:
            sequence.tickets.append(Ticket(step.step_seq, plan.epoch, plan.q_cap, plan.n_drafts, plan.is_sampling))
        self.next_rows.planned(step)
        self._in_flight.append((step, [sequence for sequence, _ in planned]))
        self.counters.scheduled_tokens += step.num_rows
        self.counters.chunked_prefills += sum(not plan.is_sampling for _, plan in planned_step.admitted)
        return step

    def _can_propose(self, planned: list[tuple[Sequence, SequencePlan]]) -> bool:
        return self.limits.num_speculative_tokens > 0 and any(plan.is_sampling for _, plan in planned)

    def planned(self, step: SchedulerOutputs) -> list[Sequence]:
        """The sequences of the only step in flight, in the order of its row groups."""
        ((newest, sequences),) = self._in_flight
        assert newest is step
        return sequences

    # ---- applying -----------------------------------------------------------------------------------------------------

    def apply(self, result: StepResult, seconds: float = 0.0) -> list[SequenceEvent]:
        """Commit the oldest step in flight: confirm, append, stop, give memory back. Stale results change nothing.

        `seconds` is what the step took, for the draft budget.
        """
        step, sequences = self._in_flight.popleft()
        assert step.step_seq == result.step_seq
        events = []
        if self.draft_budget is not None:
            accepted = sum(outcome.num_accepted for outcome in result.sequences)
            promised = sum(sum(outcome.survival[: outcome.n_drafts]) for outcome in result.sequences)
            self.draft_budget.observe(step, seconds, accepted, promised)
        for sequence, outcome in zip(sequences, result.sequences, strict=True):
            ticket = sequence.tickets.popleft()
            assert ticket.step_seq == step.step_seq
            if ticket.epoch != sequence.epoch:
                self.counters.stale_results += 1
                continue
            if outcome.observed is not None:
                observe(sequence, outcome.observed)
            sequence.confirmed += ticket.q_cap - ticket.n_drafts
            if outcome.failure is not None:
                self._end(sequence, "error")
                events.append(SequenceEvent(sequence, outcome.first(0)))
            elif ticket.is_sampling:
                sequence.confirmed += outcome.num_accepted
                if ticket.n_drafts:
                    self.counters.count_run(ticket.n_drafts, outcome)
                    sequence.survival = outcome.survival
                try:
                    outcome = outcome.first(self._append(sequence, outcome.token_ids))
                except GrammarError as error:
                    self._end(sequence, "error")
                    outcome = outcome.first(0)._replace(failure=str(error))
                events.append(SequenceEvent(sequence, outcome))
            if sequence.status is Status.RUNNING:
                self.recovery.confirmed(sequence)
        self.release.drain(step.step_seq)
        return events

    def _append(self, sequence: Sequence, token_ids: tuple[int, ...]) -> int:
        """Append tokens up to the one that ends the sequence; returns how many. What a run holds behind an end is dropped."""
        for count, token in enumerate(token_ids, start=1):
            sequence.token_ids.append(token)
            if (reason := finish_reason(sequence, token)) is not None:
                self._end(sequence, reason)
                return count
        return len(token_ids)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        if self.on_finish is not None:
            self.on_finish(sequence)
        self.running.remove(sequence)
        self._retire(sequence, Status.FINISHED)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's memory; it will be computed again from its known tokens, before newer requests."""
        self.running.remove(sequence)
        self._retire(sequence, Status.WAITING)
        sequence.confirmed = 0
        sequence.num_preemptions += 1
        self.counters.preemptions += 1
        self.admission.put_back(sequence)

    def _retire(self, sequence: Sequence, status: Status) -> None:
        self.memory.retire(sequence, status)
        if not self._in_flight:
            # Copies of the step that is being planned have it as their fence.
            self.release.drain(self._next_step - 1)

    def check_integrity(self) -> None:
        """The books of blocks and slots agree with the running sequences and with what waits behind a fence."""
        self.memory.check_integrity(self.running)
