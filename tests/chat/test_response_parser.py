"""`ResponseParser`: the published parses, the same message however the answer is cut, and arguments that come back whole."""

import json
from itertools import pairwise
from typing import Any

import deepseek_recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer import ChatMessage, Recipe, Rejected, ResponseParser, TokenAdder, Tokenizer, ToolCall
from deepinfer.chat.recipe import ResponseStart
from deepinfer.chat.response_parser import ChatEvent
from tests.chat.cases import FILE, PARSES_THAT_DIFFER
from tests.chat.conversations import LOOKALIKES, TOOL, arguments, names, texts

EOS = "<｜end▁of▁sentence｜>"
CALLS = """\n\n<｜DSML｜ calls>
<｜DSML｜ invoke name="look_up">
<｜DSML｜ parameter name="query" string="true">a < b</｜DSML｜ parameter>
<｜DSML｜ parameter name="limit" string="false">[2, {"x": null}]</｜DSML｜ parameter>
</｜DSML｜ invoke>
<｜DSML｜ invoke name="stop">

</｜DSML｜ invoke>
</｜DSML｜ calls>"""
# Golden answers, and answers that end where a marker could begin.
ANSWERS: list[tuple[ResponseStart, str]] = [
    ("content", "hi there"),
    ("content", "1 < 2 <"),
    ("content", "a\n\n<"),
    ("content", "a\n\n<｜DSML｜ call"),
    ("content", "é 中文 😀" + CALLS),
    ("content", CALLS[:-30]),
    ("reasoning", "  why?\n</think>\n\nbecause" + CALLS),
    ("reasoning", "never ends </thin"),
    ("reasoning", "in the middle" + CALLS + "</think>after"),
    ("continued_reasoning", "\n\nand so</think>yes"),
    ("continued_content", "\n\ngoes on" + CALLS),
    ("tool_calls", CALLS.removeprefix("\n\n<｜DSML｜ calls>\n")),
]


def parse(start: ResponseStart, parts: list[Any], **arguments: Any) -> ChatMessage:
    """The message, after a check that the events tell the same."""
    parser = ResponseParser(start, **arguments)
    events = [event for part in parts for event in parser.push(part)] + parser.finish()
    message = parser.message
    assert joined(events, "content") == message.content
    assert joined(events, "reasoning") == (message.reasoning_content or "")
    for i, call in enumerate(message.tool_calls):
        own = [event for event in events if event.tool_call_index == i]
        assert [(event.kind, event.text) for event in own[:1]] == [("tool_call", call.name)]
        assert joined(own, "arguments") == call.arguments
        assert {event.tool_call_id for event in own} == {call.id}
    return message


def joined(events: list[ChatEvent], kind: str) -> str:
    return "".join(event.text for event in events if event.kind == kind)


@pytest.mark.parametrize("case", FILE["parse"], ids=lambda case: case["name"])
def test_the_published_parses_are_met(case: dict[str, Any]) -> None:
    start: ResponseStart = "reasoning" if case["thinking_mode"] == "thinking" else "content"
    found = parse(start, [case["text"].removesuffix(EOS)])
    if case["name"] in PARSES_THAT_DIFFER:
        assert "error" in case
        return
    wanted = case["message"]
    # The namespace of a tool is part of its name here, as in the prompt.
    calls = [
        ("::".join(filter(None, (c.get("namespace"), c["function"]["name"]))), c["function"]["arguments"])
        for c in wanted["tool_calls"]
    ]
    assert (found.content, found.reasoning_content or "") == (wanted["content"], wanted["reasoning_content"])
    assert [(call.name, call.arguments) for call in found.tool_calls] == calls


def test_what_the_published_parser_rejects_is_read_as_far_as_it_goes() -> None:
    texts = {case["name"]: case["text"].removesuffix(EOS) for case in FILE["parse"]}
    call = ToolCall("call_0", "lookup", '{"query": "value", "limit": 2}')
    whole = ChatMessage(content="summary", reasoning_content="  reason  ", tool_calls=(call,))
    twice = ChatMessage(
        content="summary",
        reasoning_content="  reason  ",
        tool_calls=(ToolCall("call_0", "lookup", '{"query": "value", "query": "x"}'),),
    )
    assert parse("content", [texts["missing_eos"]]) == ChatMessage(content="hi")
    assert parse("reasoning", [texts["missing_think"]]) == ChatMessage(content="", reasoning_content="hi")
    assert parse("reasoning", [texts["v4_tags"]]) == whole
    assert parse("reasoning", [texts["duplicate_param"]]) == twice
    assert parse("reasoning", [texts["text_after_calls"]]) == whole


@pytest.mark.parametrize(("start", "text"), ANSWERS)
def test_every_cut_gives_the_same_message(start: ResponseStart, text: str) -> None:
    whole = parse(start, [text])
    for cut in range(len(text) + 1):
        assert parse(start, [text[:cut], text[cut:]]) == whole
    for size in (1, 2, 3, 7):
        assert parse(start, [text[i : i + size] for i in range(0, len(text), size)]) == whole


