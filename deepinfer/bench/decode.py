"""Steady decode of random or real weights, each figure beside the time in which its bytes can be read.

Contexts are filled with random cache rows instead of a prefill, so that a million tokens take no longer to set up than a hundred.
Which experts the rows choose is observed in one step that runs without graphs and compiled code, after the timed ones.
"""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepinfer.backends import Backend
from deepinfer.bench.bench_model import weight_bytes
from deepinfer.bench.ceilings import Ceilings
from deepinfer.bench.floors import decode_work, expected_active, total
from deepinfer.bench.model_holder import ModelHolder, release_memory
from deepinfer.bench.report import Report
from deepinfer.bench.steady_decode import SteadyDecode
from deepinfer.engine_config import EngineConfig
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.model.compiled import compilation_count, uncompiled
from deepinfer.model.transformer import Transformer

ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeFigures:
    """One batch of one configuration; times are for a step in milliseconds.

    Attributes:
        wall_ms: median of the measured stretches; `device_ms` and `host_ms` are means over all of them.
        busy: share of the wall time in which the compute stream was busy.
        active_experts: that some row of the step chose, mean over the layers; `routing` says whether that was observed or even
            routing was assumed.
        floor_ms: `gigabytes` over the measured read rate; `ratio` is the floor over the wall time.
        extra_gb: device memory that was reserved at the peak, above weights and cache.
        compiled: graphs compiled after the warm-up.
    """

    kernels: str
    batch_invariant: bool
    batch: int
    context: int
    drafts: int
    depth: int
    wall_ms: float
    device_ms: float
    host_ms: float
    busy: float
    tokens_per_step: float
    tokens_per_s: float
    active_experts: float
    routing: str
    gigabytes: float
    gflop: float
    floor_ms: float
    ratio: float
    weights_gb: float
    cache_gb: float
    extra_gb: float | None
    compiled: int


def measure_decode(
    holder: ModelHolder,
    config: EngineConfig,
    report: Report,
    *,
    kernels: Sequence[str],
    batches: Sequence[int],
    contexts: Sequence[int],
    depths: Sequence[int],
    steps: int,
) -> None:
    """A row for every combination; depths alternate within one run. Fills `report`, whose ceilings give the floors."""
    for kind in kernels:
        wanted = replace(config, kernels=kind, compile=False if kind == "plain" else config.compile)
        try:
            model, backend = holder.open(wanted)
        except Exception as error:
            if isinstance(error, ConfigError | CapacityError) and len(kernels) == 1:
                raise
            report.failed(f"kernels {kind}", error)
            continue
        for batch, context in itertools.product(batches, contexts):
            what = f"kernels {kind}, batch {batch}, context {context}"
            if report.is_over(what):
                continue
            try:
                for figures in decode_figures(model, backend, wanted, report.ceilings, batch, context, depths, steps):
                    report.add(row_of(figures))
            except (RuntimeError, CapacityError, ConfigError, AssertionError) as error:
                report.failed(what, error)
            release_memory()


def decode_figures(
    model: Transformer,
    backend: Backend,
    config: EngineConfig,
    ceilings: Ceilings | None,
    batch: int,
    context: int,
    depths: Sequence[int],
    steps: int,
) -> list[DecodeFigures]:
    """One batch at each depth, alternating."""
    assert ceilings is not None
    release_memory()
    with peak_memory(model.device) as peak:
        runs = [steady_decode(model, config, batch, context, depth, steps * ROUNDS) for depth in depths]
        for run in runs:
            run.warm_up()
        compiled = compilation_count()
        for _ in range(ROUNDS):
            for run in runs:
                run.steps(steps)
        compiled = compilation_count() - compiled
        reserved = peak()
    # Before the step that observes, which is none of them.
    times = [run.times(steps * ROUNDS) for run in runs]
    walls = [run.median_ms for run in runs]
    cache_bytes = sum(t.nbytes for run in runs for t in run.worker.cache.tensors())
    drafts, moe = config.num_speculative_tokens, model.config.moe
    active, routing = observed_experts(runs[0]), "observed"
    if active is None:
        active, routing = expected_active(moe.n_routed_experts, moe.n_activated_experts, batch * (1 + drafts)), "even"
    work = total(decode_work(model.config, sequences=batch, context=context, drafts=drafts, active_experts=active))
    floor, weights = ceilings.read_ms(work.bytes), weight_bytes(model)
    return [
        DecodeFigures(
            kernels=backend.name,
            batch_invariant=config.batch_invariant,
            batch=batch,
            context=context,
            drafts=drafts,
            depth=run.depth,
            wall_ms=wall,
            device_ms=device,
            host_ms=host,
            busy=device / mean,
            tokens_per_step=run.tokens_per_step,
            tokens_per_s=run.tokens_per_step * batch / wall * 1e3,
            active_experts=active,
            routing=routing,
            gigabytes=work.bytes / 1e9,
            gflop=work.flops / 1e9,
            floor_ms=floor,
            ratio=floor / wall,
            weights_gb=weights / 1e9,
            cache_gb=cache_bytes / len(runs) / 1e9,
            extra_gb=None if reserved is None else (reserved - weights - cache_bytes) / 1e9,
            compiled=compiled,
        )
        for run, wall, (mean, device, host) in zip(runs, walls, times, strict=True)
    ]


def steady_decode(model: Transformer, config: EngineConfig, batch: int, context: int, depth: int, steps: int) -> SteadyDecode:
    """Steady decode as an engine with this configuration would run it."""
    return SteadyDecode(
        model,
        batch,
        depth,
        steps,
        context=context,
        num_drafts=config.num_speculative_tokens,
        is_adaptive=config.adaptive_verification,
        uses_graphs=config.cuda_graphs is not False,
    )


def observed_experts(run: SteadyDecode) -> float | None:
    """Experts that the real rows of the next step choose, mean over the backbone's layers; None if there is no memory for it."""
    model, chosen = run.worker.model, []
    count = run.batch
    buckets, run.worker.shapes.buckets = run.worker.shapes.buckets, ()
    hooks = [
        layer.get_submodule("ffn.gate").register_forward_hook(lambda _, args, out: chosen.append(out.ids)) for layer in model.layers
    ]
    with suppress(torch.OutOfMemoryError), uncompiled(model):
        # What was in flight first, then a step of which everything is seen.
        asyncio.run(run.loop.flush())
        rows_before = run.scheduler.counters.scheduled_tokens
        asyncio.run(run.advance(1))
        count = run.scheduler.counters.scheduled_tokens - rows_before
    for hook in hooks:
        hook.remove()
    run.worker.shapes.buckets = buckets
    if len(chosen) < len(model.layers):
        return None
    return sum(ids[:count].unique().numel() for ids in chosen[: len(model.layers)]) / len(model.layers)


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Any]:
    """Gives a function: bytes that were reserved on a CUDA device at the peak since the beginning, None elsewhere."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield lambda: torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def row_of(figures: Any) -> dict[str, Any]:
    """The fields of a record as a row of a report."""
    return {name: getattr(figures, name) for name in figures.__dataclass_fields__}
