"""WorkerStepState: everything the device work of one step reads or returns. Nothing is looked up by "current".

Legend: T rows, R rows with logits, B row groups (one sequence each), S groups that sample, k drafts of a proposal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np
import torch

from deepinfer.dims import Bool, Float, Int, Tensor
from deepinfer.model.rows import TRASH_SLOT
from deepinfer.runtime.constraints import Continuations, SamplerInputs
from deepinfer.runtime.device import Event
from deepinfer.runtime.observations import StepObservations
from deepinfer.runtime.plan import NOT_IN_LAST_STEP, SchedulerOutputs, StepResult
from deepinfer.runtime.replay_state import ReplayMetadata, stage_replay
from deepinfer.runtime.sampler import SamplerOutput, SamplingMetadata
from deepinfer.runtime.staging import Packed, to_device

POISON = -1  # a token or position that the host does not know
FORWARD_INPUTS = ("token_ids", "token_starts", "starts", "q_lens", "max_drafts", "draft_budget", "remap", "slots", "block_tables")


class PaddedShape(NamedTuple):
    """The fixed shape of a step that a graph can replay: row groups, rows, and blocks of the longest sequence.

    `is_even`: every rank of a group runs it. `splits_drafts`: see `SequenceMetadata`; it is in the graph.
    """

    groups: int
    rows: int
    table_width: int
    is_even: bool = False
    splits_drafts: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceMetadata:
    """What a step's row groups feed and where; staged on the host, copied to the device with the step, never changed afterwards.

    Attributes:
        token_ids: tokens that the host knows, of all groups behind each other; at least one.
        token_starts: where each group's tokens begin there.
        starts: first position of each group; `POISON` where the step before decides it: the device alone knows true lengths.
        q_lens: rows of each group that are certain.
        max_drafts: most rows behind them that may feed drafts.
        remap: group of the same sequence in the step before; -1 if the host knows everything.
        sample_groups: the groups that sample.
        num_rows: T; rows that no group fills are padding, and then the last group is a trash sequence.
        num_logits: R.
        draft_budget: rows for drafts in all groups together.
        splits_drafts: whether that may be less than `max_drafts` asks for, so that the device chooses.
        is_even: whether every rank of a group runs a step of this shape.
        block_size: tokens in a cache block.
        replay: how some of the rows differ from plain ones; None if none does.
    """

    token_ids: Int[Tensor, " n"]
    token_starts: Int[Tensor, " B"]
    starts: Int[Tensor, " B"]
    q_lens: Int[Tensor, " B"]
    max_drafts: Int[Tensor, " B"]
    draft_budget: Int[Tensor, " 1"]
    remap: Int[Tensor, " B"]
    slots: Int[Tensor, " B"]
    block_tables: Int[Tensor, "B blocks"]
    sample_groups: Int[Tensor, " S"]
    num_rows: int
    num_logits: int
    splits_drafts: bool
    block_size: int
    is_even: bool = False
    replay: ReplayMetadata | None = None

    def forward_inputs(self) -> list[Tensor]:
        """The tensors that the forward reads, in a fixed order."""
        return [getattr(self, name) for name in FORWARD_INPUTS]

    def with_forward_inputs(self, tensors: Sequence[Tensor]) -> Self:
        """The same metadata over other tensors, in the order of `forward_inputs`."""
        return replace(self, **dict(zip(FORWARD_INPUTS, tensors, strict=True)))  # type: ignore[arg-type]

    def as_padding(self) -> Self:
        """Rows of the same shape that touch nothing but trash."""
        zeros = {name: torch.zeros_like(getattr(self, name)) for name in FORWARD_INPUTS}
        zeros["remap"] = torch.full_like(self.remap, NOT_IN_LAST_STEP)
        return self.with_forward_inputs([zeros[name] for name in FORWARD_INPUTS])

    def to(self, device: torch.device) -> Self:
        """A copy whose tensors are on the device."""
        names = (*FORWARD_INPUTS, "sample_groups")
        moved = to_device([getattr(self, name) for name in names], device)
        return replace(self, **dict(zip(names, moved, strict=True)))  # type: ignore[arg-type]


def table_width(plan: SchedulerOutputs, block_size: int) -> int:
    """Blocks that the longest sequence of a step can reach."""
    return max((-(-(seq.start + seq.q_cap) // block_size) for seq in plan.sequences), default=1)


def stage_metadata(plan: SchedulerOutputs, block_size: int, padded: PaddedShape | None = None) -> SequenceMetadata:
    """Turn a plan into host tensors, padded if a shape is given.

    Padding groups have no rows. Behind them stands one more, whose rows are all that is left over: a sequence of the trash slot
    and block.
    """
    sequences = plan.sequences
    pad = 0 if padded is None else padded.groups + 1 - len(sequences)
    width = max(table_width(plan, block_size), 1 if padded is None else padded.table_width)
    tokens: list[int] = []
    token_starts: list[int] = []
    # Of numpy, which reads a tuple several times faster: a million tokens have 16,000 blocks.
    table = np.full((len(sequences) + pad, width), TRASH_SLOT)
    for group, seq in enumerate(sequences):
        token_starts.append(len(tokens))
        tokens += seq.token_ids
        blocks = seq.blocks[:width]
        table[group, : len(blocks)] = np.fromiter(blocks, np.int64, len(blocks))
    if padded is not None:
        # At least one; and as many for every step of a shape.
        tokens += [0] * (max(padded.groups + 1, padded.rows) - len(tokens))

    columns = {
        "token_starts": token_starts,
        "starts": [seq.start if seq.remap == NOT_IN_LAST_STEP else POISON for seq in sequences],
        "q_lens": [seq.q_cap - seq.n_drafts for seq in sequences],
        "max_drafts": [seq.n_drafts for seq in sequences],
        "remap": [seq.remap for seq in sequences],
        "slots": [seq.slot for seq in sequences],
    }
    fillers = {"remap": NOT_IN_LAST_STEP, "slots": TRASH_SLOT}
    padded_columns = [values + [fillers.get(name, 0)] * pad for name, values in columns.items()]
    per_group = torch.tensor(padded_columns, dtype=torch.int64).unbind(0)
    sampling = [group for group, seq in enumerate(sequences) if seq.is_sampling]
    num_rows = plan.num_rows if padded is None else padded.rows
    is_even = padded is not None and padded.is_even
    return SequenceMetadata(
        token_ids=torch.tensor(tokens or [0], dtype=torch.int64),
        draft_budget=torch.tensor([plan.draft_rows], dtype=torch.int64),
        **dict(zip(columns, per_group, strict=True)),
        block_tables=torch.from_numpy(table),
        sample_groups=torch.tensor(sampling, dtype=torch.int64),
        num_rows=num_rows,
        num_logits=len(sampling) + plan.draft_rows,
        splits_drafts=(padded is not None and padded.splits_drafts) or plan.draft_rows < sum(seq.n_drafts for seq in sequences),
        block_size=block_size,
        is_even=is_even,
        replay=stage_replay(plan, len(sequences) + pad, num_rows),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceOutputs:
    """Device tensors that the next step reads: allocated with the step, written by its launches.

    Attributes:
        tokens: the next three in columns behind each other, which are views, so that one copy moves them.
        sampled: last token drawn for each group, `POISON` where none is.
        next_start: position of the next row of each group's sequence: the true length of its cache.
        drafts: tokens proposed to follow `sampled`.
        survival: estimated probability that a draft and all before it are accepted.
        draft_logprobs: log probabilities that the drafts were drawn with; no vocabulary unless the verification needs them.
    """

    tokens: Int[Tensor, "B n"]
    survival: Float[Tensor, "B k"]
    draft_logprobs: Float[Tensor, "B k V"]
    sampled: Int[Tensor, " B"] = field(init=False)
    next_start: Int[Tensor, " B"] = field(init=False)
    drafts: Int[Tensor, "B k"] = field(init=False)

    def __post_init__(self) -> None:
        for name, view in (("sampled", self.tokens[:, 0]), ("next_start", self.tokens[:, 1]), ("drafts", self.tokens[:, 2:])):
            object.__setattr__(self, name, view)

    @classmethod
    def empty(cls, groups: int, k: int, vocab_size: int, device: torch.device) -> Self:
        """Poisoned tensors for a step of `groups` row groups."""
        return cls(
            tokens=torch.full((groups, 2 + k), POISON, device=device),
            survival=torch.full((groups, k), float(POISON), device=device),
            draft_logprobs=torch.empty((groups, k, vocab_size), device=device),
        )

    def copy_from(self, other: Self) -> None:
        """Take over what another step left, in the first places of these tensors. Mutates them."""
        groups = other.tokens.shape[0]
        self.tokens[:groups].copy_(other.tokens)
        if other.survival.numel():
            self.survival[:groups].copy_(other.survival)


class LogitRows(NamedTuple):
    """What the forward leaves for the sampler.

    Attributes:
        final: hidden rows that get logits, each sampling group's behind each other.
        positions: their positions.
        fed_next: the token fed in the row after each of them.
        group: which sampling group each belongs to, counted among those that sample.
        place: its place among the logits of its group.
        groups, slots, remap: of the groups that sample: their numbers, their ring slots, and where they stood in the step before.
        n_drafts: drafts that were fed for each sampling group.
        survival: what was estimated for the drafts that the group was offered.
    """

    final: Float[Tensor, "R D"]
    positions: Int[Tensor, " R"]
    fed_next: Int[Tensor, " R"]
    group: Int[Tensor, " R"]
    place: Int[Tensor, " R"]
    groups: Int[Tensor, " S"]
    slots: Int[Tensor, " S"]
    remap: Int[Tensor, " S"]
    n_drafts: Int[Tensor, " S"]
    survival: Float[Tensor, "S k"]

    @property
    def draft_follows(self) -> Bool[Tensor, " R"]:
        """Whether the next row feeds a draft of the same group."""
        return self.place < self.n_drafts[self.group]


@dataclass(slots=True, eq=False)
class StepBox:
    """What the launches of one step leave for each other and for the host; each field is written once.

    `sampling` and `inputs` are on the device; `texts` are what the groups' drafts continue; where a graph draws, `draft_inputs` is
    all that drafts start from. `drawn` keeps the sampler's device
    tensors alive until their copy `host` has been read; `seen` is the copy of what was observed. `drafts` is the host
    copy of what the step proposed, made only where a grammar has to look at it; `drafts_copied` guards it.
    """

    logit_rows: LogitRows | None = None
    sampling: SamplingMetadata | None = None
    inputs: SamplerInputs | None = None
    texts: Continuations | None = None
    draft_inputs: Int[Tensor, "3 n"] | None = None
    drawn: Packed[SamplerOutput] | None = None
    host: SamplerOutput | None = None
    seen: StepObservations | None = None
    copied: Event | None = None
    drafts: Int[Tensor, "B k"] | None = None
    drafts_copied: Event | None = None
    result: StepResult | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WorkerStepState:
    """One step on its way: its plan, its inputs, its outputs, and the events that guard them. Immutable after submit."""

    plan: SchedulerOutputs
    metadata: SequenceMetadata
    sampling: SamplingMetadata
    before: DeviceOutputs | None  # of the step before
    outputs: DeviceOutputs
    forward_done: Event
    box: StepBox
    observed: StepObservations | None = None
