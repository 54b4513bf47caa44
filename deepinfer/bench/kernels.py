"""Times of the decode kernels at the published widths, each with its byte floor: `python -m deepinfer.bench.kernels --json OUT`.

First the machine's own read bandwidth is measured. A time is the median of replays of one CUDA graph that calls the kernel
with as many copies of the weights as do not fit the cache; with another form of the same operation the two graphs alternate.
The floor is the time in which the weights can be read.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer.ops.dequantized import gathered_experts, grouped_experts, grouped_linear, linear_fp8
from deepinfer.ops.elementwise import rms_norm
from deepinfer.ops.formats import dequantize_fp8
from deepinfer.ops.triton_kernels.packing import WGMMA, PackedMatrix, interleave_rows, pack_fp4, pack_fp8, permute_channels

if TYPE_CHECKING:
    from deepinfer.ops.triton_kernels.fp8_linear import Tiling

BEYOND_CACHE_BYTES = 450_000_000
READ_BYTES = 4 * 2**30
REPLAYS = 15
TOKENS = (1, 4, 16, 32, 64, 128)
# name -> output rows, channels, groups of a bfloat16 input (0: FP8 activations)
LINEARS = {
    "wq_b": (32768, 1280, 0),
    "wo_b": (5120, 8192, 0),
    "shared w1+w3": (4608, 5120, 0),
    "shared w2": (5120, 2304, 0),
    "wq_a+wkv": (1792, 5120, 0),
    "wo_a": (8192, 4096, 8),
    "indexer wq_b": (4096, 1280, 0),
    "engram wkv": (25600, 6144, 0),
    "main_proj": (5120, 15360, 0),
}
HEADS, HEAD_DIM, WINDOW, CHOSEN, POOL_ROWS = 64, 512, 128, 512, 500_000
DIM, INTER_DIM, NUM_EXPERTS, TOPK, LIMIT = 5120, 2304, 384, 6, 10.0


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One operation at one batch size; `other` is the Inductor form of the same operation."""

    name: str
    tokens: int
    us: float
    megabytes: float
    floor_us: float
    ratio: float
    other_us: float | None = None
    other_ratio: float | None = None
    note: str = ""


