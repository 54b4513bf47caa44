"""The engine's loop as one asyncio task: takes requests, steps while there is work, hands out outputs.

Everything here runs on one event loop; `LLMEngine` is the door from other threads and loops.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as AnySequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tqdm.auto import tqdm

from deepinfer.engine_config import EngineConfig
from deepinfer.errors import CapacityError, ConfigError, DeepInferError, EngineClosed, NothingToDraw, StepError
from deepinfer.model.cache import CacheSizes
from deepinfer.model.compiled import is_compiled, set_up_compiler
from deepinfer.model.transformer import Transformer
from deepinfer.outputs import RequestOutput
from deepinfer.parallel.config import Role
from deepinfer.parallel.hand_over import Arrivals, CacheState, Exports, RequestState, first_event, start_sequence
from deepinfer.runtime.cache_layout import choose_num_blocks
from deepinfer.runtime.device import Device, free_memory_bytes
from deepinfer.runtime.draft_budget import DraftBudget
from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.loop import StepLoop
from deepinfer.runtime.output_processor import LiveRequest, OutputProcessor
from deepinfer.runtime.prefix_cache import PrefixCache
from deepinfer.runtime.prefix_file import load_prefixes, save_prefixes
from deepinfer.runtime.recovery_settings import cache_names, max_backtrack, num_host_blocks, num_ring_snapshots, replay_policy
from deepinfer.runtime.request import Request
from deepinfer.runtime.scheduler import Scheduler, SequenceEvent
from deepinfer.runtime.sequence import Sequence, Status
from deepinfer.runtime.step_shapes import SHORT_PREFILLS
from deepinfer.runtime.worker import Worker
from deepinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A snapshot of the engine; counts are totals since the start.

    Attributes:
        num_waiting, num_running: sequences.
        free_blocks, usable_blocks: cache blocks now.
        steps: steps applied.
        drafted_tokens: drafts proposed.
        verified_by_position, accepted_by_position: drafts that got a row, and those that stood, by their place in a proposal.
        cached_tokens, replayed_tokens: tokens whose entries came from the prefix cache, and those of them that ran again.
        tokens_per_step: tokens that a sequence gained, on average, from a step that could verify drafts of it.
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
    drafted_tokens: int
    verified_tokens: int
    accepted_tokens: int
    verified_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    tokens_per_step: float
    cached_tokens: int
    replayed_tokens: int


class EngineCore:
    """Owns scheduler, worker and loop; single writer of their state.

    Raises: ConfigError for a length beyond the model's, CapacityError if the cache does not fit.
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer, config: EngineConfig, device: Device) -> None:
        self.config = config
        self.limits = _limits(model, config, device)
        self.worker = _open_worker(model, self.limits, device, config)
        is_speculative = self.limits.num_speculative_tokens > 0
        precision = model.numerics.precision.name
        self.outputs = OutputProcessor(tokenizer, precision, time.monotonic, is_speculative, config.replay)
        self.arrivals, self.exports = Arrivals(), Exports(self.worker)
        self.steps = self.generated_tokens = 0
        self._replay_policy = replay_policy(model, config)
        self._cache_names = cache_names(model, config)
        self._next_seq_id = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._room = asyncio.Event()
        self._is_closing = False
        self._reset()

    def _reset(self) -> None:
        drafts = self.limits.num_speculative_tokens
        budget = DraftBudget(drafts) if drafts and self.config.adaptive_verification else None
        self.scheduler = Scheduler(self.limits, budget, self._replay_policy, self._cache_names)
        if self.config.parallel.role == Role.PREFILL:
            self.scheduler.on_finish = self.exports.keep_cache
        self.loop = self._open_loop()

    def _open_loop(self) -> StepLoop:
        return StepLoop(self.scheduler, self.worker, self.config.async_scheduling, self._on_events)

    def _on_events(self, events: list[SequenceEvent]) -> None:
        self.steps += 1
        self.generated_tokens += sum(len(event.result.token_ids) for event in events)
        if self.config.parallel.role == Role.PREFILL:
            self.exports.keep_states(events)
        for event in events:
            if event.result.failure is not None:
                self._end_failed(event.sequence.request, event.result.failure)
        self.outputs.process(events)

    def _end_failed(self, request: Request, failure: str) -> None:
        """End all completions of a request of which one cannot go on; the others' steps in flight become stale."""
        live = self.outputs.live.pop(request.request_id, None)
        if live is not None:
            for sequence in live.sequences:
                self.scheduler.abort(sequence)
            live.on_error(NothingToDraw(f"request {request.request_id}: {failure}"))

    async def run(self) -> None:
        """Step until closed. A failing step ends the requests it could have touched; the engine goes on with the others."""
        if is_compiled(self.worker.model):
            set_up_compiler()
        if self.worker.shapes.buckets and self.worker.device.can_capture:
            warm_up(self.worker, in_group=self.config.parallel.ep_size > 1)
        while not self._is_closing:
            if not self.loop.has_work and not self.arrivals:
                self._idle.set()
                self._room.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            self._idle.clear()
            try:
                self.arrivals.admit(self.scheduler, self.worker)
                await self.loop.step()
            except Exception as error:
                self._step_failed(error)
            if not self._is_full:
                self._room.set()
            # Submissions, aborts and stream consumers run here, beside the device.
            await asyncio.sleep(0)
        self._fail(list(self.outputs.live.values()), EngineClosed("the engine was closed"))
        self._idle.set()
        # Whoever waits for room or for idleness is answered before the event loop stops.
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    def _step_failed(self, error: Exception) -> None:
        logger.exception("step %d failed; the requests in it end", self.steps)
        self._fail(self._touched(), StepError(f"step {self.steps} failed: {type(error).__name__}: {error}"))

    def _touched(self) -> list[LiveRequest]:
        """All requests but those that only wait: they have no rows in a step and no memory to lose."""

        def is_touched(sequences: list[Sequence]) -> bool:
            is_waiting = any(s.status is Status.WAITING for s in sequences)
            return not is_waiting or any(s.status is Status.RUNNING or s.tickets for s in sequences)

        return [live for live in self.outputs.live.values() if is_touched(live.sequences)]

    def _fail(self, lives: list[LiveRequest], error: DeepInferError) -> None:
        """End requests with an error, forget every step in flight, and queue the other requests anew."""
        for live in lives:
            del self.outputs.live[live.request.request_id]
        counters = self.scheduler.counters
        # Those that wait with their cache are computed anew, like the others.
        self.arrivals.clear()
        self._reset()
        self.scheduler.counters = counters
        for live in self.outputs.live.values():
            for sequence in live.sequences:
                if sequence.status is Status.WAITING:
                    self.scheduler.add(sequence)
        for live in lives:
            live.on_error(error)

    async def submit(
        self, request: Request, on_output: Callable[[RequestOutput], None], on_error: Callable[[DeepInferError], None]
    ) -> None:
        """Queue a request; waits while the queue is full. Cancelled while waiting, nothing has been queued.

        Raises: CapacityError if it can never fit; EngineClosed.
        """
        while self._is_full and not self._is_closing:
            self._room.clear()
            await self._room.wait()
        if self._is_closing:
            raise EngineClosed("the engine was closed")
        sequences = []
        for index in range(request.params.n):
            self._next_seq_id += 1
            sequences.append(Sequence.open(request, index, self._next_seq_id, self.outputs.tokenizer))
        # Whoever wants something of every row has to compute every row.
        can_fork = self.config.parallel.ep_size == 1 and len(request.prompt_token_ids) > 1
        if can_fork and not request.params.returns_features:
            self.scheduler.add(sequences[0], sequences[1:])
        else:
            for sequence in sequences:
                self.scheduler.add(sequence)
        self.outputs.open(request, sequences, on_output, on_error)
        self._wake.set()

    async def enter(
        self,
        request: Request,
        cache: CacheState,
        on_output: Callable[[RequestOutput], None],
        on_error: Callable[[DeepInferError], None],
    ) -> None:
        """Queue a request whose prompt has been computed elsewhere, but for its end. Raises CapacityError if it can never fit."""
        self.limits.check_fits(request, f"request {request.request_id}")
        self._next_seq_id += 1
        sequence = Sequence.open(request, 0, self._next_seq_id, self.outputs.tokenizer)
        self.outputs.open(request, [sequence], on_output, on_error)
        self.arrivals.add(sequence, cache)
        self._wake.set()

    def share(self, requests: AnySequence[T]) -> list[T]:
        """The requests (or states) that this process owns."""
        return list(requests)

    async def resume(
        self, state: RequestState, on_output: Callable[[RequestOutput], None], on_error: Callable[[DeepInferError], None]
    ) -> None:
        """Go on with a request that another engine has prefilled. Raises CapacityError if it can never fit."""
        self.limits.check_fits(state.request, f"request {state.request.request_id}")
        self._next_seq_id += 1
        sequence = start_sequence(state, self._next_seq_id, self.outputs.tokenizer)
        self.outputs.open(state.request, [sequence], on_output, on_error)
        if state.cache is not None:
            self.arrivals.add(sequence, state.cache)
        self.outputs.process([first_event(state, sequence)])
        self._wake.set()

    @property
    def _is_full(self) -> bool:
        return len(self.scheduler.waiting) >= self.config.max_queued_requests

    def abort(self, request_id: str) -> None:
        """End a request with what it has; unknown or finished ids do nothing."""
        live = self.outputs.live.get(request_id)
        if live is not None:
            for sequence in live.sequences:
                if self.arrivals.drop(sequence):
                    self.scheduler.waiting.append(sequence)
                self.scheduler.abort(sequence)
            self.outputs.publish(live)

    async def flush(self) -> None:
        """Wait until nothing is queued, running or in flight."""
        while (self.loop.has_work or self.arrivals) and not self._is_closing:
            self._idle.clear()
            self._wake.set()
            await self._idle.wait()

    async def save_prefixes(self, path: Path) -> int:
        """Write the stored prefixes once nothing runs; returns tokens. Raises: ConfigError with caching off, PrefixFileError."""
        await self.flush()
        return save_prefixes(path, self._prefix_cache(), self.worker.cache)

    async def load_prefixes(self, path: Path) -> int:
        """Take in stored prefixes once nothing runs; returns tokens. Raises: ConfigError with caching off, PrefixFileError."""
        await self.flush()
        self.scheduler.recovery.drop_offloads()
        return load_prefixes(path, self._prefix_cache(), self.scheduler.blocks, self.scheduler.slots, self.worker.cache)

    def _prefix_cache(self) -> PrefixCache:
        if self.scheduler.recovery.cache is None:
            raise ConfigError("EngineConfig.enable_prefix_caching = False: there are no stored prefixes; set it to True")
        return self.scheduler.recovery.cache

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
            drafted_tokens=counters.drafted,
            verified_tokens=counters.verified,
            accepted_tokens=counters.accepted,
            verified_by_position=tuple(counters.verified_at),
            accepted_by_position=tuple(counters.accepted_at),
            tokens_per_step=1 + counters.accepted / max(counters.verify_steps, 1),
            cached_tokens=self.scheduler.recovery.counters.cached_tokens,
            replayed_tokens=self.scheduler.recovery.counters.replayed_tokens,
        )


