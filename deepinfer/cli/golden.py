"""`deepinfer golden`: record golden outputs, and compare another build with them."""

import argparse
import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

from deepinfer.cli.generate import check_writable, read_lines
from deepinfer.errors import Rejected

WORST_ROW = 4.0  # times the tolerance of a tensor is allowed for its worst row
NAME = "golden"
HELP = "record golden outputs, or compare another build with them"
RECORD = """Read every prompt plainly (greedy unless asked otherwise) and write down tokens, logits and named tensors, with what
made them. The size is announced first. Interrupted, it goes on when it is called again with the same arguments."""
COMPARE = """Compare OTHER with the recording DIR: tokens, predictions and named tensors. OTHER is another recording, JSON lines of
{prompt_token_ids, token_ids, logprobs} (vLLM's and SGLang's names work too), a safetensors file of one prompt, or a folder of them.
Our model reads the tokens of the other build, so that one flipped token does not end the comparison.

Exit status: 0 equal within tolerance, 1 differs, 2 input that cannot be used."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare both commands."""
    kinds = parser.add_subparsers(title="commands", metavar="WHAT", required=True, dest="what")
    formatter = argparse.RawDescriptionHelpFormatter
    _add_record(kinds.add_parser("record", help="record a model", description=RECORD, formatter_class=formatter))
    _add_compare(kinds.add_parser("compare", help="compare with a recording", description=COMPARE, formatter_class=formatter))


def _add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint folder or a preset's name")
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help="JSON lines as in `generate --jsonl` (.jsonl), or a text a line"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="an empty folder, or one to go on with")
    parser.add_argument(
        "-t",
        "--tensors",
        action="append",
        metavar="PATTERN",
        help="tensors to keep, may be repeated: '*' is one part of a name, '**' any number; '**' alone keeps all, which names the "
        "exact module of a fault (default: embedding, streams, choices, entries, Engram rows, proposals); '' keeps none",
    )
    parser.add_argument("--top-logprobs", type=int, metavar="N", help="keep the N best log probabilities instead of all logits")
    parser.add_argument(
        "--max-bytes", type=float, default=4e9, metavar="N", help="refuse to write more bytes than this (default 4e9)"
    )
    sampling = parser.add_argument_group("reading")
    sampling.add_argument("--max-tokens", type=int, default=32, help="tokens to generate; 0 reads the prompts alone (default 32)")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default 0)")
    sampling.add_argument("--top-k", type=int, default=0, help="keep the k most probable tokens; 0 keeps all (default 0)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="keep the most probable tokens up to this mass (default 1)")
    sampling.add_argument("--min-p", type=float, default=0.0, help="keep tokens this fraction as probable as the best (default 0)")
    sampling.add_argument("--seed", type=int, default=0, help="seed of the noise (default 0)")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    sampling.add_argument("--precision", default="native", help="native, float32, float32_kv or bfloat16 (default native)")
    sampling.add_argument("--device", help="torch device (default: the accelerator if there is one, else cpu)")
    sampling.add_argument("--batch-size", type=int, default=1, help="prompts that share every forward (default 1)")
    sampling.add_argument("--chunk-tokens", type=int, default=2048, help="prompt tokens in one forward (default 2048)")
    sampling.add_argument("--batch-invariant", action="store_true", help="a row's bits do not depend on batch and chunks")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("golden", type=Path, metavar="DIR", help="the recording")
    parser.add_argument("other", type=Path, metavar="OTHER", help="what to compare with it")
    parser.add_argument("-m", "--model", help="the recorded model (default: where it was when it was recorded)")
    parser.add_argument("--device", help="torch device (default: the accelerator if there is one, else cpu)")
    parser.add_argument(
        "--name-map",
        type=Path,
        metavar="FILE",
        help="JSON object of OTHER's tensor names to ours; '*' stands for the same text in both",
    )
    parser.add_argument(
        "--prompt", type=int, default=0, help="which prompt the first output of OTHER is of, if it does not say (0)"
    )
    parser.add_argument(
        "--allow-missing", action="store_true", help="judge the prompts that both sides have; else a missing one means status 1"
    )
    parser.add_argument(
        "--token-gap",
        type=float,
        help="log probabilities this close may swap tokens (default: by precision, wider where last bits carry far; same below)",
    )
    parser.add_argument("--logprob-tolerance", type=float, help="allowed difference of log probabilities (default: by precision)")
    parser.add_argument("--tensor-tolerance", type=float, help="allowed relative difference of tensors (default: by precision)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON; '-' prints it instead of the text")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page with plots")


def run(args: argparse.Namespace) -> int:
    """Record or compare."""
    return run_record(args) if args.what == "record" else run_compare(args)


def run_record(args: argparse.Namespace) -> int:
    """Announce, record, say where it is."""
    if not (math.isfinite(args.max_bytes) and args.max_bytes >= 0):
        raise Rejected(f"--max-bytes {args.max_bytes}: expected a finite number of bytes, at least 0")
    prompts = read_prompts(args.prompts)
    from deepinfer import SamplingParams
    from deepinfer.golden.observe import DEFAULT_PATTERNS
    from deepinfer.golden.recorder import logger, record

    params = None
    if args.max_tokens:
        names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")
        params = SamplingParams(**{name: getattr(args, name) for name in names})
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        recording = record(
            args.model,
            prompts,
            args.output,
            precision=args.precision,
            device=args.device,
            batch_invariant=args.batch_invariant,
            sampling_params=params,
            top_logprobs=args.top_logprobs,
            patterns=DEFAULT_PATTERNS if args.tensors is None else [p for p in args.tensors if p],
            batch_size=args.batch_size,
            chunk_tokens=args.chunk_tokens,
            max_bytes=int(args.max_bytes),
            use_tqdm=sys.stderr.isatty(),
        )
    finally:
        logger.removeHandler(handler)
    print(f"{args.output}: {len(recording.recorded)} prompts, {len(recording.manifest.tensors)} tensors each")
    return 0


def read_prompts(path: Path) -> list[Any]:
    """Prompts of a file: JSON lines, or a text a line. Raises: Rejected."""
    try:
        if path.suffix == ".jsonl":
            return read_lines(path)
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise Rejected(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise Rejected(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not lines:
        raise Rejected(f"{path} holds no prompt")
    return lines


def run_compare(args: argparse.Namespace) -> int:
    """Compare, print, write. Returns the verdict."""
    for path in (args.json, args.html):
        if path is not None and str(path) != "-":
            check_writable(path)
    from deepinfer.golden.comparison import compare
    from deepinfer.golden.html import to_html
    from deepinfer.golden.other_build import read_name_map
    from deepinfer.golden.recording import Recording

    golden = Recording.open(args.golden)
    options = {"token_gap": args.token_gap, "logprob": args.logprob_tolerance, "tensor": args.tensor_tolerance}
    if args.tensor_tolerance is not None:
        options["row"] = WORST_ROW * args.tensor_tolerance
    report = compare(
        golden,
        args.other,
        model=args.model,
        device=args.device,
        name_map=read_name_map(args.name_map) if args.name_map else None,
        first_prompt=args.prompt,
        tolerances={name: value for name, value in options.items() if value is not None},
        allow_missing=args.allow_missing,
        use_tqdm=sys.stderr.isatty(),
    )
    if str(args.json) == "-":
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print(report)
        if args.json:
            args.json.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    if args.html:
        args.html.write_text(to_html(report), encoding="utf-8")
    return report.exit_code
