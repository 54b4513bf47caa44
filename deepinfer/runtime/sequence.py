"""The running state of one completion. The scheduler writes it, everybody else reads.

Every number has one owner. `confirmed` counts the tokens whose cache rows are kept and whose successors are known on the host;
what is on its way is in `tickets`, one for each step that has been planned and not applied. No other length is stored.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Self

from deepinfer.detokenizer import Detokenizer
from deepinfer.outputs import FinishReason
from deepinfer.runtime.plan import Observed, ReplaySpan, TokenLogprobs
from deepinfer.runtime.prefix_cache import Ending
from deepinfer.runtime.request import Request
from deepinfer.runtime.stop_strings import StopStrings
from deepinfer.structured.grammar import GrammarState
from deepinfer.tokenizer import Tokenizer


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Ticket(NamedTuple):
    """One planned step of one sequence; popped exactly once, in order, also when the sequence is gone by then.

    Attributes:
        q_cap: rows scheduled, in tokens.
        n_drafts: rows at their end that hold drafts and may be rejected.
        is_sampling: whether the step draws at least one token for this sequence.
    """

    step_seq: int
    epoch: int
    q_cap: int
    n_drafts: int
    is_sampling: bool


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion of a request.

    Attributes:
        token_ids: prompt and output tokens known on the host.
        confirmed: tokens whose cache rows are valid; a prefix of `token_ids`.
        epoch: raised by preemption, abort and finish; results of an older epoch are stale.
        slot: place of its window rings, while running.
        blocks: cache blocks in position order, while running.
        grammar: stands behind the output tokens, which preemption keeps; None without structured output.
        prompt_scores: log probabilities of the prompt's tokens from the second on, as far as they are known.
        observed: hidden states and experts of the first `num_observed` tokens, in pieces.
        stop_strings: finds the request's stop strings, if it has any, in the output so far.
        survival: estimates for the drafts that were last verified: how far its drafts tend to stand.
        digests: names of its full blocks in the prefix cache, as far as they were needed.
        ending: the stored prefix that it is about to be started from.
        replay: how the rows of its prompt differ from plain ones.
        save_points: positions in its prompt at whose end the rings shall be kept.
        num_cached_tokens: tokens whose entries came from the cache when it first started.
        num_replayed_tokens: of those, and of later starts, the ones that ran again to fill the rings.
    """

    request: Request
    index: int
    seq_id: int
    token_ids: list[int]
    confirmed: int = 0
    tickets: deque[Ticket] = field(default_factory=deque)
    epoch: int = 0
    status: Status = Status.WAITING
    slot: int | None = None
    blocks: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    grammar: GrammarState | None = None
    survival: tuple[float, ...] = ()
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)
    observed: list[Observed] = field(default_factory=list)
    num_observed: int = 0
    stop_strings: StopStrings | None = None
    digests: list[bytes] = field(default_factory=list)
    ending: Ending | None = None
    replay: ReplaySpan | None = None
    save_points: tuple[int, ...] = ()
    num_cached_tokens: int = 0
    num_replayed_tokens: int = 0

    @classmethod
    def open(cls, request: Request, index: int, seq_id: int, tokenizer: Tokenizer) -> Self:
        """Completion `index` of a request, with no output yet."""
        params, strings = request.params, None
        if params.stop:
            detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
            strings = StopStrings(params.stop, detokenizer, include=params.include_stop_str_in_output)
        return cls(request, index, seq_id, list(request.prompt_token_ids), stop_strings=strings)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def last_output_tokens(self, count: int) -> list[int]:
        """Up to `count` output tokens from the end."""
        return self.token_ids[max(self.num_prompt_tokens, len(self.token_ids) - count) :]

    @property
    def total_inflight_tokens(self) -> int:
        """Rows planned for the current epoch and not applied yet, in tokens."""
        total = 0
        for ticket in self.tickets:
            if ticket.epoch == self.epoch:
                total += ticket.q_cap
        return total

    @property
    def num_sampling_inflight(self) -> int:
        """Planned steps of the current epoch that will draw a token."""
        total = 0
        for ticket in self.tickets:
            if ticket.epoch == self.epoch:
                total += ticket.is_sampling
        return total

    @property
    def next_position(self) -> int:
        """Position of the next row to plan; an upper bound while drafts are in flight."""
        return self.confirmed + self.total_inflight_tokens

    @property
    def seed(self) -> int:
        """Seed of this completion: the request's, one higher for each further completion."""
        return self.request.seed + self.index
