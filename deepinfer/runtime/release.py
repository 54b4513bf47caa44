"""DeferredRelease: memory returns to its pool only when every step that may touch it has completed.

The host forgets a finished or preempted sequence at once; a step in flight may still write to its blocks. Each entry waits for
the newest step that was planned with it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.runtime.ids import IdPool


@dataclass(frozen=True, slots=True)
class _Entry:
    fence: int  # newest step_seq that may touch the resources
    blocks: tuple[int, ...]
    slot: int | None


class DeferredRelease:
    """Blocks and slots on their way back to their pools."""

    def __init__(self, blocks: IdPool, slots: IdPool) -> None:
        self._blocks, self._slots = blocks, slots
        # Told of every return before it happens; for tests that poison the memory or check who may still touch it.
        self.on_return: Callable[[tuple[int, ...], int | None], None] | None = None
        self._queue: deque[_Entry] = deque()

    def defer(self, fence: int, blocks: tuple[int, ...], slot: int | None) -> None:
        """Queue resources behind step `fence`. Fences never decrease from call to call by more than the pipeline's depth."""
        self._queue.append(_Entry(fence, blocks, slot))

    def drain(self, completed: int) -> None:
        """Give back everything whose fence is at most the newest completed step."""
        waiting = deque[_Entry]()
        for entry in self._queue:
            if entry.fence <= completed:
                if self.on_return is not None:
                    self.on_return(entry.blocks, entry.slot)
                self._blocks.give_back(entry.blocks)
                if entry.slot is not None:
                    self._slots.give_back((entry.slot,))
            else:
                waiting.append(entry)
        self._queue = waiting

    @property
    def held_blocks(self) -> list[int]:
        return [i for entry in self._queue for i in entry.blocks]

    @property
    def held_slots(self) -> list[int]:
        return [entry.slot for entry in self._queue if entry.slot is not None]
