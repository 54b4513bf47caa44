"""`deepinfer chat`: a conversation in the terminal, or the answer to one from a file."""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from deepinfer.cli.generate import tell_of_cut
from deepinfer.errors import Rejected, RequestError

if TYPE_CHECKING:
    from deepinfer import ChatMessage, LLMEngine, RequestOutput, SamplingParams, TokenAdder

NAME = "chat"
HELP = "talk with a model"
DESCRIPTION = """Talk with a model: one line is one message, the answer streams. Ctrl-C ends the answer, end of input
(Ctrl-D) the program. With --json-messages the conversation comes from a file and one answer is written."""

MINI_IS_NO_CHAT_MODEL = "note: mini was trained on Python source code only and cannot hold a conversation"
# Keys of a conversation's file beside the messages: arguments of `chat` that have no option.
FILE_KEYS = {"messages", "tools", "tool_choice", "response_format"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "model", nargs="?", default="mini", help="a checkpoint folder in the published format, or a preset (default mini)"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message at the beginning")
    parser.add_argument(
        "--thinking", action=argparse.BooleanOptionalAction, default=True, help="reason before the answer (default: yes)"
    )
    parser.add_argument("--reasoning-effort", type=_effort, metavar="EFFORT", help="low, high, max or 1 to 100 (default high)")
    parser.add_argument(
        "--json-messages",
        type=Path,
        metavar="FILE",
        help='answer once the messages in this file, a JSON list or {"messages": [...], "tools": [...]}; "-" is standard input',
    )
    parser.add_argument("--json", action="store_true", help="write the answer to --json-messages as OpenAI's API does")

    sampling = parser.add_argument_group("sampling (as in vLLM)")
    sampling.add_argument("--max-tokens", type=int, default=2048, help="most tokens of an answer (default 2048)")
    sampling.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="keep the most probable tokens up to this mass (default 1)")
    sampling.add_argument("--seed", type=int, help="seed of the noise (default: from the number of the answer)")

    engine = parser.add_argument_group("engine")
    engine.add_argument("--precision", default="native", help="native, float32, float32_kv or bfloat16 (default native)")
    engine.add_argument("--device", help="torch device (default: the accelerator if there is one, else cpu)")
    engine.add_argument("--max-model-len", type=int, help="longest conversation in tokens (default: the model's)")


def run(args: argparse.Namespace) -> int:
    """Load, talk. Returns the exit code."""
    if args.json and args.json_messages is None:
        raise Rejected("--json is for --json-messages")
    given = None if args.json_messages is None else read_conversation(args.json_messages)
    from deepinfer import LLMEngine, SamplingParams, TokenAdder

    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    options: dict[str, Any] = {"thinking": args.thinking, "reasoning_effort": args.reasoning_effort}
    start = [] if args.system is None else [{"role": "system", "content": args.system}]
    engine_options = {name: getattr(args, name) for name in ("precision", "device", "max_model_len")}
    with LLMEngine.from_pretrained(args.model, **engine_options) as engine:
        if args.model == "mini":
            print(MINI_IS_NO_CHAT_MODEL, file=sys.stderr)
        adder = TokenAdder(engine.tokenizer)
        if given is None:
            return converse(engine, start, params, options, adder)
        messages = given.pop("messages")
        if start and isinstance(messages, list):
            messages = [*start, *messages]
        options |= given
        if args.json:
            answer = engine.chat(messages, params, **options, format="openai", use_tqdm=False)
            print(json.dumps(answer, ensure_ascii=False))
            return 130 if answer["choices"][0]["finish_reason"] == "abort" else 0
        _, is_whole = write_answer(sys.stdout, engine, messages, params, options, adder)
        return 0 if is_whole else 130


def converse(
    engine: "LLMEngine", messages: list[Any], params: "SamplingParams", options: dict[str, Any], adder: "TokenAdder"
) -> int:
    """Read a line, write an answer, until the input ends. What cannot be answered is said and forgotten."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if not line.strip():
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            answer, _ = write_answer(sys.stdout, engine, asked, params, options, adder)
        except RequestError as error:
            print(f"deepinfer: {error}", file=sys.stderr)
            continue
        messages = [*asked, answer] if answer is not None else messages


def write_answer(
    out: TextIO,
    engine: "LLMEngine",
    messages: list[Any],
    params: "SamplingParams",
    options: dict[str, Any],
    adder: "TokenAdder",
) -> "tuple[ChatMessage | None, bool]":
    """Stream an answer; returns it, as far as it came, and whether it was left to its end."""
    answer: ChatMessage | None = None
    last: RequestOutput | None = None
    write = answer_writer(out)

    async def stream() -> None:
        nonlocal answer, last
        async for output in engine.stream_chat(messages, params, **options, token_adder=adder):
            answer = output.outputs[0].message
            assert answer is not None
            write(answer)
            last = output

    is_whole = True
    try:
        asyncio.run(stream())
    except KeyboardInterrupt:
        is_whole = False
    for call in answer.tool_calls if answer is not None else ():
        out.write(f"\n[tool call] {call.name}({call.arguments})")
    out.write("\n")
    out.flush()
    if last is not None:
        tell_of_cut(last, params.max_tokens)
    return answer, is_whole


def answer_writer(out: TextIO) -> "Callable[[ChatMessage], None]":
    """A function that writes what is new in a growing answer; reasoning stands in lines of its own."""
    num_reasoning = num_content = 0

    def write(answer: "ChatMessage") -> None:
        nonlocal num_reasoning, num_content
        reasoning = answer.reasoning_content or ""
        if reasoning[num_reasoning:]:
            out.write(("" if num_reasoning else "[thinking] ") + reasoning[num_reasoning:])
        if answer.content[num_content:]:
            out.write(("\n\n" if reasoning and not num_content else "") + answer.content[num_content:])
        num_reasoning, num_content = len(reasoning), len(answer.content)
        out.flush()

    return write


def read_conversation(path: Path) -> dict[str, Any]:
    """`messages` and what else a file says. Raises: Rejected, naming the file."""
    where = "standard input" if str(path) == "-" else str(path)
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        value = json.loads(text)
    except OSError as error:
        raise Rejected(f"{where}: cannot be read ({error.strerror})") from error
    # Text that is no UTF-8 is a ValueError too; very many brackets end in a RecursionError.
    except (ValueError, RecursionError) as error:
        raise Rejected(f"{where}: not valid JSON ({error})") from error
    if isinstance(value, list):
        return {"messages": value}
    if not isinstance(value, dict) or "messages" not in value or not set(value) <= FILE_KEYS:
        raise Rejected(
            f"{where}: expected a list of messages, or an object with 'messages' and any of {', '.join(sorted(FILE_KEYS))}"
        )
    return value


def _effort(text: str) -> str | int:
    return int(text) if text.lstrip("-").isdecimal() else text
