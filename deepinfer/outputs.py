"""What a user gets back. Names are vLLM's, plus a few research fields."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "error"]
ReplayMode = Literal["full", "exact", "bounded"]
SHOWN_CHARACTERS = 60  # of a text, in a repr


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for. `arguments` is the JSON text it wrote, which need not be valid JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    """An answer of the model, taken apart; may stand in the messages of the next `chat`.

    Attributes:
        reasoning_content: what was written up to `</think>`; None if thinking was off.
    """

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The message as OpenAI's API spells it, with DeepSeek's key for the reasoning."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


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
        replay_mode: how prefixes were recovered: "full" and "exact" change nothing, "bounded" is an approximation.
        accepted_per_step: accepted drafts in each step that gave it tokens, one token of the target besides; None without drafts.
        message: the answer taken apart, if it was asked for with `chat`.
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
    replay_mode: ReplayMode = "full"
    accepted_per_step: list[int] | None = None
    message: ChatMessage | None = None

    def __repr__(self) -> str:
        end = "running" if self.finish_reason is None else f"finish_reason={self.finish_reason!r}"
        return f"CompletionOutput({self.index}, {_cut(self.text)}, {len(self.token_ids)} tokens, {end})"


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """Times in seconds of a monotonic clock, and counts."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_replayed_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """State of one request; `finished` says whether it is final.

    Attributes:
        prompt_logprobs: for each prompt token a map of token id to `Logprob`: the token itself, then the most probable ones in
            its place; None for the first token, which follows nothing.
        num_cached_tokens: prompt tokens whose compressed entries came from the prefix cache, in the first completion.
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

    def __repr__(self) -> str:
        asked = f"{len(self.prompt_token_ids)} prompt tokens"
        if self.prompt is not None:
            asked = f"{_cut(self.prompt)}, {asked}"
        # Of many completions the first stands for all: a notebook shows lists of outputs.
        answers = [repr(completion) for completion in self.outputs[:1]]
        answers += [f"and {len(self.outputs) - 1} more"] * (len(self.outputs) > 1)
        return f"RequestOutput({self.request_id!r}, {asked} -> {', '.join(answers) or 'nothing'})"


def _cut(text: str) -> str:
    """A text for a repr."""
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "...")
