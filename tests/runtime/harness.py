"""A scheduler, a worker and a loop without an engine around them, and what the reference run gives for a request.

The reference is one request alone in the plain loop with a cache of its own. Memory that nobody wrote is NaN, and so is memory
that went back to its pool.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from deepinfer.checkpoint.load import load_model
from deepinfer.engine_config import EngineConfig
from deepinfer.model.cache import CacheSizes
from deepinfer.model.numerics import reference_ops
from deepinfer.model.transformer import Transformer
from deepinfer.outputs import ReplayMode
from deepinfer.runtime import recovery_settings as settings
from deepinfer.runtime.device import Device, InlineDevice
from deepinfer.runtime.draft_budget import DraftBudget
from deepinfer.runtime.fuzz_device import FuzzDevice
from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.loop import StepLoop
from deepinfer.runtime.plan import TokenLogprobs
from deepinfer.runtime.request import Request
from deepinfer.runtime.scheduler import Scheduler, SequenceEvent
from deepinfer.runtime.sequence import Sequence
from deepinfer.runtime.worker import Worker
from deepinfer.sampling_checks import tokenize_bad_words
from deepinfer.sampling_params import SamplingParams
from deepinfer.structured.compiler import GrammarCompiler
from deepinfer.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
BLOCK_SIZE = 4
MAX_LEN = 128
EOS = 1


@cache
def tiny_model(batch_invariant: bool = True) -> Transformer:
    """Four layers with every kind of memory, in float32."""
    return load_model(GOLDEN / "bf16_full", "float32", "cpu", ops=reference_ops(batch_invariant=batch_invariant))


@cache
def tiny_tokenizer() -> Tokenizer:
    """The tokenizer of the tiny model: all bytes, 61 merges."""
    return Tokenizer.from_folder(GOLDEN / "bf16_full")


@cache
def tiny_grammars() -> GrammarCompiler:
    """Grammars over the tokens of the tiny model."""
    return GrammarCompiler(tiny_tokenizer(), EOS)


class Outcome(NamedTuple):
    """Everything that a request must give whatever runs beside it."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    stop_reason: int | str | None
    text: str | None
    prompt_scores: list[TokenLogprobs]


def make_request(name: str, prompt: Iterable[int], params: SamplingParams) -> Request:
    """A validated request for the tiny model."""
    assert params.max_tokens is not None
    return Request(
        request_id=name,
        prompt=None,
        prompt_token_ids=tuple(prompt),
        params=params,
        max_new_tokens=params.max_tokens,
        seed=params.seed or 0,
        eos_token_id=EOS,
        stop_token_ids=frozenset({EOS, *params.stop_token_ids}),
        arrival_s=0.0,
        bad_words=tokenize_bad_words(params, tiny_tokenizer()),
        grammar=None if params.form is None else tiny_grammars().compile(params.form).result(),
    )