def _limits(model: Transformer, config: EngineConfig, device: Device) -> SchedulerLimits:
    longest = model.config.max_seq_len
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"EngineConfig.max_model_len = {config.max_model_len}: the model's longest sequence is {longest}")
    max_model_len = config.max_model_len or longest
    if config.num_blocks is not None:
        num_blocks = config.num_blocks + 1  # one is trash
    else:
        num_blocks = choose_num_blocks(
            model.config,
            block_size=config.block_size,
            element_bytes=model.numerics.precision.activation_dtype.itemsize,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            free_bytes=free_memory_bytes(device.torch_device),
        )
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        num_speculative_tokens=num_drafts(model, config),
        num_ring_snapshots=num_ring_snapshots(config),
    )


def num_drafts(model: Transformer, config: EngineConfig) -> int:
    """Drafts for each step. Raises `ConfigError` for more than the model's draft blocks were made for."""
    draft = model.config.draft
    most = draft.block_size if draft.n_layers else 0
    if config.num_speculative_tokens > most:
        raise ConfigError(f"EngineConfig.num_speculative_tokens = {config.num_speculative_tokens}: the model drafts at most {most}")
    return config.num_speculative_tokens


def warm_up(worker: Worker, in_group: bool) -> None:
    """Compile and capture before the first request, with a bar that says what is being done."""
    drafts = (1 if in_group else len(worker.shapes.draft_counts)) + (worker.num_drafts > 0)
    count = len(worker.shapes.buckets) * drafts + 1
    count += len(SHORT_PREFILLS) * worker.shapes.fixes_prefills
    with tqdm(total=count, unit="shape", desc="warming up") as bar:

        @contextmanager
        def progress(what: str) -> Iterator[None]:
            bar.set_postfix_str(what)
            yield
            bar.update()

        with worker.alone:
            worker.warm_up(progress, in_group)


