"""What must hold on an accelerator as well; skipped, with a reason, where there is none."""

import json
from pathlib import Path

import pytest
import torch

from deepinfer import EngineConfig, LLMEngine, SamplingParams, Tokenizer, load_model
from deepinfer.bench.steady_decode import SteadyDecode
from deepinfer.model.numerics import reference_ops

GOLDEN = Path(__file__).parent / "data" / "golden"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator on this machine"),
]
CASES = ["swa_tiny", "smooth_full", "select_full", "bf16_full"]


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.set_float32_matmul_precision("highest")


def greedy(case: str, **config: object) -> tuple[list[list[int]], list[list[int]]]:
    """What the engine generates for the recorded prompts, and what was recorded in float32."""
    recorded = json.loads((GOLDEN / case / "golden.json").read_text())
    mode = recorded["modes"]["f32"]
    expected = [[first, *rest] for first, rest in zip(mode["first_decode_id"], mode["greedy_ids"], strict=True)]
    with LLMEngine.from_pretrained(GOLDEN / case, precision="float32", **config) as engine:
        assert engine.model.device.type != "cpu"
        params = SamplingParams(max_tokens=len(expected[0]), temperature=0, ignore_eos=True)
        outputs = engine.generate(recorded["prompt_ids"], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], expected


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("depth", [0, 1])
def test_the_engine_gives_the_recorded_tokens_on_the_accelerator(case: str, depth: int) -> None:
    found, expected = greedy(case, async_scheduling=depth)
    assert found == expected


def test_a_captured_step_equals_an_eager_one() -> None:
    prompts = [[5 + i, 9, 77, 30 + i, 4] * (1 + i) for i in range(5)]
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
    texts = []
    for cuda_graphs in (False, True):
        model = load_model(GOLDEN / "select_full", "float32", ops=reference_ops(static_shapes=True))
        with LLMEngine(model, Tokenizer.from_folder(GOLDEN / "select_full"), EngineConfig(cuda_graphs=cuda_graphs)) as engine:
            texts.append([o.outputs[0].token_ids for o in engine.generate(prompts, params, use_tqdm=False)])
    assert texts[0] == texts[1]


def test_schedule_and_submit_never_wait_for_the_device() -> None:
    model = load_model(GOLDEN / "select_full", "native", ops=reference_ops(static_shapes=True))
    run = SteadyDecode(model, 4, 1, 20)
    run.warm_up()
    run.steps(20, check_sync=True)


def test_memory_returns_after_close() -> None:
    def allocated() -> int:
        torch.accelerator.empty_cache()
        return torch.accelerator.memory_allocated()

    before = allocated()
    for _ in range(3):
        greedy("swa_tiny")
    assert allocated() <= before + 2**20