class Harness:
    """One pipeline over the tiny model. Every return of memory is checked against launches in flight, then poisoned."""

    def __init__(
        self,
        device: Device,
        *,
        depth: int,
        num_blocks: int = 40,
        budget: int = 64,
        max_num_seqs: int = 8,
        decode_buckets: tuple[int, ...] = (),
        num_speculative_tokens: int = 0,
        model: Transformer | None = None,
        verification: str = "match",
        draft_budget: DraftBudget | None = None,
        clock: Callable[[], float] = time.perf_counter,
        replay: ReplayMode = "full",
        prefix_caching: bool = False,
        num_ring_snapshots: int = 8,
        num_host_blocks: int = 0,
    ) -> None:
        model = model or tiny_model()
        config = EngineConfig(
            replay=replay,
            enable_prefix_caching=prefix_caching,
            num_ring_snapshots=num_ring_snapshots,
            num_host_blocks=num_host_blocks,
            num_speculative_tokens=num_speculative_tokens,
        )
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            num_speculative_tokens=num_speculative_tokens,
            num_ring_snapshots=settings.num_ring_snapshots(config),
        )
        self.device = device
        policy, names = settings.replay_policy(model, config), settings.cache_names(model, config)
        self.scheduler = Scheduler(limits, draft_budget, policy, names)
        sizes = CacheSizes(
            num_slots=limits.num_slots,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_backtrack=settings.max_backtrack(limits),
        )
        chooses, drafts = draft_budget is not None, num_speculative_tokens
        self.worker = Worker(model, sizes, device, decode_buckets, drafts, verification, num_host_blocks, chooses)
        for tensor in self.worker.cache.tensors():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        blocks, slots = self.scheduler.blocks, self.scheduler.slots
        # What has several owners, or stays in the cache, is poisoned when it is worth nothing any more. A block that goes to host
        # memory is copied by the next step.
        slots.on_free = lambda i: self.poison((), i)
        if not num_host_blocks:
            blocks.on_free = lambda i: self.poison((i,), None)
        self.logprobs: dict[int, list[float]] = defaultdict(list)
        self.loop = StepLoop(self.scheduler, self.worker, depth, self._on_events, clock=clock)
        self.sequences: list[Sequence] = []

    def _on_events(self, events: list[SequenceEvent]) -> None:
        for event in events:
            self.logprobs[event.sequence.seq_id] += [around.logprob for around in event.result.logprobs or ()]

    def poison(self, blocks: tuple[int, ...], slot: int | None) -> None:
        """The host's claim that nothing in flight can touch this memory any more, and NaN in it."""
        if isinstance(self.device, FuzzDevice):
            for place in [("block", i) for i in blocks] + ([] if slot is None else [("slot", slot)]):
                self.device.host_write(place)
        cache = self.worker.cache
        for pool in cache.pools.values():
            per_block = BLOCK_SIZE // pool.ratio
            for block in blocks:
                pool.entries[block * per_block : (block + 1) * per_block] = float("nan")
                pool.index_keys[block * per_block : (block + 1) * per_block] = float("nan")
        if slot is not None:
            for memory in (*cache.rings, *cache.pending.values()):
                memory[slot] = float("nan")

    def open(self, request: Request, index: int = 0) -> Sequence:
        """One completion of a request, not queued yet."""
        sequence = Sequence.open(request, index, len(self.sequences), tiny_tokenizer())
        self.sequences.append(sequence)
        return sequence

    def add(self, request: Request, index: int = 0) -> Sequence:
        """Queue one completion of a request."""
        sequence = self.open(request, index)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> bool:
        """One step of the loop, with the books checked after it."""
        did_work = asyncio.run(self.loop.step())
        self.check_integrity()
        return did_work

    def check_integrity(self) -> None:
        """The books of the scheduler and of the prefix cache."""
        self.scheduler.check_integrity()
        if self.scheduler.recovery.cache is not None:
            self.scheduler.recovery.cache.check_integrity()

    def run(self) -> None:
        """Step until nothing is left."""
        while self.step():
            pass

    def flush(self) -> None:
        """Apply what is in flight."""
        asyncio.run(self.loop.flush())
        self.check_integrity()

    def outcome(self, sequence: Sequence) -> Outcome:
        """What a sequence has given so far; `text` where the scheduler keeps it."""
        text = None if sequence.stop_strings is None else sequence.stop_strings.text
        return Outcome(
            sequence.output_token_ids,
            self.logprobs[sequence.seq_id],
            sequence.finish_reason,
            sequence.stop_reason,
            text,
            sequence.prompt_scores,
        )


def reference(prompt: tuple[int, ...], params: SamplingParams) -> tuple[list[int], list[float]]:
    """Tokens and log probabilities of a request alone in the plain loop."""
    return reference_outcome(prompt, params)[:2]


@cache
def reference_outcome(prompt: tuple[int, ...], params: SamplingParams) -> Outcome:
    """What a request gives alone in the plain loop."""
    harness = Harness(InlineDevice(), depth=0, max_num_seqs=1, num_blocks=MAX_LEN // BLOCK_SIZE + 1)
    sequence = harness.add(make_request("reference", prompt, params))
    harness.run()
    return harness.outcome(sequence)
