"""A picture of what was reached: operations a second over operations a byte, below the machine's two ceilings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepinfer.bench.ceilings import Ceilings
from deepinfer.errors import MissingExtra


class Point(NamedTuple):
    """One measurement."""

    label: str
    flops: float
    bytes: float
    seconds: float


def points_of(what: str, rows: Sequence[dict[str, Any]]) -> list[Point]:
    """The rows of a decode or prefill report."""
    if what == "prefill":
        return [_point(row, f"{row['tokens']} in {row['chunk']}", row["tflop"] * 1e12) for row in rows]
    return [_point(row, f"batch {row['batch']}, {row['context']} back", row["gflop"] * 1e9) for row in rows]


def _point(row: dict[str, Any], label: str, flops: float) -> Point:
    return Point(f"{row['kernels']}, {label}", flops, row["gigabytes"] * 1e9, row["wall_ms"] / 1e3)


def check_matplotlib() -> None:
    """Raise MissingExtra without matplotlib: before a measurement rather than after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtra("drawing needs matplotlib: pip install 'deepinfer-reference[notebooks]'") from error


def draw_roofline(points: Sequence[Point], ceilings: Ceilings, path: Path) -> None:
    """Write the picture as a PNG. Raises: MissingExtra without matplotlib."""
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axis = figure.subplots()
    ridge = ceilings.bf16_flops_per_s / ceilings.read_bytes_per_s
    intensities = [p.flops / p.bytes for p in points]
    low, high = min([*intensities, ridge]) / 2, max([*intensities, ridge]) * 4
    axis.plot([low, ridge, high], [low * ceilings.read_bytes_per_s, *[ceilings.bf16_flops_per_s] * 2], color="black")
    for point, intensity in zip(points, intensities, strict=True):
        axis.plot([intensity], [point.flops / point.seconds], "o", label=point.label)
    axis.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="operations a second", title=ceilings.device)
    if points:
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
