"""What a user may ask of sampling; field names and meanings are vLLM's."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepinfer.errors import Rejected
from deepinfer.structured_outputs import StructuredOutputs

MAX_COMPLETIONS = 1024
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 1e6  # well within float32, in which logits are divided by it
MAX_TOP_K = 2**31 - 1
SEED_LIMIT = 2**63  # seeds are int64 on the device


def shown(value: object) -> str:
    """A value for a message: not longer than a line, and never a second error."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or an object whose repr fails
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 100 else f"{text[:100]}..."


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise Rejected(f"SamplingParams.{name} = {shown(value)}: {rule}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens of one request are drawn, and when it ends.

    Attributes:
        n: completions of the same prompt; completion i is drawn with seed + i.
        temperature: 0 is greedy, the first largest logit.
        top_k: keep the k most probable tokens; 0 or -1 keeps all. Equal ones go to the lower id.
        top_p: then keep the most probable tokens whose mass reaches p.
        min_p: keep tokens at least this fraction as probable as the most probable one.
        seed: noise depends on it, on the token's position and on its id, and on nothing else. None: one follows from the
            engine's seed and the request's number, and is returned.
        stop_token_ids: further ids that end the text, like the model's end-of-sequence token: the id stays in `token_ids` and
            has no place in `text`.
        ignore_eos: go on after the end-of-sequence token.
        max_tokens: most tokens to produce; None is as many as the model's length allows.
        min_tokens: the end-of-sequence token and stop ids cannot be drawn before this many.
        logprobs: also return the log probability of this many most probable tokens beside the chosen one's. 0: only the
            chosen one's. They are of the model's own distribution, before temperature and filters.
        skip_special_tokens: leave special tokens out of `text`.
        structured_outputs: the form that the text must have; a `StructuredOutputs` or a dictionary of its fields. The text ends
            as soon as nothing can follow it, with `finish_reason` "stop". Stop ids end it where they are drawn, complete or not.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = field(default=())
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        valid = _is_int(self.n) and 1 <= self.n <= MAX_COMPLETIONS
        _require(valid, "n", self.n, f"expected an integer from 1 to {MAX_COMPLETIONS}")
        for name, high in (("temperature", MAX_TEMPERATURE), ("top_p", 1.0), ("min_p", 1.0)):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            _require(is_number and 0 <= value <= high, name, value, f"expected a number from 0 to {high:g}")
        _require(self.top_p > 0, "top_p", self.top_p, "must be above 0")
        valid = _is_int(self.top_k) and -1 <= self.top_k <= MAX_TOP_K
        _require(valid, "top_k", self.top_k, f"expected an integer up to {MAX_TOP_K}; 0 or -1 keeps all tokens")
        valid = self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= SEED_LIMIT - self.n)
        _require(valid, "seed", self.seed, "expected None or an integer of at least 0, with seed + n at most 2^63")
        if isinstance(self.stop_token_ids, list):
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        valid = isinstance(self.stop_token_ids, tuple) and all(_is_int(i) and i >= 0 for i in self.stop_token_ids)
        _require(valid, "stop_token_ids", self.stop_token_ids, "expected a list of token ids")
        for name in ("ignore_eos", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "expected True or False")
        valid = self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1)
        _require(valid, "max_tokens", self.max_tokens, "expected None or an integer of at least 1")
        _require(
            _is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", self.min_tokens, "expected an integer of at least 0"
        )
        _require(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "exceeds max_tokens")
        valid = self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS)
        _require(valid, "logprobs", self.logprobs, f"expected None or an integer from 0 to {MAX_LOGPROBS}")
        _check_structured(self)


def _check_structured(params: SamplingParams) -> None:
    """Fields that could leave a structured answer without a token to draw, or without an end."""
    form = params.structured_outputs
    if isinstance(form, Mapping):
        known = StructuredOutputs.__dataclass_fields__
        _require(set(form) <= set(known), "structured_outputs", form, f"expected fields of {', '.join(known)}")
        try:
            form = StructuredOutputs(**form)
        except Rejected as error:
            raise Rejected(f"SamplingParams.structured_outputs = {shown(form)}: {error}") from None
        object.__setattr__(params, "structured_outputs", form)
    if form is None:
        return
    valid = isinstance(form, StructuredOutputs)
    _require(valid, "structured_outputs", form, "expected a StructuredOutputs or a dictionary of its fields")
    for name, is_set in (("ignore_eos", params.ignore_eos), ("min_tokens", params.min_tokens > 0)):
        rule = "cannot go with structured_outputs, which decide where the text may end"
        _require(not is_set, name, getattr(params, name), rule)
