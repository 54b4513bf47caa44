"""The kernels build for a GPU that is not there, and are made of the matrix instructions they were written for."""

import importlib
import pkgutil
from itertools import islice

import pytest

from deepinfer.bench.sm100 import Built, build, main, matrix_instructions, variants
from deepinfer.ops import triton_kernels
from deepinfer.ops.triton_kernels.packing import CHECKPOINT_ORDER, OPERAND_ORDER, layout_for


def test_matrix_instructions_are_read_from_a_listing() -> None:
    listing = """
        tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [ %r1 + 0 ], %rd1, %rd2, %r5, [ %r6 ], [ %r7 ], %p2;
        tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r5, %p2;
        wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%f1, %f2}, {%r1}, %rd1, 0, 1, 1, 0;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1};
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f2}, {%r1}, {%r2}, {%f2};
        wgmma.fence.sync.aligned;
    """
    assert matrix_instructions(listing) == [
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "tcgen05.mma kind::f16",
        "tcgen05.mma kind::mxf8f6f4.block_scale",
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16",
    ]


def test_the_layout_follows_the_device() -> None:
    assert layout_for((9, 0)) == OPERAND_ORDER
    assert layout_for((10, 0)) == layout_for((10, 3)) == CHECKPOINT_ORDER
    # Workstation Blackwell has no tcgen05.
    assert layout_for((12, 0)) == OPERAND_ORDER


WITHOUT_PRODUCTS = {
    "quantize_kernel",
    "norm_quantize_kernel",
    "quantize_codes_kernel",
    "prepare_kernel",
    "combine_kernel",
    "add_parts_kernel",
    "merge_kernel",
    "parts_kernel",
    "add_kernel",
    "mix_kernel",
    "route_kernel",
}


def expected_instruction(built: Built) -> str | None:
    """What a kernel of quantised weights was written for, as the beginning of an instruction's name; None for others."""
    on_blackwell = built.capability == 100
    if "block_scaled" in built.kernel:
        return "tcgen05.mma kind::mxf8f6f4.block_scale" if on_blackwell else "wgmma.mma_async"
    if built.kernel == "fp4_experts_kernel":
        return "mma.sync"
    if built.kernel in {"fp8_linear_kernel", "wide_experts_kernel"}:
        return "tcgen05.mma kind::f16" if on_blackwell else "wgmma.mma_async"
    return None


def check(built: Built) -> None:
    expected = expected_instruction(built)
    assert built.binary_bytes > 0
    if built.kernel in WITHOUT_PRODUCTS:
        assert built.instructions == []
    elif expected is not None:
        assert built.instructions, built
        assert all(found.startswith(expected) for found in built.instructions), built
    # Two programs fit a processor's shared memory, except where one needs the registers of all, and where a kernel only serves to
    # test another device's.
    is_stand_in = built.capability == 90 and "block_scaled" in built.kernel
    is_alone = is_stand_in or built.name == "attend to all, 64 heads"
    assert built.shared_bytes <= (227 if is_alone else 114) * 1024, built


@pytest.fixture
def _triton() -> None:
    pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.usefixtures("_triton")
def test_every_kernel_of_these_files_is_in_the_report() -> None:
    found = set()
    for info in pkgutil.iter_modules(triton_kernels.__path__):
        if info.name in {"packing", "launch"}:
            continue
        module = importlib.import_module(f"{triton_kernels.__name__}.{info.name}")
        found |= {name for name, value in vars(module).items() if name.endswith("_kernel") and hasattr(value, "arg_names")}
    assert {variant.kernel.__name__ for variant in variants()} == found


@pytest.mark.usefixtures("_triton")
@pytest.mark.parametrize(
    "kernel", ["fp8_linear_kernel", "fp4_experts_kernel", "wide_experts_kernel", "block_scaled_experts_kernel", "prepare_kernel"]
)
@pytest.mark.parametrize("capability", [90, 100])
def test_a_kernel_builds_for_both_generations(kernel: str, capability: int) -> None:
    for variant in islice((v for v in variants(capability) if v.kernel.__name__ == kernel), 1):
        check(build(variant, capability))


@pytest.mark.slow
@pytest.mark.usefixtures("_triton")
@pytest.mark.parametrize("capability", [90, 100])
def test_every_kernel_builds(capability: int) -> None:
    for variant in variants(capability):
        check(build(variant, capability))


@pytest.mark.usefixtures("_triton")
def test_the_report_is_printed_and_written(tmp_path, capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    first = next(iter(variants()))
    monkeypatch.setattr("deepinfer.bench.sm100.variants", lambda _: iter([first]))
    assert main(["--json", str(tmp_path / "report.json")]) == 0
    assert "1 kernels built for sm_100" in capsys.readouterr().out
    assert first.name in (tmp_path / "report.json").read_text()
