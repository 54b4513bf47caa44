"""`deepinfer generate`: text from a checkpoint."""

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from deepinfer.errors import DeepInferError, Rejected

if TYPE_CHECKING:
    from deepinfer import LLMEngine, RequestOutput, SamplingParams

NAME = "generate"
HELP = "generate text from a checkpoint"
DESCRIPTION = """Generate text. A prompt streams to the terminal; with --jsonl, --json, -o or -n above 1 there is one JSON object
for each prompt, on a line of its own.

The prompt comes from the argument, from a file (--file: the whole file is one prompt; --jsonl: one prompt a line), or from
standard input if neither is given."""

ENGINE_OPTIONS = (
    "precision",
    "device",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "num_blocks",
    "async_scheduling",
    "num_speculative_tokens",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("prompt", nargs="?", help="the prompt; '-' or nothing reads standard input")
    parser.add_argument(
        "-m", "--model", default="mini", help="a checkpoint folder in the published format, or a preset (default mini)"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-f", "--file", type=Path, help="read one prompt from a text file")
    source.add_argument(
        "--jsonl", type=Path, help='read prompts, one a line: a JSON string, {"prompt": text} or {"prompt_token_ids": [...]}'
    )
    parser.add_argument("-o", "--output", type=Path, help="write JSON lines to this file instead of the terminal")
    parser.add_argument("--json", action="store_true", help="print JSON lines, also for a single prompt")

    sampling = parser.add_argument_group("sampling (as in vLLM)")
    sampling.add_argument("-n", type=int, default=1, help="completions for each prompt (default 1)")
    sampling.add_argument("--max-tokens", type=int, default=128, help="most tokens to produce (default 128)")
    sampling.add_argument("--min-tokens", type=int, default=0, help="no end before this many tokens (default 0)")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default 0)")
    sampling.add_argument("--top-k", type=int, default=0, help="keep the k most probable tokens; 0 keeps all (default 0)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="keep the most probable tokens up to this mass (default 1)")
    sampling.add_argument("--min-p", type=float, default=0.0, help="keep tokens this fraction as probable as the best (default 0)")
    sampling.add_argument(
        "--seed",
        type=int,
        help="seed of the noise; if not given, it follows from the request's number, the same in every run, and is reported",
    )
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the text here; may be given several times"
    )
    sampling.add_argument("--presence-penalty", type=float, default=0.0, help="for tokens of the output (default 0)")
    sampling.add_argument("--frequency-penalty", type=float, default=0.0, help="for each time in the output (default 0)")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, help="for tokens of prompt and output (default 1)")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    sampling.add_argument("--logprobs", type=int, metavar="N", help="log probabilities of the chosen and the N best tokens")

    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--precision", default="native", help="native, float32, float32_kv or bfloat16 (default native: the published rounding)"
    )
    engine.add_argument("--device", help="torch device (default: the accelerator if there is one, else cpu)")
    engine.add_argument("--max-num-seqs", type=int, default=64, help="most sequences in a step (default 64)")
    engine.add_argument("--max-num-batched-tokens", type=int, default=2048, help="most tokens in a step (default 2048)")
    engine.add_argument("--max-model-len", type=int, help="longest sequence (default: the model's)")
    engine.add_argument("--num-blocks", type=int, help="cache blocks (default: from free memory)")
    engine.add_argument("--async-scheduling", type=int, choices=(0, 1), default=1, help="steps the host runs ahead (default 1)")
    engine.add_argument("--num-speculative-tokens", type=int, default=0, help="drafts verified in a step (default 0)")
    engine.add_argument("--batch-invariant", action="store_true", help="a row's bits do not depend on its batch")


def run(args: argparse.Namespace) -> int:
    """Load, generate, write. Returns the exit code."""
    prompts = read_prompts(args)
    from deepinfer import LLMEngine, SamplingParams

    check_writable(args.output)
    params = SamplingParams(
        n=args.n,
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=args.stop,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty,
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
    )
    options = {name: getattr(args, name) for name in ENGINE_OPTIONS}
    with LLMEngine.from_pretrained(args.model, batch_invariant=args.batch_invariant, **options) as engine:
        if args.n == 1 and args.output is None and not args.json and not args.jsonl:
            return asyncio.run(stream_to(sys.stdout, engine, prompts[0], params))
        try:
            outputs = engine.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        except DeepInferError as error:
            if error.outputs is not None:
                write_jsonl(error.outputs, args.output)
            if args.jsonl and error.prompt_index is not None:
                raise Rejected(
                    f"{args.jsonl}, line {filled_lines(args.jsonl.read_bytes().splitlines())[error.prompt_index]}: {error}"
                ) from error
            raise
    write_jsonl(outputs, args.output)
    for index, output in enumerate(outputs):
        tell_of_cut(output, args.max_tokens, f"prompt {index}: ")
    return 130 if any(c.finish_reason == "abort" for o in outputs for c in o.outputs) else 0


