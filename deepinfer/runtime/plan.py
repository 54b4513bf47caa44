"""The frozen messages between scheduler and worker: what a step shall do, and what came of it. No torch."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.request import Request

NOT_IN_LAST_STEP = -1


class StepKind(Enum):
    PREFILL = "prefill"  # at least one row group longer than a decode step
    DECODE = "decode"
    EMPTY_PREFILL = "empty_prefill"  # this rank has no rows, but its peers run a prefill
    IDLE = "idle"


class ReplaySpan(NamedTuple):
    """How the rows of a prompt differ from plain ones: some only replay, some stop behind the last KV source.

    Attributes:
        end: rows from here on are plain again.
        window_start: first position with window rows; keys before it are invisible.
        write_floor: entries and pending groups of positions below it are stored and stay.
        tail_start: first position that runs through the decoder half.
        tail_window_start: first position with window rows there.
        right_from: from here on everything remembered equals what a full prefill leaves.
    """

    end: int
    window_start: int
    write_floor: int
    tail_start: int
    tail_window_start: int
    right_from: int


class CacheCopy(NamedTuple):
    """A copy between two cache blocks or two slots, from a block to a place in host memory, or back."""

    kind: Literal["block", "slot", "offload", "restore"]
    source: int
    target: int

    @property
    def places(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """What it reads and what it writes."""
        if self.kind == "offload":
            return ("block", self.source), ("host block", self.target)
        if self.kind == "restore":
            return ("host block", self.source), ("block", self.target)
        return (self.kind, self.source), (self.kind, self.target)


class SequencePlan(NamedTuple):
    """The rows of one sequence in a step.

    Attributes:
        seed: of this completion.
        num_output_tokens: tokens produced before this step, in-flight ones included.
        blocks: its cache blocks, covering every position the rows may reach.
        start: position of the first row; with `remap` an upper bound, good for reserving memory only.
        token_ids: tokens to feed; empty if they are on the device: the token drawn last, and drafts.
        q_cap: most rows.
        n_drafts: most rows at their end that feed drafts of the step before.
        remap: row group of the same sequence in the step before, whose sampled token is fed; `NOT_IN_LAST_STEP` if the host
            knows all tokens.
        is_sampling: draw a token after the last row.
        replay: how the rows differ from plain ones; None if they do not.
        context: the tokens before `start`, if the n-gram history lacks them.
        scored: positions whose rows give a log probability to the prompt token behind them.
    """

    request: Request
    seq_id: int
    epoch: int
    slot: int
    blocks: tuple[int, ...]
    start: int
    token_ids: tuple[int, ...]
    q_cap: int
    n_drafts: int
    remap: int
    is_sampling: bool
    seed: int
    num_output_tokens: int
    scored: range = range(0)
    replay: ReplaySpan | None = None
    context: tuple[int, ...] = ()

    @property
    def is_chunk(self) -> bool:
        """Whether known tokens are fed that are more than the last one alone: a prompt or a part of one."""
        return self.q_cap - self.n_drafts > 1 or not self.is_sampling


class GroupShape(NamedTuple):
    """What the fullest rank of a group needs in a decode step; equal on all of them.

    Attributes:
        num_groups: sequences.
        num_blocks: cache blocks of the longest of them.
    """

    num_groups: int
    num_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOutputs:
    """One step.

    Attributes:
        group_shape: what the shape of a decode step follows from where other ranks run it too; None if they need not be alike.
        draft_rows: rows for drafts in all sequences together; if less than they have drafts, the device chooses whose.
        proposes: whether the step drafts tokens for the next one.
        copies_before, copies_after: made before and after the forward.
    """

    step_seq: int
    kind: StepKind
    sequences: tuple[SequencePlan, ...]
    draft_rows: int = 0
    proposes: bool = False
    copies_before: tuple[CacheCopy, ...] = ()
    copies_after: tuple[CacheCopy, ...] = ()
    group_shape: GroupShape | None = None

    @property
    def num_rows(self) -> int:
        return sum(s.q_cap - s.n_drafts for s in self.sequences) + self.draft_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log probabilities around one drawn token: the chosen one with its rank, and the most probable ones."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Observed(NamedTuple):
    """What a step showed of its rows beside the tokens drawn.

    Attributes:
        prompt_scores: of the prompt tokens behind the scored rows.
        hidden_states: float32 [rows kept, D].
        routed_experts: int32 [rows kept, layers, experts of a token].
    """

    prompt_scores: tuple[TokenLogprobs, ...] = ()
    hidden_states: NDArray[np.float32] | None = None
    routed_experts: NDArray[np.int32] | None = None

    @property
    def num_rows(self) -> int:
        """Rows with features."""
        return next((len(rows) for rows in (self.hidden_states, self.routed_experts) if rows is not None), 0)

    def behind(self, count: int) -> "Observed":
        """The features of the rows behind the first `count`, without the prompt's scores."""
        hidden, experts = self.hidden_states, self.routed_experts
        return Observed((), None if hidden is None else hidden[count:], None if experts is None else experts[count:])


class SequenceResult(NamedTuple):
    """What one sequence got from a step.

    Attributes:
        token_ids: the tokens drawn, in order: accepted drafts and one more.
        n_drafts: drafts that were verified.
        survival: what had been estimated for the drafts on offer, verified or not.
        failure: why nothing could be drawn; the sequence ends.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    n_drafts: int = 0
    survival: tuple[float, ...] = ()
    observed: Observed | None = None
    failure: str | None = None

    @property
    def num_accepted(self) -> int:
        """Drafts that stood."""
        return max(len(self.token_ids) - 1, 0)

    def first(self, count: int) -> "SequenceResult":
        """The same, cut to its first tokens."""
        return self._replace(token_ids=self.token_ids[:count], logprobs=None if self.logprobs is None else self.logprobs[:count])


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The host's copy of a step's outcome, row groups in the plan's order."""

    step_seq: int
    sequences: tuple[SequenceResult, ...] = field(default=())
