"""The only module that knows streams and events. Everything a step does on the device is launched through here.

`InlineDevice` runs a launch at once (CPU). `AcceleratorDevice` puts it on a stream. A third back end, for tests, runs queued
launches late and in any legal order. A launch names what it reads and writes, so that tests can check that every pair of
conflicting launches is ordered by a stream or an event.
"""

import asyncio
import os
import re
import threading
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

COMPUTE, COPY = "compute", "copy"  # stream names: the model and the sampler; device-to-host copies
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
WARM_UP_RUNS = 2  # before a capture, so that lazy initialisation is over
# What one thread of a process does at a time. Compilers trace with state of the whole process, so no other thread may call compiled
# code meanwhile; and while a thread captures, the driver refuses others that capture or wait for the whole device.
ALONE = threading.RLock()
POLL_S = 2e-5  # between two looks at an event; each look yields to other coroutines

Thunk = Callable[[], None]


class Event(Protocol):
    """A point on a stream."""

    def query(self) -> bool:
        """Whether everything before the point has completed; never blocks."""
        ...


class Device(Protocol):
    """Where launches run."""

    torch_device: torch.device
    checks_accesses: bool  # whether the names of what a launch touches are used
    can_capture: bool  # whether `capture` saves host work

    def launch(self, stream: str, thunk: Thunk, *, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> None:
        """Queue `thunk` on a stream. `reads` and `writes` name the resources it touches."""
        ...

    def record(self, stream: str) -> Event:
        """An event after everything launched on the stream so far."""
        ...

    def wait(self, stream: str, event: Event) -> None:
        """Later launches on the stream start after the event."""
        ...

    def synchronize(self, event: Event) -> None:
        """Block the host until the event has passed."""
        ...

    def close(self) -> None:
        """Give back what libraries keep for the thread that used the device."""
        ...

    def capture(self, fn: Thunk) -> Thunk:
        """A function that repeats what `fn` does to the same tensors, without its host work where the device can record that.

        `fn` may run several times before this returns.
        """
        ...


async def wait_for(device: Device, event: Event) -> None:
    """Wait for an event while other coroutines run. Cancellation leaves the device as it is."""
    while not event.query():  # noqa: ASYNC110 - a device event cannot wake a coroutine
        await asyncio.sleep(POLL_S if device.torch_device.type != "cpu" else 0)


class _Done:
    def query(self) -> bool:
        return True


class InlineDevice:
    """Runs every launch at once: the CPU."""

    def __init__(self, torch_device: torch.device | str = "cpu") -> None:
        self.torch_device = torch.device(torch_device)
        self.checks_accesses = self.can_capture = False

    def launch(self, stream: str, thunk: Thunk, *, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> None:
        thunk()

    def record(self, stream: str) -> Event:
        return _Done()

    def wait(self, stream: str, event: Event) -> None:
        pass

    def synchronize(self, event: Event) -> None:
        pass

    def close(self) -> None:
        pass

    def capture(self, fn: Thunk) -> Thunk:
        return fn


class AcceleratorDevice:
    """Streams and events of the accelerator that torch names. Compute runs on the current stream, copies on one of their own."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.checks_accesses, self.can_capture = False, torch_device.type == "cuda"
        self._copy = torch.Stream(torch_device)
        self._graph_memory: Any = None
        self._graph_stream: torch.cuda.Stream | None = None

    def _stream(self, name: str) -> torch.Stream:
        return torch.accelerator.current_stream(self.torch_device) if name == COMPUTE else self._copy

    def launch(self, stream: str, thunk: Thunk, *, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> None:
        if stream == COMPUTE:
            thunk()
            return
        with self._copy:
            thunk()

    def record(self, stream: str) -> Any:
        return self._stream(stream).record_event()

    def wait(self, stream: str, event: Any) -> None:
        self._stream(stream).wait_event(event)

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def close(self) -> None:
        if self.torch_device.type == "cuda":
            with ALONE:
                torch.cuda.synchronize(self.torch_device)
                # One workspace for each thread and stream that multiplied; nothing else returns it.
                torch._C._cuda_clearCublasWorkspaces()

    def capture(self, fn: Thunk) -> Thunk:
        if not self.can_capture:
            return fn
        # One stream for all graphs, because working memory belongs to a stream; and for their first runs, so that whatever a
        # stream needs at first is there when it is captured.
        self._graph_stream = stream = self._graph_stream or torch.cuda.Stream(self.torch_device)
        current = torch.cuda.current_stream(self.torch_device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                fn()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Graphs never run at the same time, so they share their working memory.
        self._graph_memory = self._graph_memory or torch.cuda.graph_pool_handle()
        with ALONE:
            # The libraries then take their working memory from the graphs', which lives as long as those do.
            torch._C._cuda_clearCublasWorkspaces()
            # Other threads may launch and allocate meanwhile.
            with torch.cuda.graph(graph, pool=self._graph_memory, stream=stream, capture_error_mode="thread_local"):
                fn()
        return graph.replay


def use_device(torch_device: torch.device) -> None:
    """Let this thread launch on a device: each thread begins with the first one, where kernels of our own would then run."""
    if torch_device.index is not None and torch_device.type != "cpu":
        torch.accelerator.set_device_index(torch_device)


def open_device(torch_device: torch.device) -> Device:
    """The back end for a torch device."""
    return InlineDevice(torch_device) if torch_device.type == "cpu" else AcceleratorDevice(torch_device)


def _container_memory_bytes() -> int:
    """What a container's limit leaves; without a limit more than any machine has."""
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no control group, or the word "max"
        return 2**62
    return max(limit - used, 0)


def free_memory_bytes(torch_device: torch.device) -> int:
    """Memory that can still be allocated on the device."""
    if torch_device.type == "cpu":
        # Linux counts memory that only caches files as available; SC_AVPHYS_PAGES leaves it out.
        if MEMINFO.exists() and (found := re.search(r"^MemAvailable:\s+(\d+) kB", MEMINFO.read_text(), re.MULTILINE)):
            return min(int(found.group(1)) * 1024, _container_memory_bytes())
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(torch.get_device_module(torch_device).mem_get_info(torch_device)[0])
