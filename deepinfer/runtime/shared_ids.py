"""A pool of ids that several owners may share and that may keep their contents after the last owner has gone. No tensors.

| state | owners | meaning |
|---|---|---|
| free | 0 | holds nothing |
| owned | 1 or more | a running sequence, or a step in flight, uses it |
| idle | 0 | holds something worth keeping; given away, oldest first, when nothing is free |
"""

from collections import Counter
from collections.abc import Callable, Iterable

from deepinfer.errors import DeepInferError
from deepinfer.runtime.ids import IdPool


class SharedIdPool(IdPool):
    """An `IdPool` with owners counted.

    `on_evict` is told of an idle id that is about to be given to someone else, `on_free` of every id whose contents have just
    become worthless (for tests that poison memory).
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.on_evict: Callable[[int], None] = lambda i: None
        self.on_free: Callable[[int], None] = lambda i: None
        self.evictions = 0
        self._owners = [0] * size
        self._is_kept = [False] * size
        self._idle: dict[int, None] = {}  # oldest first

    @property
    def num_free(self) -> int:
        """Ids that `take` can give: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def take(self, count: int) -> list[int]:
        while len(self._free) < count:
            oldest = next(iter(self._idle))
            self.evictions += 1
            self.on_evict(oldest)
            self.forget(oldest)
        taken = super().take(count)
        for i in taken:
            self._owners[i] = 1
        return taken

    def share(self, ids: Iterable[int]) -> None:
        """Add an owner to ids that are owned or idle."""
        for i in ids:
            if self._is_free[i]:
                raise DeepInferError(f"id {i} is free: there is nothing to share")
            self._idle.pop(i, None)
            self._owners[i] += 1

    def give_back(self, ids: Iterable[int]) -> None:
        """Remove one owner of each id; an id without owners becomes idle if it is to be kept, else free."""
        for i in ids:
            if not 0 < i < self.size or self._owners[i] == 0:
                raise DeepInferError(f"id {i} was returned to its pool more often than it was taken")
            self._owners[i] -= 1
            if self._owners[i] == 0:
                if self._is_kept[i]:
                    self._idle[i] = None
                else:
                    self._release(i)

    def keep(self, i: int) -> None:
        """Remember that an owned id holds something worth keeping."""
        assert self._owners[i] > 0
        self._is_kept[i] = True

    def forget(self, i: int) -> None:
        """What the id holds is worth nothing any more; if it has no owner, it becomes free."""
        self._is_kept[i] = False
        if i in self._idle:
            del self._idle[i]
            self._release(i)

    def _release(self, i: int) -> None:
        self.on_free(i)
        super().give_back((i,))

    def check_integrity(self, owned: Iterable[int], what: str) -> None:
        """Every owner that is counted is there, and every id is free, idle or owned: `free + idle + owned == usable`."""
        owners = Counter(owned)
        wrong = [i for i in range(1, self.size) if self._owners[i] != owners[i]]
        if wrong:
            raise DeepInferError(f"{what}: {wrong[0]} has {owners[wrong[0]]} owners, {self._owners[wrong[0]]} are counted")
        if any(self._is_free[i] for i in (*owners, *self._idle)):
            raise DeepInferError(f"{what}: an id is free and in use")
        if len(owners) + len(self._idle) + len(self._free) != self.num_usable:
            raise DeepInferError(
                f"{what}: {len(self._free)} free + {len(self._idle)} idle + {len(owners)} owned != {self.num_usable}"
            )
