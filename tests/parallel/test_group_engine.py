"""`LLMEngine` on several ranks: the tokens of one process to the bit, and an error instead of a hang when a rank is lost."""

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import (
    AgreementError,
    ConfigError,
    EngineConfig,
    LLMEngine,
    ParallelConfig,
    PeerLost,
    Rejected,
    SamplingParams,
    Tokenizer,
    load_model,
)
from deepinfer.errors import DeepInferError
from deepinfer.parallel.group_engine import GroupEngineCore
from deepinfer.runtime.device import use_device
from tests.parallel.spawn import run_ranks

MODEL = Path(__file__).parent.parent / "data" / "golden" / "bf16_full"
PROMPTS = [[3 + (7 * i + 5 * n) % 300 for i in range(n)] for n in (1, 5, 13, 3, 20)]
PARAMS = [SamplingParams(max_tokens=4 + 4 * i, temperature=0.8 * (i % 2), ignore_eos=True, logprobs=0) for i in range(5)]
# Tiny: prompts come in chunks, and two long sequences do not fit together.
TINY = {"block_size": 4, "num_blocks": 11, "max_num_seqs": 3, "max_num_batched_tokens": 8, "max_model_len": 48}
LOST_AFTER_S = 4.0


def open_engine(size: int, **settings: Any) -> LLMEngine:
    parallel = {
        "num_redundant_experts": -5 % size,
        "eplb_window": 20,
        "eplb_period": 50,
        "prefill_interval_any": 5,
        "timeout_s": 30.0,
    }
    parallel |= {name: settings.pop(name) for name in list(settings) if name in ParallelConfig.__dataclass_fields__}
    if size > 1:
        settings["parallel"] = ParallelConfig(ep_size=size, **parallel)
    return LLMEngine.from_pretrained(MODEL, precision="float32", device="cpu", batch_invariant=True, **TINY, **settings)


def core_of(engine: LLMEngine) -> GroupEngineCore:
    core = engine._thread.core
    assert isinstance(core, GroupEngineCore)
    return core


def completions(engine: LLMEngine, prompts: list[list[int]] = PROMPTS, params: list[SamplingParams] = PARAMS) -> list[Any]:
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return [(o.request_id, o.outputs[0].token_ids, o.outputs[0].cumulative_logprob, o.outputs[0].seed) for o in outputs]


def raised(call: Callable[[], Any]) -> DeepInferError | None:
    try:
        call()
    except DeepInferError as error:
        return error
    return None


def serve(rank: int, size: int) -> dict[str, Any]:
    """Everything that goes well, in one group."""
    found: dict[str, Any] = {}
    for name, settings in (
        ("overlapped", {"async_scheduling": 1, "eplb_window": 10, "eplb_period": 25}),
        ("drafting", {"async_scheduling": 1, "num_speculative_tokens": 2}),
        ("plain", {"async_scheduling": 0, "prefill_vote": "all", "cuda_graphs": False}),
    ):
        with open_engine(size, **settings) as engine:
            found[name] = completions(engine)
            found[f"{name} again"] = completions(engine, PROMPTS[:1], PARAMS[:1])
            if size > 1:
                core = core_of(engine)
                found[f"{name} moves"] = [r.num_moves for r in core.balance.rearrangements]
                found[f"{name} preemptions"] = engine.stats().preemptions
                found[f"{name} shapes"] = list(core.worker._static)
                found["stream"] = raised(partial(asyncio.run, engine.agenerate(PROMPTS[0])))
            if size > 1 and name == "plain":
                found["disagreement"] = raised(partial(completions, engine, PROMPTS[: 2 + rank], PARAMS[: 2 + rank]))
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return serve(0, 1)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda size: f"ep{size}")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(serve, request.param)


