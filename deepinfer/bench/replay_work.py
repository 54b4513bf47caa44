"""Work that a prefill takes, in every mode: floating-point operations, rows, and time to the first token."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from torch.utils.flop_counter import FlopCounterMode

from deepinfer.bench.pipeline import BLOCK_SIZE, Pipeline
from deepinfer.model.transformer import Transformer
from deepinfer.outputs import ReplayMode

REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillWork:
    """One prompt.

    Attributes:
        cached: tokens of it whose entries were stored.
        rows: rows that ran, in the encoder half; behind the last KV source `decoder_rows`.
        gflop: of all matrix products, as executed, two for each multiplication with addition.
        first_token_ms: median.
    """

    mode: str
    tokens: int
    cached: int
    rows: int
    decoder_rows: int
    gflop: float
    first_token_ms: float


# Name, mode, whether a prefix is stored, ring snapshots.
CASES: tuple[tuple[str, ReplayMode, bool, int], ...] = (
    ("full", "full", False, 0),
    ("exact, truncated", "exact", False, 0),
    ("bounded, truncated", "bounded", False, 0),
    ("exact, snapshot", "exact", True, 8),
    ("exact, replayed", "exact", True, 0),
    ("bounded, replayed", "bounded", True, 0),
)


def measure_prefill(model: Transformer, tokens: int, new_tokens: int = 64) -> Iterator[PrefillWork]:
    """A prompt of `tokens`, of which all but the last `new_tokens` (rounded to a block) are stored where caching is on."""
    known = (tokens - new_tokens) // BLOCK_SIZE * BLOCK_SIZE
    for name, mode, caching, snapshots in CASES:
        times, work = [], None
        for repeat in range(REPEATS + 1):
            pipeline = Pipeline(
                model, num_tokens=2 * tokens + 4 * BLOCK_SIZE, replay=mode, caching=caching, num_ring_snapshots_kept=snapshots
            )
            if caching:
                pipeline.add((*some_tokens(model, known), 3), max_tokens=1)
                pipeline.run()
            before = pipeline.scheduler.counters.scheduled_tokens
            truncated = pipeline.scheduler.recovery.counters.truncated_rows
            sequence = pipeline.add(some_tokens(model, tokens), max_tokens=1)
            if repeat == 0:
                # Also the warm-up: counting is not timed.
                with FlopCounterMode(display=False) as counter:
                    pipeline.run()
                rows = pipeline.scheduler.counters.scheduled_tokens - before
                skipped = pipeline.scheduler.recovery.counters.truncated_rows - truncated
                work = (sequence.num_cached_tokens, rows, rows - skipped, counter.get_total_flops() / 1e9)
            else:
                pipeline.run()
                times.append(pipeline.first_token_s[sequence.seq_id] * 1e3)
        assert work is not None
        yield PrefillWork(
            mode=name,
            tokens=tokens,
            cached=work[0],
            rows=work[1],
            decoder_rows=work[2],
            gflop=work[3],
            first_token_ms=statistics.median(times),
        )


def some_tokens(model: Transformer, count: int, salt: int = 0) -> tuple[int, ...]:
    """Token ids without a pattern that n-grams could learn."""
    return tuple(3 + (i * i * 31 + i * 7 + salt * 101) % (model.config.vocab_size - 8) for i in range(count))
