"""`deepinfer bench`: measurements, each printed as a table and, with --json, written as JSON."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepinfer.cli import bench_replay

NAME = "bench"
HELP = "measure the engine on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the measurements and their options."""
    kinds = parser.add_subparsers(title="measurements", metavar="WHAT", required=True, dest="what")
    scheduler = kinds.add_parser("scheduler", help="what planning and applying a step cost the host, without a model")
    scheduler.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024], help="running sequences")
    scheduler.add_argument("--queued", type=int, default=10_000, help="waiting sequences of the last row (default 10000)")
    overlap = kinds.add_parser("overlap", help="steady decode in the plain and the overlapped loop, alternating")
    masks = kinds.add_parser("masks", help="what grammars cost a step of steady decode, with and without, alternating")
    timeline = kinds.add_parser("timeline", help="a picture of host and device lanes, as a Chrome trace and a PNG")
    simulate = kinds.add_parser("simulate", help="expert balance and votes of large groups, without a device")
    simulate.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="group sizes")
    simulate.add_argument("--experts", type=int, default=384, help="routed experts of a layer (default 384)")
    simulate.add_argument("--layers", type=int, default=8, help="layers of the Zipf loads (default 8)")
    simulate.add_argument("--zipf", type=float, nargs="+", default=[0.5, 1.0], help="exponents of the Zipf loads")
    for kind in (overlap, masks, timeline):
        kind.add_argument("-m", "--model", default="mini", help="a checkpoint folder or a preset's name (default mini)")
        kind.add_argument("--precision", default="native", help="native, float32, float32_kv or bfloat16 (default native)")
        kind.add_argument("--device", help="torch device (default: the accelerator if there is one, else cpu)")
    overlap.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64, 128], help="batch sizes")
    overlap.add_argument("--steps", type=int, default=50, help="steps of a stretch; three stretches for each loop (default 50)")
    overlap.add_argument("--delay", type=float, nargs="+", default=[0.0], help="artificial host work for a step, in ms")
    masks.add_argument("--batch", type=int, nargs="+", default=[16], help="batch sizes (default 16)")
    masks.add_argument("--steps", type=int, default=20, help="steps of a stretch; three stretches each (default 20)")
    timeline.add_argument("--batch", type=int, default=16, help="batch size (default 16)")
    timeline.add_argument("-o", "--output", type=Path, default=Path("timeline"), help="path without ending (default timeline)")
    bench_replay.add_arguments(kinds)
    for kind in (scheduler, overlap, masks, simulate):
        kind.add_argument("--json", type=Path, help="also write the figures to this file")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    if args.what == "timeline":
        return run_timeline(args)
    if args.what == "simulate":
        return run_simulate(args)
    if args.what == "replay":
        return bench_replay.run(args, print_table)
    rows = {"scheduler": scheduler_rows, "overlap": overlap_rows, "masks": masks_rows}[args.what](args)
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def scheduler_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of running sequences, and one with a long queue."""
    from deepinfer.bench.scheduler_cost import measure_scheduler_cost

    costs = [measure_scheduler_cost(running) for running in args.running]
    costs.append(measure_scheduler_cost(64, args.queued))
    return [asdict(cost) | {"total_ms": cost.schedule_ms + cost.apply_ms} for cost in costs]


def load(args: argparse.Namespace) -> Any:
    """The model, with operations whose shapes a graph can record."""
    from deepinfer.checkpoint.load import load_model
    from deepinfer.model.numerics import reference_ops

    return load_model(args.model, args.precision, args.device, ops=reference_ops(static_shapes=True))


def overlap_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both loops for each batch and delay."""
    from deepinfer.bench.overlap import compare_depths

    model, rows = load(args), []
    for batch in args.batch:
        for delay in args.delay:
            for figures in compare_depths(model, batch, steps=args.steps, delay_ms=delay):
                rows.append(asdict(figures) | {"wall_over_device": figures.wall_ms / max(figures.device_ms, 1e-9)})
            print(json.dumps(rows[-2:]), file=sys.stderr)
    return rows


def run_simulate(args: argparse.Namespace) -> int:
    """Two tables: expert loads, then votes."""
    import numpy as np

    from deepinfer.bench.simulate import PUBLISHED_TOP_K, measure_balance, measure_votes, measured_shares, zipf_shares

    loads = {f"zipf {s:g}": zipf_shares(args.layers, args.experts, s, np.random.default_rng(0)) for s in args.zipf}
    loads["mini"] = measured_shares(args.experts, np.random.default_rng(0))
    balance = [
        asdict(measure_balance(name, shares, ranks, PUBLISHED_TOP_K)) for name, shares in loads.items() for ranks in args.ranks
    ]
    votes = [asdict(measure_votes(ranks)) for ranks in args.ranks]
    print_table(balance)
    print()
    print_table(votes)
    if args.json:
        args.json.write_text(json.dumps({"balance": balance, "votes": votes}, indent=1) + "\n", encoding="utf-8")
    return 0


def masks_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both loops for each batch, with and without grammars."""
    from deepinfer.bench.mask_cost import measure_mask_cost

    return [
        asdict(measure_mask_cost(args.model, args.precision, args.device, batch, depth=depth, steps=args.steps))
        for batch in args.batch
        for depth in (0, 1)
    ]


def run_timeline(args: argparse.Namespace) -> int:
    """Trace both loops and draw them below each other."""
    from deepinfer.bench.timeline import draw_timeline, record_timeline

    model = load(args)
    tracers = {f"async_scheduling={depth}, batch {args.batch}": record_timeline(model, args.batch, depth) for depth in (0, 1)}
    for depth, tracer in enumerate(tracers.values()):
        path = args.output.with_name(f"{args.output.name}-depth{depth}.json")
        tracer.write_chrome_trace(path)
        print(path)
    draw_timeline(tracers, args.output.with_suffix(".png"))
    print(args.output.with_suffix(".png"))
    return 0


def print_table(rows: list[dict[str, Any]]) -> None:
    """Columns of equal width."""
    names = list(rows[0])
    cells = [[f"{row[n]:.3f}" if isinstance(row[n], float) else str(row[n]) for n in names] for row in rows]
    widths = [max(len(n), *(len(line[i]) for line in cells)) for i, n in enumerate(names)]
    for line in (names, *cells):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
