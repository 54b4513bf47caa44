"""What a step's rows need on the device when some of them only replay, or stop behind the last KV source.

Legend: B row groups (one sequence each), t rows that run through the decoder half, n tokens for the n-gram history.
"""

from dataclasses import dataclass, fields, replace

import torch

from deepinfer.dims import Int, Tensor
from deepinfer.model.cache import ModelCache
from deepinfer.model.rows import Rows
from deepinfer.model.tail import Tail
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.plan import SchedulerOutputs, SequencePlan
from deepinfer.runtime.staging import to_device


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplayMetadata:
    """Staged on the host, copied to the device with the step.

    Attributes:
        window_starts, write_floors: as in `Rows`.
        tail_skipped, tail_window_starts: as in `Tail`.
        num_tail_rows: t.
        context_ids, context_slots, context_positions: tokens before replayed rows, and where they stand.
    """

    window_starts: Int[Tensor, " B"]
    write_floors: Int[Tensor, " B"]
    tail_skipped: Int[Tensor, " B"]
    tail_window_starts: Int[Tensor, " B"]
    context_ids: Int[Tensor, " n"]
    context_slots: Int[Tensor, " n"]
    context_positions: Int[Tensor, " n"]
    num_tail_rows: int

    def to(self, device: torch.device) -> "ReplayMetadata":
        """A copy on the device."""
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        moved = to_device(list(tensors.values()), device)
        return replace(self, **dict(zip(tensors, moved, strict=True)))  # type: ignore[arg-type]

    def marked(self, rows: Rows) -> Rows:
        """The rows, knowing where their windows begin and what they may write."""
        return replace(rows, window_starts=self.window_starts, write_floors=self.write_floors)

    def tail(self, rows: Rows) -> Tail:
        """The rows that go on; how many is known, which ones the device knows, for it gives rows to drafts."""
        is_skipped = rows.offsets < self.tail_skipped[rows.seq_ids]
        row_ids = torch.argsort(is_skipped.to(torch.int64), stable=True)[: self.num_tail_rows]
        return Tail(row_ids, self.tail_skipped, self.tail_window_starts)

    def recall_context(self, model: Transformer, cache: ModelCache) -> None:
        """Give the n-gram history the tokens that no row feeds. Mutates the cache."""
        if self.context_ids.shape[0]:
            model.token_window.recall(self.context_ids, self.context_slots, self.context_positions, cache)


def num_skipped(seq: SequencePlan) -> int:
    """Rows of a sequence that stop behind the last KV source."""
    return 0 if seq.replay is None else min(max(seq.replay.tail_start - seq.start, 0), seq.q_cap)


def stage_replay(plan: SchedulerOutputs, num_groups: int, num_rows: int) -> ReplayMetadata | None:
    """Host tensors for a plan that is padded to these numbers; None if all its rows are plain."""
    if all(seq.replay is None for seq in plan.sequences):
        return None
    context: list[tuple[int, int, int]] = []
    for seq in plan.sequences:
        context += [(token, seq.slot, seq.start - back) for back, token in enumerate(reversed(seq.context), start=1)]
    pad = [None] * (num_groups - len(plan.sequences))
    spans = [*(seq.replay for seq in plan.sequences), *pad]
    skipped = [*(num_skipped(seq) for seq in plan.sequences), *(0 for _ in pad)]

    def tensor(values: list[int]) -> Int[Tensor, " n"]:
        return torch.tensor(values, dtype=torch.int64)

    return ReplayMetadata(
        window_starts=tensor([0 if span is None else span.window_start for span in spans]),
        write_floors=tensor([0 if span is None else span.write_floor for span in spans]),
        tail_skipped=tensor(skipped),
        tail_window_starts=tensor([0 if span is None else span.tail_window_start for span in spans]),
        context_ids=tensor([token for token, _, _ in context]),
        context_slots=tensor([slot for _, slot, _ in context]),
        context_positions=tensor([position for _, _, position in context]),
        num_tail_rows=num_rows - sum(skipped),
    )
