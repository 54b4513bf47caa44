"""Build every Triton kernel of the package for a GPU that need not be there: `python -m deepinfer.bench.sm100 --json OUT`.

Each kernel is compiled to machine code for compute capability 10.0 (or `--capability`), in the variants that the model uses, and
the report names the matrix instructions that the compiler chose, its shared memory and its registers. Needs triton, no GPU.
Nothing is run: this shows that kernels build and what they are made of, not that they are fast.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer.errors import MissingExtra

MATRIX_INSTRUCTION = re.compile(r"\b(tcgen05\.mma|wgmma\.mma_async|mma\.sync)([\w.:]*)")
# What follows the name says shapes and types; of tcgen05 only the kind matters.
KIND = re.compile(r"kind::\w+(\.block_scale)?")

ACTIVATIONS = {"x_ptr": "*bf16", "gain_ptr": "*bf16", "x16_ptr": "*fp16", "factor_ptr": "*fp32", "scales_ptr": "*u8"}
ROUTING = {"ids_ptr": "*i64", "list_ptr": "*i32", "order_ptr": "*i32", "weight_ptr": "*fp32", "weights_ptr": "*fp32"}
PACKED = {"words_ptr": "*i32", "scales_ptr": "*i32", "exponents_ptr": "*u8", "arrivals_ptr": "*i32", "partial_ptr": "*fp32"}
STORED = {"codes_ptr": "*fp8e4nv", "code_scales_ptr": "*u8", "scale_ptr": "*u8", "up_weight_ptr": "*u8", "up_scale_ptr": "*u8"}
NUMBERS = {"eps": "fp32", "one_over_k": "fp32"}


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with the arguments that are fixed when it is compiled; `types` of the others where they are not the usual ones."""

    kernel: Any
    name: str
    constants: Mapping[str, Any]
    types: Mapping[str, str]
    warps: int
    stages: int = 3


@dataclass(frozen=True, slots=True)
class Built:
    """What came out."""

    name: str
    kernel: str
    capability: int
    instructions: list[str]
    shared_bytes: int
    binary_bytes: int


def variants(capability: int = 100) -> Iterator[Variant]:
    """Every kernel as the published model launches it."""
    yield from quantized_variants()
    yield from plain_variants(capability)


