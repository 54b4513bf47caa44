"""`deepinfer bench`: measurements, each printed as a table and, with --json, written as JSON.

Those of a model measure the machine's own rates first, so that each figure stands beside its floor.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepinfer.cli import bench_replay

NAME = "bench"
HELP = "measure the engine on this machine"
KERNELS = ("auto", "triton", "inductor", "plain")


def at_least(low: float, kind: type = int) -> Callable[[str], Any]:
    """An argument's type: a number that is not below `low`."""

    def parse(text: str) -> Any:
        noun = "an integer" if kind is int else "a number"
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value >= low:
            raise argparse.ArgumentTypeError(f"{text!r}: expected {noun} of at least {low}")
        return value

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the measurements and their options."""
    kinds = parser.add_subparsers(title="measurements", metavar="WHAT", required=True, dest="what")
    _add_host_measurements(kinds)
    positive = at_least(1)

    decode = _model_parser(kinds, "decode", "steady decode: times, busy share, byte floors, memory")
    decode.add_argument("--batch", type=positive, nargs="+", default=[1, 16, 64, 128], help="batch sizes (default 1 16 64 128)")
    decode.add_argument("--context", type=positive, nargs="+", default=[1024], help="tokens before the step (default 1024)")
    decode.add_argument("--kernels", choices=KERNELS, nargs="+", default=["auto"], help="one after the other (default auto)")
    decode.add_argument("--depth", type=int, choices=(0, 1), nargs="+", default=[1], help="steps that the host runs ahead")
    decode.add_argument("--drafts", type=at_least(0), default=0, help="drafts verified for each sequence (default 0)")
    decode.add_argument("--steps", type=positive, default=30, help="steps of a stretch; three for each row (default 30)")

    speculation = _model_parser(kinds, "speculation", "whole requests without and with drafts, alternating")
    speculation.add_argument("--batch", type=positive, nargs="+", default=[1, 4, 16, 64], help="batch sizes (default 1 4 16 64)")
    speculation.add_argument("--drafts", type=at_least(0), nargs="+", default=[0, 5], help="numbers to compare (default 0 5)")
    speculation.add_argument("--adaptive", action="store_true", help="also let the engine choose the number")
    speculation.add_argument("--max-tokens", type=positive, default=128, help="tokens of each request (default 128)")
    speculation.add_argument("--temperature", type=at_least(0, float), default=0.0, help="of the sampling (default 0)")
    speculation.add_argument("--kernels", choices=KERNELS, default="auto", help="what computes (default auto)")

    prefill = _model_parser(kinds, "prefill", "one long prompt in chunks: matrix rate against the measured one")
    prefill.add_argument("--tokens", type=positive, nargs="+", default=[8192], help="lengths of the prompt (default 8192)")
    prefill.add_argument("--chunk", type=positive, nargs="+", default=[2048], help="most rows of a step (default 2048)")
    prefill.add_argument("--kernels", choices=KERNELS, nargs="+", default=["auto"], help="one after the other (default auto)")
    for kind in (decode, prefill):
        kind.add_argument("--png", type=Path, help="also draw the rows below the machine's roofline (needs the 'notebooks' extra)")

    layer = _model_parser(kinds, "layer", "a decode step, or a chunk of a prompt, by operation: time, launches, floor")
    layer.add_argument("--batch", type=positive, help="batch size (default 1)")
    layer.add_argument("--context", type=positive, help="tokens before the step (default 1024)")
    layer.add_argument("--drafts", type=at_least(0), help="drafts verified for each sequence (default 0)")
    layer.add_argument("--prefill", type=positive, metavar="TOKENS", help="the last chunk of a prompt instead of a decode step")
    layer.add_argument("--chunk", type=positive, help="most rows of a chunk (default 2048)")
    layer.add_argument("--kernels", choices=KERNELS, default="auto", help="what computes (default auto)")
    layer.add_argument("--steps", type=positive, default=10, help="steps, or prompts, that are profiled (default 10)")

    compiling = _model_parser(kinds, "compile", "time to the first token in a fresh process, without and with compile caches")
    compiling.add_argument("--max-num-seqs", type=positive, default=64, help="most sequences in a step (default 64)")
    compiling.add_argument("--drafts", type=at_least(0), default=0, help="drafts verified for each sequence (default 0)")
    compiling.add_argument("--kernels", choices=KERNELS, default="auto", help="what computes (default auto)")
    compiling.add_argument("--timeout", type=at_least(1, float), default=500.0, help="seconds for each start (default 500)")

    replay = _model_parser(kinds, "replay", bench_replay.HELP)
    bench_replay.add_arguments(replay, positive)
    replay.add_argument("--kernels", choices=KERNELS, default="auto", help="what computes (default auto)")

    everything = _model_parser(kinds, "all", "decode, long contexts, operations, overlap, prefill and stored prefixes, in one run")
    everything.add_argument("--kernels", choices=KERNELS, default="auto", help="what computes (default auto)")

    overlap = _model_parser(kinds, "overlap", "steady decode in the plain and the overlapped loop, alternating")
    overlap.add_argument(
        "--batch", type=positive, nargs="+", default=[1, 4, 16, 64, 128], help="batch sizes (default 1 4 16 64 128)"
    )
    overlap.add_argument("--context", type=positive, nargs="+", default=[64], help="tokens before the step (default 64)")
    overlap.add_argument("--delay", type=at_least(0, float), nargs="+", default=[0.0], help="artificial host work, ms (default 0)")
    overlap.add_argument("--steps", type=positive, default=50, help="steps of a stretch; three for each loop (default 50)")
    overlap.add_argument("--kernels", choices=KERNELS, default="auto", help="what computes (default auto)")

    compare = _model_parser(kinds, "compare", "steady decode under two configurations, alternating")
    compare.add_argument("first", metavar="A", help="FIELD=VALUE,... of EngineConfig; '' for none")
    compare.add_argument("second", metavar="B", help="the same for the other side, as batch_invariant=true,kernels=triton")
    compare.add_argument("--batch", type=positive, nargs="+", default=[1, 64], help="batch sizes (default 1 64)")
    compare.add_argument("--context", type=positive, nargs="+", default=[1024], help="tokens before the step (default 1024)")
    compare.add_argument("--steps", type=positive, default=30, help="steps of a stretch; three for each row (default 30)")


def _add_host_measurements(kinds: Any) -> None:
    """What the host does, and a picture of it."""
    positive = at_least(1)
    scheduler = kinds.add_parser("scheduler", help="what planning and applying a step cost the host, without a model")
    scheduler.add_argument("--running", type=positive, nargs="+", default=[1, 64, 256, 1024], help="running sequences")
    scheduler.add_argument("--queued", type=at_least(0), default=10_000, help="waiting sequences of the last row (default 10000)")
    masks = kinds.add_parser("masks", help="what grammars cost a step of steady decode, with and without, alternating")
    timeline = kinds.add_parser("timeline", help="a picture of host and device lanes, as a Chrome trace and a PNG")
    simulate = kinds.add_parser("simulate", help="expert balance and votes of large groups, without a device")
    simulate.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="group sizes")
    simulate.add_argument("--experts", type=int, default=384, help="routed experts of a layer (default 384)")
    simulate.add_argument("--layers", type=int, default=8, help="layers of the Zipf loads (default 8)")
    simulate.add_argument("--zipf", type=float, nargs="+", default=[0.5, 1.0], help="exponents of the Zipf loads")
    for kind in (masks, timeline):
        kind.add_argument("-m", "--model", default="mini", help="a checkpoint folder or a preset's name (default mini)")
        kind.add_argument("--precision", default="native", help="native, float32, float32_kv or bfloat16 (default native)")
        kind.add_argument("--device", help="torch device (default: the accelerator if there is one, else cpu)")
    timeline.add_argument("--kernels", choices=KERNELS, default="auto", help="what computes (default auto)")
    timeline.add_argument("--batch", type=positive, default=16, help="batch size (default 16)")
    masks.add_argument("--batch", type=positive, nargs="+", default=[16], help="batch sizes (default 16)")
    masks.add_argument("--steps", type=positive, default=20, help="steps of a stretch; three stretches each (default 20)")
    timeline.add_argument("-o", "--output", type=Path, default=Path("timeline"), help="path without ending (default timeline)")
    for kind in (scheduler, masks, simulate):
        kind.add_argument("--json", type=Path, help="also write the figures to this file")


def _model_parser(kinds: Any, name: str, text: str) -> argparse.ArgumentParser:
    """A measurement of a model, with the options that all of those have."""
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=text)
    parser.add_argument(
        "-m", "--model", default="mini", help="a checkpoint folder, a preset, or flash_slice[:LAYERS[:EXPERTS]] (default mini)"
    )
    parser.add_argument("--precision", default="native", help="native, float32, float32_kv or bfloat16 (default native)")
    parser.add_argument("--device", help="torch device (default: the accelerator if there is one, else cpu)")
    parser.add_argument("--batch-invariant", action="store_true", help="bits that do not depend on the batch")
    parser.add_argument("--json", type=Path, help="also write the figures to this file, again after each row")
    parser.add_argument("--time-limit", type=at_least(0, float), metavar="S", help="begin no new row after so many seconds")
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    from deepinfer.bench.report import check_writable

    for option in ("json", "png", "output"):
        check_writable(getattr(args, option, None), f"--{option}")
    if args.what == "layer":
        check_layer(args)
    if args.what in MEASUREMENTS:
        return run_measurement(args)
    if args.what == "timeline":
        return run_timeline(args)
    if args.what == "simulate":
        return run_simulate(args)
    rows = (scheduler_rows if args.what == "scheduler" else masks_rows)(args)
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def run_measurement(args: argparse.Namespace) -> int:
    """A measurement of a model: its ceilings, then its rows. Exit status 1 if some could not be measured."""
    from deepinfer.bench.bench_model import bench_device, model_config
    from deepinfer.bench.ceilings import measure_ceilings
    from deepinfer.bench.report import Report
    from deepinfer.engine_config import EngineConfig

    config = EngineConfig(precision=args.precision, device=args.device, batch_invariant=args.batch_invariant)
    # Before anything takes time: whatever is wrong with the model's name or the device.
    model_config(args.model)
    device = bench_device(config)
    png = getattr(args, "png", None)
    if png is not None:
        from deepinfer.bench.roofline import check_matplotlib, draw_roofline, points_of

        check_matplotlib()
    with Report(args.what, measure_ceilings(device), args.json, args.time_limit) as report:
        MEASUREMENTS[args.what](args, config, report)
    if png is not None and report.ceilings is not None:
        draw_roofline(points_of(args.what, report.rows), report.ceilings, png)
        print(png)
    return 1 if report.has_failures else 0


def _decode(args: argparse.Namespace, config: Any, report: Any) -> None:
    from dataclasses import replace

    from deepinfer.bench.decode import measure_decode
    from deepinfer.bench.model_holder import ModelHolder

    measure_decode(
        ModelHolder(args.model),
        # A budget that changes from step to step would leave no one floor.
        replace(config, num_speculative_tokens=args.drafts, adaptive_verification=False),
        report,
        kernels=args.kernels,
        batches=args.batch,
        contexts=args.context,
        depths=args.depth,
        steps=args.steps,
    )


def _speculation(args: argparse.Namespace, config: Any, report: Any) -> None:
    from dataclasses import replace

    from deepinfer.bench.speculation import measure_speculation

    measure_speculation(
        args.model,
        replace(config, kernels=args.kernels),
        report,
        batches=args.batch,
        drafts=args.drafts,
        with_adaptive=args.adaptive,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
    )


def _prefill(args: argparse.Namespace, config: Any, report: Any) -> None:
    from deepinfer.bench.model_holder import ModelHolder
    from deepinfer.bench.prefill import measure_prefill

    measure_prefill(ModelHolder(args.model), config, report, kernels=args.kernels, tokens=args.tokens, chunks=args.chunk)


def _layer(args: argparse.Namespace, config: Any, report: Any) -> None:
    from dataclasses import replace

    from deepinfer.bench.layer import measure_chunk, measure_layer
    from deepinfer.bench.model_holder import ModelHolder

    own = replace(config, kernels=args.kernels, num_speculative_tokens=args.drafts or 0, adaptive_verification=False)
    holder = ModelHolder(args.model)
    if args.prefill is None:
        measure_layer(holder, own, report, batch=args.batch or 1, context=args.context or 1024, steps=args.steps)
    else:
        measure_chunk(holder, own, report, tokens=args.prefill, chunk=args.chunk or 2048, steps=args.steps)


def check_layer(args: argparse.Namespace) -> None:
    """Raise ConfigError for options of the other kind of step."""
    from deepinfer.errors import ConfigError

    given = [f"--{name}" for name in ("batch", "context", "drafts") if getattr(args, name) is not None]
    if args.prefill is not None and given:
        raise ConfigError(f"{given[0]}: is of a decode step, and --prefill measures a chunk of a prompt")
    if args.prefill is None and args.chunk is not None:
        raise ConfigError("--chunk: goes with --prefill")


def _overlap(args: argparse.Namespace, config: Any, report: Any) -> None:
    from dataclasses import replace

    from deepinfer.bench.model_holder import ModelHolder
    from deepinfer.bench.overlap import measure_overlap

    own = replace(config, kernels=args.kernels)
    sizes = {"batches": args.batch, "contexts": args.context, "delays_ms": args.delay, "steps": args.steps}
    measure_overlap(ModelHolder(args.model), own, report, **sizes)


def _all(args: argparse.Namespace, config: Any, report: Any) -> None:
    from dataclasses import replace

    from deepinfer.bench.everything import measure_all

    measure_all(args.model, replace(config, kernels=args.kernels), report)


def _compile(args: argparse.Namespace, config: Any, report: Any) -> None:
    from dataclasses import replace

    from deepinfer.bench.cold_start import measure_cold_start

    own = replace(config, kernels=args.kernels, num_speculative_tokens=args.drafts, max_num_seqs=args.max_num_seqs)
    measure_cold_start(args.model, own, report, timeout_s=args.timeout)


def _replay(args: argparse.Namespace, config: Any, report: Any) -> None:
    from dataclasses import replace

    bench_replay.measure(args, replace(config, kernels=args.kernels), report)


def _compare(args: argparse.Namespace, config: Any, report: Any) -> None:
    from deepinfer.bench.compare import compare

    texts = args.first, args.second
    compare(args.model, config, report, texts, batches=args.batch, contexts=args.context, steps=args.steps)


MEASUREMENTS: dict[str, Callable[[argparse.Namespace, Any, Any], None]] = {
    "decode": _decode,
    "speculation": _speculation,
    "prefill": _prefill,
    "layer": _layer,
    "overlap": _overlap,
    "all": _all,
    "compile": _compile,
    "replay": _replay,
    "compare": _compare,
}


def scheduler_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of running sequences, and one with a long queue."""
    from deepinfer.bench.scheduler_cost import measure_scheduler_cost

    costs = [measure_scheduler_cost(running) for running in args.running]
    costs.append(measure_scheduler_cost(64, args.queued))
    return [asdict(cost) | {"total_ms": cost.schedule_ms + cost.apply_ms} for cost in costs]


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
    from deepinfer.bench.bench_model import open_model
    from deepinfer.bench.timeline import draw_timeline, record_timeline
    from deepinfer.engine_config import EngineConfig

    model, _ = open_model(args.model, EngineConfig(precision=args.precision, device=args.device, kernels=args.kernels))
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
