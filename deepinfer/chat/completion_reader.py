"""From a completion that grows to the events of its answer."""

from deepinfer.chat.response_parser import ChatEvent, ResponseParser
from deepinfer.detokenizer import Detokenizer
from deepinfer.outputs import CompletionOutput
from deepinfer.tokenizer import Tokenizer


class CompletionReader:
    """Feeds a parser with the token ids of one completion, so that only true control tokens count.

    What a completion's `text` leaves out, the parser does not get: the token or string that stopped it and skipped special
    tokens.
    """

    def __init__(self, parser: ResponseParser, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self.parser = parser
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._num_tokens = self._num_characters = 0
        # Ids and their text, each group up to the end of a character; the last may be unfinished.
        self._groups: list[tuple[list[int], str]] = []
        self._opens_group = True

    def read(self, completion: CompletionOutput) -> list[ChatEvent]:
        """What is new since the last call; the same completion, further on."""
        for token_id in completion.token_ids[self._num_tokens :]:
            self._num_tokens += 1
            if token_id not in self._skipped:
                self._group(token_id)
        events: list[ChatEvent] = []
        while len(self._groups) > 1 or (self._groups and self._opens_group):
            ids, text = self._groups[0]
            if self._num_characters + len(text) > len(completion.text):
                break
            self._num_characters += len(text)
            del self._groups[0]
            # Bytes that are no text would keep the library waiting for the rest of a character.
            events += self.parser.push(text if "\ufffd" in text else ids)
        if completion.finish_reason is not None:
            if rest := completion.text[self._num_characters :]:
                self._num_characters += len(rest)
                events += self.parser.push(rest)
            events += self.parser.finish()
        return events

    def _group(self, token_id: int) -> None:
        text = self._detokenizer.push(token_id)
        if self._opens_group:
            self._groups.append(([token_id], text))
        else:
            ids, before = self._groups[-1]
            self._groups[-1] = ([*ids, token_id], before + text)
        self._opens_group = not self._detokenizer.is_within_character