def alternating_us(forms: Sequence[Callable[[int], object]], calls: int, replays: int = REPLAYS) -> list[float]:
    """Median microseconds a call of each form, `form(i)` for i below `calls` being one graph; replays alternate."""
    graphs = []
    # Each form is compiled for this shape alone; shapes measured before would count against the compiler's limit.
    torch.compiler.reset()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for form in forms:
            for i in range(min(2, calls)):
                form(i)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for i in range(calls):
                    form(i)
            graph.replay()
            graphs.append(graph)
        times: list[list[float]] = [[] for _ in forms]
        for _ in range(replays):
            for graph, found in zip(graphs, times, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                found.append(start.elapsed_time(end) * 1e3 / calls)
    return [statistics.median(found) for found in times]


def read_bandwidth() -> float:
    """Bytes per second of a compiled sum over more than the cache holds."""
    x = torch.ones(READ_BYTES // 4, device="cuda")
    total = torch.compile(torch.sum, dynamic=False)
    total(x)
    return READ_BYTES / (alternating_us([lambda _: total(x)], 1)[0] * 1e-6)


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, device="cuda", dtype=torch.uint8)


def random_scale(*shape: int) -> Tensor:
    return random_bytes(*shape, low=112, high=120).view(torch.float8_e8m0fnu)


def time_of(
    name: str, tokens: int, num_bytes: float, bandwidth: float, forms: Sequence[Callable[[int], object]], calls: int, note: str = ""
) -> KernelTime:
    """Measure one or two forms."""
    us = alternating_us(forms, calls)
    floor = num_bytes / bandwidth * 1e6
    other = us[1] if len(us) > 1 else None
    return KernelTime(
        name, tokens, us[0], num_bytes / 1e6, floor, floor / us[0], other, None if other is None else floor / other, note
    )


def linear_times(name: str, tokens: Sequence[int], bandwidth: float, inductor: bool, sweep: bool) -> Iterator[KernelTime]:
    """An FP8 linear, activations already quantised; with `sweep` every sensible cut too."""
    from deepinfer.ops.triton_kernels.fp8_linear import launch, new_arrivals, split_of, tiling_of
    from deepinfer.ops.triton_kernels.quantize import quantize_activations

    n, k, groups = LINEARS[name]
    copies = max(2, BEYOND_CACHE_BYTES // (n * k) + 1)
    codes = [(random_bytes(n, k) & 0xF7).view(torch.float8_e4m3fn) for _ in range(copies)]
    scale = random_scale(n // 32, k // 32)
    packed = [pack_fp8(c, scale, bf16=groups > 0) for c in codes]
    arrivals, scale_bytes = new_arrivals(n, torch.device("cuda")), scale.view(torch.uint8)
    group_rows = n // groups if groups else 0
    other = torch.compile(grouped_from_codes if groups else linear_fp8, dynamic=False)
    for t in tokens:
        x = torch.randn(t, max(groups, 1) * k, device="cuda").bfloat16()
        if groups:
            x = x.unflatten(1, (groups, k))
        x16, factor = (permute_channels(x, WGMMA).contiguous(), None) if groups else quantize_activations(x, WGMMA)

        def call(i: int, tiling: "Tiling | None" = None, split: int | None = None) -> Tensor:
            return launch(x16, factor, *packed[i], arrivals, group_rows, True, True, tiling, split)  # noqa: B023

        forms: list[Callable[[int], object]] = [call]
        if inductor:
            forms.append(lambda i: other(x, codes[i], scale_bytes))  # noqa: B023
        num_bytes = n * k * (1 + 1 / 1024)
        yield time_of(name, t, num_bytes, bandwidth, forms, copies)
        if not sweep:
            continue
        best = split_of(n, k)
        for split in sorted({s for s in (best - 1, best, best + 1, 2 * best) if s > 0 and (k // 128) % s == 0}):
            for tiling in tilings(t, n):
                if split != best or tiling != tiling_of(t, n):
                    note = f"{tuple(tiling)} split {split}"
                    form = partial(call, tiling=tiling, split=split)
                    yield from tried(name, t, num_bytes, bandwidth, form, copies, note)


def tilings(t: int, n: int) -> Iterator["Tiling"]:
    """Cuts that were near the best somewhere."""
    from deepinfer.ops.triton_kernels.fp8_linear import Tiling

    width = 16 if t <= 16 else 32 if t <= 32 else 64 if t <= 64 else 128
    for tokens in sorted({min(width, 64), width}):
        for rows, warps in ((64, 4), (128, 8)):
            for unroll, stages in ((2, 3), (2, 4), (1, 4)):
                if n % rows == 0:
                    yield Tiling(tokens, rows, unroll, warps, stages)


def grouped_from_codes(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return grouped_linear(x, dequantize_fp8(weight, scale).bfloat16())


def activation_times(tokens: Sequence[int], bandwidth: float, inductor: bool) -> Iterator[KernelTime]:
    """Norm and quantisation, which are bound by their launch; the other form is the compiled norm alone."""
    from deepinfer.ops.triton_kernels.quantize import norm_quantize_activations, quantize_activations

    for k in (1280, 5120):
        gain = torch.ones(k, device="cuda").bfloat16()
        for t in tokens:
            x = torch.randn(t, k, device="cuda").bfloat16()
            norm = torch.compile(partial(rms_norm, eps=1e-6), dynamic=False)
            yield time_of(f"quantize {k}", t, 4 * t * k, bandwidth, [lambda _: quantize_activations(x, WGMMA)], 20)  # noqa: B023
            forms: list[Callable[[int], object]] = [lambda _: norm_quantize_activations(x, gain, 1e-6, WGMMA)]  # noqa: B023
            if inductor:
                forms.append(lambda _: norm(x, gain))  # noqa: B023
            yield time_of(f"norm+quantize {k}", t, 6 * t * k, bandwidth, forms, 20, "other: norm alone")


def attention_times(tokens: Sequence[int], bandwidth: float, sweep: bool) -> Iterator[KernelTime]:
    """Attention over a full window and as many entries as are chosen, each row's its own; with `sweep` in other cuts too.

    The floor is the time to read what the lists name, each row's once.
    """
    from deepinfer.ops.triton_kernels import attention

    sink = torch.randn(HEADS, device="cuda")
    pool = torch.randn(POOL_ROWS, HEAD_DIM, device="cuda").bfloat16()
    for t in tokens:
        calls = max(2, min(16, 512 // t))
        q = torch.randn(t, HEADS, HEAD_DIM, device="cuda").bfloat16()
        places = torch.randint(POOL_ROWS, (calls, t, WINDOW + CHOSEN), device="cuda", dtype=torch.int32)
        is_own, visible = torch.zeros(t, WINDOW, device="cuda").bool(), torch.ones(t, WINDOW + CHOSEN, device="cuda").bool()

        def call(i: int, cut: "attention.Cut" = attention.CUT) -> Tensor:
            return attention.launch(q, pool, pool, pool, places[i], is_own, visible, sink, HEAD_DIM**-0.5, True, cut)  # noqa: B023

        num_bytes = min(t * (WINDOW + CHOSEN), POOL_ROWS) * HEAD_DIM * 2
        yield time_of("attention", t, num_bytes, bandwidth, [call], calls)
        if t >= attention.WIDE_ROWS:
            wide = partial(call, cut=attention.wide_cut(torch.cuda.get_device_capability()))
            yield time_of("attention, wide", t, num_bytes, bandwidth, [wide], calls)
        if not sweep:
            continue
        # Those that keep most values in registers.
        for chunk, part, (heads, warps), stages in itertools.product(
            (64, 128, 320, 640), (32, 64), ((16, 4), (16, 8), (32, 8), (64, 8)), (1, 2)
        ):
            cut = attention.Cut(chunk, part, heads, warps, stages)
            yield from tried("attention", t, num_bytes, bandwidth, partial(call, cut=cut), calls, str(tuple(cut)))


def tried(
    name: str, tokens: int, num_bytes: float, bandwidth: float, form: Callable[[int], object], calls: int, note: str
) -> Iterator[KernelTime]:
    """A time, or a line that says why there is none: too many resources for a processor, say. A sweep goes on."""
    try:
        yield time_of(name, tokens, num_bytes, bandwidth, [form], calls, note)
    except Exception as error:
        print(f"{name} {tokens} {note}: {type(error).__name__} {str(error)[:100]}", file=sys.stderr)


def stream_times(tokens: Sequence[int], bandwidth: float) -> Iterator[KernelTime]:
    """What a sub-layer does to the streams: coefficients, collapse with norm, spread; and vectors before they are stored."""
    from deepinfer.ops.triton_kernels.beside import rejoin
    from deepinfer.ops.triton_kernels.hyper_mix import hyper_mix
    from deepinfer.ops.triton_kernels.norm_rotate_round import FP8, norm_rotate_round
    from deepinfer.ops.triton_kernels.residual_streams import collapse_norm, spread

    device = torch.device("cuda")
    fn, base, scale = torch.randn(24, 4 * DIM, device=device), torch.randn(24, device=device), torch.randn(3, device=device)
    gain = torch.ones(DIM, device=device).bfloat16()
    for t in tokens:
        streams, y = torch.randn(t, 4, DIM, device=device).bfloat16(), torch.randn(t, DIM, device=device).bfloat16()
        pre, comb = torch.rand(t, 4, device=device), torch.rand(t, 4, 4, device=device)
        kv, rotation = torch.randn(t, HEAD_DIM, device=device).bfloat16(), torch.randn(t, 32, 2, device=device)

        def mix(i: int) -> None:
            hyper_mix(streams, fn, base, scale, 1e-6, 1e-6, 20)  # noqa: B023
            rejoin(device)

        forms: dict[str, tuple[int, Callable[[int], object]]] = {
            "hyper mix": (fn.nbytes, mix),
            "collapse and norm": (10 * t * DIM, lambda _: collapse_norm(streams, pre, gain, 1e-6)),  # noqa: B023
            "spread": (18 * t * DIM, lambda _: spread(y, streams, pre, comb)),  # noqa: B023
            "finish window rows": (4 * t * HEAD_DIM, lambda _: norm_rotate_round(kv, rotation, gain[:HEAD_DIM], 1e-6, FP8)),  # noqa: B023
        }
        for name, (num_bytes, form) in forms.items():
            yield time_of(name, t, num_bytes, bandwidth, [form], 20)


def random_fp4(n: int, k: int) -> tuple[Tensor, Tensor]:
    return random_bytes(NUM_EXPERTS, n, k // 2).view(torch.int8), random_scale(NUM_EXPERTS, n, k // 32)


def experts_times(tokens: Sequence[int], bandwidth: float, inductor: bool, skew: float = 0.0) -> Iterator[KernelTime]:
    """The whole layer from activations to the sum over a token's experts; batches differ within a graph."""
    from deepinfer.ops.triton_kernels.fp4_experts import fp4_experts
    from deepinfer.ops.triton_kernels.routing import combine_experts
    from deepinfer.ops.triton_kernels.wide_experts import fills_wide_tiles

    w1, w3, w2 = random_fp4(INTER_DIM, DIM), random_fp4(INTER_DIM, DIM), random_fp4(DIM, INTER_DIM)
    up = packed_in_parts(
        interleave_rows(w1[0], w3[0]), interleave_rows(*(s.view(torch.uint8) for s in (w1[1], w3[1]))).view(torch.float8_e8m0fnu)
    )
    down = packed_in_parts(*w2)
    stored: Any = [(weight, scale.view(torch.uint8)) for weight, scale in (w1, w2, w3)]
    expert_bytes = 3 * DIM * INTER_DIM * (1 / 2 + 1 / 32)
    popularity = skew * torch.randn(NUM_EXPERTS, device="cuda")
    for t in tokens:
        calls = max(2, 16 // t)
        ids = [(torch.randn(t, NUM_EXPERTS, device="cuda") + popularity).topk(TOPK).indices for _ in range(calls)]
        xs = [torch.randn(t, DIM, device="cuda").bfloat16() for _ in range(calls)]
        weights = torch.rand(t, TOPK, device="cuda")
        active = sum(i.unique().numel() for i in ids) / calls

        def call(i: int, invariant: bool = True) -> Tensor:
            return combine_experts(fp4_experts(xs[i], ids[i], weights, *up, *down, LIMIT, True, invariant), ids[i])  # noqa: B023

        forms: list[Callable[[int], object]] = [call]
        # Grouped products decode every expert, which the rest of the memory does not always hold.
        reference = gathered_experts if t * TOPK <= NUM_EXPERTS else grouped_experts
        if inductor:
            other: Callable[..., Tensor] = torch.compile(reference, dynamic=False)
            forms.append(lambda i: other(xs[i], ids[i], weights, *stored, LIMIT))  # noqa: B023
        most = max(int(i.flatten().bincount().max()) for i in ids)
        note = f"{active:.0f} experts, at most {most} tokens" + (f"; other: {reference.__name__}" if inductor else "")
        yield time_of(f"experts, skew {skew}", t, active * expert_bytes, bandwidth, forms, calls, note)
        if fills_wide_tiles(t * TOPK, NUM_EXPERTS):
            wide = partial(call, invariant=False)
            yield time_of(f"wide experts, skew {skew}", t, active * expert_bytes, bandwidth, [wide], calls, note)


def packed_in_parts(weight: Tensor, scale: Tensor, part: int = 32) -> PackedMatrix:
    """`pack_fp4` of a few experts at a time, which bounds its memory."""
    scale_bytes = scale.view(torch.uint8)
    parts = [pack_fp4(weight[i : i + part], scale_bytes[i : i + part].view(scale.dtype)) for i in range(0, weight.shape[0], part)]
    return PackedMatrix(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def measure(tokens: Sequence[int], only: Sequence[str], inductor: bool, sweep: bool) -> Iterator[KernelTime]:
    """Everything that `only` names, in one go."""
    bandwidth = read_bandwidth()
    yield KernelTime("plain read", 0, READ_BYTES / bandwidth * 1e6, READ_BYTES / 1e6, READ_BYTES / bandwidth * 1e6, 1.0)
    if "activations" in only:
        yield from activation_times(tokens, bandwidth, inductor)
    if "streams" in only:
        yield from stream_times(tokens, bandwidth)
    if "attention" in only:
        yield from attention_times(tokens, bandwidth, sweep)
    if "linears" in only:
        for name in LINEARS:
            yield from linear_times(name, tokens, bandwidth, inductor, sweep)
    if "experts" in only:
        yield from experts_times(tokens, bandwidth, inductor)
        torch.cuda.empty_cache()
        yield from experts_times([t for t in (*tokens, 512) if t >= 64], bandwidth, False, skew=1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line for each figure as it comes, write all of them as JSON."""
    kinds = ("activations", "streams", "attention", "linears", "experts")
    parser = argparse.ArgumentParser(prog="python -m deepinfer.bench.kernels", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="batch sizes")
    parser.add_argument("--only", nargs="+", choices=kinds, default=list(kinds), help="what to measure (default: all)")
    parser.add_argument("--no-inductor", action="store_true", help="do not compile and time the Inductor forms")
    parser.add_argument("--sweep", action="store_true", help="also time other cuts of the linears and of attention")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("the kernels are for CUDA devices, and this machine has none")
    torch.manual_seed(0)
    rows = []
    for row in measure(args.tokens, args.only, not args.no_inductor, args.sweep):
        other = "" if row.other_us is None else f"  inductor {row.other_us:9.1f} us ({row.other_ratio:.2f})"
        print(
            f"{row.name:22} T={row.tokens:<4} {row.us:9.1f} us  {row.megabytes:8.1f} MB  floor {row.floor_us:8.1f} us  "
            f"ratio {row.ratio:.2f}{other}  {row.note}",
            flush=True,
        )
        rows.append(asdict(row))
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
