"""The published encoder's own cases, and how each is said to `Recipe` and `ResponseParser`."""

import copy
import json
from typing import Any

from tests.conftest import DATA

FILE: dict[str, Any] = json.loads((DATA / "chat-encoding.json").read_text(encoding="utf-8"))

# What the published encoder does inside and `deepseek_recipe` does not offer to its users, or does otherwise. The library wins:
# it is what DeepSeek serves with, and is newer.
ENCODINGS_THAT_DIFFER = {
    "golden_4_task_action": "task markers are internal to the encoder",
    "task_query": "task markers are internal to the encoder",
    "context_continuation": "rendering the rest of a context is internal to the encoder",
    "golden_5_images": "images are refused: the engine is text only",
    "image_chat": "images are refused: the engine is text only",
    "keep_thinking": "drop_thinking = False is not offered: reasoning is kept if there are tools, else dropped",
    "tool_results_reordered": "drop_thinking = False is not offered; `tool_results_reordered_drop` is the same conversation",
}
REJECTIONS_THAT_DIFFER = {
    "placeholder_in_text": "a control token typed by a user is text like any other, the image placeholder too",
}
PARSES_THAT_DIFFER = {
    "missing_eos": "an answer may end anywhere: max_tokens, a stop string",
    "missing_think": "the same; all of it is reasoning",
    "v4_tags": "the tags of the version before are read as well",
    "duplicate_param": "both stand in the arguments, which are the model's own JSON",
    "text_after_calls": "what follows the calls is dropped",
}


def render_arguments(case: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `Recipe.render` for a case of the file."""
    messages = copy.deepcopy(case["messages"])
    arguments: dict[str, Any] = {"messages": messages, "thinking": case["thinking_mode"] == "thinking"}
    if "reasoning_effort" in case:
        arguments["reasoning_effort"] = case["reasoning_effort"]
    for message in messages:
        if schema := message.pop("response_format", None):
            arguments["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        if message.pop("wo_eos", False):
            message["prefix"] = True
        for tool in message.get("tools", []):
            # A namespace is written into name and description.
            if space := tool.pop("namespace", None):
                function = tool["function"]
                function["name"] = f"{space['name']}::{function['name']}"
                function["description"] = f"{space['description']}\n{function['description']}"
    # The published encoder ends where the conversation ends, the library always asks for an answer.
    last = messages[-1]
    is_answered = last["role"] == "assistant" and "prefix" not in last
    arguments["add_generation_prompt"] = not is_answered and case["name"] != "namespaced_tool"
    return arguments
