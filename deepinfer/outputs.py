"""What a user gets back. Names are vLLM's, plus a few research fields."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "error"]


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
        cumulative_logprob: sum over all tokens so far.
        finish_reason: None while running; "stop" for the end-of-sequence token, a stop id or a stop string, "length" for a limit.
        stop_reason: the stop string or the stop token id that ended it; None for the end-of-sequence token.
        seed: the seed this completion was drawn with, whether or not the request brought one.
        hidden_states: float32 [T - 1, D] once finished, if asked for: the state before the final norm at each token of prompt and
            output but the last, which was never fed. Row i is what token i + 1 was drawn from.
        routed_experts: int32 [T - 1, layers, experts of a token] once finished, if asked for, of the same tokens; backbone layers.
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
    hidden_states: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    routed_experts: NDArray[np.int32] | None = field(default=None, compare=False, repr=False)
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
        prompt_logprobs: for each prompt token a map of token id to `Logprob`: the token itself, then the most probable ones in
            its place; None for the first token, which follows nothing.
        precision: the rounding points that were used.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    precision: str = "native"
