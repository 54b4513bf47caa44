"""The memory that a running sequence holds: a slot for its rings, and blocks for every position up to the bound of its rows.

The only writer of a sequence's `slot`, `blocks`, `status` and `epoch`, apart from what it takes from the prefix cache. No torch.
"""

from collections.abc import Iterable

from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.recovery import Recovery
from deepinfer.runtime.sequence import Sequence, Status


class SequenceMemory:
    """Gives memory of the pools in `recovery` to sequences and takes it back, behind the steps that may still touch it."""

    def __init__(self, recovery: Recovery, limits: SchedulerLimits) -> None:
        self.recovery, self.limits = recovery, limits
        self.blocks, self.slots, self.release = recovery.blocks, recovery.slots, recovery.release

    def start(self, sequence: Sequence) -> None:
        """Let a sequence run: it has its blocks, and there is a slot."""
        (sequence.slot,) = self.slots.take(1)
        sequence.status = Status.RUNNING

    def missing_blocks(self, sequence: Sequence, end: int) -> int:
        """Blocks that it lacks for the positions below `end`."""
        return self.limits.blocks_for(end) - len(sequence.blocks)

    def reserve(self, sequence: Sequence, end: int) -> bool:
        """Give the sequence blocks for every position below `end`, all or nothing."""
        missing = self.missing_blocks(sequence, end)
        if missing > self.blocks.num_free:
            return False
        if missing > 0:
            sequence.blocks += tuple(self.blocks.take(missing))
        return True

    def shortfall_is_on_its_way(self, sequence: Sequence, end: int) -> bool:
        """Whether blocks that wait for a step in flight will be enough: then waiting beats preempting another sequence."""
        return self.blocks.num_free + len(self.release.held_blocks) >= self.missing_blocks(sequence, end)

    def share(self, leader: Sequence, follower: Sequence, full: int, end: int) -> bool:
        """Make a follower an owner of the leader's first `full` blocks and give it others up to position `end`; all or nothing."""
        if self.limits.blocks_for(end) - full > self.blocks.num_free:
            return False
        self.blocks.share(leader.blocks[:full])
        follower.blocks = leader.blocks[:full]
        return self.reserve(follower, end)

    def shorten(self, sequence: Sequence, end: int) -> None:
        """Take back the blocks of positions from `end` on, which nobody has been told of."""
        kept = self.limits.blocks_for(end)
        # In reverse, so that the pool hands out the same ids again.
        self.blocks.give_back(reversed(sequence.blocks[kept:]))
        sequence.blocks = sequence.blocks[:kept]

    def take_back(self, sequence: Sequence) -> None:
        """Undo `start` and what came before it: no step has been made of the sequence's rows."""
        assert sequence.slot is not None
        self.slots.give_back((sequence.slot,))
        self.recovery.leave(sequence)
        sequence.status, sequence.slot = Status.WAITING, None

    def retire(self, sequence: Sequence, status: Status) -> None:
        """Raise the epoch and send the memory to its pools, behind the newest step that may touch it."""
        if sequence.slot is not None:
            self.recovery.retire(sequence)
            fence = sequence.tickets[-1].step_seq if sequence.tickets else -1
            # The end of a prefix goes before its beginning.
            self.release.defer(fence, sequence.blocks[::-1], sequence.slot)
        sequence.status = status
        sequence.epoch += 1
        sequence.blocks, sequence.slot = (), None

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Every block and slot is free, kept, owned by running sequences, or waiting behind a fence."""
        sequences = list(running)
        self.blocks.check_integrity([i for s in sequences for i in s.blocks] + self.release.held_blocks, "blocks")
        self.slots.check_integrity([s.slot for s in sequences if s.slot is not None] + self.release.held_slots, "slots")
        for sequence in sequences:
            covered = len(sequence.blocks) * self.limits.block_size
            assert sequence.next_position <= covered, "rows beyond the reserved blocks"
