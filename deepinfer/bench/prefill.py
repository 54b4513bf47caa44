"""Prefill of one long prompt in chunks through the real scheduler and worker, beside the time that its products need."""

import asyncio
import statistics
import time
from collections.abc import Sequence as Sizes
from dataclasses import dataclass, replace

from deepinfer.bench.bench_model import weight_bytes
from deepinfer.bench.ceilings import Ceilings
from deepinfer.bench.decode import peak_memory, row_of
from deepinfer.bench.floors import prefill_work, total
from deepinfer.bench.model_holder import ModelHolder, release_memory
from deepinfer.bench.report import Report
from deepinfer.bench.steady_decode import BLOCK_SIZE
from deepinfer.engine_config import EngineConfig
from deepinfer.errors import ConfigError
from deepinfer.model.cache import CacheSizes
from deepinfer.model.compiled import compilation_count
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.device import open_device
from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.loop import StepLoop
from deepinfer.runtime.request import Request
from deepinfer.runtime.scheduler import Scheduler
from deepinfer.runtime.sequence import Sequence
from deepinfer.runtime.worker import Worker
from deepinfer.sampling_params import SamplingParams

REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillFigures:
    """One prompt, from its submission to its first token.

    Attributes:
        floor_ms: `tflop` over the measured matrix rate in bfloat16, or `gigabytes` over the read rate if that is longer.
        ratio: of the matrix rate reached to the measured one.
        compiled: graphs compiled after the first prompt.
    """

    kernels: str
    batch_invariant: bool
    tokens: int
    chunk: int
    wall_ms: float
    tokens_per_s: float
    tflop: float
    tflop_per_s: float
    gigabytes: float
    floor_ms: float
    ratio: float
    extra_gb: float | None
    compiled: int


def measure_prefill(
    holder: ModelHolder, config: EngineConfig, report: Report, *, kernels: Sizes[str], tokens: Sizes[int], chunks: Sizes[int]
) -> None:
    """A row for every combination. Fills `report`."""
    for kind in kernels:
        wanted = replace(config, kernels=kind, compile=False if kind == "plain" else config.compile)
        model, backend = holder.open(wanted)
        for count in tokens:
            for chunk in chunks:
                what = f"kernels {kind}, {count} tokens in chunks of {chunk}"
                if report.is_over(what):
                    continue
                with report.noting(what):
                    assert report.ceilings is not None
                    figures = prefill_figures(model, report.ceilings, count, chunk, backend.name, config.batch_invariant)
                    report.add(row_of(figures))
                release_memory()


def prefill_figures(
    model: Transformer, ceilings: Ceilings, tokens: int, chunk: int, kernels: str, batch_invariant: bool
) -> PrefillFigures:
    """One length and one size of chunk; the first prompt compiles and is not counted."""
    with peak_memory(model.device) as peak:
        prefill = Prefill(model, tokens, chunk)
        prefill.run()
        compiled = compilation_count()
        seconds = statistics.median(prefill.run() for _ in range(REPEATS))
        reserved = peak()
    work = total(prefill_work(model.config, tokens=tokens, chunk=chunk))
    cache_bytes = sum(t.nbytes for t in prefill.worker.cache.tensors())
    multiply_ms = ceilings.multiply_ms(work.flops)
    return PrefillFigures(
        kernels=kernels,
        batch_invariant=batch_invariant,
        tokens=tokens,
        chunk=chunk,
        wall_ms=seconds * 1e3,
        tokens_per_s=tokens / seconds,
        tflop=work.flops / 1e12,
        tflop_per_s=work.flops / seconds / 1e12,
        gigabytes=work.bytes / 1e9,
        floor_ms=ceilings.floor_ms(work.bytes, work.flops),
        ratio=multiply_ms / (seconds * 1e3),
        extra_gb=None if reserved is None else (reserved - weight_bytes(model) - cache_bytes) / 1e9,
        compiled=compilation_count() - compiled,
    )


class Prefill:
    """Serves one prompt after the other, one token each. `depth`: steps that the host runs ahead."""

    def __init__(self, model: Transformer, tokens: int, chunk: int, depth: int = 1) -> None:
        if tokens >= model.config.max_seq_len:
            raise ConfigError(f"a prompt of {tokens} tokens: the model's longest sequence is {model.config.max_seq_len}")
        blocks = -(-(tokens + 1) // BLOCK_SIZE) + 1
        self.vocab_size, self.tokens, self._count = model.config.vocab_size, tokens, 0
        sizes = CacheSizes(num_slots=2, num_blocks=blocks, block_size=BLOCK_SIZE)
        self.worker = Worker(model, sizes, open_device(model.device))
        limits = SchedulerLimits(
            max_num_seqs=1, max_num_batched_tokens=chunk, max_model_len=tokens + 1, block_size=BLOCK_SIZE, num_blocks=blocks
        )
        self.scheduler = Scheduler(limits)
        self.loop = StepLoop(self.scheduler, self.worker, depth, lambda events: None)

    def run(self) -> float:
        """Seconds until the first token of a prompt is on the host."""
        self.add()
        start = time.perf_counter()
        asyncio.run(self._serve())
        return time.perf_counter() - start

    def add(self) -> None:
        """Queue a prompt."""
        self._count += 1
        prompt = tuple((7919 * i + self._count) % (self.vocab_size - 8) + 3 for i in range(self.tokens))
        request = Request(
            request_id=str(self._count),
            prompt=None,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=1, temperature=0, ignore_eos=True),
            max_new_tokens=1,
            seed=0,
            eos_token_id=1,
            stop_token_ids=frozenset(),
            arrival_s=0.0,
        )
        self.scheduler.add(Sequence(request, 0, self._count, list(prompt)))

    def advance(self, count: int) -> None:
        """Run `count` steps."""
        asyncio.run(self._advance(count))

    async def _serve(self) -> None:
        while self.scheduler.has_work:
            await self.loop.step()

    async def _advance(self, count: int) -> None:
        for _ in range(count):
            await self.loop.step()
