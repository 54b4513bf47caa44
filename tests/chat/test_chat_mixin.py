"""`chat` and `stream_chat`: prompts of conversations, answers taken apart, with a scripted engine and with a real one."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from deepinfer import (
    ChatMessage,
    LLMEngine,
    PromptTooLong,
    Recipe,
    RecipeError,
    Rejected,
    RequestOutput,
    SamplingParams,
    StructuredOutputs,
    TokenAdder,
    Tokenizer,
    TokenizerError,
    ToolCall,
)
from deepinfer.cli import main
from tests.chat.conftest import Script
from tests.chat.conversations import TOOL
from tests.chat.scripted import EOS, ScriptedEngine
from tests.chat.test_messages import FAULTS
from tests.golden import GOLDEN

HELLO = [{"role": "user", "content": "hello <｜User｜>"}]
CALLS = """

<｜DSML｜ calls>
<｜DSML｜ invoke name="look_up">
<｜DSML｜ parameter name="a" string="false">[1]</｜DSML｜ parameter>
</｜DSML｜ invoke>
</｜DSML｜ calls>"""


def test_an_answer_is_taken_apart(script: Script, published_tokenizer: Tokenizer) -> None:
    engine = script(f"so</think>\n\nwell{CALLS}")
    (output,) = engine.chat(HELLO, tools=[TOOL])
    prompt = Recipe().render(HELLO, tools=[TOOL])
    adder = TokenAdder(published_tokenizer)
    adder.follow(prompt.segments)
    assert (engine.prompts, output.prompt) == ([adder.token_ids], prompt.text)
    completion = output.outputs[0]
    assert completion.text == f"so</think>\n\nwell{CALLS}"
    call = ToolCall("call_1_0_0", "look_up", '{"a": [1]}')
    assert completion.message == ChatMessage(content="well", reasoning_content="so", tool_calls=(call,))


@pytest.mark.parametrize("thinking", [True, False])
def test_a_form_begins_behind_the_reasoning(script: Script, published_tokenizer: Tokenizer, thinking: bool) -> None:
    engine = script("so</think>{}")
    engine.chat(HELLO, SamplingParams(structured_outputs=StructuredOutputs(json_object=True)), thinking=thinking)
    form = engine.params[-1].structured_outputs
    marker = (published_tokenizer.backend.token_to_id("</think>"),)
    assert form.reasoning_end == (marker if thinking else ())


def test_every_setting_reaches_the_prompt(script: Script) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "thinking": False},
        {"tools": [TOOL], "thinking": False, "tool_choice": "required"},
        {"thinking": False},
        {"reasoning_effort": 7},
        {"response_format": {"type": "json_object"}},
    ]

    async def streamed(engine: ScriptedEngine, setting: dict[str, Any]) -> str | None:
        async with aclosing(engine.stream_chat(HELLO, **setting)) as outputs:
            async for output in outputs:
                return output.prompt
        return None

    for setting in settings:
        engine = script([EOS], [EOS])
        expected = Recipe().render(HELLO, **setting).text
        assert engine.chat(HELLO, **setting)[0].prompt == expected
        assert asyncio.run(streamed(engine, setting)) == expected
    assert len({Recipe().render(HELLO, **setting).text for setting in settings}) == len(settings)


def test_completions_of_several_conversations_keep_their_places(script: Script) -> None:
    words = ["one", "two", "three"]
    engine = script(*(f"{word}</think>{word}" for word in words))
    outputs = engine.chat([HELLO, HELLO], [SamplingParams(n=2), SamplingParams()])
    found = [[c.message for c in output.outputs] for output in outputs]
    messages = [ChatMessage(content=word, reasoning_content=word) for word in words]
    assert found == [messages[:2], messages[2:]]


def test_a_fault_names_its_conversation_before_anything_runs(script: Script) -> None:
    engine = script()
    with pytest.raises(RecipeError) as caught:
        engine.chat([HELLO, [HELLO[0], {"role": "user", "content": 5}]])
    assert caught.value.place == "messages[1][1].content"
    with pytest.raises(RecipeError, match=r"^messages: expected at least one message"):
        engine.chat([])
    with pytest.raises(RecipeError, match=r"^messages\[1\]: expected at least one message"):
        engine.chat([HELLO, []])
    with pytest.raises(RecipeError, match=r"^reasoning_effort"):
        engine.chat([HELLO], reasoning_effort=0)
    with pytest.raises(RecipeError, match=r"^format: expected None or 'openai', got 'xml'"):
        engine.chat(HELLO, format="xml")  # type: ignore[arg-type]
    assert engine.prompts == []


def test_messages_grow_while_an_answer_streams(script: Script) -> None:
    text = f"so it is 😀</think>well 1 < 2{CALLS}"
    engine = script(text, text)

    async def streamed() -> list[ChatMessage]:
        messages = [output.outputs[0].message async for output in engine.stream_chat(HELLO, tools=[TOOL])]
        return [message for message in messages if message is not None]

    messages = asyncio.run(streamed())
    assert messages[-1].content == "well 1 < 2"
    assert messages[-1] == ChatMessage(content="well 1 < 2", reasoning_content="so it is 😀", tool_calls=messages[-1].tool_calls)
    for before, after in pairwise(messages):
        assert after.content.startswith(before.content)
        assert (after.reasoning_content or "").startswith(before.reasoning_content or "")
        assert len(after.tool_calls) >= len(before.tool_calls)
    assert len({message.content for message in messages}) > 3
    (whole,) = engine.chat(HELLO, tools=[TOOL])
    assert json.loads(whole.outputs[0].message.tool_calls[0].arguments) == {"a": [1]}
    assert whole.outputs[0].message.content == messages[-1].content


@pytest.mark.parametrize("stop_after", [None, 2])
def test_a_token_adder_is_kept_from_turn_to_turn(script: Script, published_tokenizer: Tokenizer, stop_after: int | None) -> None:
    # Written letter by letter: the tokenizer would have chosen one token.
    letters = [i for letter in "area" for i in published_tokenizer.encode(letter)]
    engine = script([*letters, EOS], [EOS])
    adder = TokenAdder(published_tokenizer)

    async def turn(messages: list[Any]) -> RequestOutput:
        async with aclosing(engine.stream_chat(messages, thinking=False, token_adder=adder)) as outputs:
            async for output in outputs:
                if len(output.outputs[0].token_ids) == stop_after:
                    break
        return output

    first = asyncio.run(turn(HELLO))
    message = first.outputs[0].message
    asyncio.run(turn([*HELLO, message, HELLO[0]]))
    begin = [*engine.prompts[0], *first.outputs[0].token_ids]
    assert engine.prompts[1][: len(begin)] == begin
    with pytest.raises(Rejected, match="n is above 1"):
        asyncio.run(anext(engine.stream_chat(HELLO, SamplingParams(n=2), token_adder=adder)))  # type: ignore[arg-type]


# ---- a real engine --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    assert main(["new-tiny", str(folder)]) == 0
    with LLMEngine.from_pretrained(folder, precision="float32", device="cpu") as engine:
        yield engine


def test_chat_gives_what_generate_gives_for_its_prompt(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    for thinking in (True, False):
        (output,) = engine.chat(HELLO, params, thinking=thinking, use_tqdm=False)
        (same,) = engine.generate([output.prompt_token_ids], params, use_tqdm=False)
        assert output.outputs[0].token_ids == same.outputs[0].token_ids
        assert output.outputs[0].text == same.outputs[0].text
        message = output.outputs[0].message
        assert message is not None
        assert (message.reasoning_content is not None) == thinking

    async def streamed() -> RequestOutput:
        async for output in engine.stream_chat(HELLO, params, thinking=False):
            last = output
        return last

    found = asyncio.run(streamed())
    assert found.finished
    assert found.outputs[0].message == message


def test_a_stop_string_ends_the_message_too(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=12, temperature=1, seed=3)
    (output,) = engine.chat(HELLO, params, thinking=False, use_tqdm=False)
    text = output.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    (stopped,) = engine.chat(HELLO, replace(params, stop=[stop]), thinking=False, use_tqdm=False)
    assert stopped.outputs[0].stop_reason == stop
    message = stopped.outputs[0].message
    assert message is not None
    assert message.content == text[: text.index(stop)].lstrip("\n")


def test_what_cannot_be_served_is_refused_and_the_engine_goes_on(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=2, temperature=0)
    with pytest.raises(PromptTooLong, match="prompt 1 has"):
        engine.chat([HELLO, [{"role": "user", "content": "a" * 5000}]], params, use_tqdm=False)
    with pytest.raises(Rejected, match="2 for 1 prompts"):
        engine.chat(HELLO, [params, params], use_tqdm=False)
    assert engine.chat(HELLO, params, use_tqdm=False, format="openai")["usage"]["completion_tokens"] == 2


def test_malformed_conversations_do_not_disturb_a_good_one(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    (expected,) = engine.chat(HELLO, params, use_tqdm=False)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.chat, HELLO, params, use_tqdm=False)
        for _, arguments in FAULTS:
            if "add_generation_prompt" not in arguments:
                with pytest.raises(RecipeError):
                    engine.chat(**arguments, sampling_params=params, use_tqdm=False)
        (found,) = running.result()
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_model_without_control_tokens_is_refused() -> None:
    with (
        LLMEngine.from_pretrained(GOLDEN / "swa_tiny", precision="float32", device="cpu") as engine,
        pytest.raises(TokenizerError, match="not one for conversations"),
    ):
        engine.chat(HELLO)
