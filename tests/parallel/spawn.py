"""Run a function in several processes that form a group, and bring back what each returned."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

JOIN_S = 270


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(fn: Callable[..., Any], size: int, *args: Any, may_die: tuple[int, ...] = (), join_s: float = JOIN_S) -> list[Any]:
    """`fn(rank, size, *args)` in `size` processes; results in rank order, None from a rank that `may_die`. `fn` is importable."""
    context = multiprocessing.get_context("spawn")
    pipes, processes, port = [], [], free_port()
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(fn, rank, size, port, sender, args), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results, failures = [], []
    for rank, pipe in enumerate(pipes):
        try:
            assert pipe.poll(join_s), f"rank {rank} does not end"
            ok, value = pipe.recv()
            if not ok:
                failures.append(f"rank {rank}:\n{value}")
            results.append(value)
        except EOFError:
            assert rank in may_die, f"rank {rank} died"
            results.append(None)
    for process in processes:
        process.join(10)
        if process.is_alive():
            process.kill()
    assert not failures, "\n".join(failures)
    return results


def _rank_main(fn: Callable[..., Any], rank: int, size: int, port: int, sender: Connection, args: tuple[Any, ...]) -> None:
    import tests.conftest  # noqa: F401 - the settings under which every test runs

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        sender.send((True, fn(rank, size, *args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    sender.close()
    # Peers may be gone: tear-down would wait for them.
    os._exit(0)
