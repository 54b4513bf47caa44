"""`Recipe`: a conversation to the text that the model was trained on, with the control tokens marked in it.

The rendering is `deepseek_recipe`'s; added here are reasoning efforts from 1 to 100, which the published encoder takes too.
Source: specification section 16.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer.chat.library import load_library
from deepinfer.chat.messages import read_dictionary, read_json, read_messages, read_tools
from deepinfer.errors import RecipeError
from deepinfer.outputs import ChatMessage
from deepinfer.sampling_params import shown

ReasoningEffort = Literal["low", "high", "max"] | int
ToolChoice = Literal["auto", "none", "required"]
ResponseStart = Literal["content", "reasoning", "continued_content", "continued_reasoning", "tool_calls"]

# What reasoning effort means changed between releases with no mark in the checkpoint: the version is the caller's to say.
ENCODING_VERSIONS = ("v4.1",)
EFFORT_OF_NAME = {"low": 50, "high": 75, "max": 100}


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt: one control token, or text in which nothing is a control token, whatever it looks like."""

    text: str
    is_special: bool


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation as the model reads it.

    Attributes:
        segments: joined they are the prompt. Two texts never touch.
        response_start: what the model writes first, which its text does not show and a parser must know.
        has_tools: whether the model was told of tools; its calls are looked for only then.
    """

    segments: tuple[Segment, ...]
    response_start: ResponseStart
    has_tools: bool
    encoding_version: str

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


class Recipe:
    """Renders conversations in one version of the encoding.

    Raises: RecipeError for a version that is not offered; MissingExtra without `deepseek_recipe`.
    """

    def __init__(self, encoding_version: str = "v4.1") -> None:
        if encoding_version not in ENCODING_VERSIONS:
            offered = ", ".join(ENCODING_VERSIONS)
            raise RecipeError("encoding_version", f"expected one of {offered}, got {shown(encoding_version)}")
        self.encoding_version = encoding_version
        self._encoding = load_library().DeepseekV41Encoding()

    def __repr__(self) -> str:
        return f"Recipe({self.encoding_version!r})"

    def render(
        self,
        messages: Sequence[dict[str, Any] | ChatMessage],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        thinking: bool = True,
        reasoning_effort: ReasoningEffort | None = None,
        response_format: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> RenderedPrompt:
        """The prompt of one conversation.

        Args:
            messages: dictionaries as in OpenAI's API with the roles system, user, assistant, tool and latest_reminder.
                `content` is a text or a list of text parts; an assistant's message may bring `reasoning_content`,
                `tool_calls` and, as the last one, `"prefix": True`, which is continued.
            tools: function definitions as in OpenAI's API. A system message may bring `tools` too, a later one new tools.
            tool_choice: "none" hides the tools, "required" begins the answer with a call (not with `thinking`).
            thinking: the answer begins with reasoning, up to `</think>`. Reasoning of earlier turns is left out of the prompt
                unless there are tools.
            reasoning_effort: low (50), high (75, the default), max (100) or 1 to 100; needs `thinking`.
            response_format: `{"type": "json_object"}` or `{"type": "json_schema", "json_schema": {"schema": ...}}`: written
                into the prompt, which asks for it and does not enforce it.
            add_generation_prompt: False leaves out the header of an answer: the conversation alone.

        Raises: RecipeError with the place of the fault.
        """
        library = load_library()
        for name, flag in (("thinking", thinking), ("add_generation_prompt", add_generation_prompt)):
            if not isinstance(flag, bool):
                raise RecipeError(name, f"expected True or False, got {shown(flag)}")
        items = read_messages(messages)
        definitions = _all_tools(messages[0], tools)
        if tool_choice not in ("auto", "none", "required"):
            raise RecipeError("tool_choice", f"expected 'auto', 'none' or 'required', got {shown(tool_choice)}")
        if tool_choice == "required" and (thinking or not definitions):
            raise RecipeError("tool_choice", "'required' needs " + ("thinking = False" if thinking else "tools"))
        # The tools of the first message are those of the conversation.
        if items[0].role == "system":
            items[0] = library.SystemMessage(items[0].content)
        conversation = library.Conversation(
            items,
            thinking_mode=thinking,
            tools=definitions,
            tool_choice=tool_choice,
            **_format_arguments(response_format),
        )
        effort = _effort(reasoning_effort, thinking)
        rendered = self._encoding.render_conversation(conversation)
        segments = _segments(rendered.prompt, rendered.special_ranges)
        if thinking:
            segments = _with_effort(segments, effort)
        last = items[-1]
        if not add_generation_prompt:
            if last.prefix or tool_choice == "required":
                raise RecipeError("add_generation_prompt", "False, but the answer has been begun: by 'prefix' or by tool_choice")
            segments = segments[:-2]
        return RenderedPrompt(
            segments=tuple(segments),
            response_start=_response_start(last, thinking=thinking, is_call=tool_choice == "required"),
            encoding_version=self.encoding_version,
            has_tools=tool_choice != "none" and bool(definitions or any(getattr(item, "tools", None) for item in items)),
        )


def _all_tools(first: Any, tools: object) -> list[Any]:
    own = first.get("tools") if isinstance(first, Mapping) else None
    if own and tools:
        raise RecipeError("tools", "messages[0].tools holds tools as well; give them in one place")
    return read_tools(own, "messages[0].tools") if own else read_tools(tools if tools is not None else [])


def _effort(effort: object, thinking: bool) -> int:
    if effort is None:
        return EFFORT_OF_NAME["high"]
    if not thinking:
        raise RecipeError("reasoning_effort", f"{shown(effort)} needs thinking = True")
    number = EFFORT_OF_NAME.get(effort) if isinstance(effort, str) else effort
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= 100:
        raise RecipeError("reasoning_effort", f"expected low, high, max or an integer from 1 to 100, got {shown(effort)}")
    return number


def _with_effort(segments: list[Segment], effort: int) -> list[Segment]:
    """The same prompt with this number where the library, which knows three efforts by name, wrote that of its default."""
    begin = f"Reasoning Effort: {EFFORT_OF_NAME['high']} "
    bos, system, text = segments[:3]
    assert text.text.startswith(begin)
    return [bos, system, Segment(f"Reasoning Effort: {effort} " + text.text[len(begin) :], False), *segments[3:]]


def _format_arguments(response_format: object) -> dict[str, Any]:
    place = "response_format"
    if response_format is None:
        return {}
    entries = read_dictionary(response_format, place, {"type", "json_schema"})
    kind = entries.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise RecipeError(f"{place}.type", f"expected 'text', 'json_object' or 'json_schema', got {shown(kind)}")
    if kind != "json_schema":
        if "json_schema" in entries:
            raise RecipeError(f"{place}.json_schema", f"the type is {kind!r}")
        return {"response_format": kind}
    place += ".json_schema"
    schema = read_dictionary(entries.get("json_schema"), place, {"name", "description", "schema", "strict"}).get("schema")
    if not isinstance(schema, dict):
        raise RecipeError(f"{place}.schema", f"expected a JSON schema as a dictionary, got {shown(schema)}")
    read_json(schema, f"{place}.schema")
    return {"response_schema": schema}


def _segments(prompt: str, special_ranges: Sequence[tuple[int, int]]) -> list[Segment]:
    segments, end = [], 0
    for start, stop in [*special_ranges, (len(prompt), len(prompt))]:
        segments += [Segment(prompt[end:start], False), Segment(prompt[start:stop], True)]
        end = stop
    return [segment for segment in segments if segment.text]


def _response_start(last: Any, *, thinking: bool, is_call: bool) -> ResponseStart:
    if is_call:
        return "tool_calls"
    if not thinking:
        return "content"
    if not last.prefix:
        return "reasoning"
    return "continued_reasoning" if last.reasoning_content and not last.content else "continued_content"
