"""A group that measures its own exchanges on the device, without a wait of the host."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, Self

import torch

from deepinfer.dims import Tensor
from deepinfer.parallel.ranks import Ranks


class Mark(Protocol):
    """A point in the device's work; `torch.cuda.Event` is one."""

    def record(self) -> Any: ...

    def elapsed_time(self, end: Self) -> float:
        """Milliseconds until `end`; both have passed."""
        ...


class HostMark:
    """A point in time, for a device that works while the host waits."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Self) -> float:
        return (end.seconds - self.seconds) * 1e3


def mark_maker(device: torch.device, *, in_graphs: bool = False) -> Callable[[], Mark]:
    """Makes marks for a CPU or a CUDA device. `in_graphs`: such that a captured step records them again in each replay."""
    if device.type == "cpu":
        return HostMark
    return partial(torch.cuda.Event, enable_timing=True, **({"external": True} if in_graphs else {}))


class TimedRanks(Ranks):
    """`Ranks` whose exchanges leave marks inside `marking`: a pair for each, in order, until `forget`."""

    _new_mark: Callable[[], Mark] | None = None
    _marks: tuple[tuple[Mark, Mark], ...] = ()

    @contextmanager
    def marking(self, new_mark: Callable[[], Mark]) -> Iterator[None]:
        """Leave marks inside. What is captured there goes on recording them."""
        self._new_mark = new_mark
        try:
            yield
        finally:
            self._new_mark = None

    def forget(self) -> None:
        """Begin anew: the marks of one step are wanted."""
        self._marks = ()

    def exchange_ms(self) -> float:
        """Time of all exchanges since `forget`, waiting for slower ranks included. The device has finished them."""
        return sum(begin.elapsed_time(end) for begin, end in self._marks)

    def _all_to_all(self, result: Tensor, rows: Tensor, received: list[int] | None, sent: list[int] | None) -> None:
        if self._new_mark is None:
            super()._all_to_all(result, rows, received, sent)
            return
        begin, end = self._new_mark(), self._new_mark()
        begin.record()
        super()._all_to_all(result, rows, received, sent)
        end.record()
        self._marks = (*self._marks, (begin, end))
