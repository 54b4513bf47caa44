"""A group of processes: who takes part, the groups that collectives run over, and what to say when a peer does not come.

Control traffic has a CPU group (gloo) of its own. It never enters the device's compute stream, and its order does not depend on
that of the collectives inside the model. `torch.distributed` is used here, in `expert_parallel` and in `expert_moves` only.
"""

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from deepinfer.dims import Int, Shaped, Tensor
from deepinfer.errors import ConfigError, PeerLost
from deepinfer.parallel.config import ParallelConfig

# torch.distributed leaves these without types.
Group = Any
BEATS_IN_TIMEOUT = 5  # signs of life in the time that a peer is waited for
LONGEST_BEAT_S = 1.0
SPIN_S = 1e-3  # how long a collective is looked at without a pause
POLL_S = 2e-4  # pause between two looks afterwards


@dataclass(slots=True)
class _Sign:
    """What a rank last said about itself."""

    beat: int
    doing: str


class Ranks:
    """This process among its peers."""

    def __init__(self, device_group: Group, cpu_group: Group, results_group: Group, store: dist.Store, timeout_s: float) -> None:
        self.device_group, self.cpu_group, self.results_group = device_group, cpu_group, results_group
        self.rank, self.size, self.timeout_s = dist.get_rank(cpu_group), dist.get_world_size(cpu_group), timeout_s
        self._store, self._doing = store, "its start"
        self._beat_s = min(LONGEST_BEAT_S, timeout_s / BEATS_IN_TIMEOUT)
        self._is_closed, self._has_news = threading.Event(), threading.Event()
        self._heart = threading.Thread(target=self._show_life, name="deepinfer-heartbeat", daemon=True)
        self._heart.start()

    @classmethod
    def open(cls, config: ParallelConfig, device: torch.device) -> Self:
        """Join the group that `torchrun` started. Collective: every rank calls it.

        Raises: ConfigError if this process was not started as one of `config.num_ranks`.
        """
        if not dist.is_initialized():
            if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
                raise ConfigError(
                    f"ParallelConfig.{config.size_name}: this process is not part of a group; start the program with "
                    f"`torchrun --nproc-per-node {config.num_ranks} ...`"
                )
            dist.init_process_group(backend_for(device), timeout=timedelta(seconds=config.timeout_s))
        if dist.get_world_size() != config.num_ranks:
            raise ConfigError(f"ParallelConfig.{config.size_name}: the group has {dist.get_world_size()} processes")
        timeout = timedelta(seconds=config.timeout_s)
        device_group, cpu_group, results_group = (
            dist.new_group(backend=backend, timeout=timeout) for backend in (backend_for(device), "gloo", "gloo")
        )
        store = dist.PrefixStore("deepinfer", dist.distributed_c10d._get_default_store())
        return cls(device_group, cpu_group, results_group, store, config.timeout_s)

    def close(self) -> None:
        """Stop showing life. The process groups belong to the process."""
        self._is_closed.set()
        self._has_news.set()
        self._heart.join()

    # ---- control traffic ----------------------------------------------------------------------------------------------

    async def gather(self, what: str, row: Sequence[int]) -> list[tuple[int, ...]]:
        """The same number of integers from every rank, in rank order. Other coroutines run meanwhile.

        Raises: PeerLost if a rank does not come in time.
        """
        own = torch.tensor(row, dtype=torch.int64, device="cpu")
        rows = own.new_empty(self.size, len(row))
        await self._finish(dist.all_gather(list(rows.unbind(0)), own, self.cpu_group, async_op=True), what)
        return [tuple(of_rank) for of_rank in rows.tolist()]

    def gather_waiting(self, what: str, row: Sequence[int]) -> list[tuple[int, ...]]:
        """`gather` for a program without an event loop, such as one that loads a model."""
        own = torch.tensor(row, dtype=torch.int64, device="cpu")
        rows = own.new_empty(self.size, len(row))
        try:
            dist.all_gather(list(rows.unbind(0)), own, self.cpu_group)
        except RuntimeError as error:
            raise self.lost(f"{what!r} failed: {first_line(error)}") from error
        return [tuple(of_rank) for of_rank in rows.tolist()]

    async def sum(self, what: str, values: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """The sum over all ranks, of host tensors. Raises PeerLost."""
        total = values.clone()
        await self._finish(dist.all_reduce(total, group=self.cpu_group, async_op=True), what)
        return total

    async def _finish(self, work: Any, what: str) -> None:
        start = time.monotonic()
        try:
            while not work.is_completed():
                waited_s = time.monotonic() - start
                if waited_s > self.timeout_s:
                    raise self.lost(f"no answer to {what!r} within {self.timeout_s:g} s")
                # Peers are at most a few steps' work away; after that, let them have the processor.
                await asyncio.sleep(0 if waited_s < SPIN_S else POLL_S)
            work.wait()
        except RuntimeError as error:
            raise self.lost(f"{what!r} failed: {first_line(error)}") from error

    # ---- results ------------------------------------------------------------------------------------------------------

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Every rank's value on rank 0, None elsewhere. Blocks, for as long as the slowest rank needs."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = data.new_empty(self.size, dtype=torch.int64)
        try:
            dist.all_gather(list(sizes.unbind(0)), torch.tensor(data.numel(), device="cpu"), self.results_group)
            if self.rank != 0:
                dist.send(data, 0, self.results_group)
                return None
            values = [value]
            for source in range(1, self.size):
                buffer = data.new_empty(int(sizes[source]))
                dist.recv(buffer, source, self.results_group)
                values.append(pickle.loads(buffer.numpy().tobytes()))
        except RuntimeError as error:
            raise self.lost(f"gathering results failed: {first_line(error)}") from error
        return values

    # ---- device traffic -----------------------------------------------------------------------------------------------

    def exchange(self, rows: Shaped[Tensor, "n ..."], sent: list[int], received: list[int]) -> Shaped[Tensor, "m ..."]:
        """Rows in rank order of their destination go out, rows in rank order of their source come back."""
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        self._all_to_all(result, rows.contiguous(), received, sent)
        return result

    def exchange_evenly(self, rows: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "n ..."]:
        """As `exchange`, an equal part to and from each rank: no sizes to be known, so that a graph can hold it."""
        rows = rows.contiguous()
        result = torch.empty_like(rows)
        self._all_to_all(result, rows, None, None)
        return result

    def _all_to_all(self, result: Tensor, rows: Tensor, received: list[int] | None, sent: list[int] | None) -> None:
        try:
            dist.all_to_all_single(result, rows, received, sent, group=self.device_group)
        except RuntimeError as error:
            raise self.lost(f"an exchange of rows failed: {first_line(error)}") from error

    # ---- signs of life ------------------------------------------------------------------------------------------------

    def lost(self, why: str) -> PeerLost:
        """The error for a collective that did not complete, with what is known of the other ranks. Takes two beats to find out."""
        before = self._signs()
        time.sleep(2.5 * self._beat_s)
        after = self._signs()
        silent = tuple(r for r in range(self.size) if r != self.rank and before[r].beat == after[r].beat)
        others = "; ".join(
            f"rank {r}: {'no sign of life since' if r in silent else 'alive, at'} {after[r].doing}"
            for r in range(self.size)
            if r != self.rank
        )
        return PeerLost(f"rank {self.rank} at {self.doing}: {why}. {others}", self.rank, silent)

    def _signs(self) -> list[_Sign]:
        return [self._sign(rank) for rank in range(self.size)]

    def _sign(self, rank: int) -> _Sign:
        try:
            if not self._store.check([f"life/{rank}"]):
                return _Sign(-1, "its start")
            beat, _, doing = self._store.get(f"life/{rank}").decode().partition(" ")
        except RuntimeError:
            return _Sign(-1, "an unknown step (the store is gone, and with it the process that holds it)")
        return _Sign(int(beat), doing)

    @property
    def doing(self) -> str:
        """What this rank is at, for the message of a peer that waits in vain."""
        return self._doing

    @doing.setter
    def doing(self, what: str) -> None:
        self._doing = what
        self._has_news.set()

    def _show_life(self) -> None:
        """Publish `doing` whenever it has changed, and again after a while; the last time after the end."""
        beat, is_closed = 0, False
        while not is_closed:
            beat += 1
            try:
                self._store.set(f"life/{self.rank}", f"{beat} {self._doing}")
            except RuntimeError:
                return  # the process that holds the store is gone; whoever waits will say so
            self._has_news.wait(self._beat_s)
            self._has_news.clear()
            is_closed = self._is_closed.is_set()
        with suppress(RuntimeError):
            self._store.set(f"life/{self.rank}", f"{beat + 1} {self._doing}")


def backend_for(device: torch.device) -> str:
    """The collectives' back end for tensors on a device."""
    return "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)


def first_line(error: Exception) -> str:
    """The part of a message that is worth repeating."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
