"""FuzzDevice: the same worker code on launches that run late, in any order that streams and events allow.

Launches are queued and run on real CPU tensors when somebody looks at an event, chosen by a seeded generator. A missing edge
therefore gives a wrong answer, reproducibly and without an accelerator. Beside that, vector clocks check every pair of launches
that touch the same resource, one of them writing: if neither a stream, an event nor the host's own waiting orders them, the pair
is a race, whatever the chosen order made of it.
"""

import random
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch

from deepinfer.errors import DeepInferError
from deepinfer.runtime.device import Thunk

Clock = dict[str, int]  # stream -> launches of it that happened before


class RaceError(DeepInferError):
    """Two unordered launches touch the same resource and one of them writes."""


def _join(*clocks: Clock) -> Clock:
    streams = {s for clock in clocks for s in clock}
    return {s: max(clock.get(s, 0) for clock in clocks) for s in streams}


@dataclass(slots=True, eq=False)
class FuzzEvent:
    """Passes when the launches before it on its stream have run."""

    device: "FuzzDevice"
    stream: str
    count: int
    clock: Clock

    def query(self) -> bool:
        self.device.advance()
        passed = self.device.ran[self.stream] >= self.count
        if passed:
            # The host has seen it: what it launches from now on happens after.
            self.device.host_clock = _join(self.device.host_clock, self.clock)
        return passed


@dataclass(slots=True, eq=False)
class _Launch:
    thunk: Thunk
    waits: list[FuzzEvent]


@dataclass(slots=True, eq=False)
class _Accesses:
    """The newest launch of each stream that read or wrote one resource; older ones of the same stream come before it."""

    writes: Clock = field(default_factory=dict)
    reads: Clock = field(default_factory=dict)


class FuzzDevice:
    """Runs launches late. `eagerness` is the chance that another one runs when an event is looked at."""

    def __init__(self, seed: int, eagerness: float = 0.5) -> None:
        self.torch_device = torch.device("cpu")
        self.checks_accesses, self.can_capture = True, False
        self.random, self.eagerness = random.Random(seed), eagerness
        self.queues: dict[str, list[_Launch]] = {}
        self.launched: dict[str, int] = {}
        self.ran: dict[str, int] = {}
        self.host_clock: Clock = {}
        self.late_looks = 0  # how often an event was found pending: shows that lateness did happen
        self._clocks: dict[str, Clock] = {}
        self._pending_waits: dict[str, list[FuzzEvent]] = {}
        self._accesses: dict[Hashable, _Accesses] = {}

    def launch(self, stream: str, thunk: Thunk, *, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> None:
        self._open(stream)
        self.launched[stream] += 1
        waits, self._pending_waits[stream] = self._pending_waits[stream], []
        before = _join(self._clocks[stream], self.host_clock, *(event.clock for event in waits))
        self._check(stream, before, list(reads), list(writes))
        self._clocks[stream] = before | {stream: self.launched[stream]}
        self.queues[stream].append(_Launch(thunk, waits))

    def record(self, stream: str) -> FuzzEvent:
        self._open(stream)
        return FuzzEvent(self, stream, self.launched[stream], dict(self._clocks[stream]))

    def wait(self, stream: str, event: FuzzEvent) -> None:
        self._open(stream)
        self._pending_waits[stream].append(event)

    def synchronize(self, event: FuzzEvent) -> None:
        while not event.query():
            pass

    def close(self) -> None:
        pass

    def capture(self, fn: Thunk) -> Thunk:
        return fn

    def advance(self) -> None:
        """Run some of the launches that may run now, in a random order."""
        while self.random.random() < self.eagerness:
            ready = [stream for stream, queue in self.queues.items() if queue and self._may_run(queue[0])]
            if not ready:
                return
            stream = self.random.choice(ready)
            self.queues[stream].pop(0).thunk()
            self.ran[stream] += 1
        self.late_looks += any(self.queues.values())

    def _may_run(self, launch: _Launch) -> bool:
        return all(self.ran[event.stream] >= event.count for event in launch.waits)

    def _open(self, stream: str) -> None:
        if stream not in self.queues:
            self.queues[stream], self._pending_waits[stream], self._clocks[stream] = [], [], {}
            self.launched[stream] = self.ran[stream] = 0

    def host_write(self, resource: Hashable) -> None:
        """State that the host touches a resource now. Raises `RaceError` if a launch that the host has not seen end may too."""
        accesses = self._accesses.get(resource, _Accesses())
        self._require_ordered("the host's access", self.host_clock, accesses.writes | accesses.reads, resource)

    def _check(self, stream: str, before: Clock, reads: list[Hashable], writes: list[Hashable]) -> None:
        """Compare with every earlier conflicting access, then remember this one."""
        index = self.launched[stream]
        who = f"launch {index} on stream {stream!r}"
        for resource, is_write in [(r, False) for r in reads] + [(w, True) for w in writes]:
            accesses = self._accesses.setdefault(resource, _Accesses())
            self._require_ordered(who, before, accesses.writes, resource)
            if is_write:
                self._require_ordered(who, before, accesses.reads, resource)
        for resource in reads:
            self._accesses[resource].reads[stream] = index
        for resource in writes:
            self._accesses[resource].writes[stream] = index

    def _require_ordered(self, who: str, before: Clock, others: Clock, resource: Hashable) -> None:
        for stream, index in others.items():
            if index > before.get(stream, 0):
                what = resource if isinstance(resource, tuple) else type(resource).__name__
                raise RaceError(f"{who} is not ordered after launch {index} on stream {stream!r}; both touch {what}")
