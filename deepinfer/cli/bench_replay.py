"""`deepinfer bench replay`: what prefix caching and limited replay save, and what the approximation costs."""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepinfer.errors import ConfigError

HELP = "prefix cache and limited replay: drift of the approximation, work saved, a chat service"
PARTS = ("drift", "work", "chat")
FLASH_SLICE = "flash_slice"


def add_arguments(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the measurement and its options."""
    parser = kinds.add_parser("replay", help=HELP)
    parser.add_argument("-m", "--model", default="mini", help=f"a checkpoint folder, a preset's name, or {FLASH_SLICE} (random)")
    parser.add_argument("--layers", type=int, default=8, help=f"layers of {FLASH_SLICE} (default 8)")
    parser.add_argument("--precision", default="native", help="native, float32, float32_kv or bfloat16 (default native)")
    parser.add_argument("--device", help="torch device (default: the accelerator if there is one, else cpu)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all; drift needs a trained model")
    parser.add_argument("--pieces", type=int, default=8, help="drift: held-out texts (default 8)")
    parser.add_argument("--known", type=int, default=640, help="drift: tokens of the known prefix (default 640)")
    parser.add_argument("--new", type=int, default=128, help="drift: tokens behind it (default 128)")
    parser.add_argument("--rows", type=int, nargs="+", help="drift: rows that run again (default: 0 to several windows)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048], help="work: prompt lengths (default 1024 2048)")
    parser.add_argument("--conversations", type=int, default=4, help="chat: conversations at once (default 4)")
    parser.add_argument("--turns", type=int, default=4, help="chat: turns of each (default 4)")
    parser.add_argument("--system", type=int, default=256, help="chat: tokens of the common system prompt (default 256)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")


def run(args: argparse.Namespace, print_table: Any) -> int:
    """Measure the parts, print each as soon as it is there, write."""
    model, figures = _load(args), {}
    for part in args.parts:
        rows = []
        for row in _measure(part, model, args):
            rows.append(asdict(row))
            print(json.dumps(rows[-1]), file=sys.stderr)
        print_table(rows)
        print()
        figures[part] = rows
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def _load(args: argparse.Namespace) -> Any:
    from deepinfer.checkpoint.load import load_model
    from deepinfer.presets import flash_slice, random_model

    if args.model != FLASH_SLICE:
        return load_model(args.model, args.precision, args.device)
    return random_model(flash_slice(args.layers), precision=args.precision, device=args.device)


def _measure(part: str, model: Any, args: argparse.Namespace) -> Iterable[Any]:
    if part == "drift":
        from deepinfer.bench.replay_drift import held_out_pieces, measure_drift
        from deepinfer.checkpoint.locate import locate_checkpoint
        from deepinfer.tokenizer import Tokenizer

        if args.model == FLASH_SLICE:
            raise ConfigError(f"--parts drift: needs a trained model and its tokenizer, {FLASH_SLICE} has random weights")
        tokenizer = Tokenizer.from_folder(locate_checkpoint(args.model))
        window = model.config.attention.window_size
        rows = args.rows or [0, window // 4, window // 2, window - 1, 2 * window, 4 * window]
        yield from measure_drift(model, held_out_pieces(tokenizer, args.pieces, args.known, args.new), rows)
    elif part == "work":
        from deepinfer.bench.replay_work import measure_prefill

        for tokens in args.tokens:
            yield from measure_prefill(model, tokens)
    else:
        from deepinfer.bench.replay_trace import TraceShape, measure_trace

        yield from measure_trace(model, TraceShape(conversations=args.conversations, turns=args.turns, system=args.system))
