"""`deepinfer inspect`: what is in a checkpoint, as text or JSON."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.inspect_checkpoint import Report

NAME = "inspect"
HELP = "show what is in a checkpoint: layers, sizes, cache sizes, what fits where"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="checkpoint folder (one with only a config.json will do) or preset")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    from deepinfer.inspect_checkpoint import inspect_checkpoint

    report = inspect_checkpoint(args.path)
    print(json.dumps(report.to_dict(), indent=2) if args.json else format_report(report))
    return 0


def format_report(report: "Report") -> str:
    """The report as text for a terminal."""
    lines = [f"{report.path}: {'tensors present' if report.has_tensors else 'config only, sizes are computed'}", ""]
    header = ("layer", "ratio", "role", "entries of", "selection of", "Engram", "experts")
    rows = [
        (
            str(r.layer),
            str(r.ratio),
            r.role,
            "-" if r.kv_source is None else str(r.kv_source),
            "-" if r.index_source is None else str(r.index_source),
            "yes" if r.has_engram else "-",
            f"{r.experts_per_token} of {r.experts}",
        )
        for r in report.layers
    ]
    lines += [*format_table(header, rows), ""]
    sizes = [(part.name, f"{part.parameters:,}", format_bytes(part.bytes)) for part in report.parts if part.bytes]
    loaded = [part for part in report.parts if part.name != "vision (not loaded)"]
    sizes.append(("sum of what is loaded", f"{sum(p.parameters for p in loaded):,}", format_bytes(sum(p.bytes for p in loaded))))
    lines += [*format_table(("part", "parameters", "bytes"), sizes), ""]
    lines.append(
        f"backbone {report.backbone_parameters:,} parameters, Engram tables {report.engram_table_parameters:,}, "
        f"draft {report.draft_parameters:,}"
    )
    lines.append("")
    longest = report.max_seq_len
    caches = [
        (c.form, f"{c.per_token:,.1f}", format_bytes(c.per_sequence), format_bytes(c.per_token * longest + c.per_sequence))
        for c in report.cache
    ]
    lines += format_table(("cache", "bytes a token", "a sequence", f"{longest:,} tokens"), caches)
    lines += ["", f"On devices of which {report.usable_share:.0%} can be used for weights and cache (1 GB = 10^9 bytes):"]
    fits = [
        (
            f"{f.memory_gb} GB",
            "fits" if f.holds_all else "no",
            "fits" if f.holds_all_but_tables else "no",
            "no" if f.expert_parallel_ranks is None else str(f.expert_parallel_ranks),
            f"{f.cache_tokens:,}",
        )
        for f in report.fits
    ]
    lines += format_table(("memory", "whole", "Engram tables on host", "devices, experts divided", "cache tokens left"), fits)
    return "\n".join(lines)


def format_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns padded to their widest cell."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]


def format_bytes(count: float) -> str:
    """Bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
