"""A batch that decodes for ever through the real scheduler, worker and loop: what the measurements of a step have in common."""

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deepinfer.errors import ConfigError
from deepinfer.model.cache import CacheSizes, ModelCache
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.device import COMPUTE, open_device
from deepinfer.runtime.draft_budget import DraftBudget
from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.loop import StepLoop
from deepinfer.runtime.request import Request
from deepinfer.runtime.scheduler import Scheduler, SequenceEvent
from deepinfer.runtime.sequence import Sequence
from deepinfer.runtime.trace import Tracer, TracingDevice
from deepinfer.runtime.worker import Worker
from deepinfer.sampling_params import SamplingParams

BLOCK_SIZE = 64
PROMPT_TOKENS = 32
WARM_UP_STEPS = 12
SETTLING_STEPS = 3


class SteadyDecode:
    """`steps(count)` advances the batch. One for each configuration, so that several can alternate.

    Args:
        total_steps: that will be measured in all, which is what room is made for.
        host_delay_ms: artificial work in the callbacks of each step.
        context: tokens that each sequence begins behind, their cache rows random; None: a short prompt is prefilled.
        num_drafts: drafts for each sequence and step; `is_adaptive` leaves their number to the engine's budget.
        uses_graphs: capture the step, where the device can.

    Raises: ConfigError if the sequences would grow beyond the model's longest.
    """

    def __init__(
        self,
        model: Transformer,
        batch: int,
        depth: int,
        total_steps: int,
        host_delay_ms: float = 0.0,
        *,
        context: int | None = None,
        num_drafts: int = 0,
        is_adaptive: bool = False,
        uses_graphs: bool = True,
    ) -> None:
        begin = PROMPT_TOKENS if context is None else context
        # A settling step, or one of the budget's trials, may come with every measured one; each may keep all of its drafts.
        length = begin + 2 * (1 + num_drafts) * (total_steps + WARM_UP_STEPS)
        if context is not None and length > model.config.max_seq_len:
            raise ConfigError(
                f"a context of {context} tokens and {total_steps} measured steps reach position {length}, "
                f"the model's longest sequence is {model.config.max_seq_len}"
            )
        blocks = batch * -(-(length + 2 * num_drafts) // BLOCK_SIZE) + 1
        self.batch, self.depth, self.host_delay_ms = batch, depth, host_delay_ms
        self.generated = 0
        self.tracer = Tracer()
        device = TracingDevice(open_device(model.device), self.tracer)
        can_capture = device.can_capture and model.numerics.ops.static_shapes and uses_graphs
        buckets = (1 << (batch - 1).bit_length(),) if can_capture else ()
        sizes = CacheSizes(num_slots=batch + 1, num_blocks=blocks, block_size=BLOCK_SIZE, max_backtrack=num_drafts)
        limits = SchedulerLimits(
            max_num_seqs=batch,
            max_num_batched_tokens=max(batch * max(PROMPT_TOKENS, 1 + num_drafts), 1),
            max_model_len=length,
            block_size=BLOCK_SIZE,
            num_blocks=blocks,
            num_speculative_tokens=num_drafts,
        )
        chooses = num_drafts > 0 and is_adaptive
        self.worker = Worker(model, sizes, device, buckets, num_drafts, chooses_drafts=chooses)
        self.scheduler = Scheduler(limits, DraftBudget(num_drafts) if chooses else None)
        self.loop = StepLoop(self.scheduler, self.worker, depth, self._callbacks, self.tracer.span)
        if context is not None:
            fill_with_noise(self.worker.cache, model)
        params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
        for index in range(batch):
            prompt = tuple((7 * index + i) % (model.config.vocab_size - 8) + 3 for i in range(begin + (context is not None)))
            request = Request(
                request_id=str(index),
                prompt=None,
                prompt_token_ids=prompt,
                params=params,
                max_new_tokens=length - len(prompt),
                seed=0,
                eos_token_id=model.config.eos_token_id,
                stop_token_ids=frozenset(),
                arrival_s=0.0,
            )
            sequence = Sequence(request, 0, index, list(prompt))
            if context is None:
                self.scheduler.add(sequence)
            else:
                # As if all but its last token had been processed: an admission without a prefill.
                assert self.scheduler.adopt(sequence, context)
        self.wall_ms: list[float] = []  # of a step, for each measured stretch
        self._gained: list[float] = []  # tokens of a sequence and step, likewise
        self._stretches: list[tuple[float, float]] = []  # begin and end on the tracer's clock

    def _callbacks(self, events: list[SequenceEvent]) -> None:
        self.generated += sum(len(event.result.token_ids) for event in events)
        end = time.perf_counter() + self.host_delay_ms / 1e3
        while time.perf_counter() < end:
            pass

    def warm_up(self, steps: int = WARM_UP_STEPS) -> None:
        """Prefill, capture, and forget what was traced."""
        asyncio.run(self.advance(steps))
        self.tracer.clear()

    def steps(self, count: int, check_sync: bool = False) -> None:
        """Advance and record the wall time of the whole stretch, divided by its steps.

        A device that has run another graph in between takes this one up again in steps that are not measured.
        """
        asyncio.run(self.advance(SETTLING_STEPS))
        before, start = self.generated, self.tracer.now_ms()
        with forbid_synchronisation(self.loop) if check_sync else _nothing():
            asyncio.run(self.advance(count))
        end = self.tracer.now_ms()
        self.wall_ms.append((end - start) / count)
        self._stretches.append((start, end))
        self._gained.append((self.generated - before) / count / self.batch)

    async def advance(self, count: int) -> None:
        """Run `count` steps."""
        for _ in range(count):
            await self.loop.step()

    def times(self, steps: int) -> tuple[float, float, float]:
        """Wall time, time of the compute stream and of the host itself, in ms: means over `steps` measured steps."""
        device = host = 0.0
        for span in self.tracer.spans():
            if any(begin <= span.start_ms <= end for begin, end in self._stretches):
                device += (span.end_ms - span.start_ms) * (span.lane == COMPUTE)
                host += (span.end_ms - span.start_ms) * (span.lane == "host" and span.name != "wait")
        return sum(end - begin for begin, end in self._stretches) / steps, device / steps, host / steps

    @property
    def median_ms(self) -> float:
        """Wall time of a step in the median stretch."""
        return statistics.median(self.wall_ms)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence gained from a measured step."""
        return statistics.mean(self._gained)


def fill_with_noise(cache: ModelCache, model: Transformer) -> None:
    """Random cache rows and n-gram histories, of the size that real ones have. Mutates the cache."""
    for tensor in cache.tensors():
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.random_(0, max(model.config.engram.compressed_vocab_size, 1))


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def forbid_synchronisation(loop: StepLoop) -> Iterator[None]:
    """Make every host wait for a CUDA device inside schedule and submit an error."""
    names = ("_schedule", "_submit", "_submit_sampler")
    kept = {name: getattr(loop, name) for name in names}
    torch.cuda.synchronize()

    def checked(fn):  # type: ignore[no-untyped-def]
        def call(*args):  # type: ignore[no-untyped-def]
            torch.cuda.set_sync_debug_mode("error")
            try:
                return fn(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    for name, fn in kept.items():
        setattr(loop, name, checked(fn))
    try:
        yield
    finally:
        for name, fn in kept.items():
            setattr(loop, name, fn)
