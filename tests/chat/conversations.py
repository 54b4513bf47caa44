"""Random conversations, shaped as OpenAI's API shapes them, with texts that look like control tokens."""

from typing import Any

from hypothesis import strategies as st

MARKERS = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"),
    *("<think>", "</think>", "｜DSML｜", "<｜deepseek_image｜>", "<|EOT|>"),
)
LOOKALIKES = (
    *MARKERS,
    *("</thi", "\n\n<｜DSML｜ calls>\n", "</｜DSML｜ parameter>", '"', "\\", "😀", "é", "中文", "\n\n"),
)

pieces = st.one_of(st.sampled_from(LOOKALIKES), st.text(st.characters(exclude_categories=["Cs"]), max_size=6))
texts = st.lists(pieces, max_size=5).map("".join)
said = texts.filter(str.strip)
numbers = st.one_of(st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False, width=32))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=5,
)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True)
# The library writes any name of a parameter and reads back those without quotes and spaces.
arguments = st.dictionaries(st.from_regex(r"[A-Za-z_.é-]{1,8}", fullmatch=True), values, max_size=3)

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Finds <think> things.", "parameters": {"type": "object", "properties": {}}},
}


@st.composite
def conversations(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `Recipe.render`: messages that end with a question or a tool's answer, perhaps tools, perhaps thinking."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(said)})
    for turn in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(said)})
        if draw(st.booleans()):
            calls = [
                {"id": f"{turn}.{i}", "type": "function", "function": {"name": draw(names), "arguments": draw(arguments)}}
                for i in range(draw(st.integers(1, 2)))
            ]
            messages.append({"role": "assistant", "content": draw(texts), "reasoning_content": draw(texts), "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": draw(texts)} for call in reversed(calls)]
        else:
            messages.append({"role": "assistant", "content": draw(said), "reasoning_content": draw(texts)})
    messages.append({"role": "user", "content": draw(said)})
    return {"messages": messages, "thinking": draw(st.booleans()), "tools": draw(st.sampled_from([None, [TOOL]]))}
