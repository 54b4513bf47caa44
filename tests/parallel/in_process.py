"""Ranks as threads of one process, and a device that captures on the CPU: what graphs of a group do, without a group or graphs."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepinfer.parallel.ranks import Ranks
from deepinfer.runtime.device import InlineDevice
from deepinfer.runtime.fuzz_device import FuzzDevice

PATIENCE_S = 60.0
HOST_READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__")


class Board:
    """Where the threads of a group put what the others shall have."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.parts: list[list[Tensor]] = [[] for _ in range(size)]
        self.calls = [""] * size

    def meet(self, rank: int, call: str) -> None:
        """Wait for the others, who must have come for the same thing."""
        self.calls[rank] = call
        self.barrier.wait()
        calls = list(self.calls)
        self.barrier.wait()
        assert len(set(calls)) == 1, f"ranks are at {calls}"


class ThreadRanks:
    """The exchanges of `Ranks` among threads. Arguments that do not fit together are an error."""

    def __init__(self, rank: int, size: int, board: Board) -> None:
        self.rank, self.size, self.board = rank, size, board

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """See `Ranks.exchange`."""
        self.board.parts[self.rank] = list(rows.split(sent))
        self.board.meet(self.rank, f"an exchange of {rows.dtype}")
        parts = [of_rank[self.rank] for of_rank in self.board.parts]
        assert [len(part) for part in parts] == received
        result = torch.cat(parts)
        self.board.barrier.wait()
        return result

    def exchange_evenly(self, rows: Tensor) -> Tensor:
        """See `Ranks.exchange_evenly`."""
        each = [len(rows) // self.size] * self.size
        return self.exchange(rows, each, each)

    def gather_waiting(self, what: str, row: list[int]) -> list[tuple[int, ...]]:
        """See `Ranks.gather_waiting`."""
        rows = self.exchange_evenly(torch.tensor(row).repeat(self.size))
        return [tuple(of_rank) for of_rank in rows.unflatten(0, (self.size, -1)).tolist()]


def run_threads(fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """`fn(ranks, *args)` for each of `size` ranks; results in rank order."""
    board, results, errors = Board(size), [None] * size, []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = fn(ThreadRanks(rank, size, board), *args)
            board.meet(rank, "the end")
        except BaseException as error:
            errors.append(error)
            board.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    return results


class HostRead(AssertionError):
    """A captured function looked at a value."""


def _nonsense(dtype: torch.dtype) -> float | int | bool:
    """A value that shows where it is used: as an index it is out of any range."""
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


class Graph(TorchDispatchMode):
    """Records operations; `replay` repeats them on the same tensors, with nothing of the Python around them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise HostRead(str(func))
        out = func(*args, **kwargs)
        # A view shows what its base holds; there is nothing to repeat. Some operations give a view or a copy, as it comes.
        places = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        is_view = func.is_view and all(leaf.untyped_storage().data_ptr() in places for leaf in tree_leaves(out))
        if not is_view:
            self.calls.append((func, args, kwargs, out))
        return out

    @torch.inference_mode()
    def spoil(self) -> None:
        """Overwrite what was allocated while recording; the next replay makes it anew."""
        for _, args, kwargs, out in self.calls:
            given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                    tensor.fill_(_nonsense(tensor.dtype))

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            if isinstance(out, Tensor):
                out, again = (out,), (again,)
            for place, value in zip(out or (), again or (), strict=True):
                if place is not value:
                    place.copy_(value)


class CapturingDevice(InlineDevice):
    """`capture` records what a function does, and its replays are that alone, as those of a CUDA graph.

    Graphs share their working memory: a replay overwrites what graphs that were captured later have left in theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.can_capture, self.num_replays = True, 0
        self.graphs: list[Graph] = []

    def capture(self, fn: Callable[[], None]) -> Callable[[], None]:
        fn()
        graph, kept = Graph(), {name: getattr(Tensor, name) for name in HOST_READS}

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise HostRead("a captured function reads a value on the host")

        try:
            for name in HOST_READS:
                setattr(Tensor, name, refuse)
            with graph:
                fn()
        finally:
            for name, method in kept.items():
                setattr(Tensor, name, method)

        place = len(self.graphs)
        self.graphs.append(graph)

        def replay() -> None:
            self.num_replays += 1
            graph.replay()
            for later in self.graphs[place + 1 :]:
                later.spoil()

        # Nothing has been computed by a capture.
        graph.spoil()
        return replay


class LateCapturingDevice(FuzzDevice):
    """The same, and launches run late."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.can_capture, self.num_replays = True, 0
        self.graphs: list[Graph] = []

    capture = CapturingDevice.capture


def record_exchanges() -> None:
    """Let `Graph` see the even exchanges of this process's group as one operation each. Mutates `Ranks`."""
    original, opened = Ranks._all_to_all, {}

    @torch.library.custom_op("deepinfer_tests::exchange", mutates_args=("result",))
    def exchange(result: Tensor, rows: Tensor) -> None:
        original(opened["ranks"], result, rows, None, None)

    def all_to_all(self: Ranks, result: Tensor, rows: Tensor, received: list[int] | None, sent: list[int] | None) -> None:
        opened["ranks"] = self
        if received is None:
            exchange(result, rows)
        else:
            original(self, result, rows, received, sent)

    Ranks._all_to_all = all_to_all  # type: ignore[method-assign]
