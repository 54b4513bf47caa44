"""What may be handed in as a prompt, and how it becomes token ids."""

from collections.abc import Sequence
from typing import TypedDict

from deepinfer.config import ModelConfig
from deepinfer.errors import Rejected
from deepinfer.sampling_params import shown
from deepinfer.tokenizer import Tokenizer


class TokensPrompt(TypedDict):
    """A prompt that is already tokenised."""

    prompt_token_ids: list[int]


Prompt = str | Sequence[int] | TokensPrompt


def to_token_ids(prompt: Prompt, index: int, tokenizer: Tokenizer, config: ModelConfig) -> tuple[str | None, list[int]]:
    """The prompt's text, if it came as one, and its token ids.

    Raises: Rejected, naming the prompt by its index, for a wrong type, an empty prompt, ids outside the vocabulary, or images.
    """
    where = f"prompt {index}"
    text: str | None = None
    if isinstance(prompt, str):
        text, token_ids = prompt, _encode(prompt, where, tokenizer)
    else:
        given: object = prompt
        if isinstance(prompt, dict):
            if set(prompt) != {"prompt_token_ids"}:
                keys = shown(list(prompt))
                raise Rejected(
                    f"{where}: expected a dictionary with 'prompt_token_ids' alone, got {keys}; images are not supported"
                )
            given = prompt["prompt_token_ids"]
        # Bytes are a sequence of integers too, but nobody means token ids by them.
        if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray | memoryview):
            raise Rejected(f"{where}: expected a text or a list of token ids, got {type(given).__name__}")
        strangers = [i for i in given if not isinstance(i, int) or isinstance(i, bool)]
        if strangers:
            raise Rejected(f"{where}: expected a text or a list of token ids, got {shown(strangers[0])} in the list")
        token_ids = list(given)
    if not token_ids:
        raise Rejected(f"{where} is empty: at least one token is needed to predict the next")
    if config.image_token_id is not None and config.image_token_id in token_ids:
        raise Rejected(f"{where} holds the image token {config.image_token_id}: images are not supported, this engine is text only")
    outside = [i for i in token_ids if not 0 <= i < config.vocab_size]
    if outside:
        raise Rejected(f"{where}: token ids {shown(outside[:5])} are outside the vocabulary [0, {config.vocab_size})")
    return text, token_ids


def _encode(text: str, where: str, tokenizer: Tokenizer) -> list[int]:
    try:
        return tokenizer.encode(text)
    except Rejected as error:
        raise Rejected(f"{where}: {error}") from None
