"""What a user gets back. Names are vLLM's, plus a few research fields."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability, and its rank (1 is the most probable) where it is known."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One completion so far. `text`, `token_ids` and `logprobs` always describe the same tokens.

    Attributes:
        text: of all tokens but the one that stopped it; special tokens are left out if the parameters say so.
        logprobs: for each token a map of token id to `Logprob`: the chosen token, then the most probable ones.
        finish_reason: None while running; "stop" for the end-of-sequence token or a stop id, "length" for a limit.
        stop_reason: the stop token id that ended it, if it was not the end-of-sequence token.
        seed: the seed this completion was drawn with, whether or not the request brought one.
        accepted_per_step: accepted drafts in each step that gave it tokens, one token of the target besides; None without drafts.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    seed: int = 0
    accepted_per_step: list[int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """Times in seconds of a monotonic clock, and counts."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """State of one request; `finished` says whether it is final.

    Attributes:
        precision: the rounding points that were used.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    precision: str = "native"