def decode_buckets(model: Transformer, config: EngineConfig, device: Device) -> tuple[int, ...]:
    """Row counts that decode steps are padded to, so that a few captured graphs serve all of them; none without graphs.

    Ranks of a group agree on a bucket whatever the device, so that their steps need no counts to be exchanged.
    """
    can_capture = device.can_capture and model.numerics.ops.static_shapes
    if config.cuda_graphs is True and not can_capture:
        raise ConfigError(
            f"EngineConfig.cuda_graphs = True: needs a CUDA device and reference_ops(static_shapes=True), "
            f"got {device.torch_device} and static_shapes={model.numerics.ops.static_shapes}"
        )
    if config.cuda_graphs is False or not (can_capture or config.parallel.ep_size > 1):
        return ()
    return tuple(1 << i for i in range((config.max_num_seqs - 1).bit_length() + 1))


def _open_worker(model: Transformer, limits: SchedulerLimits, device: Device, config: EngineConfig) -> Worker:
    drafts, buckets = limits.num_speculative_tokens, decode_buckets(model, config, device)
    sizes = CacheSizes(
        num_slots=limits.num_slots, num_blocks=limits.num_blocks, block_size=limits.block_size, max_backtrack=max_backtrack(limits)
    )
    try:
        chooses = drafts > 0 and config.adaptive_verification
        return Worker(model, sizes, device, buckets, drafts, config.spec_verification, num_host_blocks(config), chooses)
    # Out of memory is a RuntimeError of many texts: too large to allocate, to address, or to count.
    except RuntimeError as error:
        raise CapacityError(
            f"a cache for {limits.max_num_seqs} sequences and {limits.num_blocks - 1} blocks of {limits.block_size} tokens does "
            f"not fit on {device.torch_device}; lower max_num_seqs or num_blocks ({error})"
        ) from error
