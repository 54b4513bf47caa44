"""`deepinfer chat`: lines in, streamed answers out, a conversation from a file, Ctrl-C and the end of input."""

import asyncio
import io
import json
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from deepinfer import ChatMessage, LLMEngine, RequestOutput, SamplingParams, TokenAdder, ToolCall
from deepinfer.cli import main
from deepinfer.cli.chat import MINI_IS_NO_CHAT_MODEL, answer_writer
from tests.golden import GOLDEN

COMMON = ("--max-tokens", "6", "--device", "cpu", "--precision", "float32", "--temperature", "0")
HELLO = {"role": "user", "content": "hello"}


class Result(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a tokenizer with the control tokens."""
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    assert main(["new-tiny", str(folder)]) == 0
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path) -> Run:
    """Runs the command in this process."""

    def run_command(*arguments: Any, stdin: str = "", model: Any = model) -> Result:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        try:
            status = main(["chat", str(model), *COMMON, *map(str, arguments)])
        except SystemExit as error:
            status = int(error.code or 0)
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return run_command


def written(message: ChatMessage) -> str:
    """The lines of an answer."""
    out = io.StringIO()
    answer_writer(out)(message)
    return out.getvalue() + "\n"


def answers(model: Path, *turns: dict[str, Any], start: tuple[Any, ...] = (), **settings: Any) -> list[ChatMessage]:
    """What the engine says, turn by turn."""
    messages, found = list(start), list[ChatMessage]()

    async def last(outputs: AsyncGenerator[RequestOutput, None]) -> ChatMessage:
        states = [output.outputs[0].message async for output in outputs]
        assert states[-1] is not None
        return states[-1]

    with LLMEngine.from_pretrained(model, precision="float32", device="cpu") as engine:
        adder = TokenAdder(engine.tokenizer)
        for turn in turns:
            messages.append(turn)
            params = SamplingParams(max_tokens=6, temperature=0)
            found.append(asyncio.run(last(engine.stream_chat(messages, params, **settings, token_adder=adder))))
            messages.append(found[-1])
    return found


@pytest.mark.parametrize(
    ("options", "settings", "start"),
    [
        ((), {}, ()),
        (("--no-thinking",), {"thinking": False}, ()),
        (("--reasoning-effort", "42"), {"reasoning_effort": 42}, ()),
        (
            ("--reasoning-effort", "low", "--system", "Be brief."),
            {"reasoning_effort": "low"},
            ({"role": "system", "content": "Be brief."},),
        ),
    ],
    ids=str,
)
def test_lines_are_answered_in_one_conversation(
    run: Run, model: Path, options: tuple[str, ...], settings: dict[str, Any], start: tuple[Any, ...]
) -> None:
    result = run(*options, stdin="hello\n\nand then?\n")
    expected = answers(model, HELLO, {"role": "user", "content": "and then?"}, start=start, **settings)
    assert (result.status, result.out) == (0, "".join(map(written, expected)))


def test_reasoning_answer_and_calls_are_told_apart() -> None:
    out = io.StringIO()
    write = answer_writer(out)
    for reasoning, content in (("so", ""), ("so it", ""), ("so it is", "w"), ("so it is", "well")):
        write(ChatMessage(content=content, reasoning_content=reasoning))
    assert out.getvalue() == "[thinking] so it is\n\nwell"


def test_what_cannot_be_answered_is_said_and_the_conversation_goes_on(run: Run, model: Path) -> None:
    result = run("--no-thinking", stdin=f"{'long ' * 300}\nhello\n")
    assert "prompt 0 has" in result.err
    assert (result.status, result.out) == (0, written(answers(model, HELLO, thinking=False)[0]))


class Interrupting(io.StringIO):
    """Presses Ctrl-C when the first piece of an answer is written."""

    is_armed = True

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.is_armed and text:
            self.is_armed = False
            signal.raise_signal(signal.SIGINT)
        return count


def test_ctrl_c_ends_the_answer_and_not_the_program(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = answers(model, HELLO, thinking=False)
    asked = []
    stream_chat = LLMEngine.stream_chat

    def recorded(engine: LLMEngine, messages: list[Any], *rest: Any, **options: Any) -> Any:
        asked.append(messages)
        return stream_chat(engine, messages, *rest, **options)

    monkeypatch.setattr(LLMEngine, "stream_chat", recorded)
    out = Interrupting()
    monkeypatch.setattr("sys.stdout", out)
    assert run("--no-thinking", stdin="hello\nhello\n").status == 0
    (first, second) = asked
    assert (first, second[::2]) == ([HELLO], [HELLO, HELLO])
    begun = second[1]
    assert out.getvalue().startswith(begun.content + "\n")
    assert whole.content.startswith(begun.content)
    assert 0 < len(begun.content) < len(whole.content)


def test_ctrl_c_at_the_prompt_goes_on(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = [KeyboardInterrupt(), "hello", EOFError()]

    def read(prompt: str) -> str:
        line = lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    monkeypatch.setattr("builtins.input", read)
    assert run("--no-thinking").out == written(answers(model, HELLO, thinking=False)[0])
    assert lines == []


@pytest.mark.parametrize(
    "content", [[HELLO], {"messages": [HELLO]}, {"messages": [HELLO], "response_format": {"type": "json_object"}}], ids=str
)
def test_a_conversation_from_a_file_gets_one_answer(run: Run, model: Path, tmp_path: Path, content: Any) -> None:
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(content))
    settings = {key: value for key, value in content.items() if key != "messages"} if isinstance(content, dict) else {}
    (expected,) = answers(model, HELLO, **settings)
    assert run("--json-messages", file).out == written(expected)
    for result in (run("--json-messages", file, "--json"), run("--json-messages", "-", "--json", stdin=json.dumps(content))):
        found = json.loads(result.out)
        assert (result.status, found["model"]) == (0, model.name)
        assert found["choices"][0]["message"] == expected.to_dict()


def test_calls_are_written_behind_the_answer(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called = ChatMessage(content="well", tool_calls=(ToolCall("a", "f", '{"x": 1}'),))
    monkeypatch.setattr("deepinfer.chat.response_parser.ResponseParser.message", called)
    assert run("--no-thinking", stdin="hello\n").out == 'well\n[tool call] f({"x": 1})\n'


def refused(result: Result, *parts: str) -> None:
    assert (result.status, result.out) == (2, "")
    assert "Traceback" not in result.err
    message = result.err.splitlines()[-1]
    assert message.startswith("deepinfer")
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"{not json", ("not valid JSON",)),
        (b"[" * 100_000, ("not valid JSON",)),
        (b'["\xff"]', ("not valid JSON", "utf-8")),
        (b'"hello"', ("expected a list of messages",)),
        (b"{}", ("expected a list of messages",)),
        (b'{"messages": [], "temperature": 1}', ("expected a list of messages", "tool_choice")),
        (b"[]", ("messages: expected at least one",)),
        (b'[{"role": "user", "content": 5}]', ("messages[0].content", "got 5")),
        (b'{"messages": "hello"}', ("messages: expected a list",)),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": [5]}', ("tools[0]: expected a dictionary",)),
    ],
)
def test_a_bad_file_is_refused_with_the_place(run: Run, tmp_path: Path, content: bytes, parts: tuple[str, ...]) -> None:
    file = tmp_path / "messages.json"
    file.write_bytes(content)
    for options in ((), ("--json",)):
        refused(run("--json-messages", file, *options), *parts)


def test_wrong_options_are_refused(run: Run, tmp_path: Path) -> None:
    refused(run("--json-messages", tmp_path / "absent"), "absent", "cannot be read")
    refused(run("--json"), "--json is for --json-messages")
    refused(run("--temperature", "nan"), "temperature")
    file = tmp_path / "messages.json"
    file.write_text(json.dumps([HELLO]))
    for effort in ("0", "101", "-5", "medium", "1.5"):
        refused(run("--reasoning-effort", effort, "--json-messages", file), "reasoning_effort", effort)
    refused(run("--no-thinking", "--reasoning-effort", "5", "--json-messages", file), "needs thinking")
    refused(run(model="nowhere"), "nowhere")
    refused(run(model=GOLDEN / "swa_tiny"), "no control token", "generate()")
    refused(run("--json-messages", file, model=GOLDEN / "swa_tiny"), "no control token")


def test_without_the_library_the_error_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    refused(run(stdin="hello\n"), "pip install 'deepinfer-reference[chat]'")


def test_mini_says_that_it_is_no_chat_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "--device", "cpu"]) == 0
    assert MINI_IS_NO_CHAT_MODEL in capsys.readouterr().err