@given(st.lists(st.sampled_from([*LOOKALIKES, *CALLS.splitlines(keepends=True)]), max_size=8).map("".join), st.data())
@settings(max_examples=150)
def test_every_cut_of_a_tangle_gives_the_same_message(text: str, data: st.DataObject) -> None:
    start = data.draw(st.sampled_from(["content", "reasoning", "continued_content", "continued_reasoning"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    assert parse(start, parts) == parse(start, [text])


@pytest.mark.parametrize(("start", "text"), ANSWERS)
def test_every_cut_of_the_ids_gives_the_same_message(
    start: ResponseStart, text: str, published_tokenizer: Tokenizer, library: deepseek_recipe.Tokenizer
) -> None:
    ids = published_tokenizer.encode(text)
    whole = parse(start, [ids], tokenizer=library)
    assert whole == parse(start, [text])
    for cut in range(len(ids) + 1):
        assert parse(start, [ids[:cut], ids[cut:]], tokenizer=library) == whole
    assert parse(start, [[token_id] for token_id in ids], tokenizer=library) == whole


def test_golden_answers_are_taken_apart() -> None:
    calls = (ToolCall("c_0", "look_up", '{"query": "a < b", "limit": [2, {"x": null}]}'), ToolCall("c_1", "stop", "{}"))
    found = parse("reasoning", ["  why?\n</think>\n\nbecause" + CALLS], tool_call_id="c")
    assert found == ChatMessage(content="because", reasoning_content="  why?", tool_calls=calls)
    assert parse("content", ["1 < 2 <"]) == ChatMessage(content="1 < 2 <")
    # Where the prompt has begun the calls, there is no content.
    assert parse("tool_calls", ["a" + CALLS.partition("calls>")[2]]).content == ""
    assert parse("content", ["a" + CALLS], has_tools=False) == ChatMessage(content="a" + CALLS)


def test_text_streams_as_soon_as_it_can_be_no_marker() -> None:
    parser = ResponseParser("content")
    assert [event.text for event in parser.push("abc")] == ["abc"]
    assert parser.push("\n\n<｜DSML｜") == []
    assert parser.push(" calls>") == []
    assert parser.finish() == []
    parser = ResponseParser("content")
    assert joined(parser.push("abc\n\n<"), "content") in ("", "abc")
    parser.push("b")
    assert parser.message == ChatMessage(content="abc\n\n<b")


@given(st.dictionaries(names, arguments, min_size=1, max_size=2), texts, texts)
@settings(max_examples=100)
def test_what_is_rendered_is_parsed_back(
    published_tokenizer: Tokenizer, library: deepseek_recipe.Tokenizer, calls: dict[str, Any], content: str, reasoning: str
) -> None:
    """As ids: in text, a marker within an argument cannot be told from a true one."""
    given_calls = [{"id": name, "function": {"name": name, "arguments": value}} for name, value in calls.items()]
    user = {"role": "user", "content": "q"}
    answer = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": given_calls}
    recipe, adder = Recipe(), TokenAdder(published_tokenizer)
    adder.follow(recipe.render([user], tools=[TOOL]).segments)
    start = len(adder.token_ids)
    adder.follow(recipe.render([user, answer], tools=[TOOL], add_generation_prompt=False).segments)
    ids = adder.token_ids[start:-1]
    found = parse("reasoning", [[token_id] for token_id in ids], tokenizer=library)
    # Empty lines around reasoning and answer are the model's way to set them apart.
    assert (found.content.strip("\n"), (found.reasoning_content or "").strip("\n")) == (content.strip("\n"), reasoning.strip("\n"))
    assert {call.name: json.loads(call.arguments) for call in found.tool_calls} == calls


def test_a_marker_in_ordinary_tokens_is_text(published_tokenizer: Tokenizer, library: deepseek_recipe.Tokenizer) -> None:
    spelled = published_tokenizer.encode("about </think>", split_special_tokens=True)
    true = published_tokenizer.encode("</think>yes")
    found = parse("reasoning", [spelled, true], tokenizer=library)
    assert found == ChatMessage(content="yes", reasoning_content="about </think>")
    # In text the two are the same.
    assert parse("reasoning", ["about </think>", "</think>yes"]) == ChatMessage(content="yes", reasoning_content="about ")


def test_a_parser_takes_one_answer() -> None:
    parser = ResponseParser()
    with pytest.raises(Rejected, match="without a tokenizer"):
        parser.push([5])
    parser.push("abc")
    parser.finish()
    assert parser.finish() == []
    with pytest.raises(Rejected, match="finished"):
        parser.push("d")
    assert parser.message == ChatMessage(content="abc")
