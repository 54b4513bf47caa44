"""Continuous batching: admit, cut prompts into chunks, preempt, plan the next step, apply the last one's result.

Pure decisions: no clock, no torch, no device. The same scheduler serves the plain loop and the overlapped one; the only
difference is whether the result of step N has been applied when step N + 1 is planned.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from deepinfer.errors import GrammarError
from deepinfer.outputs import FinishReason
from deepinfer.runtime.counters import SchedulerCounters
from deepinfer.runtime.draft_budget import DraftBudget
from deepinfer.runtime.ending import finish_reason, observe
from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.plan import (
    NOT_IN_LAST_STEP,
    CacheCopy,
    GroupShape,
    SchedulerOutputs,
    SequencePlan,
    SequenceResult,
    StepKind,
    StepResult,
)
from deepinfer.runtime.recovery import CacheNames, Recovery
from deepinfer.runtime.replay import Entry, ReplayPolicy
from deepinfer.runtime.sequence import Sequence, Status, Ticket
from deepinfer.runtime.shared_prompt import SharedPrompts


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
    """Owns every `Sequence` and the pools of blocks and slots. Without a `draft_budget` every draft is verified."""

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
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.shared_prompts = SharedPrompts()
        self.counters = SchedulerCounters()
        # Told of a sequence that ends by itself while it still owns its memory.
        self.on_finish: Callable[[Sequence], None] | None = None
        self._in_flight: deque[tuple[SchedulerOutputs, list[Sequence]]] = deque()
        # seq_id -> (row group, epoch) in the newest planned step, for sequences that draw a token there
        self._last_row_of: dict[int, tuple[int, int]] = {}
        self._last_proposed = False  # whether the newest planned step drafts tokens
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
        self.waiting.append(sequence)
        self.shared_prompts.add(sequence, others)

    def adopt(self, sequence: Sequence, confirmed: int) -> bool:
        """Start a sequence whose first `confirmed` tokens come with their cache rows, if there is memory; whether there was.

        On success the caller fills the memory before the next step is launched. It must not be in the queue.
        """
        if self._free_places <= 0 or not self._reserve(sequence, confirmed):
            return False
        (sequence.slot,) = self.slots.take(1)
        sequence.status, sequence.confirmed = Status.RUNNING, confirmed
        self.running.append(sequence)
        return True

    def abort(self, sequence: Sequence) -> None:
        """End a sequence now. Later results for it are stale. Aborting twice, or after the end, does nothing."""
        if sequence.status is Status.FINISHED:
            return
        if not self.shared_prompts.forget(sequence):
            (self.running if sequence.status is Status.RUNNING else self.waiting).remove(sequence)
            self._queue_followers(self.shared_prompts.part(sequence))
        sequence.finish_reason = "abort"
        self._retire(sequence, Status.FINISHED)

    def _queue_followers(self, followers: list[Sequence]) -> None:
        """Let the first of them compute the prompt for the others, before newer requests."""
        if followers:
            self.waiting.appendleft(followers[0])
            self.shared_prompts.add(followers[0], followers[1:])

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
            if self._is_chunk(sequence, start):
                wants_prefill = True
            elif wanted := self._wanted(sequence, start):
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
            count = self._cut(sequence, start, min(self._wanted(sequence, start), budget))
            if count == 0 or (not allow_prefill and self._is_chunk(sequence, start)):
                continue
            reserved = self._reserve(sequence, start + count)
            while not reserved and not self._shortfall_is_on_its_way(sequence, start + count):
                victim, everyone_fits = self.running[-1], False
                self._preempt(victim)
                if victim is sequence:
                    break
                reserved = self._reserve(sequence, start + count)
            if reserved:
                planned.append((sequence, self._plan(sequence, start, count)))
                budget -= count
            else:
                everyone_fits = False
        for leader, row in tuple(planned):
            for plan in self._fork(leader, row.start, budget if everyone_fits else 0):
                planned.append(plan)
                budget -= 1
        admitted = self._admit(budget) if everyone_fits else ()
        return PlannedStep(planned, [(sequence, self._plan(sequence, start, count)) for sequence, start, count in admitted])

    def withdraw_prefill(self, step: PlannedStep) -> None:
        """Undo what a planned step reserved for prompts; the queue and the pools are as before. Mutates `step`.

        Nothing may have been taken from a cache of prefixes, and nobody may have forked: copies would be on their way.
        """
        # In reverse, so that the pools hand out the same ids again.
        for sequence, plan in reversed(step.admitted):
            if plan.epoch != sequence.epoch:
                continue  # aborted since
            assert sequence.slot is not None
            self.running.remove(sequence)
            self.slots.give_back((sequence.slot,))
            self.recovery.leave(sequence)
            sequence.status, sequence.slot = Status.WAITING, None
            self.waiting.appendleft(sequence)
        for sequence, plan in reversed(step.running):
            if plan.is_chunk and plan.epoch == sequence.epoch:
                kept = self.limits.blocks_for(plan.start)
                self.blocks.give_back(reversed(sequence.blocks[kept:]))
                sequence.blocks = sequence.blocks[:kept]
        step.running, step.admitted = [row for row in step.running if not row[1].is_chunk], []

    def _is_chunk(self, sequence: Sequence, start: int) -> bool:
        """Whether the next rows of a running sequence are known tokens, more than the last one alone."""
        return not self._continues_last_step(sequence, start) and len(sequence.token_ids) - start > 1

    def _wanted(self, sequence: Sequence, position: int) -> int:
        """Rows the sequence could use from `position` on, before any budget."""
        known = len(sequence.token_ids)
        if self._continues_last_step(sequence, position):
            return 1 + self._drafts_wanted(sequence)
        if position < known:
            return known - position
        # All known tokens are planned. Each sampling step in flight yields one more; feed it from the device, unless the
        # sequence will have reached its limit by then.
        in_flight = sequence.num_sampling_inflight
        can_grow = in_flight > 0 and sequence.num_output_tokens + in_flight < sequence.request.max_new_tokens
        return 1 if can_grow else 0

    def _continues_last_step(self, sequence: Sequence, position: int) -> bool:
        """Whether the next row feeds the token that the newest planned step draws, and drafts of that step may follow it."""
        row = self._last_row_of.get(sequence.seq_id)
        if not self._last_proposed or row is None or row[1] != sequence.epoch:
            return False
        return self._drafts_wanted(sequence) >= 0 and len(sequence.token_ids) - position <= 1

    def _drafts_wanted(self, sequence: Sequence) -> int:
        """Drafts that could still be of use; negative if the sequence needs no further step. Each step in flight yields a token."""
        left = sequence.request.max_new_tokens - sequence.num_output_tokens - sequence.num_sampling_inflight
        return min(self.limits.num_speculative_tokens, left - 1)

    def _missing_blocks(self, sequence: Sequence, end: int) -> int:
        return self.limits.blocks_for(end) - len(sequence.blocks)

    def _reserve(self, sequence: Sequence, end: int) -> bool:
        """Give the sequence blocks for every position below `end`, all or nothing."""
        missing = self._missing_blocks(sequence, end)
        if missing > self.blocks.num_free:
            return False
        if missing > 0:
            sequence.blocks += tuple(self.blocks.take(missing))
        return True

    def _shortfall_is_on_its_way(self, sequence: Sequence, end: int) -> bool:
        """Whether blocks that wait for a step in flight will be enough: then waiting beats preempting another sequence."""
        return self.blocks.num_free + len(self.release.held_blocks) >= self._missing_blocks(sequence, end)

    def _admit(self, budget: int) -> Iterator[tuple[Sequence, int, int]]:
        # A follower that finds no slot when its leader reaches the fork computes the prompt again.
        kept = self.shared_prompts.num_waiting(self.running)
        while self.waiting and budget > 0 and self._free_places > kept:
            sequence = self.waiting[0]
            entry = self._enter(sequence, budget)
            if entry is None:
                break
            self.waiting.popleft()
            (sequence.slot,) = self.slots.take(1)
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            self.recovery.entered(sequence, entry, self._next_step)
            if entry.start >= sequence.num_prompt_tokens - 1:
                # Nothing is left to wait for: what the leader starts from is there for its followers, too.
                self._queue_followers(self.shared_prompts.part(sequence))
            kept += self.shared_prompts.num_waiting([sequence])
            left = len(sequence.token_ids) - entry.start
            count = self._cut(sequence, entry.start, min(left, budget))
            budget -= count
            yield sequence, entry.start, count

    @property
    def _free_places(self) -> int:
        """Sequences that may start now."""
        return min(self.slots.num_free, self.limits.max_num_seqs - len(self.running))

    def _cut(self, sequence: Sequence, start: int, count: int) -> int:
        """Rows of a chunk up to the next place where something is copied."""
        return self.shared_prompts.cut(sequence, start, self.recovery.cut(sequence, start, count))

    def _enter(self, sequence: Sequence, budget: int) -> Entry | None:
        """Give a waiting sequence what it takes from the cache and room for its first rows; None if there is no room.

        What it would take from the cache takes room as well: if that is too much, it starts from nothing.
        """
        for from_cache in (True, False):
            entry = self.recovery.enter(sequence, from_cache=from_cache)
            end = min(entry.start + budget, len(sequence.token_ids))
            if self.slots.num_free > 0 and self._reserve(sequence, max(end, entry.end)):
                return entry
            self.recovery.leave(sequence)
        return None

    def _fork(self, leader: Sequence, start: int, budget: int) -> Iterator[tuple[Sequence, SequencePlan]]:
        """Plan the last prompt row of completions that fork from `leader` in this step; those without room queue up."""
        followers = self.shared_prompts.due(leader, start)
        assert leader.slot is not None
        # Nobody writes to full blocks again, so they have several owners; what the fork divides is copied.
        full = start // self.limits.block_size
        while followers and budget > 0 and self._free_places > 0 and self._share_blocks(leader, followers[0], full, start + 1):
            follower = followers.pop(0)
            (follower.slot,) = self.slots.take(1)
            follower.status, follower.confirmed = Status.RUNNING, start
            self.running.append(follower)
            self.counters.forks += 1
            divided = [CacheCopy("block", leader.blocks[full], follower.blocks[full])] * (start % self.limits.block_size > 0)
            self.recovery.copy([CacheCopy("slot", leader.slot, follower.slot), *divided])
            budget -= 1
            yield follower, self._plan(follower, start, 1)
        self._queue_followers(followers)

    def _share_blocks(self, leader: Sequence, follower: Sequence, full: int, end: int) -> bool:
        """Make a follower an owner of the leader's first blocks and give it others up to position `end`; all or nothing."""
        if self.limits.blocks_for(end) - full > self.blocks.num_free:
            return False
        self.blocks.share(leader.blocks[:full])
        follower.blocks = leader.blocks[:full]
        return self._reserve(follower, end)

    def _plan(self, sequence: Sequence, start: int, count: int) -> SequencePlan:
        known = len(sequence.token_ids)
        continues = self._continues_last_step(sequence, start)
        is_on_device = continues or start >= known
        assert sequence.slot is not None
        is_replay = sequence.replay is not None and start < sequence.replay.end
        self.recovery.planned(sequence, start + count, self._next_step)
        return SequencePlan(
            request=sequence.request,
            seq_id=sequence.seq_id,
            epoch=sequence.epoch,
            slot=sequence.slot,
            blocks=sequence.blocks,
            start=start,
            token_ids=() if is_on_device else tuple(sequence.token_ids[start : start + count]),
            q_cap=count,
            n_drafts=count - 1 if continues else 0,
            remap=self._last_row_of[sequence.seq_id][0] if is_on_device else NOT_IN_LAST_STEP,
            is_sampling=start + count >= known,
            scored=self._scored(sequence, start, count),
            seed=sequence.seed,
            num_output_tokens=sequence.num_output_tokens + sequence.num_sampling_inflight,
            replay=sequence.replay if is_replay else None,
            context=self.recovery.context(sequence, start),
        )

    def _scored(self, sequence: Sequence, start: int, count: int) -> range:
        """Positions among the next rows whose prompt tokens behind them shall get a log probability and have none yet."""
        if sequence.request.params.prompt_logprobs is None or sequence.index > 0:
            return range(0)
        first = max(start, len(sequence.prompt_scores))
        return range(first, max(first, min(start + count, sequence.num_prompt_tokens - 1)))

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
        self._next_step, self._last_proposed = self._next_step + 1, proposes
        for sequence, plan in planned:
            sequence.tickets.append(Ticket(step.step_seq, plan.epoch, plan.q_cap, plan.n_drafts, plan.is_sampling))
        self._last_row_of = {plan.seq_id: (row, plan.epoch) for row, (_, plan) in enumerate(planned) if plan.is_sampling}
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
        self.waiting.appendleft(sequence)

    def _retire(self, sequence: Sequence, status: Status) -> None:
        """Raise the epoch and send the memory to its pools, behind the newest step that may touch it."""
        if sequence.slot is not None:
            self.recovery.retire(sequence)
            fence = sequence.tickets[-1].step_seq if sequence.tickets else -1
            # The end of a prefix goes before its beginning.
            self.release.defer(fence, sequence.blocks[::-1], sequence.slot)
        sequence.status = status
        sequence.epoch += 1
        sequence.blocks, sequence.slot = (), None
        if not self._in_flight:
            # Copies of the step that is being planned have it as their fence.
            self.release.drain(self._next_step - 1)

    def check_integrity(self) -> None:
        """Every block and slot is free, kept, owned by running sequences, or waiting behind a fence."""
        self.blocks.check_integrity([i for s in self.running for i in s.blocks] + self.release.held_blocks, "blocks")
        self.slots.check_integrity([s.slot for s in self.running if s.slot is not None] + self.release.held_slots, "slots")
        for sequence in self.running:
            covered = len(sequence.blocks) * self.limits.block_size
            assert sequence.next_position <= covered, "rows beyond the reserved blocks"
