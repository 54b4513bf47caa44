"""The frozen messages between scheduler and worker: what a step shall do, and what came of it. No torch."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from deepinfer.runtime.request import Request

NOT_IN_LAST_STEP = -1


class StepKind(Enum):
    PREFILL = "prefill"  # at least one row group longer than a decode step
    DECODE = "decode"
    EMPTY_PREFILL = "empty_prefill"  # this rank has no rows, but its peers run a prefill
    IDLE = "idle"


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

    @property
    def is_chunk(self) -> bool:
        """Whether known tokens are fed that are more than the last one alone: a prompt or a part of one."""
        return self.q_cap - self.n_drafts > 1 or not self.is_sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOutputs:
    """One step.

    Attributes:
        draft_rows: rows for drafts in all sequences together; if less than they have drafts, the device chooses whose.
        proposes: whether the step drafts tokens for the next one.
    """

    step_seq: int
    kind: StepKind
    sequences: tuple[SequencePlan, ...]
    draft_rows: int = 0
    proposes: bool = False

    @property
    def num_rows(self) -> int:
        return sum(s.q_cap - s.n_drafts for s in self.sequences) + self.draft_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log probabilities around one drawn token: the chosen one with its rank, and the most probable ones."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class SequenceResult(NamedTuple):
    """What one sequence got from a step.

    Attributes:
        token_ids: the tokens drawn, in order: accepted drafts and one more.
        n_drafts: drafts that were verified.
        survival: what had been estimated for the drafts on offer, verified or not.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    n_drafts: int = 0
    survival: tuple[float, ...] = ()

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
