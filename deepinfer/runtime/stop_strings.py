"""Stop strings: found in the text of one sequence as its tokens come, wherever the boundaries of tokens and characters lie.

The scheduler asks for every token when it applies a step, so that a sequence ends at the very token that completes a stop string,
also in the middle of an accepted run. No torch.
"""

from collections.abc import Sequence

from deepinfer.detokenizer import Detokenizer


class StopStrings:
    """The text of one sequence, cut at the first stop string.

    Attributes:
        text: everything so far; without the stop string, or with it if `include`, once one has been found.
    """

    def __init__(self, stop: Sequence[str], detokenizer: Detokenizer, *, include: bool) -> None:
        self._stop, self._detokenizer, self._include = stop, detokenizer, include
        self._is_over = False
        self.text = ""

    def push(self, token_id: int, *, may_stop: bool) -> str | None:
        """Take in a token. Returns the stop string that its text completes, if it may: the one that ends first, then the longest.

        A string that was complete before it was allowed to stop does not count; one that began before, and ends now, does.
        """
        searched = len(self.text)
        self.text += self._detokenizer.push(token_id)
        if not may_stop or len(self.text) == searched:
            return None
        found: list[tuple[int, int, str]] = []
        for stop in self._stop:
            start = self.text.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        end, start, stop = min(found)
        self.text = self.text[: end if self._include else start]
        self._is_over = True
        return stop

    def finish(self) -> None:
        """The sequence is over: nothing is held back any more. Idempotent."""
        if not self._is_over:
            self.text += self._detokenizer.finish()
            self._is_over = True

    @property
    def shown(self) -> str:
        """The text that no further token can take back: without an end that may be the beginning of a stop string."""
        if self._is_over or self._include:
            return self.text
        held = 0
        for stop in self._stop:
            longest = min(len(stop) - 1, len(self.text))
            held = max(held, next((n for n in range(longest, 0, -1) if self.text.endswith(stop[:n])), 0))
        return self.text[: len(self.text) - held]
