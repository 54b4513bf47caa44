"""What the scheduler keeps of sequences that leave, and how a sequence that comes finds it again. No tensors.

Prefix hits and preemption are one mechanism: memory of a sequence that ends, or is preempted, stays in its pools under the name of
the tokens that it was computed from, and whoever starts with these tokens enters there.

Everything that a step in flight reads or writes has an owner until that step has completed: what a step only copies from or to is
handed to `DeferredRelease` with the step as its fence.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer.runtime.host_tier import HostTier
from deepinfer.runtime.plan import CacheCopy
from deepinfer.runtime.prefix_cache import Ending, Match, PrefixCache
from deepinfer.runtime.release import DeferredRelease
from deepinfer.runtime.replay import Entry, ReplayPolicy
from deepinfer.runtime.sequence import Sequence
from deepinfer.runtime.shared_ids import SharedIdPool


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheNames:
    """What turns caching on.

    Attributes:
        root: digest of everything besides tokens that cached entries depend on.
        keeps_rings: whether the rings at the end of a prefix are kept.
        max_backtrack: rows beyond a sequence's end that may have been written without spoiling the rings at its end.
        context: tokens before a row that its n-grams reach back to.
        num_host_blocks: places in host memory for blocks that the device gives away.
    """

    root: bytes
    keeps_rings: bool
    max_backtrack: int
    context: int
    num_host_blocks: int = 0


@dataclass(slots=True)
class RecoveryCounters:
    """Totals in tokens, and counts."""

    looked_up_tokens: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    truncated_rows: int = 0
    snapshots: int = 0


class Recovery:
    """Owns the pools of blocks and slots, the index over them, and the copies that the next step has to make.

    With the default policy and without `names` it is two pools and does nothing else.
    """

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        block_size: int,
        policy: ReplayPolicy | None = None,
        names: CacheNames | None = None,
    ) -> None:
        self.policy, self.names, self.block_size = policy or ReplayPolicy(), names, block_size
        self.counters = RecoveryCounters()
        self.cache: PrefixCache | None = None
        self.blocks, self.slots = SharedIdPool(num_blocks), SharedIdPool(num_slots)
        if names is not None:
            host = HostTier(names.num_host_blocks)
            self.cache = PrefixCache(names.root, block_size, self.blocks, self.slots, host)
            self.cache.on_offload = self._offload
        self.release = DeferredRelease(self.blocks, self.slots)
        self._before: list[CacheCopy] = []
        self._after: list[CacheCopy] = []
        self._new_endings: list[Ending] = []

    def copy(self, copies: Iterable[CacheCopy]) -> None:
        """Have copies made before the step that is being planned, behind those that are wanted already."""
        self._before += copies

    def _offload(self, block: int, place: int) -> None:
        self._before.append(CacheCopy("offload", block, place))

    # ---- entering -----------------------------------------------------------------------------------------------------

    def enter(self, sequence: Sequence, *, from_cache: bool = True) -> Entry:
        """Choose where a waiting sequence starts, and make it an owner of the full blocks that it takes from the cache.

        `leave` undoes it; `entered` makes it final. Mutates the sequence.
        """
        if self.cache is None:
            return self._enter(sequence, Match())
        self.cache.extend_digests(sequence.digests, sequence.token_ids)
        reads_cache = from_cache and not sequence.request.params.needs_every_row
        for with_host in (True, False) if reads_cache else ():
            match = self.cache.match(sequence.digests, sequence.token_ids, with_host=with_host)
            entry = self._enter(sequence, match)
            if self._claim(sequence, match.blocks[: entry.end // self.block_size]):
                return entry
        return self._enter(sequence, Match())

    def _enter(self, sequence: Sequence, match: Match) -> Entry:
        """What `match` makes of the sequence, without any ownership yet."""
        ending, matched = match.ending, len(match.blocks) * self.block_size
        ending_at = 0 if ending is None else ending.num_blocks * self.block_size + len(ending.tokens)
        has_snapshot = ending is not None and ending.slot is not None
        if not has_snapshot:
            matched = max(matched, ending_at)
        entry = self.policy.enter(matched, ending_at if has_snapshot else 0)
        sequence.ending = (
            ending if ending is not None and entry.end == ending_at and (ending.tokens or entry.from_snapshot) else None
        )
        sequence.confirmed = entry.start
        sequence.save_points = self._save_points(sequence, entry, len(match.blocks) * self.block_size)
        span = self.policy.span(entry, len(sequence.token_ids), sequence.save_points)
        sequence.replay = None if sequence.request.params.needs_every_row else span
        return entry

    def _claim(self, sequence: Sequence, found: tuple[int | None, ...]) -> bool:
        """Make the sequence an owner of stored blocks and its ending; those in host memory come back into blocks of its own.

        False if there is no room for these, or if making it has pushed them out; then nothing has changed hands.
        """
        assert self.cache is not None
        ending, host = sequence.ending, self.cache.host
        blocks = [] if ending is None or ending.block is None else [ending.block]
        slots = [] if ending is None or ending.slot is None else [ending.slot]
        present = [block for block in found if block is not None]
        self.blocks.share([*present, *blocks])
        self.slots.share(slots)
        absent = [sequence.digests[n] for n, block in enumerate(found) if block is None]
        restored: list[int] = []
        if len(absent) <= self.blocks.num_free:
            restored = self.blocks.take(len(absent))
        if len(restored) < len(absent) or any(host.find(digest) is None for digest in absent):
            self.blocks.give_back([*restored, *blocks, *reversed(present)])
            self.slots.give_back(slots)
            return False
        # In order with whatever is offloaded before and after.
        self._before += [CacheCopy("restore", host.use(d), block) for d, block in zip(absent, restored, strict=True)]
        own = iter(restored)
        sequence.blocks = tuple(next(own) if block is None else block for block in found)
        return True

    def _save_points(self, sequence: Sequence, entry: Entry, matched: int) -> tuple[int, ...]:
        """Where the prompt's rings shall be kept: at its last block edge, for whoever asks again, and where it leaves a stored
        prefix that has no snapshot yet, for whoever branches off there next."""
        if self.cache is None or self.names is None or not self.names.keeps_rings:
            return ()
        last = (len(sequence.token_ids) - 1) // self.block_size * self.block_size
        points = sorted({point for point in (matched, last) if point > entry.start})
        return tuple(p for p in points if not self.cache.has_ending(sequence.digests[p // self.block_size - 1], ()))

    def leave(self, sequence: Sequence) -> None:
        """Undo `enter`: nothing has been launched with it."""
        owned = set(sequence.blocks)
        self._before = [copy for copy in self._before if copy.kind != "restore" or copy.target not in owned]
        self.blocks.give_back(reversed(sequence.blocks))
        if sequence.ending is not None:
            self._give_back_ending(sequence.ending)
        sequence.blocks, sequence.ending, sequence.confirmed, sequence.replay, sequence.save_points = (), None, 0, None, ()

    def _give_back_ending(self, ending: Ending) -> None:
        self.blocks.give_back([] if ending.block is None else [ending.block])
        self.slots.give_back([] if ending.slot is None else [ending.slot])

    def entered(self, sequence: Sequence, entry: Entry, step_seq: int) -> None:
        """The sequence has its slot and blocks and runs in step `step_seq`: plan the copies that it starts from."""
        ending, sequence.ending = sequence.ending, None
        if ending is not None:
            if ending.block is not None:
                self._before.append(CacheCopy("block", ending.block, sequence.blocks[ending.num_blocks]))
            if ending.slot is not None:
                assert sequence.slot is not None
                self._before.append(CacheCopy("slot", ending.slot, sequence.slot))
            self.release.defer(step_seq, () if ending.block is None else (ending.block,), ending.slot)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = entry.end
        sequence.num_replayed_tokens += entry.end - entry.start
        counters = self.counters
        counters.looked_up_tokens += len(sequence.token_ids)
        counters.cached_tokens += entry.end
        counters.replayed_tokens += entry.end - entry.start
        if sequence.replay is not None:
            counters.truncated_rows += sequence.replay.tail_start - entry.start

    # ---- running ------------------------------------------------------------------------------------------------------

    def cut(self, sequence: Sequence, start: int, count: int) -> int:
        """Rows of a chunk up to the next place where the rings shall be kept."""
        return next((p - start for p in sequence.save_points if start < p < start + count), count)

    def context(self, sequence: Sequence, start: int) -> tuple[int, ...]:
        """Tokens before the first row of a replay, which no row of it feeds."""
        is_first = self.names is not None and sequence.replay is not None and start == sequence.replay.window_start > 0
        return tuple(sequence.token_ids[max(start - self.names.context, 0) : start]) if is_first and self.names else ()

    def planned(self, sequence: Sequence, end: int, step_seq: int) -> None:
        """A chunk that ends at `end` is part of step `step_seq`: keep its rings if they are wanted and there is room."""
        if end not in sequence.save_points or self.slots.num_free == 0:
            return
        assert sequence.slot is not None
        num_blocks = end // self.block_size
        (slot,) = self.slots.take(1)
        self._after.append(CacheCopy("slot", sequence.slot, slot))
        self._new_endings.append(Ending(sequence.digests[num_blocks - 1], num_blocks, (), None, slot))
        self.release.defer(step_seq, (), slot)

    def drop_offloads(self) -> None:
        """Forget the offloads that no step has made yet: something else is about to be written to their blocks."""
        if self.cache is not None:
            self.cache.host.forget({copy.target for copy in self._before if copy.kind == "offload"})
            self._before = [copy for copy in self._before if copy.kind != "offload"]

    def take_copies(self) -> tuple[tuple[CacheCopy, ...], tuple[CacheCopy, ...]]:
        """The copies to make before and after the forward of the step that is planned now."""
        copies = tuple(self._before), tuple(self._after)
        # Only now: whoever enters in this very step copies before there is anything to copy.
        for ending in self._new_endings:
            assert self.cache is not None
            self.counters.snapshots += self.cache.add_ending(ending)
        self._before, self._after, self._new_endings = [], [], []
        return copies

    def confirmed(self, sequence: Sequence) -> None:
        """Register the full blocks of what has just been confirmed."""
        if self.cache is not None:
            self._register_blocks(sequence, sequence.confirmed)

    def _register_blocks(self, sequence: Sequence, end: int) -> None:
        assert self.cache is not None
        count = end // self.block_size
        self.cache.extend_digests(sequence.digests, sequence.token_ids)
        self.cache.add_blocks(sequence.digests[:count], sequence.blocks[:count])

    # ---- leaving ------------------------------------------------------------------------------------------------------

    def retire(self, sequence: Sequence) -> None:
        """A running sequence is about to give its memory back: register what is worth keeping of it."""
        if self.cache is None or self.names is None:
            return
        end = min(sequence.confirmed, len(sequence.token_ids))
        self._register_blocks(sequence, end)
        if self.policy.mode == "bounded":
            # The pending group of an odd end would have to be kept as well; a row more is cheaper.
            end -= end % 2
        right_from = 0 if sequence.replay is None else sequence.replay.right_from
        write_floor = 0 if sequence.replay is None else sequence.replay.write_floor
        num_blocks = end // self.block_size
        tokens = tuple(sequence.token_ids[num_blocks * self.block_size : end])
        block = sequence.blocks[num_blocks] if tokens else None
        digest = sequence.digests[num_blocks - 1] if num_blocks else self.cache.root
        # Rows in flight, and rejected ones, have written behind the end.
        is_intact = sequence.next_position - end <= self.names.max_backtrack
        if self.names.keeps_rings and 0 < end >= right_from and is_intact:
            self.counters.snapshots += self.cache.add_ending(Ending(digest, num_blocks, tokens, block, sequence.slot))
        elif self.policy.mode == "bounded" and tokens and end >= write_floor:
            self.cache.add_ending(Ending(digest, num_blocks, tokens, block, None))
