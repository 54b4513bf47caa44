"""What a user may ask of sampling; field names and meanings are vLLM's."""

import math
from dataclasses import dataclass, field

from deepinfer.errors import Rejected

MAX_LOGPROBS = 20
MAX_SEED = 2**63


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise Rejected(f"SamplingParams.{name} = {value!r}: {rule}")


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
        seed: noise depends on it, on the token's position and on its id, and on nothing else. None: the engine draws one and
            returns it.
        stop_token_ids: further ids that end the text, like the model's end-of-sequence token; the id stays in `token_ids`.
        ignore_eos: go on after the end-of-sequence token.
        max_tokens: most tokens to produce; None is as many as the model's length allows.
        min_tokens: the end-of-sequence token and stop ids cannot be drawn before this many.
        logprobs: also return the log probability of this many most probable tokens beside the chosen one's. 0: only the
            chosen one's. They are of the model's own distribution, before temperature and filters.
        skip_special_tokens: leave special tokens out of `text`.
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

    def __post_init__(self) -> None:
        _require(_is_int(self.n) and 1 <= self.n <= 1024, "n", self.n, "expected an integer from 1 to 1024")
        for name, low, high in (("temperature", 0.0, math.inf), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            _require(is_number and low <= value <= high, name, value, f"expected a finite number from {low:g} to {high:g}")
        _require(self.top_p > 0, "top_p", self.top_p, "must be above 0")
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "expected an integer; 0 or -1 keeps all tokens")
        _require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed < MAX_SEED),
            "seed",
            self.seed,
            "expected None or 0 .. 2^63-1",
        )
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
