"""How much of the device's time the host wastes: steady decode in the plain and in the overlapped loop, side by side.

The two loops alternate in one run on one model. Device time comes from events around each launch; with an artificial host delay
the wall time of the overlapped loop must be the larger of host and device, not their sum.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from deepinfer.model.cache import CacheSizes
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.device import COMPUTE, open_device
from deepinfer.runtime.loop import StepLoop
from deepinfer.runtime.request import Request
from deepinfer.runtime.scheduler import Scheduler, SchedulerLimits, SequenceEvent
from deepinfer.runtime.sequence import Sequence
from deepinfer.runtime.trace import Tracer, TracingDevice
from deepinfer.runtime.worker import Worker
from deepinfer.sampling_params import SamplingParams

BLOCK_SIZE = 64
PROMPT_TOKENS = 32
WARM_UP_STEPS = 12
SETTLING_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapFigures:
    """Steady decode of one batch in one loop; times are medians for a step in milliseconds.

    Attributes:
        device_ms: time the compute stream was busy.
        busy: share of the wall time of a step in which it was.
        host_ms: time the host spent planning, submitting, applying and in callbacks, the artificial delay included.
    """

    batch: int
    depth: int
    host_delay_ms: float
    wall_ms: float
    device_ms: float
    host_ms: float
    busy: float


class SteadyDecode:
    """A batch that decodes for ever: `steps(count)` advances it. One per depth, so that two can alternate."""

    def __init__(self, model: Transformer, batch: int, depth: int, total_steps: int, host_delay_ms: float = 0.0) -> None:
        length = PROMPT_TOKENS + 2 * (total_steps + WARM_UP_STEPS)
        blocks = batch * -(-length // BLOCK_SIZE) + 1
        self.batch, self.depth, self.host_delay_ms = batch, depth, host_delay_ms
        self.tracer = Tracer()
        device = TracingDevice(open_device(model.device), self.tracer)
        buckets = () if model.device.type == "cpu" else (batch,)
        sizes = CacheSizes(num_slots=batch + 1, num_blocks=blocks, block_size=BLOCK_SIZE)
        limits = SchedulerLimits(
            max_num_seqs=batch,
            max_num_batched_tokens=max(batch * PROMPT_TOKENS, 1),
            max_model_len=length,
            block_size=BLOCK_SIZE,
            num_blocks=blocks,
        )
        self.scheduler = Scheduler(limits)
        self.loop = StepLoop(self.scheduler, Worker(model, sizes, device, buckets), depth, self._callbacks, self.tracer.span)
        params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
        for index in range(batch):
            prompt = tuple((7 * index + i) % (model.config.vocab_size - 8) + 3 for i in range(PROMPT_TOKENS))
            request = Request(
                request_id=str(index),
                prompt=None,
                prompt_token_ids=prompt,
                params=params,
                max_new_tokens=length - PROMPT_TOKENS,
                seed=0,
                eos_token_id=model.config.eos_token_id,
                stop_token_ids=frozenset(),
                arrival_s=0.0,
            )
            self.scheduler.add(Sequence(request, 0, index, list(prompt)))
        self.wall_ms: list[float] = []

    def _callbacks(self, events: list[SequenceEvent]) -> None:
        end = time.perf_counter() + self.host_delay_ms / 1e3
        while time.perf_counter() < end:
            pass

    def warm_up(self) -> None:
        """Prefill, capture, and forget what was traced."""
        asyncio.run(self._advance(WARM_UP_STEPS))
        self.tracer.clear()

    def steps(self, count: int, check_sync: bool = False) -> None:
        """Advance and record the wall time of the whole stretch, divided by its steps.

        A device that has run another graph in between takes this one up again in steps that are not measured.
        """
        asyncio.run(self._advance(SETTLING_STEPS))
        start = time.perf_counter()
        with forbid_synchronisation(self.loop) if check_sync else _nothing():
            asyncio.run(self._advance(count))
        self.wall_ms.append((time.perf_counter() - start) / count * 1e3)

    async def _advance(self, count: int) -> None:
        for _ in range(count):
            await self.loop.step()

    def figures(self, steps: int) -> OverlapFigures:
        """What was seen over `steps` measured steps."""
        spans = self.tracer.spans()
        advanced = steps + SETTLING_STEPS * len(self.wall_ms)
        device = sum(s.end_ms - s.start_ms for s in spans if s.lane == COMPUTE) / advanced
        host = sum(s.end_ms - s.start_ms for s in spans if s.lane == "host" and s.name != "wait") / advanced
        wall = statistics.median(self.wall_ms)
        return OverlapFigures(
            batch=self.batch,
            depth=self.depth,
            host_delay_ms=self.host_delay_ms,
            wall_ms=wall,
            device_ms=device,
            host_ms=host,
            busy=device / wall,
        )


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def forbid_synchronisation(loop: StepLoop) -> Iterator[None]:
    """Make every host wait for a CUDA device inside schedule and submit an error."""
    schedule, submit = loop._schedule, loop._submit
    torch.cuda.synchronize()

    def checked(fn):  # type: ignore[no-untyped-def]
        def call(*args):  # type: ignore[no-untyped-def]
            torch.cuda.set_sync_debug_mode("error")
            try:
                return fn(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    loop._schedule, loop._submit = checked(schedule), checked(submit)  # type: ignore[method-assign]
    try:
        yield
    finally:
        loop._schedule, loop._submit = schedule, submit  # type: ignore[method-assign]


def compare_depths(
    model: Transformer, batch: int, *, steps: int = 50, rounds: int = 3, delay_ms: float = 0.0
) -> list[OverlapFigures]:
    """Depth 0 and depth 1 on the same model, alternating `rounds` times."""
    runs = [SteadyDecode(model, batch, depth, steps * rounds, delay_ms) for depth in (0, 1)]
    for run in runs:
        run.warm_up()
    for _ in range(rounds):
        for run in runs:
            run.steps(steps)
    return [run.figures(steps * rounds) for run in runs]