@pytest.mark.parametrize("name", ["overlapped", "drafting", "plain"])
def test_rank_0_returns_what_one_process_returns(name: str, found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert found[0][name] == alone[name]
    # Fewer prompts than ranks.
    assert found[0][f"{name} again"] == alone[f"{name} again"]
    assert all(rank[name] == [] for rank in found[1:])


def test_memory_was_short_and_experts_moved(found: list[dict[str, Any]]) -> None:
    preemptions = sum(rank[f"{name} preemptions"] for rank in found for name in ("overlapped", "drafting", "plain"))
    # Of five requests on four ranks only two share a memory, and one of them is short.
    assert preemptions > 0 or len(found) == 4
    assert len(found[0]["overlapped moves"]) > 0
    assert all(rank["overlapped moves"] == found[0]["overlapped moves"] for rank in found)


def test_decode_steps_have_agreed_shapes_unless_graphs_are_off(found: list[dict[str, Any]]) -> None:
    for name in ("overlapped", "drafting", "plain"):
        shapes = [rank[f"{name} shapes"] for rank in found]
        assert bool(shapes[0]) == (name != "plain")
        assert all(of_rank == shapes[0] for of_rank in shapes)


def test_different_prompts_on_different_ranks_are_an_error(found: list[dict[str, Any]]) -> None:
    assert isinstance(found[0]["disagreement"], AgreementError)
    assert "[2, 3" in str(found[0]["disagreement"])


def lose_a_rank(rank: int, size: int, how: str) -> tuple[str, str, float]:
    """Rank 1 goes away in the middle of a step; what the others see, twice, and after how long."""
    with open_engine(size, timeout_s=LOST_AFTER_S) as engine:
        core = core_of(engine)
        original = core.worker.submit_forward

        def failing(plan: Any, previous: Any) -> Any:
            if plan.step_seq == 6:
                if how == "killed":
                    os._exit(1)
                if how == "stuck":
                    time.sleep(3 * LOST_AFTER_S)
                raise RuntimeError("a fault of this rank")
            return original(plan, previous)

        if rank == 1:
            core.worker.submit_forward = failing  # type: ignore[method-assign]
        start = time.monotonic()
        first = raised(lambda: engine.generate(PROMPTS, PARAMS, use_tqdm=False))
        took_s = time.monotonic() - start
        second = raised(lambda: engine.generate(PROMPTS, PARAMS, use_tqdm=False))
        assert (type(first), str(first)) == (type(second), str(second))
        missing = first.missing if isinstance(first, PeerLost) else ()
        return f"{type(first).__name__} {missing}", str(first), took_s


@pytest.mark.parametrize("how", ["killed", *(pytest.param(h, marks=pytest.mark.slow) for h in ("stuck", "raising"))])
def test_a_lost_rank_is_named_with_its_step(how: str) -> None:
    seen = run_ranks(lose_a_rank, 2, how, may_die=(1,))
    kind, message, took_s = seen[0]
    assert kind == ("PeerLost ()" if how == "stuck" else "PeerLost (1,)")
    assert message.startswith("rank 0 at step 6")
    assert "rank 1: " + ("alive" if how == "stuck" else "no sign of life") in message
    # A killed rank's last sign of life may be of an earlier step.
    assert re.search(rf"rank 1: .* step {'[0-6]' if how == 'killed' else '6'} ", message)
    assert took_s < 4 * LOST_AFTER_S
    if how == "raising":
        assert seen[1][:2] == ("StepError ()", "rank 1 at step 6 (prefill_any) failed: RuntimeError: a fault of this rank")


def test_a_group_needs_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2"):
        open_engine(2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_redundant_experts": 0}, "5 experts and 0 redundant ones make 5 slots"),
        ({"cp_size": 2}, "cp_size = 2: prompts are spread by engines of role prefill"),
        ({"kernels": "triton"}, "they are for CUDA devices, the device is cpu"),
        ({"kernels": "inductor"}, "on a CPU it is proven for the plain operations"),
    ],
)
def test_what_does_not_fit_is_refused_before_joining(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_engine(2, **settings)


def test_an_engine_of_a_group_is_not_made_around_a_whole_model() -> None:
    model = load_model(MODEL, "float32", "cpu")
    two, spread = ParallelConfig(ep_size=2), ParallelConfig(cp_size=2, role="prefill")
    for config, message in (
        (EngineConfig(parallel=two), "from_pretrained"),
        (EngineConfig(parallel=ParallelConfig(cp_size=2)), "engines of role prefill"),
        (EngineConfig(parallel=two, enable_prefix_caching=True), "enable_prefix_caching and replay"),
        (EngineConfig(parallel=ParallelConfig(role="decode"), replay="exact"), "enable_prefix_caching and replay"),
        (EngineConfig(parallel=spread, kernels="inductor"), "inside attention, which is not compiled"),
        (EngineConfig(parallel=spread, compile=True), "inside attention, which is not compiled"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLMEngine(model, Tokenizer.from_folder(MODEL), config)


def test_streaming_on_several_ranks_is_refused(found: list[dict[str, Any]]) -> None:
    assert all(isinstance(rank["stream"], Rejected) for rank in found)


def test_an_engine_launches_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on the first accelerator, whose rank is not the only one."""
    seen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr("deepinfer.engine_thread.use_device", lambda device: seen.append((threading.current_thread().name, device)))
    with open_engine(1) as engine:
        engine.flush()
    assert seen == [("deepinfer-engine", torch.device("cpu"))]


@pytest.mark.parametrize(("device", "chosen"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cpu", [])])
def test_only_a_numbered_accelerator_is_chosen(device: str, chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: seen.append(str(device)))
    use_device(torch.device(device))
    assert seen == chosen
