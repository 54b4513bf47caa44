"""A picture of the overlap: host and device lanes over a few steady steps, as a Chrome trace and as a PNG."""

from pathlib import Path
from typing import Any

from deepinfer.bench.steady_decode import SteadyDecode
from deepinfer.errors import MissingExtra
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.device import COMPUTE, COPY
from deepinfer.runtime.trace import Span, Tracer

LANES = ("host", COMPUTE, COPY)
COLOURS = {
    "schedule": "#4c72b0",
    "submit": "#55a868",
    "constrain": "#e5ae38",
    "submit sampler": "#8fbc8f",
    "wait": "#dddddd",
    "apply": "#c44e52",
    "callbacks": "#ccb974",
    "forward": "#8172b2",
    "sampler": "#64b5cd",
    "draft": "#da8bc3",
    "copy": "#937860",
}


def record_timeline(model: Transformer, batch: int, depth: int, steps: int = 6) -> Tracer:
    """Trace `steps` steps of steady decode."""
    run = SteadyDecode(model, batch, depth, steps)
    run.warm_up()
    run.steps(steps)
    return run.tracer


def draw_timeline(tracers: dict[str, Tracer], path: Path) -> None:
    """Write the lanes of one or more traces as a PNG. Raises: MissingExtra without matplotlib."""
    timeline_figure({title: tracer.spans() for title, tracer in tracers.items()}).savefig(path, dpi=120)


def timeline_figure(traces: dict[str, list[Span]]) -> Any:
    """The lanes of one or more traces below each other, as a matplotlib figure. Raises: MissingExtra without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise MissingExtra("drawing needs matplotlib: pip install 'deepinfer-reference[notebooks]'") from error
    figure = Figure(figsize=(12, 1.2 + 1.6 * len(traces)), layout="constrained")
    axes = figure.subplots(len(traces), 1, squeeze=False)[:, 0]
    for axis, (title, spans) in zip(axes, traces.items(), strict=True):
        begin = min((span.start_ms for span in spans), default=0.0)
        for lane_index, lane in enumerate(LANES):
            for span in spans:
                if span.lane == lane:
                    _draw_bar(axis, span, begin, lane_index)
        axis.set_yticks(range(len(LANES)), LANES)
        axis.invert_yaxis()
        axis.set_title(title, loc="left", fontsize=10)
    axes[-1].set_xlabel("ms")
    figure.legend(handles=[Patch(color=c, label=n) for n, c in COLOURS.items()], loc="outside upper right", ncols=11, fontsize=8)
    return figure


def _draw_bar(axis, span: Span, begin: float, lane: int) -> None:  # type: ignore[no-untyped-def]
    width = max(span.end_ms - span.start_ms, 1e-3)
    axis.barh(lane, width, left=span.start_ms - begin, height=0.7, color=COLOURS.get(span.name, "black"), edgecolor="none")
