"""What the machine itself reaches: bytes read and matrix operations for each second. Every other measurement begins with these."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

READ_BYTES = {"cpu": 2**29, "cuda": 2**32}  # far more than any cache holds
MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
REPEATS = 7
BYTES_OF_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of one device.

    Attributes:
        read_bytes_per_s: of a sum over a tensor of float32 (compiled on CUDA).
        bf16_flops_per_s: of a square product of random bfloat16 matrices, two operations for each multiplication.
    """

    device: str
    read_bytes_per_s: float
    bf16_flops_per_s: float

    def read_ms(self, num_bytes: float) -> float:
        """The time in which so many bytes can be read."""
        return num_bytes / self.read_bytes_per_s * 1e3

    def multiply_ms(self, flops: float) -> float:
        """The time that so many operations take in bfloat16."""
        return flops / self.bf16_flops_per_s * 1e3

    def floor_ms(self, num_bytes: float, flops: float) -> float:
        """The longer of both: reading and multiplying can go on at once."""
        return max(self.read_ms(num_bytes), self.multiply_ms(flops))


def measure_ceilings(device: torch.device) -> Ceilings:
    """Both rates, each the median of several runs."""
    kind = "cpu" if device.type == "cpu" else "cuda"
    return Ceilings(_name(device), _read_rate(device, kind), _matrix_rate(device, kind))


def _read_rate(device: torch.device, kind: str) -> float:
    values = torch.ones(READ_BYTES[kind] // BYTES_OF_FLOAT32, device=device)
    total: Callable[..., torch.Tensor] = torch.sum
    if kind == "cuda":
        # A reduction of the library is slower than the memory.
        total = torch.compile(torch.sum, dynamic=False)
    return READ_BYTES[kind] / _median_seconds(lambda: total(values), device)


def _matrix_rate(device: torch.device, kind: str) -> float:
    n = MATRIX_SIZE[kind]
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    return 2 * n**3 / _median_seconds(lambda: a @ b, device)


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    for _ in range(2):
        run()
    return statistics.median(_seconds(run, device) for _ in range(REPEATS))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    stream = torch.accelerator.current_stream(device)
    stream.record_event(begin)
    run()
    stream.record_event(end)
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"
