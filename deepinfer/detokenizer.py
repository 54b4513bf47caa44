"""Text of a growing token sequence, piece by piece.

Byte-level tokens are exact byte strings, so that decoding them as they come needs no look at earlier tokens: what is kept between
two tokens is at most three bytes, the beginning of an unfinished UTF-8 character.
"""

import codecs

from deepinfer.tokenizer import Tokenizer

# U+D800 to U+DFFF would be coded as ED A0 80 to ED BF BF.
_SURROGATE_LEAD, _FIRST_SURROGATE_BYTE = 0xED, 0xA0


class Detokenizer:
    """Turns the token ids of one sequence into text as they arrive.

    The pieces of `push` and of a last `finish` join to exactly `tokenizer.decode(all ids)`. A piece never ends within a
    character, and U+FFFD is given only for bytes that no further token can complete.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        # Both this and the library's decoder replace each maximal invalid run by one U+FFFD, as Unicode recommends.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def is_within_character(self) -> bool:
        """Whether bytes are held back that the next token may complete."""
        return bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        """The text that became complete with this token, often "" while a character is unfinished.

        Raises: Rejected if `token_id` is not one of the vocabulary; the sequence is then as before.
        """
        # A skipped token leaves the unfinished bytes as they are: the tokens around it may still form one character.
        if self._tokenizer.check_id(token_id) in self._skipped:
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        held, _ = self._decoder.getstate()
        # Python's decoder keeps the first two bytes of a UTF-8 coded surrogate, which no third byte makes valid.
        if len(held) == 2 and held[0] == _SURROGATE_LEAD and held[1] >= _FIRST_SURROGATE_BYTE:
            text += self._decoder.decode(b"", final=True)
        return text

    def finish(self) -> str:
        """What is left at the end of the sequence: U+FFFD if it stopped within a character, else "". Starts a new sequence."""
        return self._decoder.decode(b"", final=True)
