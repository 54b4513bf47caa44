"""What the host and the device did when: spans on lanes, for a picture of the overlap.

Host spans are taken around the loop's phases; device spans come from a `TracingDevice`, which brackets every launch. Written as
Chrome trace events (load the JSON in a trace viewer).
"""

import json
import time
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer.runtime.device import COMPUTE, Device, Event, Thunk


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of the picture; times in milliseconds since the trace began."""

    lane: str  # "host", or the name of a stream
    name: str
    start_ms: float
    end_ms: float


class Tracer:
    """Collects spans. Device spans on an accelerator are resolved from timing events once everything has run."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()
        self._spans: list[Span] = []
        self._timed: list[tuple[str, str, Any, Any]] = []
        self._base: Any = None
        self._base_ms = 0.0

    def now_ms(self) -> float:
        """Milliseconds since the trace began, on the host's clock."""
        return (time.perf_counter() - self._origin) * 1e3

    @contextmanager
    def span(self, name: str, lane: str = "host") -> Iterator[None]:
        """Record what runs inside."""
        start = self.now_ms()
        try:
            yield
        finally:
            self._spans.append(Span(lane, name, start, self.now_ms()))

    def timed(self, lane: str, name: str, start: Any, end: Any) -> None:
        """Record a device span between two timing events."""
        self._timed.append((lane, name, start, end))

    def align(self, device: torch.device) -> None:
        """Tie the device's clock to the host's: call when the device is idle."""
        torch.accelerator.synchronize(device)
        self._base = torch.accelerator.current_stream(device).record_event(torch.Event(device, enable_timing=True))
        torch.accelerator.synchronize(device)
        self._base_ms = self.now_ms()

    def clear(self) -> None:
        """Forget every span so far; what the device has not finished is waited for."""
        self.spans()
        self._spans.clear()

    def spans(self) -> list[Span]:
        """Everything recorded, in order of its start. Waits for the device."""
        for lane, name, start, end in self._timed:
            end.synchronize()
            begin = self._base_ms + self._base.elapsed_time(start)
            self._spans.append(Span(lane, name, begin, begin + start.elapsed_time(end)))
        self._timed.clear()
        return sorted(self._spans, key=lambda span: span.start_ms)

    def write_chrome_trace(self, path: Path) -> None:
        """Write the spans as complete events, one thread for each lane."""
        spans = self.spans()
        lanes = list(dict.fromkeys(["host", COMPUTE, *(span.lane for span in spans)]))
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": lanes.index(lane), "name": "thread_name", "args": {"name": lane}} for lane in lanes
        ]
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": lanes.index(span.lane),
                "name": span.name,
                "ts": span.start_ms * 1e3,
                "dur": (span.end_ms - span.start_ms) * 1e3,
            }
            for span in spans
        ]
        path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


class TracingDevice:
    """A device whose launches leave spans; named after the launched function."""

    def __init__(self, inner: Device, tracer: Tracer) -> None:
        self.inner, self.tracer = inner, tracer
        self.torch_device, self.checks_accesses, self.can_capture = inner.torch_device, inner.checks_accesses, inner.can_capture
        if self.torch_device.type != "cpu":
            tracer.align(self.torch_device)

    def launch(self, stream: str, thunk: Thunk, *, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> None:
        name = thunk.__name__
        if self.torch_device.type == "cpu":

            def timed() -> None:
                with self.tracer.span(name, stream):
                    thunk()

            self.inner.launch(stream, timed, reads=reads, writes=writes)
            return

        def bracketed() -> None:
            current = torch.accelerator.current_stream(self.torch_device)
            start = current.record_event(torch.Event(self.torch_device, enable_timing=True))
            thunk()
            self.tracer.timed(stream, name, start, current.record_event(torch.Event(self.torch_device, enable_timing=True)))

        self.inner.launch(stream, bracketed, reads=reads, writes=writes)

    def record(self, stream: str) -> Event:
        return self.inner.record(stream)

    def wait(self, stream: str, event: Event) -> None:
        self.inner.wait(stream, event)

    def synchronize(self, event: Event) -> None:
        self.inner.synchronize(event)

    def close(self) -> None:
        self.inner.close()

    def capture(self, fn: Thunk) -> Thunk:
        return self.inner.capture(fn)
