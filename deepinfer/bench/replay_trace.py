"""A synthetic chat service with and without the prefix cache, alternating in one run.

Conversations share a system prompt; each turn sends everything so far and some new tokens, and gets an answer.
"""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from deepinfer.bench.pipeline import Pipeline
from deepinfer.bench.replay_work import some_tokens
from deepinfer.model.transformer import Transformer
from deepinfer.outputs import ReplayMode


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceShape:
    """Sizes of the conversations, in tokens."""

    conversations: int = 4
    turns: int = 4
    system: int = 256
    question: int = 48
    answer: int = 16

    @property
    def longest(self) -> int:
        return self.system + self.turns * (self.question + self.answer)


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFigures:
    """One mode.

    Attributes:
        hit_rate: share of prompt tokens whose entries came from the cache.
        replayed: share of prompt tokens that ran again although their entries were stored.
        rows: rows that ran in all.
        first_token_ms, first_token_p90_ms: over all turns.
        same_text: turns whose answer is the one of the first mode.
    """

    mode: str
    hit_rate: float
    replayed: float
    rows: int
    first_token_ms: float
    first_token_p90_ms: float
    total_s: float
    same_text: str


MODES: tuple[tuple[str, ReplayMode, bool], ...] = (
    ("full, no cache", "full", False),
    ("exact", "exact", True),
    ("bounded", "bounded", True),
)


def measure_trace(model: Transformer, shape: TraceShape) -> Iterator[TraceFigures]:
    """All turns of all conversations in every mode; the modes take turns, so that the machine's moods fall on all of them."""
    for _, mode, caching in MODES:
        # Whatever is compiled or set up by the first steps.
        _Run(model, TraceShape(conversations=1, turns=1, system=80, answer=2), mode, caching).turn(0)
    runs = [_Run(model, shape, mode, caching) for _, mode, caching in MODES]
    for turn in range(shape.turns):
        for run in runs:
            run.turn(turn)
    for (name, _, _), run in zip(MODES, runs, strict=True):
        counters = run.pipeline.scheduler.recovery.counters
        times = sorted(s * 1e3 for s in run.pipeline.first_token_s.values())
        same = sum(a == b for a, b in zip(run.answers, runs[0].answers, strict=True))
        yield TraceFigures(
            mode=name,
            hit_rate=counters.cached_tokens / max(counters.looked_up_tokens, 1),
            replayed=counters.replayed_tokens / max(counters.looked_up_tokens, 1),
            rows=run.pipeline.scheduler.counters.scheduled_tokens,
            first_token_ms=statistics.median(times),
            first_token_p90_ms=times[math.ceil(0.9 * len(times)) - 1],
            total_s=run.total_s,
            same_text=f"{same}/{len(run.answers)}",
        )


class _Run:
    """The conversations in one mode; each goes on with the answers of that mode."""

    def __init__(self, model: Transformer, shape: TraceShape, mode: ReplayMode, caching: bool) -> None:
        self.model, self.shape = model, shape
        self.pipeline = Pipeline(
            model,
            num_tokens=2 * shape.conversations * (shape.longest + 64),
            replay=mode,
            caching=caching,
            max_num_seqs=shape.conversations,
            num_ring_snapshots_kept=4 * shape.conversations,
        )
        self.texts = [some_tokens(model, shape.system)] * shape.conversations
        self.answers: list[list[int]] = []
        self.total_s = 0.0

    def turn(self, turn: int) -> None:
        """One question in each conversation, all at once."""
        start = time.perf_counter()
        sequences = []
        for index, text in enumerate(self.texts):
            question = some_tokens(self.model, self.shape.question, salt=1 + turn * self.shape.conversations + index)
            sequences.append(self.pipeline.add(text + question, self.shape.answer))
        self.pipeline.run()
        self.total_s += time.perf_counter() - start
        self.answers += [sequence.output_token_ids for sequence in sequences]
        self.texts = [tuple(sequence.token_ids) for sequence in sequences]
