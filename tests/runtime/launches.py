"""What a step makes the host launch: operations counted by where they come from, a replay as one."""

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from deepinfer.runtime.device import InlineDevice, Thunk

# Neither views nor memory that nobody writes are work for a device.
WITHOUT_WORK = {"empty", "empty_like", "empty_strided", "new_empty", "detach"}


class _Counting(TorchDispatchMode):
    def __init__(self, found: Counter[str], name: str) -> None:
        super().__init__()
        self.found, self.name = found, name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.overloadpacket.__name__ not in WITHOUT_WORK:
            self.found[self.name] += 1
        return func(*args, **(kwargs or {}))


class CountingDevice(InlineDevice):
    """Counts the operations of each launch, by the name of the launched function. What would be captured runs when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def launch(self, stream: str, thunk: Thunk, *, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> None:
        with _Counting(self.found, thunk.__name__):
            thunk()

    def capture(self, fn: Thunk) -> Thunk:
        def replay() -> None:
            self.found["replays"] += 1
            with _disable_current_modes():
                fn()

        with _disable_current_modes():
            fn()
        return replay
