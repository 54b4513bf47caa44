"""How much of the device's time the host wastes: steady decode in the plain and in the overlapped loop, side by side.

The two loops alternate in one run on one model. Device time comes from events around each launch; with an artificial host delay
the wall time of the overlapped loop must be the larger of host and device, not their sum.
"""

from dataclasses import dataclass

from deepinfer.bench.steady_decode import SteadyDecode
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


def compare_depths(
    model: Transformer, batch: int, *, steps: int = 50, rounds: int = 3, delay_ms: float = 0.0
) -> list[OverlapFigures]:
    """Depth 0 and depth 1 on the same model, alternating `rounds` times."""
    runs = [SteadyDecode(model, batch, depth, steps * rounds, delay_ms) for depth in (0, 1)]
    for run in runs:
        run.warm_up()
    for _ in range(rounds):
        for run in runs:
            run.steps(steps)
    return [figures(run, steps * rounds) for run in runs]
