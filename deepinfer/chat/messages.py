"""OpenAI-shaped dictionaries in, messages and tools of `deepseek_recipe` out. Every fault is named by its place.

The library's own converter passes over keys that it does not know; here nothing is passed over.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from deepinfer.chat.library import load_library
from deepinfer.errors import RecipeError
from deepinfer.outputs import ChatMessage
from deepinfer.sampling_params import shown

if TYPE_CHECKING:
    from deepseek_recipe import Message, ToolCall, ToolDefinition

KEYS_OF_ROLE = {
    "system": {"role", "content", "tools"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "reasoning_content", "tool_calls", "prefix"},
    "tool": {"role", "content", "tool_call_id"},
    "latest_reminder": {"role", "content"},
}
# The name stands between quotes in the model's own markup, which has no way to escape one.
TOOL_NAME = re.compile(r"[\w.:-]+")


def read_messages(messages: object) -> "list[Message]":
    """The messages of one conversation.

    Raises: RecipeError with the place of the first fault.
    """
    items = read_list(messages, "messages")
    if not items:
        _refuse("messages", "at least one message", items)
    return [_message(item, f"messages[{i}]", is_last=i == len(items) - 1) for i, item in enumerate(items)]


def read_tools(tools: object, place: str = "tools") -> "list[ToolDefinition]":
    """Definitions of the functions that the model may call. Raises: RecipeError with the place of the first fault."""
    definitions = [_tool(tool, f"{place}[{i}]") for i, tool in enumerate(read_list(tools, place))]
    names = [definition.name for definition in definitions]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise RecipeError(f"{place}[{i}].function.name", f"{name!r} is the name of an earlier tool too")
    return definitions


def read_list(value: object, place: str) -> list[Any]:
    """A list or another sequence that is no text. Raises: RecipeError."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        _refuse(place, "a list", value)
    return list(value)


def read_dictionary(value: object, place: str, known: set[str]) -> dict[str, Any]:
    """The entries that say something; None says nothing. Raises: RecipeError for another type or an unknown key."""
    if not isinstance(value, Mapping):
        _refuse(place, "a dictionary", value)
    for key, entry in value.items():
        if key not in known and entry is not None:
            raise RecipeError(place, f"unknown key {shown(key)}; known are {', '.join(sorted(known))}")
    return {key: entry for key, entry in value.items() if entry is not None}


