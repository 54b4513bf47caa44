"""`ResponseParser`: what the model writes, taken apart while it comes: reasoning, content, tool calls.

The grammar is `deepseek_recipe`'s and lenient: a call that breaks off or is not valid JSON is handed out as it is, what is no call
among calls is dropped, and so are empty lines around reasoning and content. The completion's `text` keeps it all.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from deepinfer.chat.library import load_library
from deepinfer.chat.recipe import RenderedPrompt, ResponseStart
from deepinfer.errors import Rejected
from deepinfer.outputs import ChatMessage, ToolCall

if TYPE_CHECKING:
    import deepseek_recipe


@dataclass(frozen=True, slots=True)
class ChatEvent:
    """A piece of an answer.

    Attributes:
        kind: where `text` belongs. "tool_call" begins a call and its text is the name; "arguments" adds to the JSON text of the
            call at `tool_call_index`.
    """

    kind: Literal["reasoning", "content", "tool_call", "arguments"]
    text: str
    tool_call_index: int | None = None
    tool_call_id: str | None = None


class ResponseParser:
    """Takes an answer in pieces. The events join to the same message however it is cut.

    Args:
        response_start: how the answer begins, see `RenderedPrompt`.
        has_tools: whether calls are looked for.
        tokenizer: the library's own, see `library_tokenizer`; needed for pieces that are ids.
        tool_call_id: call i gets the id `{tool_call_id}_{i}`. The library's ids are random and an answer should be reproducible.
    """

    def __init__(
        self,
        response_start: ResponseStart = "content",
        *,
        has_tools: bool = True,
        tokenizer: "deepseek_recipe.Tokenizer | None" = None,
        tool_call_id: str = "call",
    ) -> None:
        self._library: Any = load_library()
        self._has_tokenizer, self._tool_call_id = tokenizer is not None, tool_call_id
        stages = self._library.ThinkingInitialStage
        stage = {
            "reasoning": stages.ReasoningStart,
            "continued_reasoning": stages.ReasoningContinuation,
            "continued_content": stages.ContentContinuation,
        }.get(response_start)
        options = self._library.ParsingOptions(
            parse_tool_calls=has_tools,
            starts_in_tool_calls=response_start == "tool_calls",
            thinking_initial_stage=stage,
        )
        # The conversation only tells the generator whether there will be reasoning.
        conversation = self._library.Conversation(thinking_mode=stage is not None)
        request = self._library.ConversationRequest(conversation, self._library.ModelVersion.DeepseekV41Flash)
        generator = self._library.ChatCompletionRequest.chunk_generator(request, "", "")
        self._processor = self._library.StreamProcessor(generator, options, tokenizer)
        self._content = ""
        self._reasoning = "" if stage is not None else None
        self._calls: list[ToolCall] = []
        self._is_finished = False
        self._take(self._processor.push(self._library.InferenceChunk.ready()))

    @classmethod
    def for_prompt(cls, prompt: RenderedPrompt, **arguments: Any) -> Self:
        """The parser of the answer to a prompt; further arguments as in the constructor."""
        return cls(prompt.response_start, has_tools=prompt.has_tools, **arguments)

    @property
    def message(self) -> ChatMessage:
        """Everything so far."""
        return ChatMessage(content=self._content, reasoning_content=self._reasoning, tool_calls=tuple(self._calls))

    def push(self, part: str | Sequence[int]) -> list[ChatEvent]:
        """Take in the next piece, text or ids, without the token that ended the answer.

        In ids only a control token's own id is one; in text its spelling is all there is to see.

        Raises: Rejected after `finish`, or for ids without a tokenizer.
        """
        if self._is_finished:
            raise Rejected("the answer has been finished: a parser takes one answer")
        chunk = self._library.InferenceChunk
        if isinstance(part, str):
            return self._take(self._processor.push(chunk.text(part)))
        if not self._has_tokenizer:
            raise Rejected("token ids for a parser without a tokenizer: give it one, or push text")
        return self._take(self._processor.push(chunk.tokens(list(part))))

    def finish(self) -> list[ChatEvent]:
        """The rest, that might have become a marker. A second call gives nothing."""
        if self._is_finished:
            return []
        self._is_finished = True
        finish = self._library.InferenceChunk.finish(self._library.InferenceFinishReason.Stop)
        return self._take([*self._processor.push(finish), *self._processor.finish()])

    def _take(self, chunks: list[Any]) -> list[ChatEvent]:
        events: list[ChatEvent] = []
        for chunk in chunks:
            for choice in json.loads(chunk.to_json())["choices"]:
                events += self._events(choice["delta"])
        return events

    def _events(self, delta: dict[str, Any]) -> list[ChatEvent]:
        events = []
        if text := delta.get("reasoning_content"):
            self._reasoning = (self._reasoning or "") + text
            events.append(ChatEvent("reasoning", text))
        if text := delta.get("content"):
            self._content += text
            events.append(ChatEvent("content", text))
        for call in delta.get("tool_calls") or ():
            index, function = call["index"], call["function"]
            if name := function.get("name"):
                call_id = f"{self._tool_call_id}_{index}"
                self._calls.append(ToolCall(call_id, name, ""))
                events.append(ChatEvent("tool_call", name, index, call_id))
            if text := function.get("arguments"):
                known = self._calls[index]
                self._calls[index] = ToolCall(known.id, known.name, known.arguments + text)
                events.append(ChatEvent("arguments", text, index, known.id))
        return events


def library_tokenizer(tokenizer_json: str) -> "deepseek_recipe.Tokenizer":
    """The library's tokenizer for the text of a tokenizer.json; takes a fifth of a second for the published one."""
    tokenizer: deepseek_recipe.Tokenizer = load_library().Tokenizer.from_str(tokenizer_json)
    return tokenizer
