"""`deepinfer bench replay`: what prefix caching and limited replay save, and what the approximation costs."""

import argparse
from collections.abc import Iterable
from typing import Any

from deepinfer.errors import ConfigError

HELP = "prefix cache and limited replay: drift of the approximation, work saved, a chat service"
PARTS = ("drift", "work", "chat")


def add_arguments(parser: argparse.ArgumentParser, positive: Any) -> None:
    """Declare what is measured and its sizes, beside the options of every measurement of a model."""
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all; drift needs a trained model")
    parser.add_argument("--pieces", type=positive, default=8, help="drift: held-out texts (default 8)")
    parser.add_argument("--known", type=positive, default=640, help="drift: tokens of the known prefix (default 640)")
    parser.add_argument("--new", type=positive, default=128, help="drift: tokens behind it (default 128)")
    parser.add_argument("--rows", type=int, nargs="+", help="drift: rows that run again (default: 0 to several windows)")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1024, 2048], help="work: prompt lengths (default 1024 2048)")
    parser.add_argument("--conversations", type=positive, default=4, help="chat: conversations at once (default 4)")
    parser.add_argument("--turns", type=positive, default=4, help="chat: turns of each (default 4)")
    parser.add_argument("--system", type=positive, default=256, help="chat: tokens of the common system prompt (default 256)")


def measure(args: argparse.Namespace, config: Any, report: Any) -> None:
    """Every part in turn, of one model. What fails is noted and the others go on. Fills `report`."""
    from deepinfer.bench.bench_model import open_model, slice_config
    from deepinfer.bench.decode import row_of
    from deepinfer.bench.replay_work import measure_work

    is_random = slice_config(args.model) is not None
    parts = args.parts or [part for part in PARTS if part != "drift" or not is_random]
    if is_random and "drift" in parts:
        raise ConfigError(f"--parts drift: needs a trained model and its tokenizer, {args.model} has random weights")
    model, backend = open_model(args.model, config)
    for part in parts:
        report.part = part
        if part == "work":
            measure_work(model, backend.name, args.tokens, report)
            continue
        if report.is_over(part):
            continue
        with report.noting(part):
            for row in _drift(model, args) if part == "drift" else _chat(model, args):
                report.add(row_of(row))


def _drift(model: Any, args: argparse.Namespace) -> Iterable[Any]:
    from deepinfer.bench.replay_drift import held_out_pieces, measure_drift
    from deepinfer.checkpoint.locate import locate_checkpoint
    from deepinfer.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(locate_checkpoint(args.model))
    window = model.config.attention.window_size
    rows = args.rows or [0, window // 4, window // 2, window - 1, 2 * window, 4 * window]
    return measure_drift(model, held_out_pieces(tokenizer, args.pieces, args.known, args.new), rows)


def _chat(model: Any, args: argparse.Namespace) -> Iterable[Any]:
    from deepinfer.bench.replay_trace import TraceShape, measure_trace

    return measure_trace(model, TraceShape(conversations=args.conversations, turns=args.turns, system=args.system))
