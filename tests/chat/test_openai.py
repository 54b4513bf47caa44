"""The dictionary of OpenAI's API: its shape, its counts, its log probabilities."""

import json
import time
from typing import Any

import pytest

from deepinfer import SamplingParams, Tokenizer
from tests.chat.conftest import Script
from tests.chat.conversations import TOOL
from tests.chat.scripted import EOS
from tests.chat.test_chat_mixin import CALLS, HELLO


def test_the_dictionary_has_the_shape_of_the_api(script: Script) -> None:
    engine = script(f"so it is</think>well{CALLS}")
    (num_completion,) = map(len, engine.answers)
    before = int(time.time())
    found = engine.chat(HELLO, tools=[TOOL], format="openai")
    assert before <= found.pop("created") <= time.time()
    num_prompt = len(engine.prompts[0])
    assert found == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "scripted",
        "system_fingerprint": "deepinfer-v4.1-native",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "well",
                    "reasoning_content": "so it is",
                    "tool_calls": [
                        {"id": "call_1_0_0", "type": "function", "function": {"name": "look_up", "arguments": '{"a": [1]}'}}
                    ],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 3},
        },
    }
    assert json.loads(json.dumps(found)) == found


def test_one_conversation_gives_one_dictionary_and_a_list_a_list(script: Script) -> None:
    engine = script(*[[EOS]] * 3)
    assert isinstance(engine.chat(HELLO, format="openai"), dict)
    assert [type(found) for found in engine.chat([HELLO, HELLO], format="openai")] == [dict, dict]


@pytest.mark.parametrize(
    ("text", "ends", "thinking", "reason", "num_reasoning"),
    [
        ("so it is</think>well", True, True, "stop", 3),
        ("so it is</think>well", False, True, "length", 3),
        ("so it is", True, True, "stop", 3),
        ("so it is", False, True, "length", 3),
        ("so it is</think>well", True, False, "stop", 0),
        (f"so</think>{CALLS}", False, True, "length", 1),
    ],
)
def test_reasoning_tokens_are_those_before_its_end(
    text: str, ends: bool, thinking: bool, reason: str, num_reasoning: int, script: Script
) -> None:
    engine = script(text)
    if not ends:
        engine.answers[0].pop()
    found = engine.chat(HELLO, thinking=thinking, tools=[TOOL], format="openai")
    assert found["choices"][0]["finish_reason"] == reason
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_reasoning


@pytest.mark.parametrize("num_top", [0, 1, 2, -1])
def test_log_probabilities_stand_beside_reasoning_and_content(num_top: int, script: Script, published_tokenizer: Tokenizer) -> None:
    engine = script("so it</think>é")
    (ids,) = engine.answers
    found = engine.chat(HELLO, SamplingParams(logprobs=num_top), format="openai")["choices"][0]["logprobs"]

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": str(token_id), "logprob": logprob, "bytes": list(published_tokenizer.token_bytes(token_id))}

    entries = [
        {**entry(i, -0.5), "top_logprobs": [entry(i - 1, -0.25), entry(i, -0.5)][: num_top if num_top >= 0 else None]} for i in ids
    ]
    assert found == {"reasoning_content": entries[:2], "content": entries[2:]}
    assert entries[3]["bytes"] == list("é".encode())