def plain_variants(capability: int) -> Iterator[Variant]:
    """Kernels of what is not quantised."""
    from deepinfer.ops.triton_kernels import (
        attention,
        float32_linear,
        hyper_mix,
        index_scores,
        quantize,
        residual_streams,
        route,
        select,
    )

    types = dict.fromkeys(("maximum_ptr", "sum_ptr", "out_ptr", "sink_ptr", "partial_ptr"), "*fp32")
    types |= dict.fromkeys(("x_ptr", "w_ptr", "q_ptr", "kv_ptr", "parts_ptr", "result_ptr"), "*bf16")
    types |= dict.fromkeys(("own_ptr", "ring_ptr", "pool_ptr"), "*bf16") | dict.fromkeys(("visible_ptr", "is_own_ptr"), "*i1")
    types |= {"scale": "fp32", "places_ptr": "*i32"}
    wide = attention.wide_cut((capability // 10, capability % 10))
    for cut, single in ((attention.CUT, False), (attention.CUT, True), (wide, True)):
        constants: dict[str, Any] = {"H": 64, "D": 512, "CHUNK": cut.chunk, "PLACES": cut.places}
        constants |= {"HEADS": cut.heads, "SINGLE": single, "PDL": True}
        name = f"attend to {'all' if single else 'a chunk'}, {cut.heads} heads"
        yield Variant(attention.chunk_kernel, name, constants, types, cut.warps, cut.stages)
    yield Variant(attention.merge_kernel, "merge chunks", {"H": 64, "D": 512, "PDL": True}, types, 4)
    for tokens in (16, 64, float32_linear.MOST_TOKENS):
        constants = {"ROWS": float32_linear.ROWS, "STEP": float32_linear.STEP, "TOKENS": tokens, "PDL": True}
        yield Variant(float32_linear.bf16_kernel, f"bf16 linear, {tokens} tokens", constants, types, 4)
    yield Variant(float32_linear.parts_kernel, "float32 activations in parts", {"BLOCK": 1024}, types | {"x_ptr": "*fp32"}, 4)
    yield Variant(float32_linear.add_kernel, "add parts and splits", {"TERMS": 16, "BLOCK": 128, "PDL": True}, types, 4)
    floats = ("fn_ptr", "partial_ptr", "base_ptr", "scale_ptr", "pre_ptr", "post_ptr", "comb_ptr", "logits_ptr", "bias_ptr")
    types = dict.fromkeys(floats, "*fp32") | {"norm_eps": "fp32", "scale": "fp32"}
    constants = {"R": 24, "CHUNK": hyper_mix.CHUNK, "COLUMNS": hyper_mix.COLUMNS, "TOKENS": hyper_mix.TOKENS, "STEP": 128}
    for is_bf16 in (True, False):
        name = f"project the streams, {'bf16' if is_bf16 else 'float32'}"
        of_streams = types | {"x_ptr": "*bf16" if is_bf16 else "*fp32"}
        yield Variant(hyper_mix.project_kernel, name, constants | {"IS_BF16": is_bf16}, of_streams, 4)
    constants = {"C": 128, "COLUMNS": hyper_mix.COLUMNS, "M": 4, "ITERATIONS": 20}
    yield Variant(hyper_mix.mix_kernel, "mix the streams", constants, types, 1)
    types |= dict.fromkeys(("streams_ptr", "y_ptr", "gain_ptr"), "*bf16") | {"one_over_d": "fp32"}
    constants = {"M": 4, "BLOCKS": 256, "PDL": True}
    yield Variant(residual_streams.collapse_norm_kernel, "collapse and norm", constants, types, quantize.NORM_WARPS)
    constants = {"M": 4, "COLUMNS": residual_streams.COLUMNS}
    yield Variant(residual_streams.spread_kernel, "spread", constants, types | {"out_ptr": "*bf16"}, 4)
    yield from finishing_variants()
    constants = {"K": 6, "PADDED": 512, "WIDTH": 8, "THRESHOLD": route.THRESHOLD, "SUM_FLOOR": route.SUM_FLOOR, "PDL": True}
    yield Variant(route.route_kernel, "choose experts", constants, types, 2)
    types = dict.fromkeys(("q_ptr", "weights_ptr", "keys_ptr", "out_ptr"), "*bf16")
    types |= dict.fromkeys(("tables_ptr", "seq_ids_ptr", "n_visible_ptr"), "*i64")
    constants = {"H": 32, "D": 128, "ENTRIES": index_scores.ENTRIES}
    yield Variant(index_scores.index_scores_kernel, "index scores", constants, types, 4)
    types = {"scores_ptr": "*bf16", "visible_ptr": "*i64", "mask_ptr": "*i1", "ids_ptr": "*i64"}
    for count in (2048, select.MOST_SCORES):
        padded, warps = select.launch_of(count)
        constants = {"PADDED": padded, "WIDTH": 512, "BITS": 16}
        yield Variant(select.select_kernel, f"select among {count} entries", constants, types, warps)
        constants = {"BLOCKS": padded // 64, "BLOCK": 64, "BITS": 16}
        yield Variant(select.candidates_kernel, f"candidates among {count} entries", constants, types, warps)


def finishing_variants() -> Iterator[Variant]:
    """Kernels of vectors that are stored or compared."""
    from deepinfer.ops.triton_kernels import norm_rotate_round as finishing

    types = dict.fromkeys(("x_ptr", "gain_ptr", "y_ptr"), "*bf16") | {"rotation_ptr": "*fp32", "one_over_d": "fp32"}
    forms = {
        "queries": (512, False, finishing.NOT),
        "window rows": (512, True, finishing.FP8),
        "entries": (512, False, finishing.FP4_E4M3),
        "index queries": (128, False, finishing.FP4_UE8M0),
        "index keys": (128, True, finishing.FP4_UE8M0),
    }
    for name, (width, norm, rounding) in forms.items():
        group = 16 if rounding == finishing.FP4_E4M3 else 32
        constants = {"GROUPS": width // group, "GROUP": group, "NORM": norm, "ROUNDING": rounding, "PDL": True}
        yield Variant(finishing.norm_rotate_round_kernel, f"finish {name}", constants, types, 1)


def quantized_variants() -> Iterator[Variant]:
    """Kernels of quantised weights."""
    from deepinfer.ops.triton_kernels import block_scaled, fp4_experts, fp8_linear, quantize, routing, shared_expert, wide_experts

    fixed: dict[str, Any] = {"PDL": True}
    yield Variant(quantize.quantize_kernel, "quantize", fixed | {"BLOCKS": 256, "INSTRUCTION": 3}, {}, 16)
    constants = fixed | {"BLOCKS": 64, "INSTRUCTION": 2}
    of_norm = {"y_ptr": "*bf16"}
    yield Variant(quantize.norm_quantize_kernel, "norm and quantize", constants, of_norm, quantize.NORM_WARPS)
    prepare = fixed | {"BLOCKS": 256, "P2": 1024, "E": 384, "E2": 512, "SPLIT": False}
    yield Variant(routing.prepare_kernel, "sort pairs by expert", prepare, {}, 8)
    types = dict.fromkeys(("y_ptr", "shared_ptr", "out_ptr", "gate_up_ptr"), "*bf16")
    for shared in (False, True):
        constants = {"TOPK": 6, "TOPK2": 8, "COLUMNS": 1024, "SHARED": shared, "PDL": not shared}
        yield Variant(routing.combine_kernel, f"combine{', with the shared expert' if shared else ''}", constants, types, 4)
    constants = fixed | {"LIMIT": 10.0, "BLOCKS": 128, "INSTRUCTION": 2}
    yield Variant(shared_expert.swiglu_quantize_kernel, "SwiGLU and quantize", constants, types, 16)
    for tokens in (1, 32, 64, 128):
        for n, bf16 in ((32768, False), (5120, False), (1024, True)):
            cut = fp8_linear.tiling_of(tokens, n)
            split = 1 if n == 32768 else 4
            constants = fixed | {
                "TOKENS": cut.tokens,
                "ROWS": cut.rows,
                "UNROLL": cut.unroll,
                "SPLIT": split,
                "WARPS": cut.warps,
                "BF16": bf16,
                "GROUP_ROWS": 1024 if bf16 else 0,
                "LAST_ADDS": split > 1 and tokens == 1,
            }
            types = PACKED | {"y_ptr": "*bf16", "x_ptr": "*bf16" if bf16 else "*fp16", "factor_ptr": "*fp32"}
            name = f"fp8 linear{', bf16 activations' if bf16 else ''}, {cut.tokens} tokens, {cut.rows} rows, split {split}"
            yield Variant(fp8_linear.fp8_linear_kernel, name, constants, types, cut.warps, cut.stages)
    yield Variant(
        fp8_linear.add_parts_kernel,
        "add parts",
        fixed | {"SPLIT": 4, "ELEMENTS": 1024},
        {"y_ptr": "*bf16", "partial_ptr": "*fp32"},
        4,
    )
    for up in (True, False):
        for tiles in (1, fp4_experts.LARGE_TILES):
            constants = fixed | {
                "LIMIT": 10.0,
                "UP": up,
                "TOPK": 6,
                "ROWS": fp4_experts.FP4_ROWS,
                "WARPS": fp4_experts.FP4_WARPS,
                "TILES": tiles,
                "SPLIT": tiles > 1,
            }
            types = PACKED | {"x_ptr": "*fp16", "y_ptr": "*fp16" if up else "*bf16"}
            name = f"fp4 experts, {'up' if up else 'down'}, {8 * tiles} tokens"
            yield Variant(fp4_experts.fp4_experts_kernel, name, constants, types, fp4_experts.FP4_WARPS, fp4_experts.STAGES)
    tiling = wide_experts.TILING
    for up in (True, False):
        constants = {"LIMIT": 10.0, "UP": up, "TOPK": 6, "ROWS": tiling.rows, "TOKENS": tiling.tokens, "WARPS": tiling.warps}
        types = PACKED | {"x_ptr": "*fp16", "y_ptr": "*fp16" if up else "*bf16", "bounds_ptr": "*i64", "order_ptr": "*i64"}
        name = f"fp4 experts, {'up' if up else 'down'}, wide"
        yield Variant(wide_experts.wide_experts_kernel, name, constants, types, tiling.warps, tiling.stages)
    yield Variant(block_scaled.quantize_codes_kernel, "quantize to codes", fixed | {"BLOCKS": 256}, STORED, 16)
    shape = {"ROWS": block_scaled.ROWS, "STEP": block_scaled.STEP}
    for tokens in (16, 128):
        for split, result in ((1, "*bf16"), (4, "*fp32")):
            constants = fixed | shape | {"TOKENS": tokens, "SPLIT": split}
            types = STORED | {"weight_ptr": "*fp8e4nv", "y_ptr": result}
            name = f"block-scaled fp8 linear, {tokens} tokens, split {split}"
            yield Variant(block_scaled.block_scaled_linear_kernel, name, constants, types, 4, block_scaled.STAGES)
    for up in (True, False):
        constants = fixed | shape | {"LIMIT": 10.0, "UP": up, "TOPK": 6, "TOKENS": block_scaled.EXPERT_TOKENS}
        types = STORED | {"weight_ptr": "*u8", "y_ptr": "*fp8e4nv" if up else "*bf16", "y_scales_ptr": "*u8"}
        name = f"block-scaled fp4 experts, {'up' if up else 'down'}"
        yield Variant(block_scaled.block_scaled_experts_kernel, name, constants, types, 4, block_scaled.STAGES)


def build(variant: Variant, capability: int) -> Built:
    """Compile one variant, as a launch with aligned pointers and sizes would."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    usual = ACTIVATIONS | ROUTING | NUMBERS | dict(variant.types)
    signature, divisible = {}, {}
    for index, name in enumerate(variant.kernel.arg_names):
        kind = "constexpr" if name in variant.constants else usual.get(name, "i32")
        signature[name] = kind
        # Pointers, and the sizes of matrices.
        if kind.startswith("*") or name in ("N", "K"):
            divisible[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(variant.kernel, signature, dict(variant.constants), divisible)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Built(
        name=variant.name,
        kernel=variant.kernel.__name__,
        capability=capability,
        instructions=matrix_instructions(compiled.asm["ptx"]),
        shared_bytes=compiled.metadata.shared,
        binary_bytes=len(compiled.asm["cubin"]),
    )


def matrix_instructions(ptx: str) -> list[str]:
    """The distinct matrix instructions of a listing, tcgen05 by its kind alone."""
    found = set()
    for name, rest in MATRIX_INSTRUCTION.findall(ptx):
        kind = KIND.search(rest)
        found.add(f"{name} {kind.group(0)}" if kind else name + rest)
    return sorted(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build all, print a line for each, write all as JSON."""
    parser = argparse.ArgumentParser(prog="python -m deepinfer.bench.sm100", description=__doc__)
    parser.add_argument("--capability", type=int, default=100, help="compute capability times ten (default 100)")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    args = parser.parse_args(arguments)
    try:
        import triton
    except ModuleNotFoundError as error:
        raise MissingExtra("building kernels needs triton: pip install triton") from error
    rows = []
    for variant in variants(args.capability):
        built = build(variant, args.capability)
        print(f"{built.name:58} {built.shared_bytes:7} B shared  {', '.join(built.instructions) or '-'}", flush=True)
        rows.append(asdict(built))
    print(f"{len(rows)} kernels built for sm_{args.capability} with triton {triton.__version__}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
