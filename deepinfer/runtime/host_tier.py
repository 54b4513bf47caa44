"""Which place in host memory holds which cache block that the device gave away. Names only; no tensors."""


class HostTier:
    """Places by digest; the one that was used longest ago goes first. Copies are made by steps, in the order of these decisions."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))
        self._place_of: dict[bytes, int] = {}  # used longest ago first
        self.offloads = self.restores = 0

    def find(self, digest: bytes) -> int | None:
        """The place of a block."""
        return self._place_of.get(digest)

    def use(self, digest: bytes) -> int:
        """The place of a block that is there, which is now the one used last."""
        self.restores += 1
        place = self._place_of.pop(digest)
        self._place_of[digest] = place
        return place

    def store(self, digest: bytes) -> int | None:
        """A place for a block that the device gives away; None if it is here already, or nothing is kept here."""
        if digest in self._place_of or not (self._free or self._place_of):
            return None
        self.offloads += 1
        place = self._free.pop() if self._free else self._place_of.pop(next(iter(self._place_of)))
        self._place_of[digest] = place
        return place

    def forget(self, places: set[int]) -> None:
        """Nothing is at these places after all."""
        self._place_of = {digest: place for digest, place in self._place_of.items() if place not in places}
        self._free += places
