"""Text to token ids and back: a byte-level BPE over the `tokenizers` library.

Reads `tokenizer.json` and, where there is one, `tokenizer_config.json` of a checkpoint folder. Nothing is added to a prompt:
the beginning-of-sentence token is the caller's to write. Source: specification section 15.
"""

import json
import operator
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models

from deepinfer.config import ModelConfig
from deepinfer.errors import Rejected, TokenizerError

# Settings of tokenizer_config.json that would change ids or text and that the release leaves off.
_MUST_BE_OFF = ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "split_special_tokens")


def _byte_alphabet() -> dict[str, int]:
    """The byte behind each character of byte-level BPE: 188 bytes stand for themselves, 68 are moved to U+0100 and up."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(moved)}


BYTE_OF_CHARACTER = _byte_alphabet()


class Tokenizer:
    """The tokenizer of one checkpoint.

    Args:
        backend: becomes this object's own; truncation and padding that its file asks for are switched off.
        where: what error messages call it.

    Raises: TokenizerError if it is no byte-level BPE, or if its ids do not run from 0 without a gap.
    """

    def __init__(self, backend: tokenizers.Tokenizer, where: str = "tokenizer") -> None:
        for part, kind in ((backend.model, models.BPE), (backend.decoder, decoders.ByteLevel)):
            if not isinstance(part, kind):
                found = type(part).__name__
                raise TokenizerError(f"{where}: expected a byte-level BPE, whose model is BPE and decoder ByteLevel; found {found}")
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.where = backend, where
        self._size: int = backend.get_vocab_size(with_added_tokens=True)
        gap = next((i for i in range(self._size) if backend.id_to_token(i) is None), None)
        if gap is not None:
            raise TokenizerError(f"{where}: expected {self._size} tokens with the ids 0 to {self._size - 1}; id {gap} has none")
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Read the tokenizer of a checkpoint folder.

        Raises: TokenizerError if a file is missing, unreadable or asks for something that is not done here.
        """
        file, settings_file = Path(path) / "tokenizer.json", Path(path) / "tokenizer_config.json"
        text = _read(file, "the tokenizer of the checkpoint, in the format of the tokenizers library")
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        # The library raises plain Exception for whatever is wrong with the text.
        except Exception as error:
            raise TokenizerError(f"{file}: expected the format of the tokenizers library; it says: {error}") from error
        if settings_file.exists():
            _check_settings(settings_file)
        return cls(backend, str(file))

    def __len__(self) -> int:
        return self._size

    @property
    def vocab_size(self) -> int:
        """All ids, added tokens included."""
        return self._size

    def check_against(self, config: ModelConfig) -> None:
        """Raise TokenizerError unless there is one token for each row of the model's embedding."""
        if self._size != config.vocab_size:
            raise TokenizerError(
                f"{self.where} has {self._size} tokens, but config.json says vocab_size {config.vocab_size}: "
                "take both files from the same checkpoint"
            )

    def encode(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; no token is added at either end.

        The published encoding turns every added token that stands in the text into its id, whether or not it is flagged special,
        and wherever it came from. With `split_special_tokens` none is: what looks like a control token stays ordinary text, and
        no id of an added token comes out. Texts that touch must be joined before they are encoded, because a token may span them.

        Raises: Rejected if `text` is not a string or is not valid Unicode.
        """
        if not isinstance(text, str):
            raise Rejected(f"text to encode: expected str, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"character {error.start} is U+{ord(text[error.start]):04X}, a lone surrogate"
            raise Rejected(f"text to encode: expected valid Unicode, but {found}") from None
        backend = self._plain_backend if split_special_tokens else self.backend
        return backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. Only tokens flagged special are skipped (`<think>` is not).

        Raises: Rejected if an id is not one of this vocabulary.
        """
        checked = [self.check_id(token_id) for token_id in ids]
        return self.backend.decode(checked, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """The vocabulary's string for an id: for ordinary tokens in the byte alphabet, not the text they stand for."""
        token = self.backend.id_to_token(self.check_id(token_id))
        assert token is not None
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id adds to decoded text; those of all ids together, read as UTF-8, are what `decode` gives."""
        token = self.token(token_id)
        # The library decides by the characters, not by the kind of token: an added token written in the byte alphabet is mapped
        # like an ordinary one.
        if all(character in BYTE_OF_CHARACTER for character in token):
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        return token.encode()

    def check_id(self, token_id: int) -> int:
        """`token_id` as a plain int. Raises Rejected if it is not an id of this vocabulary."""
        try:
            index = operator.index(token_id)
        except TypeError:
            raise Rejected(f"token id {token_id!r}: expected an integer, got {type(token_id).__name__}") from None
        if not 0 <= index < self._size:
            raise Rejected(f"token id {index}: outside the vocabulary, whose ids are 0 to {self._size - 1}")
        return index

    def to_str(self) -> str:
        """The tokenizer as JSON text, for libraries that build their own tables from it."""
        return self.backend.to_str()

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer without its added tokens.

        The library's own switch, `encode_special_tokens`, is not enough: it knows only tokens flagged special, and the release's
        `<think>`, `<｜User｜>` and `｜DSML｜` are not. Some added tokens are vocabulary entries as well; those leave it too, with
        the merges around them, so that no spelling leads to their ids.
        """
        parts = json.loads(self.backend.to_str())
        names = {token["content"] for token in parts["added_tokens"]}
        model = parts["model"]
        model["vocab"] = {token: i for token, i in model["vocab"].items() if token not in names}
        model["merges"] = [pair for pair in model["merges"] if names.isdisjoint((*pair, "".join(pair)))]
        return tokenizers.Tokenizer.from_str(json.dumps(parts | {"added_tokens": []}))


def _read(file: Path, what: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise TokenizerError(f"{file}: expected {what}; found: {found}") from error


def _check_settings(file: Path) -> None:
    text = _read(file, "settings of the tokenizer")
    try:
        settings: Any = json.loads(text)
    except ValueError as error:
        raise TokenizerError(f"{file}: expected a JSON object; {error}") from error
    if not isinstance(settings, dict):
        raise TokenizerError(f"{file}: expected a JSON object, found {type(settings).__name__}")
    for key in _MUST_BE_OFF:
        if settings.get(key):
            raise TokenizerError(f"{file}: {key} = {settings[key]!r}: expected false or nothing; what it asks for is not done here")