def read_json(value: object, place: str) -> str:
    """JSON text of a value. Raises: RecipeError for what JSON or Unicode cannot hold."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # The last is for a value nested too deeply, or into itself.
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(place, f"expected what JSON can hold; {error}") from error
    return read_text(text, place)


def read_text(value: object, place: str) -> str:
    """A string that is valid Unicode. Raises: RecipeError."""
    if not isinstance(value, str):
        _refuse(place, "a text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RecipeError(place, f"expected valid Unicode, but character {error.start} is a lone surrogate") from None
    return value


def _refuse(place: str, expected: str, got: object) -> NoReturn:
    raise RecipeError(place, f"expected {expected}, got {shown(got)}")


def _message(item: object, place: str, *, is_last: bool) -> "Message":
    library = load_library()
    if isinstance(item, ChatMessage):
        item = item.to_dict()
    role = item.get("role") if isinstance(item, Mapping) else None
    if isinstance(item, Mapping) and (not isinstance(role, str) or role not in KEYS_OF_ROLE):
        _refuse(f"{place}.role", f"one of {', '.join(KEYS_OF_ROLE)}", role)
    entries = read_dictionary(item, place, KEYS_OF_ROLE.get(str(role), set()))
    if role == "assistant":
        return _assistant_message(entries, place, is_last=is_last)
    content = _content(entries.get("content"), f"{place}.content")
    if role == "system":
        # None rather than an empty list: an empty one would announce new tools.
        tools = read_tools(entries["tools"], f"{place}.tools") if entries.get("tools") else None
        return library.SystemMessage(content, tools=tools)
    if role == "tool":
        call_id = entries.get("tool_call_id")
        return library.ToolMessage(content, None if call_id is None else read_text(call_id, f"{place}.tool_call_id"))
    return library.UserMessage(content) if role == "user" else library.LatestReminderMessage(content)


def _assistant_message(entries: dict[str, Any], place: str, *, is_last: bool) -> "Message":
    reasoning = entries.get("reasoning_content")
    if reasoning is not None:
        reasoning = read_text(reasoning, f"{place}.reasoning_content")
    given = read_list(entries.get("tool_calls", []), f"{place}.tool_calls")
    calls = [_tool_call(call, f"{place}.tool_calls[{i}]", i) for i, call in enumerate(given)]
    content = ""
    if "content" in entries or not (calls or reasoning):
        content = _content(entries.get("content"), f"{place}.content")
    prefix = entries.get("prefix", False)
    if not isinstance(prefix, bool):
        _refuse(f"{place}.prefix", "True or False", prefix)
    if prefix and (calls or not is_last):
        raise RecipeError(f"{place}.prefix", "only the last message, and one without tool calls, can be continued")
    return load_library().AssistantMessage(content, reasoning, calls or None, prefix)


def _content(value: object, place: str) -> str:
    """A text, or a list of text parts, which are joined by empty lines."""
    if isinstance(value, str):
        return read_text(value, place)
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray | memoryview):
        _refuse(place, "a text or a list of text parts", value)
    texts = []
    for i, part in enumerate(value):
        here = f"{place}[{i}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind != "text":
            _refuse(f"{here}.type", "'text' (images are not supported, this engine is text only)", kind)
        texts.append(read_text(read_dictionary(part, here, {"type", "text"}).get("text"), f"{here}.text"))
    return "\n\n".join(texts)


def _function(item: object, place: str, around: set[str], inside: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An entry of `tools` or `tool_calls` and the function in it, with a name that the markup can hold."""
    entries = read_dictionary(item, place, {"type", "function"} | around)
    if entries.get("type", "function") != "function":
        _refuse(f"{place}.type", "'function'", entries["type"])
    function = read_dictionary(entries.get("function"), f"{place}.function", {"name"} | inside)
    name = read_text(function.get("name"), f"{place}.function.name")
    if not TOOL_NAME.fullmatch(name):
        _refuse(f"{place}.function.name", "letters, digits and any of _ . : -", name)
    return entries, function


def _tool_call(item: object, place: str, index: int) -> "ToolCall":
    entries, function = _function(item, place, {"id", "index"}, {"arguments"})
    # Ids only say which result belongs to which call; a call without one is matched by nothing.
    call_id = read_text(entries.get("id", f"unnamed_{index}"), f"{place}.id")
    arguments, here = function.get("arguments", "{}"), f"{place}.function.arguments"
    text = read_text(arguments, here) if isinstance(arguments, str) else read_json(arguments, here)
    return load_library().ToolCall(call_id, function["name"], text)


def _tool(item: object, place: str) -> "ToolDefinition":
    _, function = _function(item, place, set(), {"description", "parameters", "strict"})
    here = f"{place}.function"
    description, parameters, strict = (function.get(key) for key in ("description", "parameters", "strict"))
    if description is not None:
        description = read_text(description, f"{here}.description")
    if strict is not None and not isinstance(strict, bool):
        _refuse(f"{here}.strict", "True or False", strict)
    if parameters is not None:
        if not isinstance(parameters, Mapping):
            _refuse(f"{here}.parameters", "a JSON schema as a dictionary", parameters)
        read_json(parameters, f"{here}.parameters")
    try:
        return load_library().ToolDefinition(function["name"], description, parameters, strict)
    # The library has limits of its own: integers of 64 bits, 128 levels.
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RecipeError(f"{here}.parameters", f"expected what JSON can hold; {error}") from error
