"""What `SamplingParams` alone cannot check: token ids against the vocabulary, words against the tokenizer, limits of the engine."""

from collections.abc import Iterable

from deepinfer.errors import Rejected
from deepinfer.runtime.request import Request
from deepinfer.sampling_params import SamplingParams, shown
from deepinfer.tokenizer import Tokenizer


def check_sampling(params: SamplingParams, where: str, vocab_size: int, max_logprobs: int) -> None:
    """Raise `Rejected`, naming field and prompt, for ids outside the vocabulary or more log probabilities than the engine gives.

    `max_logprobs`: -1 is no limit.
    """
    fields: dict[str, Iterable[int]] = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "forced_token_ids": params.forced_token_ids,
        "logit_bias": [token for token, _ in params.bias_pairs],
    }
    for name, ids in fields.items():
        outside = [i for i in ids if i >= vocab_size]
        if outside:
            raise Rejected(f"{name} of {where}: {shown(outside)} are outside the vocabulary [0, {vocab_size})")
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and max_logprobs >= 0 and not 0 <= wanted <= max_logprobs:
            raise Rejected(
                f"{name} of {where}: {shown(wanted)} is more than this engine gives, max_logprobs = {max_logprobs}; "
                "-1 as max_logprobs of EngineConfig is no limit"
            )


def tokenize_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences that stand for `bad_words`, as in vLLM.

    Each word counts as the tokens of the word alone, and as those of the word behind a space if they differ in the first token
    and are as many.
    """
    sequences: list[tuple[int, ...]] = []
    for word in params.bad_words:
        alone = tuple(tokenizer.encode(word.lstrip()))
        spaced = tuple(tokenizer.encode(" " + word.lstrip()))
        sequences.append(alone)
        if spaced[0] != alone[0] and len(spaced) == len(alone):
            sequences.append(spaced)
    return tuple(dict.fromkeys(sequences))


def check_something_can_be_drawn(request: Request, where: str, vocab_size: int) -> None:
    """Raise `Rejected`, naming both fields, if what may be drawn is forbidden to the last token by another field.

    Sequences of several bad words can still leave nothing; then the request ends with `NothingToDraw`.
    """
    params = request.params
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    words = {word[0] for word in request.bad_words if len(word) == 1}
    if words.issuperset(allowed):
        raise Rejected(f"allowed_token_ids of {where}: every one of them is a word of bad_words, so that nothing can be drawn")
    if params.min_tokens > len(params.forced_token_ids) and (words | request.stop_token_ids).issuperset(allowed):
        raise Rejected(
            f"min_tokens of {where}: every token that may be drawn is in stop_token_ids, which min_tokens = "
            f"{shown(params.min_tokens)} forbids at first; allowed_token_ids or stop_token_ids must leave another one"
        )
