"""Work that a prefill takes, in every mode: rows, floating-point operations, and time to the first token."""

import statistics
from collections.abc import Sequence as Sizes
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from torch.utils.flop_counter import FlopCounterMode

from deepinfer.bench.decode import row_of
from deepinfer.bench.model_holder import release_memory
from deepinfer.bench.pipeline import BLOCK_SIZE, Pipeline
from deepinfer.bench.report import Report
from deepinfer.errors import ConfigError
from deepinfer.model.compiled import compilation_count, is_compiled
from deepinfer.model.transformer import Transformer
from deepinfer.outputs import ReplayMode
from deepinfer.runtime.sequence import Sequence

REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillWork:
    """One prompt.

    Attributes:
        cached: tokens of it whose entries were stored.
        rows: rows that ran, in the encoder half; behind the last KV source `decoder_rows`.
        gflop: of all matrix products, as executed, two for each multiplication with addition; None where layers are compiled.
        first_token_ms: median, until the token is on the host.
        compiled: graphs compiled after the first prompt of this kind.
    """

    mode: str
    kernels: str
    tokens: int
    cached: int
    rows: int
    decoder_rows: int
    gflop: float | None
    first_token_ms: float
    compiled: int


class Case(NamedTuple):
    """A way into a prompt. With `caching` its beginning is stored; `snapshots` is how many ring snapshots are kept."""

    name: str
    mode: ReplayMode
    caching: bool
    snapshots: int


CASES = (
    Case("full", "full", caching=False, snapshots=0),
    Case("exact, truncated", "exact", caching=False, snapshots=0),
    Case("bounded, truncated", "bounded", caching=False, snapshots=0),
    Case("exact, snapshot", "exact", caching=True, snapshots=8),
    Case("exact, replayed", "exact", caching=True, snapshots=0),
    Case("bounded, replayed", "bounded", caching=True, snapshots=0),
)


def measure_work(model: Transformer, kernels: str, tokens: Sizes[int], report: Report) -> None:
    """A row for every length in every mode; what fails is noted and the others go on. Fills `report`."""
    for count in tokens:
        for case in CASES:
            what = f"{count} tokens, {case.name}"
            if report.is_over(what):
                continue
            with report.noting(what):
                report.add(row_of(prefill_work(model, case, count, kernels=kernels)))
            release_memory()


def prefill_work(model: Transformer, case: Case, tokens: int, new_tokens: int = 64, kernels: str = "plain") -> PrefillWork:
    """A prompt of `tokens`, of which all but the last `new_tokens` (rounded to a block) are stored where caching is on.

    Raises: ConfigError for a length that leaves nothing to store, or is beyond the model's.
    """
    known = (tokens - new_tokens) // BLOCK_SIZE * BLOCK_SIZE
    if known <= 0 or tokens >= model.config.max_seq_len:
        least, most = new_tokens + BLOCK_SIZE, model.config.max_seq_len - 1
        raise ConfigError(f"a prompt of {tokens} tokens: expected a length from {least} to {most}")
    # What is stored, and what each repetition leaves besides.
    num_tokens = tokens + (REPEATS + 2) * (tokens - known + BLOCK_SIZE)
    pipeline = Pipeline(
        model, num_tokens=num_tokens, replay=case.mode, caching=case.caching, num_ring_snapshots_kept=case.snapshots
    )
    common = some_tokens(model, known)
    if case.caching:
        pipeline.add((*common, 3), max_tokens=1)
        pipeline.run()
    # The first run is the warm-up: it compiles and counts, and is not timed.
    counters, recovery = pipeline.scheduler.counters, pipeline.scheduler.recovery.counters
    rows, truncated = counters.scheduled_tokens, recovery.truncated_rows
    with nullcontext() if is_compiled(model) else FlopCounterMode(display=False) as counter:
        first = _run_prompt(pipeline, common, tokens, 0)
    rows, truncated = counters.scheduled_tokens - rows, recovery.truncated_rows - truncated
    compiled, times = compilation_count(), []
    for repeat in range(1, 1 + REPEATS):
        # Another end each time, which is not stored yet.
        sequence = _run_prompt(pipeline, common, tokens, repeat)
        assert sequence.num_cached_tokens == first.num_cached_tokens
        times.append(pipeline.first_token_s[sequence.seq_id] * 1e3)
    return PrefillWork(
        mode=case.name,
        kernels=kernels,
        tokens=tokens,
        cached=first.num_cached_tokens,
        rows=rows,
        decoder_rows=rows - truncated,
        gflop=None if counter is None else counter.get_total_flops() / 1e9,
        first_token_ms=statistics.median(times),
        compiled=compilation_count() - compiled,
    )


def _run_prompt(pipeline: Pipeline, common: tuple[int, ...], tokens: int, salt: int) -> Sequence:
    """A prompt that begins with what is known. Nothing else is queued or on the device."""
    prompt = common + some_tokens(pipeline.model, tokens - len(common), salt=1 + salt)
    sequence = pipeline.add(prompt, max_tokens=1)
    pipeline.run()
    return sequence


def some_tokens(model: Transformer, count: int, salt: int = 0) -> tuple[int, ...]:
    """Token ids without a pattern that n-grams could learn."""
    return tuple(3 + (i * i * 31 + i * 7 + salt * 101) % (model.config.vocab_size - 8) for i in range(count))
