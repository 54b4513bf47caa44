"""WorkerStepState: everything the device work of one step reads or returns. Nothing is looked up by "current".

Legend: T rows, B row groups (one sequence each), S groups that sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.rows import TRASH_SLOT, Rows
from deepinfer.runtime.device import Event
from deepinfer.runtime.observations import StepObservations
from deepinfer.runtime.plan import NOT_IN_LAST_STEP, SchedulerOutputs, StepResult
from deepinfer.runtime.sampler import SamplerOutput, SamplingMetadata
from deepinfer.runtime.staging import to_device

POISON = -1  # a token or position that the host does not know
SAMPLER_INPUTS = ("sample_rows", "sample_of", "sample_index", "draft_follows", "sample_groups", "first_logit")
FORWARD_INPUTS = ("token_ids", "seq_ids", "offsets", "remaining", "starts", "q_lens", "n_drafts", "remap", "slots", "block_tables")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceMetadata:
    """Where a step's rows stand; staged on the host, copied to the device with the step, never changed afterwards.

    Attributes:
        token_ids: tokens to feed; `POISON` where the token comes from the step before.
        seq_ids, offsets, remaining: as in `Rows`.
        starts: first position of each group; `POISON` where the step before decides it: the device alone knows true lengths.
        q_lens: rows of each group.
        remap: group of the same sequence in the step before; -1 if the host knows everything.
        n_drafts: rows at the end of each group that feed drafts.
        sample_rows: rows that get logits: the last certain row of each group that samples, and its drafts.
        sample_of: which sampling group each of them belongs to, counted among those that sample.
        sample_index: its place among the logits of its group.
        draft_follows: 1 if the next row of the group feeds a draft.
        sample_groups: the groups that sample.
        first_logit: which of the rows with logits is the first of each of them.
        block_size: tokens in a cache block.
    """

    token_ids: Int[Tensor, " T"]
    seq_ids: Int[Tensor, " T"]
    offsets: Int[Tensor, " T"]
    remaining: Int[Tensor, " T"]
    starts: Int[Tensor, " B"]
    q_lens: Int[Tensor, " B"]
    n_drafts: Int[Tensor, " B"]
    remap: Int[Tensor, " B"]
    slots: Int[Tensor, " B"]
    block_tables: Int[Tensor, "B blocks"]
    sample_rows: Int[Tensor, " R"]
    sample_of: Int[Tensor, " R"]
    sample_index: Int[Tensor, " R"]
    draft_follows: Int[Tensor, " R"]
    sample_groups: Int[Tensor, " S"]
    first_logit: Int[Tensor, " S"]
    block_size: int

    def forward_inputs(self) -> list[Tensor]:
        """The tensors that the forward reads, in a fixed order."""
        return [getattr(self, name) for name in FORWARD_INPUTS]

    def with_forward_inputs(self, tensors: Sequence[Tensor]) -> Self:
        """The same metadata over other tensors, in the order of `forward_inputs`."""
        return replace(self, **dict(zip(FORWARD_INPUTS, tensors, strict=True)))  # type: ignore[arg-type]

    def as_padding(self) -> Self:
        """Rows of the same shape that touch nothing but trash."""
        zeros = {name: torch.zeros_like(getattr(self, name)) for name in FORWARD_INPUTS}
        groups = torch.arange(self.starts.shape[0])
        zeros |= {"seq_ids": groups[: self.seq_ids.shape[0]], "q_lens": torch.ones_like(self.q_lens)}
        zeros["remap"] = torch.full_like(self.remap, NOT_IN_LAST_STEP)
        return self.with_forward_inputs([zeros[name] for name in FORWARD_INPUTS])

    def to(self, device: torch.device, names: Sequence[str] = (*FORWARD_INPUTS, *SAMPLER_INPUTS)) -> Self:
        """A copy whose tensors `names` are on the device; the others stay where they are."""
        moved = to_device([getattr(self, name) for name in names], device)
        return replace(self, **dict(zip(names, moved, strict=True)))  # type: ignore[arg-type]


def table_width(plan: SchedulerOutputs, block_size: int) -> int:
    """Blocks that the longest sequence of a step can reach."""
    return max((-(-(seq.start + seq.q_cap) // block_size) for seq in plan.sequences), default=1)


def stage_metadata(plan: SchedulerOutputs, block_size: int, num_groups: int, min_width: int = 1) -> SequenceMetadata:
    """Turn a plan into host tensors, padded to `num_groups` row groups and block tables of at least `min_width`.

    A padding group is one row of the trash sequence: it reads and writes the trash slot and block only.
    """
    tokens: list[int] = []
    seq_ids: list[int] = []
    offsets: list[int] = []
    remaining: list[int] = []
    sample_rows: list[int] = []
    sample_of: list[int] = []
    sample_index: list[int] = []
    for group, seq in enumerate(plan.sequences):
        tokens += seq.token_ids or [POISON] * seq.q_cap
        seq_ids += [group] * seq.q_cap
        offsets += range(seq.q_cap)
        remaining += range(seq.q_cap - 1, -1, -1)
        if seq.is_sampling:
            sample_of += [sample_of[-1] + 1 if sample_of else 0] * (1 + seq.n_drafts)
            sample_rows += range(len(tokens) - 1 - seq.n_drafts, len(tokens))
            sample_index += range(1 + seq.n_drafts)
    pad = num_groups - len(plan.sequences)
    tokens += [0] * pad
    seq_ids += range(len(plan.sequences), num_groups)
    offsets += [0] * pad
    remaining += [0] * pad
    width = max(table_width(plan, block_size), min_width)
    table = torch.full((num_groups, width), TRASH_SLOT)
    for group, seq in enumerate(plan.sequences):
        blocks = seq.blocks[:width]
        table[group, : len(blocks)] = torch.tensor(blocks)

    def per_group(values: list[int], filler: int) -> Int[Tensor, " B"]:
        return torch.tensor(values + [filler] * pad, dtype=torch.int64)

    def tensor(values: list[int]) -> Int[Tensor, " n"]:
        return torch.tensor(values, dtype=torch.int64)

    return SequenceMetadata(
        token_ids=tensor(tokens),
        seq_ids=tensor(seq_ids),
        offsets=tensor(offsets),
        remaining=tensor(remaining),
        starts=per_group([seq.start if seq.remap == NOT_IN_LAST_STEP else POISON for seq in plan.sequences], 0),
        q_lens=per_group([seq.q_cap for seq in plan.sequences], 1),
        n_drafts=per_group([seq.n_drafts for seq in plan.sequences], 0),
        remap=per_group([seq.remap for seq in plan.sequences], NOT_IN_LAST_STEP),
        slots=per_group([seq.slot for seq in plan.sequences], TRASH_SLOT),
        block_tables=table,
        sample_rows=tensor(sample_rows),
        sample_of=tensor(sample_of),
        first_logit=tensor([row for row, index in enumerate(sample_index) if index == 0]),
        sample_index=tensor(sample_index),
        draft_follows=tensor([i < seq.n_drafts for seq in plan.sequences if seq.is_sampling for i in range(1 + seq.n_drafts)]),
        sample_groups=tensor([group for group, seq in enumerate(plan.sequences) if seq.is_sampling]),
        block_size=block_size,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceOutputs:
    """Device tensors that the next step reads: allocated with the step, written by its launches.

    Attributes:
        sampled: last token drawn for each group, `POISON` where none is.
        next_start: position of the next row of each group's sequence: the true length of its cache.
        drafts: tokens proposed to follow `sampled`.
        final: hidden rows that get logits.
        positions: their positions.
        fed_next: the token fed in the row after each of them.
    """

    sampled: Int[Tensor, " B"]
    next_start: Int[Tensor, " B"]
    drafts: Int[Tensor, "B k"]
    final: Float[Tensor, "R D"]
    positions: Int[Tensor, " R"]
    fed_next: Int[Tensor, " R"]


@dataclass(slots=True, eq=False)
class StepBox:
    """What the launches of one step leave for each other and for the host; each field is written once.

    `drawn` keeps the sampler's device tensors alive until their copy `host` has been read; `seen` is that of what was observed.
    """

    drawn: SamplerOutput | None = None
    host: SamplerOutput | None = None
    seen: StepObservations | None = None
    copied: Event | None = None
    result: StepResult | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WorkerStepState:
    """One step on its way: its plan, its inputs, its outputs, and the events that guard them. Immutable after submit."""

    plan: SchedulerOutputs
    metadata: SequenceMetadata
    sampling: SamplingMetadata
    outputs: DeviceOutputs
    forward_done: Event
    observed: StepObservations | None = None
    box: StepBox = field(default_factory=StepBox)


def build_rows(meta: SequenceMetadata, previous: DeviceOutputs | None) -> tuple[Rows, Int[Tensor, " B"]]:
    """Remap and length correction, on the device: complete a step's inputs from the results of the step before.

    A group with `remap >= 0` feeds the token that the step before drew for the same sequence, then that step's drafts, from the
    position which it left behind. Returns the rows and each group's corrected start.
    """
    token_ids, starts = meta.token_ids, meta.starts
    if previous is not None:
        is_remapped = meta.remap >= 0
        source = meta.remap.clamp(min=0)
        starts = torch.where(is_remapped, previous.next_start[source], starts)
        feed = torch.cat((previous.sampled[:, None], previous.drafts), dim=1)[source]
        fed = feed[meta.seq_ids, meta.offsets.clamp(max=feed.shape[1] - 1)]
        token_ids = torch.where(is_remapped[meta.seq_ids], fed, token_ids)
    rows = Rows(
        token_ids=token_ids,
        positions=starts[meta.seq_ids] + meta.offsets,
        seq_ids=meta.seq_ids,
        offsets=meta.offsets,
        remaining=meta.remaining,
        slots=meta.slots,
        block_tables=meta.block_tables,
        block_size=meta.block_size,
    )
    return rows, starts
