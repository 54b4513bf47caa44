"""What may be handed in as a prompt, and how it becomes token ids."""

from collections.abc import Sequence
from typing import TypedDict

from deepinfer.config import ModelConfig
from deepinfer.errors import Rejected
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
        text, token_ids = prompt, tokenizer.encode(prompt)
    else:
        given: object = prompt
        if isinstance(prompt, dict):
            if set(prompt) != {"prompt_token_ids"}:
                raise Rejected(
                    f"{where}: a dictionary must hold 'prompt_token_ids' alone, got {sorted(prompt)}; images are not supported"
                )
            given = prompt["prompt_token_ids"]
        if not isinstance(given, Sequence) or not all(isinstance(i, int) and not isinstance(i, bool) for i in given):
            raise Rejected(f"{where}: expected a text or a list of token ids, got {type(given).__name__}")
        token_ids = list(given)
    if not token_ids:
        raise Rejected(f"{where} is empty: at least one token is needed to predict the next")
    outside = [i for i in token_ids if not 0 <= i < config.vocab_size]
    if outside:
        raise Rejected(f"{where}: token ids {outside[:5]} are outside the vocabulary [0, {config.vocab_size})")
    if config.image_token_id is not None and config.image_token_id in token_ids:
        raise Rejected(f"{where} holds the image token {config.image_token_id}: images are not supported, this engine is text only")
    return text, token_ids
