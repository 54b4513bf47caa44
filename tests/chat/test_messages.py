"""Messages and tools that are malformed are refused with the place of the fault."""

import copy
import math
import random
from typing import Any

import pytest

from deepinfer import Recipe, RecipeError
from tests.chat.conversations import TOOL

USER = {"role": "user", "content": "q"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
DEEP: dict[str, Any] = {}
for _ in range(5000):
    DEEP = {"a": DEEP}


def with_call(**changes: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": "", "tool_calls": [CALL | changes]}]


def with_function(**function: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": [TOOL, {"type": "function", "function": function}]}


FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": None}),
    ("messages", {"messages": "hello"}),
    ("messages", {"messages": {"role": "user"}}),
    ("messages", {"messages": []}),
    ("messages[1]", {"messages": [USER, "hello"]}),
    ("messages[1]", {"messages": [USER, [USER]]}),
    ("messages[1].role", {"messages": [USER, {"content": "q"}]}),
    ("messages[0].role", {"messages": [{"role": "developer", "content": "q"}]}),
    ("messages[0].role", {"messages": [{"role": ["user"], "content": "q"}]}),
    ("messages[0]", {"messages": [USER | {"name": "me"}]}),
    ("messages[0]", {"messages": [USER | {"tool_calls": [CALL]}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": b"q"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": "a\ud800"}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": ["q"]}]}),
    (
        "messages[0].content[1].type",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
    ),
    ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache": 1}]}]}),
    ("messages[1].content", {"messages": [USER, {"role": "assistant"}]}),
    ("messages[1].reasoning_content", {"messages": [USER, {"role": "assistant", "content": "", "reasoning_content": 1}]}),
    ("messages[1].prefix", {"messages": [USER, {"role": "assistant", "content": "", "prefix": 1}]}),
    ("messages[1].prefix", {"messages": [USER, {"role": "assistant", "content": "", "prefix": True}, USER]}),
    ("messages[1].prefix", {"messages": [USER, with_call()[1] | {"prefix": True}]}),
    ("messages[1].tool_calls", {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": "f()"}]}),
    ("messages[1].tool_calls[0]", {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": ["f()"]}]}),
    ("messages[1].tool_calls[0]", {"messages": with_call(extra=1)}),
    ("messages[1].tool_calls[0].id", {"messages": with_call(id=5)}),
    ("messages[1].tool_calls[0].type", {"messages": with_call(type="custom")}),
    ("messages[1].tool_calls[0].function", {"messages": with_call(function=None)}),
    ("messages[1].tool_calls[0].function.name", {"messages": with_call(function={"arguments": "{}"})}),
    ("messages[1].tool_calls[0].function.name", {"messages": with_call(function={"name": 'f">'})}),
    ("messages[1].tool_calls[0].function.arguments", {"messages": with_call(function={"name": "f", "arguments": {"a": math.nan}})}),
    ("messages[1].tool_calls[0].function.arguments", {"messages": with_call(function={"name": "f", "arguments": {"a": {1}}})}),
    ("messages[1].tool_calls[0].function.arguments", {"messages": with_call(function={"name": "f", "arguments": {"a": "\udfff"}})}),
    ("messages[1].tool_calls[0].function.arguments", {"messages": with_call(function={"name": "f", "arguments": DEEP})}),
    ("messages[1].tool_call_id", {"messages": [USER, {"role": "tool", "content": "r", "tool_call_id": 7}]}),
    ("messages[0].tools[0].function.name", {"messages": [{"role": "system", "content": "s", "tools": [{"function": {}}]}, USER]}),
    ("tools", {"messages": [USER], "tools": 5}),
    ("tools[0]", {"messages": [USER], "tools": ["f"]}),
    ("tools[0].type", {"messages": [USER], "tools": [TOOL | {"type": "web_search"}]}),
    ("tools[1].function.name", {"messages": [USER], "tools": [TOOL, TOOL]}),
    ("tools[1].function.name", with_function(name="two words")),
    ("tools[1].function", with_function(name="f", returns="int")),
    ("tools[1].function.description", with_function(name="f", description=5)),
    ("tools[1].function.strict", with_function(name="f", strict="yes")),
    ("tools[1].function.parameters", with_function(name="f", parameters=[])),
    ("tools[1].function.parameters", with_function(name="f", parameters={"a": math.inf})),
    ("tools[1].function.parameters", with_function(name="f", parameters={"a": 10**30})),
    ("tools[1].function.parameters", with_function(name="f", parameters={1: 2})),
    ("tools[1].function.parameters", with_function(name="f", parameters=DEEP)),
    ("tools[1].function.parameters", with_function(name="f", parameters={"a": "\ud800"})),
    ("tool_choice", {"messages": [USER], "tool_choice": {"type": "function"}}),
    ("tool_choice", {"messages": [USER], "tool_choice": "required", "thinking": False}),
    ("tool_choice", {"messages": [USER], "tool_choice": "required", "tools": [TOOL]}),
    ("thinking", {"messages": [USER], "thinking": "yes"}),
    ("reasoning_effort", {"messages": [USER], "reasoning_effort": "xhigh"}),
    ("reasoning_effort", {"messages": [USER], "reasoning_effort": [50]}),
    ("reasoning_effort", {"messages": [USER], "reasoning_effort": 50, "thinking": False}),
    ("response_format", {"messages": [USER], "response_format": "json"}),
    ("response_format.type", {"messages": [USER], "response_format": {"type": "yaml"}}),
    ("response_format.json_schema", {"messages": [USER], "response_format": {"type": "json_schema"}}),
    ("response_format.json_schema", {"messages": [USER], "response_format": {"type": "text", "json_schema": {}}}),
    (
        "response_format.json_schema.schema",
        {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
    ),
    (
        "add_generation_prompt",
        {"messages": [USER, {"role": "assistant", "content": "", "prefix": True}], "add_generation_prompt": False},
    ),
]


@pytest.mark.parametrize(("place", "arguments"), FAULTS, ids=[f"{i}-{place}" for i, (place, _) in enumerate(FAULTS)])
def test_a_fault_is_refused_at_its_place(place: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe().render(**arguments)
    assert caught.value.place == place
    assert str(caught.value).startswith(f"{place}: ")
    assert len(str(caught.value)) < 400


def test_a_key_that_says_nothing_is_no_fault() -> None:
    openai = {"role": "assistant", "content": "a", "refusal": None, "audio": None, "function_call": None, "tool_calls": []}
    assert Recipe().render([USER, openai, USER]) == Recipe().render([USER, {"role": "assistant", "content": "a"}, USER])


GOOD: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "content": "r", "tool_call_id": "a"},
    ],
    "tools": [TOOL],
    "thinking": True,
    "reasoning_effort": 5,
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
}
JUNK = [
    None,
    True,
    0,
    -1,
    2.5,
    math.nan,
    10**30,
    "",
    "x",
    "\ud800",
    "\x00",
    b"x",
    [],
    [[]],
    {},
    {"a": 1},
    {1: 2},
    (),
    object(),
    {1},
    DEEP,
    TOOL,
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, entry in inner for found in places(entry, (*path, key)))]


def spoiled(seed: int) -> dict[str, Any]:
    """The good arguments with one entry replaced, removed or added."""
    choice = random.Random(seed)
    arguments = copy.deepcopy(GOOD)
    *path, last = choice.choice(places(GOOD)[1:])
    holder: Any = arguments
    for key in path:
        holder = holder[key]
    action = choice.random()
    if action < 0.7:
        holder[last] = choice.choice(JUNK)
    elif action < 0.85:
        del holder[last]
    elif isinstance(holder, dict):
        holder["unknown"] = choice.choice(JUNK)
    else:
        holder.append(choice.choice(JUNK))
    return arguments


def test_spoiled_arguments_are_refused_or_served_and_raise_nothing_else() -> None:
    recipe = Recipe()
    refused = set()
    for seed in range(400):
        arguments = spoiled(seed)
        if "messages" not in arguments or "unknown" in arguments:
            continue
        try:
            recipe.render(**arguments)
        except RecipeError as error:
            refused.add((seed, error.place.split(".")[0].split("[")[0]))
    assert len(refused) >= 200
    assert {place for _, place in refused} == set(GOOD)
