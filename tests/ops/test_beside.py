"""Forks and their memory, over stand-ins for CUDA's streams that follow its rules for captures. No GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deepinfer.ops.triton_kernels import beside as module
from deepinfer.ops.triton_kernels.beside import beside, rejoin

CPU = torch.device("cpu")


class Stream:
    """What a stream waits for, in order of launch, and whether it is being captured."""

    def __init__(self, number: int) -> None:
        self.device, self.cuda_stream, self.is_captured, self.launched = CPU, number, False, set[str]()

    def wait_stream(self, other: "Stream") -> None:
        if self.is_captured and not other.is_captured:
            raise RuntimeError("dependency created on uncaptured work in another stream")
        self.is_captured |= other.is_captured
        self.launched |= other.launched


class Streams:
    """The current stream, and the others that were made."""

    def __init__(self) -> None:
        self.current = Stream(0)
        self.made: list[Stream] = []

    def new(self, device: torch.device) -> Stream:
        self.made.append(Stream(len(self.made) + 1))
        return self.made[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Allocations(TorchFunctionMode):
    """Remembers on which stream memory was taken."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams, self.owners = streams, dict[int, Stream]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.empty:
            self.owners[result.data_ptr()] = self.streams.current
        return result


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    fake = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: fake.current)
    monkeypatch.setattr(torch.cuda, "Stream", fake.new)
    monkeypatch.setattr(torch.cuda, "stream", fake.on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.current.is_captured)
    module._beside_stream.cache_clear()
    yield fake
    module._beside_stream.cache_clear()


def test_a_fork_waits_for_what_came_before_it_and_a_reader_for_the_fork(streams: Streams) -> None:
    first = streams.current
    first.launched.add("before")
    with beside(CPU):
        second = streams.current
        second.launched.add("beside")
    first.launched.add("after")
    assert second is not first
    assert second.launched == {"before", "beside"}
    assert first.launched == {"before", "after"}
    rejoin(CPU)
    assert first.launched == {"before", "after", "beside"}


def test_a_capture_may_rejoin_without_a_fork(streams: Streams) -> None:
    first = streams.current
    rejoin(CPU)
    first.is_captured = True
    rejoin(CPU)
    with beside(CPU):
        streams.current.launched.add("beside")
    rejoin(CPU)
    assert first.launched == {"beside"}


def test_threads_on_one_stream_do_not_share_the_one_beside_it(streams: Streams) -> None:
    def fork() -> None:
        with beside(CPU):
            pass

    thread = Thread(target=fork)
    thread.start()
    thread.join()
    fork()
    fork()
    assert len(streams.made) == 2


def test_coefficients_that_nobody_keeps_go_back_to_the_stream_that_writes_them(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from deepinfer.ops.triton_kernels import hyper_mix

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: None

    for name in ("project_kernel", "mix_kernel"):
        monkeypatch.setattr(hyper_mix, name, Kernel())
    with Allocations(streams) as allocations:
        results: tuple[Tensor, ...] = hyper_mix.hyper_mix._init_fn(
            torch.zeros(3, 4, 8), torch.zeros(24, 32), torch.zeros(24), torch.zeros(3), 1e-6, 1e-6, 2
        )
    (second,) = streams.made
    assert all(allocations.owners[result.data_ptr()] is second for result in results)
