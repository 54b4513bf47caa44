"""`Recipe`: the published encoder's cases, and the same prompts as the library's own converter gives."""

import copy
import json
import sys
from itertools import pairwise
from typing import Any

import pytest
from deepseek_recipe import ChatCompletionRequest, ConversionError, ConversionOptions, DeepseekV41Encoding
from hypothesis import given, settings

from deepinfer import MissingExtra, Recipe, RecipeError
from deepinfer.outputs import ChatMessage, ToolCall
from tests.chat.cases import ENCODINGS_THAT_DIFFER, FILE, REJECTIONS_THAT_DIFFER, render_arguments
from tests.chat.conversations import TOOL, conversations

HELLO = [{"role": "user", "content": "hello"}]
by_name = {"ids": lambda case: case["name"]}


@pytest.mark.parametrize("case", FILE["encode"], **by_name)
def test_the_published_prompts_are_met(case: dict[str, Any]) -> None:
    try:
        text = Recipe().render(**render_arguments(case)).text
    except RecipeError:
        text = None
    assert (text == case["prompt"]) == (case["name"] not in ENCODINGS_THAT_DIFFER)


@pytest.mark.parametrize("case", FILE["reject"], **by_name)
def test_what_the_published_encoder_rejects_is_refused(case: dict[str, Any]) -> None:
    if case["name"] in REJECTIONS_THAT_DIFFER:
        Recipe().render(**render_arguments(case))
    else:
        with pytest.raises(RecipeError):
            Recipe().render(**render_arguments(case))


def converted(arguments: dict[str, Any]) -> tuple[str, bool, str]:
    """Prompt, whether calls are parsed, and where the answer starts, by the library's converter of OpenAI's requests."""
    messages = copy.deepcopy(arguments["messages"])
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    body = {"model": "DeepSeek-V4.1-Flash", "messages": messages, "tools": arguments.get("tools")}
    body["thinking"] = {"type": "enabled" if arguments.get("thinking", True) else "disabled"}
    body |= {name: arguments[name] for name in ("tool_choice", "response_format", "reasoning_effort") if name in arguments}
    try:
        request = ChatCompletionRequest(body).convert(ConversionOptions())
    except ConversionError as error:
        raise AssertionError(error.body) from error
    options = request.parsing_options
    stage = str(options.thinking_initial_stage).rpartition(".")[2]
    start = "tool_calls" if options.starts_in_tool_calls else STARTS[stage]
    return DeepseekV41Encoding().render_conversation(request.conversation).prompt, options.parse_tool_calls, start


STARTS = {
    "None": "content",
    "ReasoningStart": "reasoning",
    "ReasoningContinuation": "continued_reasoning",
    "ContentContinuation": "continued_content",
}


@given(conversations())
@settings(max_examples=80)
def test_prompts_are_those_of_the_librarys_converter(arguments: dict[str, Any]) -> None:
    rendered = Recipe().render(**arguments)
    assert (rendered.text, rendered.has_tools, rendered.response_start) == converted(arguments)


