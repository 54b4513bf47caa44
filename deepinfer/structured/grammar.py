"""A compiled grammar, and where one completion stands in it.

A `GrammarState` stands behind the committed tokens of its completion. It moves by `advance` alone; looking ahead along drafts
happens on a copy, so that there is nothing to roll back.

Legend: V tokens of the vocabulary, W bytes of a mask: bit i of byte j is token 8 j + i.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import GrammarError

Mask = NDArray[np.uint8]


def mask_bytes(vocab_size: int) -> int:
    """W: bytes of a mask, in whole 32-bit words."""
    return -(-vocab_size // 32) * 4


def unpack_mask(masks: Mask, vocab_size: int) -> NDArray[np.bool_]:
    """Masks [..., W] as booleans [..., V]."""
    return np.unpackbits(masks, axis=-1, bitorder="little")[..., :vocab_size].astype(np.bool_)


class Grammar:
    """What a text may be, for one tokenizer; shared by all completions that ask for it. Immutable.

    Attributes:
        fewest_tokens: no text takes fewer tokens; a lower bound (see `deepinfer.structured.shortest`).
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_token_id: int, fewest_tokens: int = 0) -> None:
        self._matcher, self.vocab_size, self.eos_token_id = matcher, vocab_size, eos_token_id
        self.fewest_tokens = fewest_tokens
        # In the middle of reasoning everything may be drawn but the end of the text, which would leave out the answer.
        self.only_eos = np.zeros(mask_bytes(vocab_size), dtype=np.uint8)
        self.only_eos[eos_token_id // 8] = 1 << eos_token_id % 8
        self.all_but_eos = ~self.only_eos

    def start(self, reasoning_end: tuple[int, ...] = ()) -> "GrammarState":
        """The state in front of the first token of a completion."""
        return GrammarState(self, reasoning_end)

    def at_start(self) -> Any:
        """A matcher of llguidance in front of the text."""
        return self._matcher.deep_copy()


class _Place(NamedTuple):
    """In the reasoning: no matcher, and the newest tokens, in which the end of the reasoning may have begun. Later: a matcher."""

    matcher: Any
    newest: tuple[int, ...]


class GrammarState:
    """Where one completion stands; the scheduler is its one writer."""

    def __init__(self, grammar: Grammar, reasoning_end: tuple[int, ...] = ()) -> None:
        self.grammar, self.reasoning_end = grammar, reasoning_end
        self._place = _Place(None if reasoning_end else grammar.at_start(), ())
        self._mask: Mask | None = None  # of the next token, once somebody has asked

    @property
    def is_reasoning(self) -> bool:
        """Whether the marker after which the form applies has not come yet."""
        return self._place.matcher is None

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far has the form; only then may end-of-sequence be drawn."""
        return not self.is_reasoning and bool(self._place.matcher.is_accepting())

    @property
    def is_complete(self) -> bool:
        """Whether the text has the form and nothing may follow it."""
        return self.is_accepting and bool((self._next_mask() == self.grammar.only_eos).all())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Move behind committed tokens. Raises GrammarError for one that is not legal; the state is then of no more use."""
        for token in token_ids:
            place = self._after(self._place, token)
            if place is None:
                raise GrammarError(f"token {token} was committed, but the grammar does not allow it after the text so far")
            self._place, self._mask = place, None

    def masks(self, draft_ids: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Legal tokens, bool [1 + drafts, V]: after the committed tokens, and after each draft.

        Rows behind a draft that is not legal allow everything: that draft is rejected, and they with it.
        """
        rows = np.empty((1 + len(draft_ids), mask_bytes(self.grammar.vocab_size)), dtype=np.uint8)
        self.write_masks(rows, draft_ids)
        return unpack_mask(rows, self.grammar.vocab_size)

    def write_masks(self, rows: Mask, draft_ids: Sequence[int] = ()) -> None:
        """`masks` into `rows` [1 + drafts, W]."""
        rows[0] = self._next_mask()
        place: _Place | None = self._place
        if draft_ids and place is not None and place.matcher is not None:
            place = _Place(place.matcher.deep_copy(), ())
        for row, token in zip(rows[1:], draft_ids, strict=True):
            place = None if place is None or token == self.grammar.eos_token_id else self._after(place, token)
            row[:] = 0xFF if place is None else self._mask_at(place)

    def _next_mask(self) -> Mask:
        if self._mask is None:
            self._mask = self._mask_at(self._place)
        return self._mask

    def _after(self, place: _Place, token: int) -> _Place | None:
        """The place behind a token, None if the token is not legal. Moves the place's matcher."""
        if place.matcher is not None:
            return place if place.matcher.consume_token(token) else None
        newest = (*place.newest, token)[-len(self.reasoning_end) :]
        return _Place(self.grammar.at_start() if newest == self.reasoning_end else None, newest)

    def _mask_at(self, place: _Place) -> Mask:
        if place.matcher is None:
            return self.grammar.all_but_eos
        mask = np.empty_like(self.grammar.only_eos)
        place.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if place.matcher.is_error():
            # Its limits are reached. Where nothing can be drawn a request ends with an error of its own.
            mask[:] = 0
        return mask
