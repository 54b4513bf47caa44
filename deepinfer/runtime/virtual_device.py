"""VirtualDevice: the worker's launches on a virtual clock, for pictures of the overlap that are the same on every machine.

A launch runs at once, so its results are right; its time is a stated cost. It starts when the host has launched it, its stream is
free and the events that its stream waits for have passed. The host's own phases cost stated times as well, and looking at an
event takes the host's clock to it.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from deepinfer.runtime.device import Thunk
from deepinfer.runtime.trace import Span


@dataclass(frozen=True, slots=True, eq=False)
class VirtualEvent:
    """A point on a stream's time line."""

    device: "VirtualDevice"
    at_ms: float

    def query(self) -> bool:
        self.device.now_ms = max(self.device.now_ms, self.at_ms)
        return True


class VirtualDevice:
    """A device whose launches take `launch_ms[name of the launched function]`, and a host whose phases take `host_ms[name]`.

    Pass `span` to `StepLoop`, so that the host's phases are counted. `now_ms` is the host's clock.
    """

    def __init__(self, launch_ms: Mapping[str, float], host_ms: Mapping[str, float]) -> None:
        self.torch_device = torch.device("cpu")
        self.checks_accesses = self.can_capture = False
        self.launch_ms, self.host_ms = dict(launch_ms), dict(host_ms)
        self.now_ms = 0.0
        self._free_ms: defaultdict[str, float] = defaultdict(float)
        self._spans: list[Span] = []

    def launch(self, stream: str, thunk: Thunk, *, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> None:
        thunk()
        start = max(self.now_ms, self._free_ms[stream])
        self._free_ms[stream] = start + self.launch_ms.get(thunk.__name__, 0.0)
        self._spans.append(Span(stream, thunk.__name__, start, self._free_ms[stream]))

    def record(self, stream: str) -> VirtualEvent:
        return VirtualEvent(self, self._free_ms[stream])

    def wait(self, stream: str, event: VirtualEvent) -> None:
        self._free_ms[stream] = max(self._free_ms[stream], event.at_ms)

    def synchronize(self, event: VirtualEvent) -> None:
        event.query()

    def close(self) -> None:
        pass

    def capture(self, fn: Thunk) -> Thunk:
        return fn

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A phase of the host: its cost first, so that what it launches starts behind it."""
        start = self.now_ms
        self.now_ms += self.host_ms.get(name, 0.0)
        yield
        self._spans.append(Span("host", name, start, self.now_ms))

    def spans(self) -> list[Span]:
        """Everything so far, in order of its start."""
        return sorted(self._spans, key=lambda span: span.start_ms)
