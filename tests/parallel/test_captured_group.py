"""A group whose decode steps are captured: replays take part in exchanges, see experts move, and give one process's tokens."""

from typing import Any

import pytest

from deepinfer.model.numerics import Ops, reference_ops
from deepinfer.sampling_params import SamplingParams
from tests.parallel.in_process import CapturingDevice, record_exchanges
from tests.parallel.spawn import run_ranks
from tests.parallel.test_group_engine import PARAMS, PROMPTS, completions, core_of, open_engine

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"eplb_window": 5, "eplb_period": 12, "async_scheduling": 1},
    "drafting": {"eplb_window": 5, "eplb_period": 12, "async_scheduling": 1, "num_speculative_tokens": 2},
}
# Long enough for tables of two widths; one rank looks at its rows, which it may not do in a graph.
LONG = [*PROMPTS[:4], [3 + i % 300 for i in range(20)]]
WATCHED = [*PARAMS[:3], SamplingParams(max_tokens=9, return_hidden_states=True), SamplingParams(max_tokens=20, ignore_eos=True)]


def capture_on_the_cpu(patch: pytest.MonkeyPatch) -> CapturingDevice:
    """Let engines of this process capture, and their plain operations have fixed shapes."""
    device = CapturingDevice()

    def static_ops(*, batch_invariant: bool = False, static_shapes: bool = False) -> Ops:
        return reference_ops(batch_invariant=batch_invariant, static_shapes=True)

    patch.setattr("deepinfer.engine.open_device", lambda torch_device: device)
    patch.setattr("deepinfer.backends.reference_ops", static_ops)
    return device


def serve_captured(rank: int, size: int) -> dict[str, Any]:
    """What each rank replays."""
    record_exchanges()
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        device = capture_on_the_cpu(patch)
        for name, settings in SETTINGS.items():
            device.num_replays = 0
            with open_engine(size, cuda_graphs=True, **settings) as engine:
                found[name] = [completions(engine), completions(engine, LONG, WATCHED)]
                core = core_of(engine)
                found[f"{name} shapes"] = list(core.worker._static)
                found[f"{name} moves"] = [r.num_moves for r in core.balance.rearrangements]
                found[f"{name} replays"] = device.num_replays
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(serve_captured, 2)


@pytest.mark.parametrize("name", SETTINGS)
def test_replays_give_the_tokens_of_one_process(name: str, found: list[dict[str, Any]]) -> None:
    settings = {key: value for key, value in SETTINGS[name].items() if not key.startswith("eplb")}
    with open_engine(1, **settings) as engine:
        assert found[0][name] == [completions(engine), completions(engine, LONG, WATCHED)]


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_were_replayed_and_experts_moved_meanwhile(name: str, found: list[dict[str, Any]]) -> None:
    assert min(rank[f"{name} replays"] for rank in found) > 30
    assert len(found[0][f"{name} moves"]) > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_all_ranks_capture_the_same_shapes_in_the_same_order(name: str, found: list[dict[str, Any]]) -> None:
    shapes = [rank[f"{name} shapes"] for rank in found]
    assert shapes[0] == shapes[1]
    assert len({width for (_, width), _, _ in shapes[0]}) > 1
