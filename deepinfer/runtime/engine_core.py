"""The engine's loop as one asyncio task: takes requests, steps while there is work, hands out outputs.

Everything here runs on one event loop; `LLMEngine` is the door from other threads and loops.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.engine_config import EngineConfig
from deepinfer.errors import DeepInferError, EngineClosed, StepError
from deepinfer.model.cache import CacheSizes
from deepinfer.model.transformer import Transformer
from deepinfer.outputs import RequestOutput
from deepinfer.runtime.cache_layout import choose_num_blocks
from deepinfer.runtime.device import Device, free_memory_bytes
from deepinfer.runtime.loop import StepLoop
from deepinfer.runtime.output_processor import OutputProcessor
from deepinfer.runtime.request import Request
from deepinfer.runtime.scheduler import Scheduler, SchedulerLimits, SequenceEvent
from deepinfer.runtime.sequence import Sequence
from deepinfer.runtime.worker import Worker
from deepinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A snapshot of the engine; counts are totals since the start.

    Attributes:
        num_waiting, num_running: sequences.
        free_blocks, usable_blocks: cache blocks now.
        steps: steps applied.
    """

    num_waiting: int
    num_running: int
    free_blocks: int
    usable_blocks: int
    steps: int
    scheduled_tokens: int
    generated_tokens: int
    preemptions: int
    stale_results: int


class EngineCore:
    """Owns scheduler, worker and loop; single writer of their state."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, config: EngineConfig, device: Device) -> None:
        self.config = config
        self.max_model_len = min(config.max_model_len or model.config.max_seq_len, model.config.max_seq_len)
        element_bytes = model.numerics.precision.activation_dtype.itemsize
        num_blocks = config.num_blocks or choose_num_blocks(
            model.config,
            block_size=config.block_size,
            element_bytes=element_bytes,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            free_bytes=free_memory_bytes(device.torch_device),
        )
        self.limits = SchedulerLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=config.block_size,
            num_blocks=num_blocks,
        )
        sizes = CacheSizes(num_slots=config.max_num_seqs + 1, num_blocks=num_blocks, block_size=config.block_size)
        self.worker = Worker(model, sizes, device)
        self.outputs = OutputProcessor(tokenizer, model.numerics.precision.name, time.monotonic)
        self.steps = self.generated_tokens = 0
        self._next_seq_id = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._room = asyncio.Event()
        self._is_closing = False
        self._reset()

    def _reset(self) -> None:
        self.scheduler = Scheduler(self.limits)
        self.loop = StepLoop(self.scheduler, self.worker, self.config.async_scheduling, self._on_events)

    def _on_events(self, events: list[SequenceEvent]) -> None:
        self.steps += 1
        self.generated_tokens += sum(len(event.result.token_ids) for event in events)
        self.outputs.process(events)

    async def run(self) -> None:
        """Step until closed. A failing step ends the requests it could have touched; the engine goes on with a fresh cache."""
        while not self._is_closing:
            if not self.scheduler.has_work:
                self._idle.set()
                self._room.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            self._idle.clear()
            try:
                await self.loop.step()
            except Exception as error:
                self._fail_all(StepError(f"step {self.steps} failed: {type(error).__name__}: {error}"))
                logger.exception("step %d failed; its requests were ended", self.steps)
            if len(self.scheduler.waiting) < self.config.max_queued_requests:
                self._room.set()
            # Submissions, aborts and stream consumers run here, beside the device.
            await asyncio.sleep(0)
        self._fail_all(EngineClosed("the engine was closed"))
        self._idle.set()

    def _fail_all(self, error: DeepInferError) -> None:
        lives = list(self.outputs.live.values())
        self.outputs.live.clear()
        self._reset()
        for live in lives:
            live.on_error(error)

    async def submit(
        self, request: Request, on_output: Callable[[RequestOutput], None], on_error: Callable[[DeepInferError], None]
    ) -> None:
        """Queue a request; waits while the queue is full. Cancelled while waiting, nothing has been queued.

        Raises: CapacityError if it can never fit; EngineClosed.
        """
        while len(self.scheduler.waiting) >= self.config.max_queued_requests and not self._is_closing:
            self._room.clear()
            await self._room.wait()
        if self._is_closing:
            raise EngineClosed("the engine was closed")
        sequences = []
        for index in range(request.params.n):
            self._next_seq_id += 1
            sequences.append(Sequence(request, index, self._next_seq_id, list(request.prompt_token_ids)))
        for sequence in sequences:
            self.scheduler.add(sequence)
        self.outputs.open(request, sequences, on_output, on_error)
        self._wake.set()

    def abort(self, request_id: str) -> None:
        """End a request with what it has; unknown or finished ids do nothing."""
        live = self.outputs.live.get(request_id)
        if live is not None:
            for sequence in live.sequences:
                self.scheduler.abort(sequence)
            self.outputs.publish(live)

    async def flush(self) -> None:
        """Wait until nothing is queued, running or in flight."""
        while self.scheduler.has_work and not self._is_closing:
            self._idle.clear()
            self._wake.set()
            await self._idle.wait()

    def close(self) -> None:
        """Ask the loop to stop before its next step."""
        self._is_closing = True
        self._wake.set()
        self._room.set()

    def stats(self) -> EngineStats:
        counters = self.scheduler.counters
        return EngineStats(
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            free_blocks=self.scheduler.blocks.num_free,
            usable_blocks=self.scheduler.blocks.num_usable,
            steps=self.steps,
            scheduled_tokens=counters.scheduled_tokens,
            generated_tokens=self.generated_tokens,
            preemptions=counters.preemptions,
            stale_results=counters.stale_results,
        )
