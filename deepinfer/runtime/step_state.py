"""WorkerStepState: everything the device work of one step reads or returns. Nothing is looked up by "current".

Legend: T rows, B row groups (one sequence each), S groups that sample.
"""

from dataclasses import dataclass, field

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.rows import TRASH_SLOT, Rows
from deepinfer.runtime.device import Event
from deepinfer.runtime.plan import SchedulerOutputs, StepResult
from deepinfer.runtime.sampler import SamplerOutput, SamplingMetadata

POISON = -1  # a token that nobody has drawn yet


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMetadata:
    """A step's inputs, staged on the host and copied to the device with the step; never changed afterwards.

    Attributes:
        token_ids: tokens to feed; `POISON` where the token comes from the step before.
        seq_ids, offsets, remaining: as in `Rows`.
        starts: first position of each group as the host knows it.
        remap: group of the same sequence in the step before, -1 if the host knows everything.
        sample_rows: last row of each group that samples.
        sample_groups: those groups.
    """

    token_ids: Int[Tensor, " T"]
    seq_ids: Int[Tensor, " T"]
    offsets: Int[Tensor, " T"]
    remaining: Int[Tensor, " T"]
    starts: Int[Tensor, " B"]
    q_lens: Int[Tensor, " B"]
    remap: Int[Tensor, " B"]
    slots: Int[Tensor, " B"]
    block_tables: Int[Tensor, "B blocks"]
    sample_rows: Int[Tensor, " S"]
    sample_groups: Int[Tensor, " S"]
    block_size: int

    def to(self, device: torch.device) -> "SequenceMetadata":
        """A copy on the device."""
        tensors = {name: getattr(self, name) for name in self.__slots__ if name != "block_size"}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        return SequenceMetadata(**moved, block_size=self.block_size)


def stage_metadata(plan: SchedulerOutputs, block_size: int) -> SequenceMetadata:
    """Turn a plan into host tensors."""
    tokens: list[int] = []
    seq_ids: list[int] = []
    offsets: list[int] = []
    remaining: list[int] = []
    sample_rows: list[int] = []
    for group, seq in enumerate(plan.sequences):
        tokens += seq.token_ids or [POISON] * seq.q_cap
        seq_ids += [group] * seq.q_cap
        offsets += range(seq.q_cap)
        remaining += range(seq.q_cap - 1, -1, -1)
        if seq.is_sampling:
            sample_rows.append(len(tokens) - 1)
    width = max((-(-(seq.start + seq.q_cap) // block_size) for seq in plan.sequences), default=1)
    table = [list(seq.blocks[:width]) + [TRASH_SLOT] * (width - len(seq.blocks)) for seq in plan.sequences]

    def tensor(values: list[int]) -> Int[Tensor, " n"]:
        return torch.tensor(values, dtype=torch.int64)

    return SequenceMetadata(
        token_ids=tensor(tokens),
        seq_ids=tensor(seq_ids),
        offsets=tensor(offsets),
        remaining=tensor(remaining),
        starts=tensor([seq.start for seq in plan.sequences]),
        q_lens=tensor([seq.q_cap for seq in plan.sequences]),
        remap=tensor([seq.remap for seq in plan.sequences]),
        slots=tensor([seq.slot for seq in plan.sequences]),
        block_tables=torch.tensor(table, dtype=torch.int64).view(len(plan.sequences), width),
        sample_rows=tensor(sample_rows),
        sample_groups=tensor([group for group, seq in enumerate(plan.sequences) if seq.is_sampling]),
        block_size=block_size,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceOutputs:
    """Device tensors that the next step reads: allocated with the step, written by its launches.

    Attributes:
        sampled: token drawn for each group, `POISON` where none is.
        next_start: position of the next row of each group's sequence: the true length of its cache.
        final: hidden rows that get logits.
    """

    sampled: Int[Tensor, " B"]
    next_start: Int[Tensor, " B"]
    final: Float[Tensor, "S D"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStepState:
    """One step on its way. Immutable after submit; the events guard the tensors beside them.

    `box` receives the sampler's output and the result exactly once each.
    """

    plan: SchedulerOutputs
    metadata: SequenceMetadata
    sampling: SamplingMetadata
    outputs: DeviceOutputs
    forward_done: Event
    box: "StepBox" = field(default_factory=lambda: StepBox())


@dataclass(slots=True)
class StepBox:
    """Filled after the forward was submitted: the sampler's output with the event of its copy, then the host's result."""

    sampler: SamplerOutput | None = None
    copied: Event | None = None
    result: StepResult | None = None


def build_rows(meta: SequenceMetadata, previous: DeviceOutputs | None) -> tuple[Rows, Int[Tensor, " B"]]:
    """Remap and length correction, on the device: complete a step's inputs from the results of the step before.

    A group with `remap >= 0` feeds the token that the step before drew for the same sequence, at the position which that step
    left behind; the host's start is only an upper bound for it. Returns the rows and each group's corrected start.
    """
    token_ids, starts = meta.token_ids, meta.starts
    if previous is not None:
        is_remapped = meta.remap >= 0
        source = meta.remap.clamp(min=0)
        starts = torch.where(is_remapped, previous.next_start[source], starts)
        token_ids = torch.where(is_remapped[meta.seq_ids], previous.sampled[source][meta.seq_ids], token_ids)
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
