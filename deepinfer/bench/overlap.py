"""How much of the device's time the host wastes: steady decode in the plain and in the overlapped loop, side by side.

The two loops alternate in one run on one model. Device time comes from events around each launch; with an artificial host delay
the wall time of the overlapped loop must be the larger of host and device, not their sum.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.bench.decode import row_of
from deepinfer.bench.model_holder import ModelHolder, release_memory
from deepinfer.bench.report import Report
from deepinfer.bench.steady_decode import SteadyDecode
from deepinfer.engine_config import EngineConfig
from deepinfer.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapFigures:
    """Steady decode of one batch in one loop; times are medians for a step in milliseconds.

    Attributes:
        device_ms: time the compute stream was busy.
        busy: share of the wall time of a step in which it was.
        host_ms: time the host spent planning, submitting, applying and in callbacks, the artificial delay included.
    """

    batch: int
    depth: int
    host_delay_ms: float
    wall_ms: float
    device_ms: float
    host_ms: float
    busy: float


def figures(run: SteadyDecode, steps: int) -> OverlapFigures:
    """What was seen of a run over `steps` measured steps."""
    mean, device, host = run.times(steps)
    return OverlapFigures(
        batch=run.batch,
        depth=run.depth,
        host_delay_ms=run.host_delay_ms,
        wall_ms=run.median_ms,
        device_ms=device,
        host_ms=host,
        busy=device / mean,
    )


def measure_overlap(
    holder: ModelHolder,
    config: EngineConfig,
    report: Report,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    delays_ms: Sequence[float],
    steps: int,
) -> None:
    """Both loops for each batch, context and artificial delay of the host; all of a batch and context alternate. Fills `report`."""
    model, _ = holder.open(config)
    for batch, context in itertools.product(batches, contexts):
        what = f"batch {batch}, context {context}"
        if report.is_over(what):
            continue
        with report.noting(what):
            for row in compare_depths(model, batch, steps=steps, context=context, delays_ms=delays_ms):
                report.add(row_of(row))
        release_memory()


def compare_depths(
    model: Transformer,
    batch: int,
    *,
    steps: int = 50,
    rounds: int = 3,
    context: int | None = None,
    delays_ms: Sequence[float] = (0.0,),
) -> list[OverlapFigures]:
    """Depth 0 and depth 1 on the same model under each delay, alternating `rounds` times."""
    runs = [SteadyDecode(model, batch, depth, steps * rounds, delay, context=context) for delay in delays_ms for depth in (0, 1)]
    for run in runs:
        run.warm_up()
    for _ in range(rounds):
        for run in runs:
            run.steps(steps)
    return [figures(run, steps * rounds) for run in runs]
