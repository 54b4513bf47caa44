"""Builds that compute the same model in another order are equal within tolerance."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.golden import compare
from deepinfer.golden.observe import DEFAULT_PATTERNS
from deepinfer.model.compiled import compile_model
from deepinfer.model.numerics import PRECISIONS, reference_ops
from deepinfer.ops.matmul import without_onednn
from deepinfer.presets import random_model, tiny_config
from tests.golden_tool.recordings import PROMPT, SHORT, clean_model, fresh_model, record_tiny

TWO = (PROMPT, SHORT)


def float64_sums(precision: str) -> Any:
    """A model whose products are summed in float64: as far from ours as another right build."""

    def product(x: Tensor, w: Tensor) -> Tensor:
        return (x.double() @ w.double().T).to(x.dtype)

    def batched(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a.double(), b.double()).to(a.dtype)

    ops = replace(reference_ops(), matmul=product, block_matmul=product, batched_matmul=batched)
    return random_model(tiny_config(), precision=precision, ops=ops)


def check_equal(golden: Any, other: Any, precision: str) -> None:
    report = compare(golden, other, model=clean_model(precision))
    assert report.is_equal, str(report)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_recording_equals_itself_exactly(precision: str, tmp_path: Path) -> None:
    golden = record_tiny(tmp_path, clean_model(precision))
    report = compare(golden, golden, model=clean_model(precision))
    assert report.exit_code == 0
    prompt = report.prompts[0]
    assert prompt.max_logprob_difference == 0
    assert all(t.relative == 0 for t in prompt.tensors)
    assert set(report.jaccard.values()) == {1.0}


@pytest.mark.parametrize("precision", ["native", *(pytest.param(p, marks=pytest.mark.slow) for p in PRECISIONS if p != "native")])
def test_batch_size_chunks_and_sums_in_another_order_are_equal(precision: str, tmp_path: Path) -> None:
    golden = record_tiny(tmp_path / "golden", clean_model(precision), TWO, patterns=DEFAULT_PATTERNS)
    together = record_tiny(tmp_path / "batch", clean_model(precision), TWO, patterns=DEFAULT_PATTERNS, batch_size=2, chunk_tokens=7)
    check_equal(golden, together, precision)
    invariant = record_tiny(
        tmp_path / "invariant", fresh_model(precision, batch_invariant=True), TWO, patterns=DEFAULT_PATTERNS, batch_size=2
    )
    check_equal(golden, invariant, precision)
    check_equal(golden, record_tiny(tmp_path / "sums", float64_sums(precision), TWO, patterns=DEFAULT_PATTERNS), precision)


@pytest.mark.parametrize("precision", ["float32", "native"])
def test_every_tensor_of_sums_in_another_order_is_within(precision: str, tmp_path: Path) -> None:
    golden = record_tiny(tmp_path / "golden", clean_model(precision))
    check_equal(golden, record_tiny(tmp_path / "sums", float64_sums(precision)), precision)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_feed_forward_equals_eager(backend: str, tmp_path: Path) -> None:
    golden = record_tiny(tmp_path / "golden", patterns=DEFAULT_PATTERNS)
    model = fresh_model(static_shapes=True)
    torch.compiler.reset()
    for layer in model.layers:
        ffn: Any = layer.ffn
        ffn.experts.forward = torch.compile(ffn.experts.forward, backend=backend, dynamic=False)
        ffn.shared_experts.forward = torch.compile(ffn.shared_experts.forward, backend=backend, dynamic=False)
    with without_onednn():
        compiled = record_tiny(tmp_path / "compiled", model, patterns=DEFAULT_PATTERNS)
    check_equal(golden, compiled, "float32")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")
def test_compiled_layers_equal_eager(tmp_path: Path) -> None:
    """Whole layers through the code generator, as an engine compiles them; what happens inside one cannot be observed."""
    golden = record_tiny(tmp_path / "golden", patterns=DEFAULT_PATTERNS)
    model = fresh_model(static_shapes=True)
    torch.compiler.reset()
    compile_model(model)
    with without_onednn():
        compiled = record_tiny(tmp_path / "compiled", model, patterns=())
    check_equal(golden, compiled, "float32")
