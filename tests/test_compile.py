"""A decode step is one graph: `torch.compile(fullgraph=True)` takes it whole and gives the plain result."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from deepinfer.model.cache import ModelCache
from deepinfer.model.rows import Rows
from deepinfer.model.transformer import Transformer
from deepinfer.ops.matmul import without_onednn
from tests.golden import Session, fresh_model, recorded, shared_model
from tests.tolerances import check_close

STEPS = 4

pytestmark = [
    pytest.mark.golden,
    # Rotations come from `torch.polar`, which stays a call of its own.
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex"),
    # The compiler's own imports.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning"),
]


class StepResult(NamedTuple):
    """What one decode step gives, drafts included."""

    logits: Tensor
    draft_ids: Tensor | None
    draft_logits: Tensor | None


def decode_step(model: Transformer) -> Callable[[Rows, ModelCache], StepResult]:
    """One token of each sequence through the backbone, the heads and the draft blocks."""

    def step(rows: Rows, memory: ModelCache) -> StepResult:
        hidden = model.forward_rows(rows, memory)
        logits = model.logits(hidden.final)
        if not len(model.mtp):
            return StepResult(logits, None, None)
        model.observe_draft(hidden.main_hidden, rows, memory)
        drafts = model.propose_draft(logits.argmax(dim=-1), rows.positions, rows.slots, memory)
        return StepResult(logits, drafts.token_ids, drafts.logits)

    return step


@torch.no_grad()
def decode(model: Transformer, case: str, step: Callable[[Rows, ModelCache], StepResult]) -> list[StepResult]:
    """The recorded prompt in plain arithmetic, then some recorded tokens through `step`."""
    recording = recorded(case, "float32")
    prompt, fed = recording["input_ids"], recording["decode.input_ids"]
    batch, length = prompt.shape
    # One block holds all positions, so that no shape changes from step to step.
    session = Session(model, batch, length + STEPS, block_size=64)
    rows = session.rows([(ids, 0) for ids in prompt])
    hidden = model.forward_rows(rows, session.cache)
    if len(model.mtp):
        model.observe_draft(hidden.main_hidden, rows, session.cache)
    return [step(session.rows([(fed[b, i : i + 1], length + i) for b in range(batch)]), session.cache) for i in range(STEPS)]


def compiled(model: Transformer, backend: str) -> Callable[[Rows, ModelCache], StepResult]:
    torch.compiler.reset()
    return torch.compile(decode_step(model), fullgraph=True, dynamic=False, backend=backend)


def check_same(compiled_steps: list[StepResult], plain_steps: list[StepResult], precision: str) -> None:
    for step, plain in zip(compiled_steps, plain_steps, strict=True):
        check_close(step.logits, plain.logits, "compiled logits", precision)
        if step.draft_ids is not None:
            assert torch.equal(step.draft_ids, plain.draft_ids)
            check_close(step.draft_logits, plain.draft_logits, "compiled logits", precision, "draft logits")


@pytest.mark.parametrize("case", ["swa_tiny", "smooth_full", "select_full", "bf16_full"])
def test_static_shapes_give_the_plain_result(case: str) -> None:
    static, plain = fresh_model(case, "float32", static_shapes=True), shared_model(case, "float32")
    check_same(decode(static, case, decode_step(static)), decode(plain, case, decode_step(plain)), "float32")


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        ("bf16_full", "native"),
        pytest.param("bf16_full", "float32", marks=pytest.mark.slow),
        pytest.param("select_full", "native", marks=pytest.mark.slow),
        pytest.param("select_full", "float32", marks=pytest.mark.slow),
    ],
)
def test_captured_step_with_every_mechanism_gives_the_eager_bits(case: str, precision: str) -> None:
    """The graph alone, without code generation: nothing is read on the host, and no value is baked in."""
    model = fresh_model(case, precision, static_shapes=True)
    # A graph cannot switch oneDNN off for its bfloat16 products, as the plain functions do.
    with without_onednn():
        captured = decode(model, case, compiled(model, "aot_eager"))
    for step, plain in zip(captured, decode(model, case, decode_step(model)), strict=True):
        assert torch.equal(step.logits, plain.logits)
        assert torch.equal(step.draft_logits, plain.draft_logits)


@pytest.mark.parametrize(
    ("case", "layers"),
    [
        ("swa_tiny", 1),
        pytest.param("swa_tiny", 3, marks=pytest.mark.slow),
        pytest.param("bf16_full", 2, marks=pytest.mark.slow),
    ],
)
def test_generated_code_of_a_step_gives_the_eager_result(case: str, layers: int) -> None:
    model = fresh_model(case, "float32", static_shapes=True, layers=layers)
    check_same(decode(model, case, compiled(model, "inductor")), decode(model, case, decode_step(model)), "float32")
