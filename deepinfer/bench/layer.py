"""Where the time of a step goes: kernels by the operation that they belong to, each operation beside its floor.

A decode step, or the last chunk of a prompt. Kernel names come from the profiler, also out of captured graphs. Kernels that run
beside each other, or that wait for the one before them, count with all their time: the sum can be longer than the step. What the
compiler fused of small operations is one line; so are the library's own kernels.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from deepinfer.bench.decode import observed_experts, row_of, steady_decode
from deepinfer.bench.floors import ATTEND, BF16, EXPERTS, FP8, HYPER, INDEX, Work, chunk_work, decode_work, total
from deepinfer.bench.model_holder import ModelHolder
from deepinfer.bench.prefill import Prefill
from deepinfer.bench.report import Report
from deepinfer.engine_config import EngineConfig

# First match decides. The first part of a name is our operation, the rest is how a kernel of it begins.
KERNELS = (
    (EXPERTS, r"(fp4|wide|block_scaled)_experts_kernel|prepare_kernel|combine_kernel"),
    (FP8, r"(fp8|block_scaled)_linear_kernel|add_parts_kernel"),
    ("quantise", r"(norm_|swiglu_)?quantize(_codes)?_kernel"),
    (BF16, r"bf16_kernel|parts_kernel|add_kernel"),
    (HYPER, r"project_kernel|mix_kernel|collapse_norm_kernel|spread_kernel"),
    ("norm, rotate, round", r"norm_rotate_round_kernel"),
    (ATTEND, r"chunk_kernel|merge_kernel"),
    (INDEX, r"index_scores_kernel"),
    ("route", r"route_kernel"),
    ("select (sort, top-k)", r"(select|candidates)_kernel|.*(sort|topk|TopK|radix|bitonic|Scan|scan)"),
    ("products of the library", r".*(gemm|gemv|cutlass|cublas|nvjet|splitK|aten::(mm|bmm|matmul|addmm))"),
    ("fused by the compiler", r"triton_"),
    ("copies", r"(Memcpy|Memset|aten::(copy_|_to_copy|clone|cat|index))"),
)
REST = "other small kernels"
GROUP_OF_PART = {EXPERTS, FP8, BF16, HYPER, ATTEND, INDEX}


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationFigures:
    """One operation of a step.

    Attributes:
        us: device time in a step, sampler and drafts included.
        share: of the device time of all operations.
        megabytes, gflop: what it has to read and to multiply; None for what works on activations alone.
        floor_us: time in which it can be read, or multiplied in bfloat16 if that takes longer; of all the sum, as they run one
            after the other.
    """

    operation: str
    launches: float
    us: float
    share: float
    megabytes: float | None
    gflop: float | None
    floor_us: float | None
    ratio: float | None
    longest_kernel: str


def operation_of(kernel: str) -> str:
    """The operation that a kernel belongs to."""
    return next((name for name, pattern in KERNELS if re.match(pattern, kernel)), REST)


Kernels = dict[str, tuple[float, float]]  # name -> launches, microseconds


def measure_layer(holder: ModelHolder, config: EngineConfig, report: Report, *, batch: int, context: int, steps: int) -> None:
    """The operations of a decode step, the mean of `steps` steps: a row for each, the longest first, and one for all.

    Fills `report`.
    """
    model, _ = holder.open(config)
    run = steady_decode(model, config, batch, context, 1, 3 * steps)
    run.warm_up()
    found: Kernels = {}
    with profiled(model.device, found, steps):
        asyncio.run(run.advance(steps))
    experts, drafts = observed_experts(run), config.num_speculative_tokens
    work = decode_work(model.config, sequences=batch, context=context, drafts=drafts, active_experts=experts)
    add_operations(report, found, work)


def measure_chunk(holder: ModelHolder, config: EngineConfig, report: Report, *, tokens: int, chunk: int, steps: int) -> None:
    """The operations of a prompt's last chunk, likewise, the mean of `steps` prompts. Fills `report`.

    Raises: ConfigError if the prompt is longer than the model's longest sequence.
    """
    model, _ = holder.open(config)
    # Each step ends before the next one begins, so that the last is alone in its profile.
    run = Prefill(model, tokens, chunk, depth=0)
    run.run()
    start = (tokens - 1) // chunk * chunk
    found: Kernels = {}
    for _ in range(steps):
        run.add()
        run.advance(start // chunk)
        with profiled(model.device, found, steps):
            run.advance(1)
    add_operations(report, found, chunk_work(model.config, start=start, end=tokens, tokens=tokens))


def add_operations(report: Report, found: Kernels, work: dict[str, Work]) -> None:
    """Rows for the kernels of a step beside the work that its formula knows. Fills `report`."""
    assert report.ceilings is not None
    us: dict[str, float] = defaultdict(float)
    launches: dict[str, float] = defaultdict(float)
    longest: dict[str, tuple[float, str]] = {}
    for kernel, (count, time_us) in found.items():
        operation = operation_of(kernel)
        us[operation] += time_us
        launches[operation] += count
        longest[operation] = max(longest.get(operation, (0.0, "")), (time_us, kernel))
    floors_us = {name: report.ceilings.floor_ms(part.bytes, part.flops) * 1e3 for name, part in work.items()}
    whole, floor = sum(us.values()), sum(floors_us.values())
    rows = [
        (name, work[name], floors_us[name]) if name in GROUP_OF_PART else (name, None, None)
        for name in sorted(us, key=lambda name: -us[name])
    ]
    us["all"], launches["all"], longest["all"] = whole, sum(launches.values()), (0.0, "")
    for operation, part, floor_us in [*rows, ("all", total(work), floor)]:
        report.add(
            row_of(
                OperationFigures(
                    operation=operation,
                    launches=launches[operation],
                    us=us[operation],
                    share=us[operation] / whole if whole else 0.0,
                    megabytes=None if part is None else part.bytes / 1e6,
                    gflop=None if part is None else part.flops / 1e9,
                    floor_us=floor_us,
                    ratio=None if floor_us is None else floor_us / us[operation] if whole else 0.0,
                    longest_kernel=longest[operation][1][:48],
                )
            )
        )


@contextmanager
def profiled(device: torch.device, found: Kernels, repeats: int) -> Iterator[None]:
    """Add what runs meanwhile to `found`, divided by `repeats`; on a CPU operations by themselves, without those inside them."""
    on_cpu = device.type == "cpu"
    activity = torch.profiler.ProfilerActivity.CPU if on_cpu else torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        yield
        if not on_cpu:
            torch.accelerator.synchronize()
    for event in profile.key_averages():
        time_us = event.self_cpu_time_total if on_cpu else event.self_device_time_total
        if time_us > 0:
            count, so_far = found.get(event.key, (0.0, 0.0))
            found[event.key] = (count + event.count / repeats, so_far + time_us / repeats)