def read_prompts(args: argparse.Namespace) -> list[Any]:
    """Prompts from the argument, a file or standard input. Raises: Rejected, naming file and line."""
    if args.prompt not in (None, "-"):
        if args.file or args.jsonl:
            raise Rejected("give the prompt as an argument or as a file, not both")
        return [args.prompt]
    try:
        if args.file:
            return [args.file.read_text(encoding="utf-8")]
        if args.jsonl:
            return read_lines(args.jsonl)
        return [sys.stdin.read()]
    except OSError as error:
        raise Rejected(f"{error.filename}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise Rejected(f"{args.file or 'standard input'}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_lines(path: Path) -> list[Any]:
    """The prompts of a JSON-lines file; empty lines count as lines only. Raises: Rejected, naming the line."""
    lines = path.read_bytes().splitlines()
    prompts = [parse_line(f"{path}, line {number}", lines[number - 1]) for number in filled_lines(lines)]
    if not prompts:
        raise Rejected(f"{path} holds no prompt")
    return prompts


def filled_lines(lines: list[bytes]) -> list[int]:
    """Numbers, from 1, of the lines that hold a prompt."""
    return [number for number, line in enumerate(lines, start=1) if line.strip()]


def parse_line(where: str, line: bytes) -> Any:
    """One prompt of a JSON-lines file."""
    try:
        value = json.loads(line.decode())
    # A line of very many brackets ends in a RecursionError.
    except (ValueError, RecursionError) as error:
        raise Rejected(f"{where}: not valid JSON ({error})") from error
    if isinstance(value, dict) and "prompt" in value:
        if unknown := sorted(set(value) - {"prompt"}):
            raise Rejected(f"{where}: unknown key {unknown[0]!r} beside 'prompt'")
        value = value["prompt"]
        if not isinstance(value, str | list):
            raise Rejected(f"{where}: expected a text or a list of token ids as 'prompt', got {type(value).__name__}")
    if not isinstance(value, str | list | dict):
        raise Rejected(f"{where}: expected a text, a list of token ids or an object, got {line.decode()[:40]}")
    return value


def check_writable(path: Path | None) -> None:
    """Raises: Rejected, before the work rather than after it; what the file holds stays until there is something to write."""
    if path is not None:
        try:
            path.open("a").close()
        except OSError as error:
            raise Rejected(f"{path}: cannot be written ({error.strerror})") from error


async def stream_to(out: TextIO, engine: "LLMEngine", prompt: Any, params: "SamplingParams") -> int:
    """Write text as it grows, followed by a line of counts on standard error."""
    shown = 0
    async for output in engine.stream(prompt, params):
        completion = output.outputs[0]
        out.write(completion.text[shown:])
        out.flush()
        shown = len(completion.text)
    out.write("\n")
    seconds = (output.metrics.finished_s or 0) - output.metrics.arrival_s if output.metrics else 0.0
    count, rate = len(completion.token_ids), len(completion.token_ids) / max(seconds, 1e-9)
    sys.stderr.write(
        f"[{len(output.prompt_token_ids)} prompt + {count} new tokens in {seconds:.2f} s, {rate:.1f} tokens/s, "
        f"{completion.finish_reason}, precision {output.precision}, seed {completion.seed}]\n"
    )
    tell_of_cut(output, params.max_tokens)
    return 0


def tell_of_cut(output: "RequestOutput", max_tokens: int | None, which: str = "") -> None:
    """Say on standard error that the longest sequence, and not --max-tokens, has ended a text."""
    for completion in output.outputs:
        count = len(completion.token_ids)
        if completion.finish_reason == "length" and max_tokens is not None and count < max_tokens:
            longest = len(output.prompt_token_ids) + count
            sys.stderr.write(
                f"{which}ended after {count} of --max-tokens {max_tokens}: prompt and output have at most {longest} tokens\n"
            )
            return


def write_jsonl(outputs: list[Any], path: Path | None) -> None:
    """One JSON object for each output, fields as in `RequestOutput`; the command asks for no arrays."""
    lines = [json.dumps(asdict(output), ensure_ascii=False) + "\n" for output in outputs]
    if path is None:
        sys.stdout.writelines(lines)
        return
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise Rejected(f"{path}: cannot be written ({error.strerror})") from error
