"""Who starts next: the queue of waiting sequences, where each enters, and completions that fork from the one before them. No torch.

The list of running sequences is the scheduler's. It appends what it is given here before it asks for more: places are counted anew
each time.
"""

from collections import deque
from collections.abc import Iterator

from deepinfer.runtime.plan import CacheCopy
from deepinfer.runtime.replay import Entry
from deepinfer.runtime.sequence import Sequence, Status
from deepinfer.runtime.sequence_memory import SequenceMemory
from deepinfer.runtime.shared_prompt import SharedPrompts


class Admission:
    """Owns the queue and the followers of leaders. Sequences that it gives have their slot and blocks, and run."""

    def __init__(self, memory: SequenceMemory, running: list[Sequence]) -> None:
        self.memory, self.recovery, self.limits = memory, memory.recovery, memory.limits
        self.running = running
        self.waiting: deque[Sequence] = deque()
        self.shared_prompts = SharedPrompts()

    @property
    def free_places(self) -> int:
        """Sequences that may start now."""
        return min(self.memory.slots.num_free, self.limits.max_num_seqs - len(self.running))

    # ---- queueing -----------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, followers: list[Sequence]) -> None:
        """Queue a sequence, and completions that start from its prompt's rows."""
        self.waiting.append(sequence)
        self.shared_prompts.add(sequence, followers)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a sequence that ran before newer requests."""
        self.waiting.appendleft(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Take a sequence out of whatever it waits in. Completions that wait for it, even while it runs, go on without it."""
        if self.shared_prompts.forget(sequence):
            return
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        self._queue_followers(self.shared_prompts.part(sequence))

    def _queue_followers(self, followers: list[Sequence]) -> None:
        """Let the first of them compute the prompt for the others, before newer requests."""
        if followers:
            self.waiting.appendleft(followers[0])
            self.shared_prompts.add(followers[0], followers[1:])

    # ---- starting -----------------------------------------------------------------------------------------------------

    def admit(self, budget: int, step_seq: int) -> Iterator[tuple[Sequence, int, int]]:
        """Start waiting sequences in step `step_seq`, in order, while there is room: each with its first row and their number."""
        # A follower that finds no slot when its leader reaches the fork computes the prompt again.
        kept = self.shared_prompts.num_waiting(self.running)
        while self.waiting and budget > 0 and self.free_places > kept:
            sequence = self.waiting[0]
            entry = self._enter(sequence, budget)
            if entry is None:
                break
            self.waiting.popleft()
            self.memory.start(sequence)
            self.recovery.entered(sequence, entry, step_seq)
            if entry.start >= sequence.num_prompt_tokens - 1:
                # Nothing is left to wait for: what the leader starts from is there for its followers, too.
                self._queue_followers(self.shared_prompts.part(sequence))
            kept += self.shared_prompts.num_waiting([sequence])
            left = len(sequence.token_ids) - entry.start
            count = self.cut(sequence, entry.start, min(left, budget))
            budget -= count
            yield sequence, entry.start, count

    def _enter(self, sequence: Sequence, budget: int) -> Entry | None:
        """Give a waiting sequence what it takes from the cache and room for its first rows; None if there is no room.

        What it would take from the cache takes room as well: if that is too much, it starts from nothing.
        """
        for from_cache in (True, False):
            entry = self.recovery.enter(sequence, from_cache=from_cache)
            end = min(entry.start + budget, len(sequence.token_ids))
            if self.memory.slots.num_free > 0 and self.memory.reserve(sequence, max(end, entry.end)):
                return entry
            self.recovery.leave(sequence)
        return None

    def fork(self, leader: Sequence, start: int, budget: int) -> Iterator[Sequence]:
        """Start the completions that fork from `leader` before its row at `start`, one row each; those without room queue up."""
        followers = self.shared_prompts.due(leader, start)
        assert leader.slot is not None
        # Nobody writes to full blocks again, so they have several owners; what the fork divides is copied.
        full = start // self.limits.block_size
        while followers and budget > 0 and self.free_places > 0 and self.memory.share(leader, followers[0], full, start + 1):
            follower = followers.pop(0)
            self.memory.start(follower)
            divided = [CacheCopy("block", leader.blocks[full], follower.blocks[full])] * (start % self.limits.block_size > 0)
            assert follower.slot is not None
            self.recovery.copy([CacheCopy("slot", leader.slot, follower.slot), *divided])
            budget -= 1
            yield follower
        self._queue_followers(followers)

    def cut(self, sequence: Sequence, start: int, count: int) -> int:
        """Rows of a chunk up to the next place where something is copied."""
        return self.shared_prompts.cut(sequence, start, self.recovery.cut(sequence, start, count))
