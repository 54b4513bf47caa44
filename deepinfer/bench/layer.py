"""Where the time of a decode step goes: kernels by the operation that they belong to, each operation beside its byte floor.

Kernel names come from the profiler, also out of captured graphs. What the compiler fused of small operations is one line; so are
the library's own kernels.
"""

import asyncio
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.bench.decode import observed_experts, row_of, steady_decode
from deepinfer.bench.floors import ATTEND, BF16, EXPERTS, FP8, HYPER, INDEX, decode_work
from deepinfer.bench.model_holder import ModelHolder
from deepinfer.bench.report import Report
from deepinfer.engine_config import EngineConfig

# First match decides. The first part of a name is our operation, the rest is how a kernel of it begins.
KERNELS = (
    (EXPERTS, r"(fp4|block_scaled)_experts_kernel|prepare_kernel|combine_kernel"),
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
        floor_us: time in which its bytes can be read; None for what reads only activations, which counts as 0.
    """

    operation: str
    launches: float
    us: float
    share: float
    megabytes: float | None
    floor_us: float | None
    ratio: float | None
    longest_kernel: str


def operation_of(kernel: str) -> str:
    """The operation that a kernel belongs to."""
    return next((name for name, pattern in KERNELS if re.match(pattern, kernel)), REST)


def measure_layer(holder: ModelHolder, config: EngineConfig, report: Report, *, batch: int, context: int, steps: int) -> None:
    """A row for each operation, the longest first, and one for all of them. Fills `report`."""
    assert report.ceilings is not None
    model, _ = holder.open(config)
    run = steady_decode(model, config, batch, context, 1, 3 * steps)
    run.warm_up()
    found = profiled_kernels(run, model.device, steps)
    drafts = config.num_speculative_tokens
    work = decode_work(model.config, sequences=batch, context=context, drafts=drafts, active_experts=observed_experts(run))
    us: dict[str, float] = defaultdict(float)
    launches: dict[str, float] = defaultdict(float)
    longest: dict[str, tuple[float, str]] = {}
    for kernel, (count, time_us) in found.items():
        operation = operation_of(kernel)
        us[operation] += time_us
        launches[operation] += count
        longest[operation] = max(longest.get(operation, (0.0, "")), (time_us, kernel))
    whole = sum(us.values())
    for operation in sorted(us, key=lambda o: -us[o]):
        num_bytes = work[operation].bytes if operation in GROUP_OF_PART else None
        floor = None if num_bytes is None else report.ceilings.read_ms(num_bytes) * 1e3
        report.add(
            row_of(
                OperationFigures(
                    operation=operation,
                    launches=launches[operation],
                    us=us[operation],
                    share=us[operation] / whole,
                    megabytes=None if num_bytes is None else num_bytes / 1e6,
                    floor_us=floor,
                    ratio=None if floor is None else floor / us[operation],
                    longest_kernel=longest[operation][1][:48],
                )
            )
        )
    num_bytes = sum(part.bytes for part in work.values())
    floor = report.ceilings.read_ms(num_bytes) * 1e3
    report.add(
        row_of(
            OperationFigures(
                operation="all",
                launches=sum(launches.values()),
                us=whole,
                share=1.0,
                megabytes=num_bytes / 1e6,
                floor_us=floor,
                ratio=floor / whole if whole else 0.0,
                longest_kernel="",
            )
        )
    )


def profiled_kernels(run: Any, device: torch.device, steps: int) -> dict[str, tuple[float, float]]:
    """Kernel name to launches and microseconds a step; on a CPU operations by themselves, without those inside them."""
    on_cpu = device.type == "cpu"
    activity = torch.profiler.ProfilerActivity.CPU if on_cpu else torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        asyncio.run(run.advance(steps))
        if not on_cpu:
            torch.accelerator.synchronize()
    found: dict[str, tuple[float, float]] = {}
    for event in profile.key_averages():
        time_us = event.self_cpu_time_total if on_cpu else event.self_device_time_total
        if time_us > 0:
            found[event.key] = (event.count / steps, time_us / steps)
    return found
