"""Workers of one process take turns at code that may be compiled."""

from contextlib import AbstractContextManager

import pytest
import torch

from deepinfer.checkpoint.load import load_model
from deepinfer.model.compiled import compile_model
from deepinfer.model.numerics import inductor_ops
from deepinfer.runtime import worker
from deepinfer.runtime.device import InlineDevice
from deepinfer.runtime.engine_core import warm_up
from deepinfer.sampling_params import SamplingParams
from tests.runtime.harness import GOLDEN, Harness, make_request


class Turns(AbstractContextManager[None]):
    """Stands in for the lock: counts who is inside."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


@pytest.mark.parametrize("compiles", [True, False])
def test_only_workers_of_compiled_models_take_turns_and_do_for_all_that_they_launch(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, depths = Turns(), []
    monkeypatch.setattr(worker, "ALONE", turns)
    model = load_model(GOLDEN / "bf16_full", "float32", "cpu", ops=inductor_ops())
    if compiles:
        compile_model(model, backend="eager")
    for name in ("forward_rows", "logits", "propose_draft", "observe_draft"):

        def watched(*args: object, _run: object = getattr(model, name), _name: str = name) -> object:
            depths.append((_name, turns.depth))
            return _run(*args)  # type: ignore[operator]

        monkeypatch.setattr(model, name, watched)
    harness = Harness(InlineDevice(), depth=1, model=model, num_speculative_tokens=3)
    warm_up(harness.worker, in_group=False)
    harness.add(make_request("0", (5, 6, 7), SamplingParams(max_tokens=6, temperature=0)))
    harness.run()
    assert {name for name, _ in depths} == {"forward_rows", "logits", "propose_draft", "observe_draft"}
    assert {depth for _, depth in depths} == {int(compiles)}
    torch.compiler.reset()
