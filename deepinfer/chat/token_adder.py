"""`TokenAdder`: the token ids of a conversation that grows, each piece of it tokenised once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepinfer.chat.recipe import Segment
from deepinfer.errors import Rejected, TokenizerError
from deepinfer.tokenizer import Tokenizer

# Every conversation needs the first six; the others are looked for when they come.
CHAT_MARKERS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)


@dataclass(slots=True)
class _Piece:
    segment: Segment
    token_ids: list[int]


class TokenAdder:
    """Turns segments and generated ids into the ids of one prompt.

    A control token is the id of that name. Everything else is tokenised without the tokenizer's added tokens, so that
    what a user types never becomes a control token. Text between two control tokens is tokenised in one go, and a control token
    is never part of another token: pieces that stand need not be looked at again.

    Raises: TokenizerError if the tokenizer lacks the markers of a conversation.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: list[_Piece] = []
        for marker in CHAT_MARKERS:
            self._marker_id(marker)

    @property
    def token_ids(self) -> list[int]:
        """All ids so far."""
        return [token_id for piece in self._pieces for token_id in piece.token_ids]

    def extend(self, part: Segment | Sequence[int]) -> list[int]:
        """Add a segment, or ids that the model wrote, and return what came in addition.

        Raises: Rejected for ids outside the vocabulary, and for a text behind a text: a token might span both.
        """
        if not isinstance(part, Segment):
            return self._extend_ids(part)
        if part.is_special:
            ids = [self._marker_id(part.text)]
        elif self._ends_with_text:
            raise Rejected("a text behind a text: join them to one segment, because a token may span both")
        else:
            ids = self._tokenizer.encode(part.text, split_special_tokens=True)
        self._pieces.append(_Piece(part, ids))
        return ids

    def follow(self, segments: Iterable[Segment]) -> int:
        """Become the prompt of these segments; returns how many ids at the beginning stand as they were.

        Pieces with the same text keep their ids, also ids that the model wrote and the tokenizer would have chosen otherwise.
        """
        wanted = list(segments)
        kept = 0
        while kept < min(len(wanted), len(self._pieces)) and self._pieces[kept].segment == wanted[kept]:
            kept += 1
        del self._pieces[kept:]
        count = len(self.token_ids)
        for segment in wanted[kept:]:
            self.extend(segment)
        return count

    @property
    def _ends_with_text(self) -> bool:
        return bool(self._pieces) and not self._pieces[-1].segment.is_special

    def _extend_ids(self, ids: Sequence[int]) -> list[int]:
        checked = [self._tokenizer.check_id(token_id) for token_id in ids]
        first_touched = len(self._pieces) - self._ends_with_text
        for token_id in checked:
            if token_id in self._tokenizer.added_ids:
                self._pieces.append(_Piece(Segment(self._tokenizer.token(token_id), True), [token_id]))
            elif self._ends_with_text:
                self._pieces[-1].token_ids.append(token_id)
            else:
                self._pieces.append(_Piece(Segment("", False), [token_id]))
        for piece in self._pieces[first_touched:]:
            if not piece.segment.is_special:
                piece.segment = Segment(self._tokenizer.decode(piece.token_ids), False)
        return checked

    def _marker_id(self, marker: str) -> int:
        token_id = self._tokenizer.backend.token_to_id(marker)
        if token_id is None or token_id not in self._tokenizer.added_ids:
            where = self._tokenizer.where
            raise TokenizerError(f"{where} has no control token {marker!r}: its model is not one for conversations; use generate()")
        return int(token_id)