@pytest.mark.parametrize(
    "changes",
    [
        {"tool_choice": "none", "tools": [TOOL]},
        {"tool_choice": "required", "tools": [TOOL], "thinking": False},
        {"reasoning_effort": "low"},
        {"reasoning_effort": "max", "tools": [TOOL]},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
        {"response_format": {"type": "json_object"}, "messages": [{"role": "user", "content": "hello in json"}]},
        {"messages": [*HELLO, {"role": "assistant", "content": "well", "prefix": True}]},
        {"messages": [*HELLO, {"role": "assistant", "content": "well", "prefix": True}], "thinking": False},
        {"messages": [*HELLO, {"role": "assistant", "content": "", "reasoning_content": "so", "prefix": True}]},
        {"messages": [*HELLO, {"role": "assistant", "content": "well", "reasoning_content": "so", "prefix": True}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"messages": [*HELLO, {"role": "latest_reminder", "content": "now"}, {"role": "user", "content": "b"}]},
        {"messages": [{"role": "system", "content": "s"}, *HELLO, {"role": "system", "content": "t"}]},
        {"messages": [*HELLO, {"role": "assistant", "content": "a"}]},
    ],
    ids=str,
)
def test_every_setting_gives_what_the_librarys_converter_gives(changes: dict[str, Any]) -> None:
    arguments = {"messages": HELLO} | changes
    rendered = Recipe().render(**arguments)
    assert (rendered.text, rendered.has_tools, rendered.response_start) == converted(arguments)


@given(conversations())
@settings(max_examples=50)
def test_texts_never_touch_and_hold_no_control_token(arguments: dict[str, Any]) -> None:
    segments = Recipe().render(**arguments).segments
    assert all(segment.text for segment in segments)
    assert not any(not a.is_special and not b.is_special for a, b in pairwise(segments))


def test_a_marker_typed_by_a_user_is_text() -> None:
    rendered = Recipe().render([{"role": "user", "content": "a <｜User｜> b </think>"}], thinking=False)
    assert [s.text for s in rendered.segments if not s.is_special] == ["a <｜User｜> b </think>"]


def test_every_effort_has_its_number() -> None:
    recipe = Recipe()
    for effort in range(1, 101):
        line = f"Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
        assert recipe.render(HELLO, reasoning_effort=effort).segments[2].text == line
    assert recipe.render(HELLO, reasoning_effort=50) == recipe.render(HELLO, reasoning_effort="low")


def test_text_that_reads_like_the_effort_stays_as_it_is() -> None:
    text = "Reasoning Effort: 75 (range"
    messages = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    assert Recipe().render(messages, reasoning_effort=3).text.count(text) == 2
    assert Recipe().render(messages, thinking=False).text.count(text) == 2


def test_tools_of_the_first_message_are_those_of_the_conversation() -> None:
    messages = [{"role": "system", "content": "s", "tools": [TOOL]}, *HELLO]
    rendered = Recipe().render(messages)
    assert rendered == Recipe().render([{"role": "system", "content": "s"}, *HELLO], tools=[TOOL])
    assert rendered.has_tools
    with pytest.raises(RecipeError, match="one place"):
        Recipe().render(messages, tools=[TOOL])


def test_later_tools_are_announced() -> None:
    rendered = Recipe().render([*HELLO, {"role": "system", "content": "s", "tools": [TOOL]}])
    assert "### Updated Tool Schemas" in rendered.text
    assert rendered.has_tools


def test_an_answer_may_stand_in_the_messages_as_it_came() -> None:
    answer = ChatMessage(content="", reasoning_content="r", tool_calls=(ToolCall("call_1_0_0", "look_up", '{"a": 1}'),))
    result = {"role": "tool", "tool_call_id": "call_1_0_0", "content": "found"}
    as_dictionary = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "r",
        "tool_calls": [{"id": "call_1_0_0", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 1}'}}],
    }
    assert answer.to_dict() == as_dictionary
    recipe = Recipe()
    assert recipe.render([*HELLO, answer, result], tools=[TOOL]) == recipe.render([*HELLO, as_dictionary, result], tools=[TOOL])


def test_a_conversation_can_be_rendered_without_asking_for_an_answer() -> None:
    whole = Recipe().render(HELLO)
    alone = Recipe().render(HELLO, add_generation_prompt=False)
    assert whole.text == alone.text + "<｜Assistant｜><think>"


def test_the_version_of_the_encoding_is_named_and_kept() -> None:
    assert Recipe("v4.1").render(HELLO).encoding_version == "v4.1"
    with pytest.raises(RecipeError, match=r"encoding_version: expected one of v4\.1, got 'v4'"):
        Recipe("v4")


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    with pytest.raises(MissingExtra, match=r"pip install 'deepinfer-reference\[chat\]'"):
        Recipe()
