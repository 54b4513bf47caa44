"""A second stream, on which short launches run beside long ones.

`beside` opens a fork: what is launched in it waits for what the current stream has been given so far, and for nothing after.
Whatever reads results of a fork calls `rejoin` first. Tensors of the current stream that a fork reads must be alive until then:
their memory may be given to the current stream's next launch as soon as nobody holds them, so an operation that rejoins takes them
as arguments. What is allocated in a fork goes back to the second stream, whose next launch comes behind everything that reads it,
so results may be dropped at any time. Both work while a graph is being captured, where forks become branches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import get_ident

import torch


@cache
def _beside_stream(device: torch.device, stream: int, thread: int) -> torch.cuda.Stream:
    """One for each stream, so that capturing one does not touch the others, and for each thread.

    What a thread gives back may be taken again in a fork that another thread had opened before the last reader was launched.
    """
    return torch.cuda.Stream(device)


def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    current = torch.cuda.current_stream(device)
    return current, _beside_stream(current.device, current.cuda_stream, get_ident())


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Launch on the second stream of the current one."""
    current, second = _streams(device)
    second.wait_stream(current)
    with torch.cuda.stream(second):
        yield


def rejoin(device: torch.device) -> None:
    """Let the current stream wait for everything that runs beside it."""
    current, second = _streams(device)
    if torch.cuda.is_current_stream_capturing():
        with torch.cuda.stream(second):
            is_part = torch.cuda.is_current_stream_capturing()
        if not is_part:
            # Nothing in this capture runs beside it, and to wait for what is outside of the capture would be an error.
            return
    current.wait_stream(second)
