"""Pools of integer ids: cache blocks and ring slots. No tensors."""

from collections.abc import Iterable

from deepinfer.errors import DeepInferError


class IdPool:
    """Hands out the ids 1 .. size - 1, lowest recently freed last; id 0 is trash and never handed out."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, 0, -1))
        self._is_free = [False] + [True] * (size - 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Ids that exist, the trash one excluded."""
        return self.size - 1

    def take(self, count: int) -> list[int]:
        """Remove `count` ids from the pool; the caller has checked `num_free`."""
        assert count <= len(self._free)
        taken = [self._free.pop() for _ in range(count)]
        for i in taken:
            self._is_free[i] = False
        return taken

    def give_back(self, ids: Iterable[int]) -> None:
        """Return ids. A double return is an error of the engine, never silently merged."""
        for i in ids:
            if not 0 < i < self.size or self._is_free[i]:
                raise DeepInferError(f"id {i} was returned to its pool twice or never came from it")
            self._is_free[i] = True
            self._free.append(i)

    def check_integrity(self, owned: Iterable[int], what: str) -> None:
        """Every id is free or owned exactly once: `free + owned == usable`."""
        owned = list(owned)
        if len(set(owned)) != len(owned):
            raise DeepInferError(f"{what}: an id has two owners")
        if any(self._is_free[i] for i in owned):
            raise DeepInferError(f"{what}: an owned id is also free")
        if len(owned) + len(self._free) != self.num_usable:
            raise DeepInferError(f"{what}: {len(self._free)} free + {len(owned)} owned != {self.num_usable}")
