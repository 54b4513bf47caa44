"""What one step costs the host before anything reaches the device: planning and applying, without a model."""

import gc
import statistics
import time
from dataclasses import dataclass

from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.plan import SequenceResult, StepResult
from deepinfer.runtime.request import Request
from deepinfer.runtime.scheduler import Scheduler
from deepinfer.runtime.sequence import Sequence
from deepinfer.sampling_params import SamplingParams

PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class SchedulerCost:
    """Medians in milliseconds over the measured steps of steady decode."""

    running: int
    queued: int
    schedule_ms: float
    apply_ms: float


def measure_scheduler_cost(running: int, queued: int = 0, steps: int = 200) -> SchedulerCost:
    """Plan and apply decode steps of `running` sequences while `queued` more wait."""
    limits = SchedulerLimits(
        max_num_seqs=running,
        max_num_batched_tokens=max(running * PROMPT_TOKENS, 1),
        max_model_len=4096,
        block_size=64,
        num_blocks=running * 64 + 1,
    )
    scheduler = Scheduler(limits)
    params = SamplingParams(max_tokens=4000, temperature=0)
    for index in range(running + queued):
        request = Request(
            request_id=str(index),
            prompt=None,
            prompt_token_ids=(5,) * PROMPT_TOKENS,
            params=params,
            max_new_tokens=4000,
            seed=0,
            eos_token_id=1,
            stop_token_ids=frozenset({1}),
            arrival_s=0.0,
        )
        scheduler.add(Sequence(request, 0, index, [5] * PROMPT_TOKENS))
    schedule_s, apply_s = [], []
    gc.collect()
    for _ in range(steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        assert plan is not None
        result = StepResult(step_seq=plan.step_seq, sequences=tuple(SequenceResult(token_ids=(7,)) for _ in plan.sequences))
        before = time.perf_counter()
        scheduler.apply(result)
        schedule_s.append(planned - start)
        apply_s.append(time.perf_counter() - before)
    # The first steps prefill.
    skip = steps // 4
    return SchedulerCost(running, queued, statistics.median(schedule_s[skip:]) * 1e3, statistics.median(apply_s[skip:]) * 1e3)
