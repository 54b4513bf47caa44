"""What a user may ask of sampling; field names and meanings are vLLM's, but for a few fields of research.

Checks that need the model or the tokenizer are in `deepinfer.sampling_checks`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

from deepinfer.errors import Rejected
from deepinfer.structured_outputs import StructuredOutputs

MAX_COMPLETIONS = 1024
MAX_TEMPERATURE = 1e6  # well within float32, in which logits are divided by it
MAX_TOP_K = 2**31 - 1
MAX_BIAS = 100.0  # as in OpenAI's API, where it forces or bans a token
MAX_PENALTY = 2.0
MAX_REPETITION = 1e3  # far from where float32 logits overflow
SEED_LIMIT = 2**63  # seeds are int64 on the device


def shown(value: object) -> str:
    """A value for a message: not longer than a line, and never a second error."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or an object whose repr fails
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 100 else f"{text[:100]}..."


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens of one request are drawn, when it ends, and what comes back beside the text.

    A token goes through: `allowed_token_ids`, `bad_words`, `logit_bias`, repetition, frequency and presence penalty, temperature,
    `min_p`, `top_k`, `top_p`. Lists may be given where tuples are kept.

    Attributes:
        n: completions of the same prompt; completion i is drawn with seed + i.
        temperature: 0 is greedy, the first largest logit.
        top_k: keep the k most probable tokens; 0 or -1 keeps all. Equal ones go to the lower id.
        top_p: then keep the most probable tokens whose mass reaches p.
        min_p: keep tokens at least this fraction as probable as the most probable one.
        presence_penalty: subtracted from the logit of every token that the output holds.
        frequency_penalty: subtracted from a token's logit once for each time that the output holds it.
        repetition_penalty: divides positive and multiplies negative logits of tokens that prompt or output hold.
        logit_bias: added to the logits of some token ids; kept as pairs in ascending order of the ids.
        bad_words: words that the output shall not hold, each as the tokens of the word alone, and of the word behind a space if
            that changes its first token only: the last token of the word is not drawn after the others.
        allowed_token_ids: the only tokens that may be drawn; None: all.
        seed: noise depends on it, on the token's position and on its id, and on nothing else. None: one follows from the
            engine's seed and the request's number, and is returned.
        stop: strings that end the text, wherever token boundaries lie. The string that is complete first counts; of those, the
            longest. It is left out of `text`; `token_ids` and `logprobs` keep its tokens.
        stop_token_ids: further ids that end the text, like the model's end-of-sequence token: the id stays in `token_ids` and
            has no place in `text`.
        include_stop_str_in_output: keep in `text` what ended it, a stop string or a stop token.
        ignore_eos: go on after the end-of-sequence token.
        max_tokens: most tokens to produce; None is as many as the model's length allows.
        min_tokens: the end-of-sequence token and stop ids cannot be drawn, and stop strings do not count, before this many.
        forced_token_ids: the output begins with these tokens, whatever the model would draw; nothing ends the text before the
            last of them. With `logprobs` they are scored as a continuation (teacher forcing). Generation goes on behind them up to
            `max_tokens`.
        logprobs: also return the log probability of this many most probable tokens beside the chosen one's. 0: only the
            chosen one's; -1: of the whole vocabulary. They are of the model's own distribution, before every field above.
        prompt_logprobs: the same for the tokens of the prompt.
        skip_special_tokens: leave special tokens out of `text`.
        structured_outputs: the form that the text must have; a `StructuredOutputs` or a dictionary of its fields. The text ends
            as soon as nothing can follow it, with `finish_reason` "stop". Stop strings and stop ids end it too, complete or not.
        return_hidden_states: return the hidden state, before the final norm, of every token that the model was fed.
        return_routed_experts: return the experts that every layer chose for every token that the model was fed.

    Raises: Rejected for a value that cannot be honoured, naming the field, or the two fields that do not go together.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    forced_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    return_hidden_states: bool = False
    return_routed_experts: bool = False

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        return f"SamplingParams({', '.join(f'{name}={shown(getattr(self, name))}' for name in changed_fields(self))})"

    def __post_init__(self) -> None:
        for name in _LISTS:
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        object.__setattr__(self, "structured_outputs", _as_form(self.structured_outputs))
        for name, (is_valid, rule) in _RULES.items():
            _require(is_valid(getattr(self, name)), name, getattr(self, name), rule)
        for name, is_wrong, rule in _CONFLICTS:
            _require(not is_wrong(self), name, getattr(self, name), rule)

    @property
    def first_free_stop(self) -> int:
        """Output tokens before the first that may end the text by itself."""
        return max(self.min_tokens, len(self.forced_token_ids) - 1)

    @property
    def returns_features(self) -> bool:
        """Whether something of every fed token comes back."""
        return self.return_hidden_states or self.return_routed_experts

    @property
    def needs_every_row(self) -> bool:
        """Whether no prompt token may be skipped because its cache rows are known."""
        return self.prompt_logprobs is not None or self.returns_features

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @property
    def form(self) -> StructuredOutputs | None:
        """`structured_outputs` as it is kept."""
        return cast(StructuredOutputs | None, self.structured_outputs)

    @property
    def has_penalty(self) -> bool:
        """Whether earlier tokens change the logits of later ones."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise Rejected(f"SamplingParams.{name} = {shown(value)}: {rule}")


# Fields that may come as lists. A tuple cannot change after it was checked, and can be hashed.
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "forced_token_ids", "logit_bias")


def _as_tuple(name: str, value: Any) -> Any:
    """The value as a tuple if it is of a kind that the field takes; anything else stays, to be refused."""
    if value is None:
        return None if name == "allowed_token_ids" else ()
    if name == "stop" and isinstance(value, str):
        return (value,)
    if name != "logit_bias":
        return tuple(value) if isinstance(value, list) else value
    if isinstance(value, Mapping) and all(_is_int(key) for key in value):
        return tuple(sorted(value.items()))
    return value


def _as_form(value: Any) -> Any:
    """A dictionary as the `StructuredOutputs` that it describes; anything else stays, to be refused."""
    if not isinstance(value, Mapping):
        return value
    known = StructuredOutputs.__dataclass_fields__
    _require(set(value) <= set(known), "structured_outputs", value, f"expected fields of {', '.join(known)}")
    try:
        return StructuredOutputs(**value)
    except Rejected as error:
        raise Rejected(f"SamplingParams.structured_outputs = {shown(value)}: {error}") from None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    """Whether the value is a text with at least one character and without lone surrogates."""
    if not isinstance(value, str) or not value:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _is_word(value: object) -> bool:
    return _is_text(value) and not str(value).isspace()


def _is_token_id(value: object) -> bool:
    return _is_int(value) and value >= 0  # type: ignore[operator]


def _is_bias(value: object) -> bool:
    if not (isinstance(value, tuple) and len(value) == 2 and _is_token_id(value[0]) and _is_number(value[1])):
        return False
    return -MAX_BIAS <= value[1] <= MAX_BIAS


def _tuple_of(is_valid: Callable[[object], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and all(map(is_valid, value))


class Rule(NamedTuple):
    """What one field must be."""

    is_valid: Callable[[Any], bool]
    rule: str


class Conflict(NamedTuple):
    """Fields that do not go together; each of them alone is valid."""

    name: str
    is_wrong: Callable[[SamplingParams], bool]
    rule: str


def _integer(low: int, high: int | None = None, hint: str = "") -> Rule:
    span = f"of at least {low}" if high is None else f"from {low} to {high}"
    is_valid = lambda value: _is_int(value) and low <= value and (high is None or value <= high)  # noqa: E731
    return Rule(is_valid, f"expected an integer {span}{hint}")


def _number(low: float, high: float) -> Rule:
    return Rule(lambda value: _is_number(value) and low <= value <= high, f"expected a number from {low:g} to {high:g}")


def _above_zero(high: float) -> Rule:
    return Rule(lambda value: _is_number(value) and 0 < value <= high, f"expected a number above 0, up to {high:g}")


def _or_none(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.is_valid(value), rule.rule.replace("expected", "expected None or", 1))


_FLAG = Rule(_is_flag, "expected True or False")
_TOKEN_IDS = Rule(_tuple_of(_is_token_id), "expected a list of token ids")

_RULES: dict[str, Rule] = {
    "n": _integer(1, MAX_COMPLETIONS),
    "temperature": _number(0, MAX_TEMPERATURE),
    "top_p": _above_zero(1),
    "top_k": _integer(-1, MAX_TOP_K, "; 0 or -1 keeps all tokens"),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": _number(1 / MAX_REPETITION, MAX_REPETITION),
    "logit_bias": Rule(_tuple_of(_is_bias), f"expected token ids with a bias from {-MAX_BIAS:g} to {MAX_BIAS:g} each"),
    "bad_words": Rule(_tuple_of(_is_word), "expected a list of words, each of valid Unicode and more than spaces"),
    "allowed_token_ids": _or_none(Rule(lambda ids: _TOKEN_IDS.is_valid(ids) and len(ids) > 0, "expected token ids, at least one")),
    "seed": _or_none(_integer(0, SEED_LIMIT - 1)),
    "stop": Rule(_tuple_of(_is_text), "expected a text or a list of texts, each of valid Unicode and not empty"),
    "stop_token_ids": _TOKEN_IDS,
    "include_stop_str_in_output": _FLAG,
    "ignore_eos": _FLAG,
    "max_tokens": _or_none(_integer(1)),
    "min_tokens": _integer(0),
    "forced_token_ids": _TOKEN_IDS,
    "logprobs": _or_none(_integer(-1, None, "; -1 is the whole vocabulary")),
    "prompt_logprobs": _or_none(_integer(-1, None, "; -1 is the whole vocabulary")),
    "skip_special_tokens": _FLAG,
    "structured_outputs": Rule(
        lambda value: value is None or isinstance(value, StructuredOutputs),
        "expected None, a StructuredOutputs or a dictionary of its fields",
    ),
    "return_hidden_states": _FLAG,
    "return_routed_experts": _FLAG,
}


def _is_structured(params: SamplingParams) -> bool:
    return params.structured_outputs is not None


_CONFLICTS = (
    Conflict("seed", lambda p: p.seed is not None and p.seed + p.n > SEED_LIMIT, "seed + n must be at most 2^63"),
    Conflict("min_tokens", lambda p: p.max_tokens is not None and p.min_tokens > p.max_tokens, "exceeds max_tokens"),
    Conflict(
        "forced_token_ids",
        lambda p: p.max_tokens is not None and len(p.forced_token_ids) > p.max_tokens,
        "more tokens than max_tokens; to score a continuation alone, set max_tokens to its length",
    ),
    Conflict(
        "forced_token_ids",
        lambda p: bool(p.forced_token_ids) and p.allowed_token_ids is not None,
        "does not go with allowed_token_ids: a forced token is not chosen from any",
    ),
    Conflict(
        "forced_token_ids",
        lambda p: bool(p.forced_token_ids and p.bad_words),
        "does not go with bad_words: a forced token is not chosen from any",
    ),
    Conflict(
        "logit_bias",
        lambda p: len({token for token, _ in p.bias_pairs}) < len(p.bias_pairs),
        "expected each token id once",
    ),
    # Each of these could leave a structured answer without a token to draw, or go on behind its end.
    Conflict("structured_outputs", lambda p: _is_structured(p) and p.ignore_eos, "does not go with ignore_eos"),
    Conflict("structured_outputs", lambda p: _is_structured(p) and p.min_tokens > 0, "does not go with min_tokens"),
    Conflict("structured_outputs", lambda p: _is_structured(p) and bool(p.bad_words), "does not go with bad_words"),
    Conflict("structured_outputs", lambda p: _is_structured(p) and bool(p.forced_token_ids), "does not go with forced_token_ids"),
    Conflict(
        "structured_outputs",
        lambda p: _is_structured(p) and p.allowed_token_ids is not None,
        "does not go with allowed_token_ids",
    ),
)


def changed_fields(params: SamplingParams) -> list[str]:
    """Names of the fields that differ from their defaults."""
    defaults = SamplingParams()
    return [f.name for f in fields(params) if getattr(params, f.name) != getattr(defaults, f.name)]
