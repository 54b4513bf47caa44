"""An engine that spreads long prompts over ranks: the states of one that does not, to the bit."""

import os
import pickle
from typing import Any

import pytest
import torch

from deepinfer import AgreementError, ConfigError, EngineConfig, LLMEngine, ParallelConfig, SamplingParams
from deepinfer.errors import DeepInferError
from deepinfer.parallel import context_engine
from deepinfer.parallel.context_engine import ContextEngineCore
from deepinfer.parallel.hand_over import RequestState
from tests.parallel.spawn import run_ranks
from tests.parallel.test_hand_over import MODEL, engine, plain

# Too short, just long enough, odd and even, and long enough for drafts (last chunks of a window of 12).
LENGTHS = (1, 8, 14, 17, 32, 37, 50, 61)
PROMPTS = [[3 + (7 * i + 5 * n) % 300 for i in range(n)] for n in LENGTHS]
PARAMS = [
    SamplingParams(max_tokens=1 + i % 3 * 4, temperature=0.9 * (i % 2), seed=i, ignore_eos=True, logprobs=1)
    for i in range(len(PROMPTS))
]
SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 60, "max_num_seqs": 4, "max_num_batched_tokens": 12, "max_model_len": 70}


def open_engine(size: int, **settings: Any) -> LLMEngine:
    parallel = ParallelConfig(cp_size=size, role="prefill", timeout_s=settings.pop("timeout_s", 30.0))
    return LLMEngine.from_pretrained(
        MODEL, precision="float32", device="cpu", batch_invariant=True, parallel=parallel, **SIZES, **settings
    )


def core_of(engine: LLMEngine) -> ContextEngineCore:
    core = engine._thread.core
    assert isinstance(core, ContextEngineCore)
    return core


def raised(engine: LLMEngine, prompts: list[list[int]]) -> DeepInferError | None:
    try:
        engine.prefill(prompts, use_tqdm=False)
    except DeepInferError as error:
        return error
    return None


def prefill(rank: int, size: int) -> dict[str, Any]:
    """States without and with drafts, and what happens to prompts that differ."""
    found: dict[str, Any] = {}
    for drafts in (0, 2):
        with open_engine(size, num_speculative_tokens=drafts) as one:
            found[f"states {drafts}"] = pickle.dumps(one.prefill(PROMPTS, PARAMS, use_tqdm=False))
            found[f"spread {drafts}"] = core_of(one).num_spread
            found[f"blocks {drafts}"] = one.stats().free_blocks
            found["differ"] = raised(one, PROMPTS[: 3 + rank])
            found[f"again {drafts}"] = len(one.prefill(PROMPTS[-1:], use_tqdm=False))
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda size: f"cp{size}")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(prefill, request.param)


def alone(drafts: int) -> list[RequestState]:
    with engine("prefill", num_speculative_tokens=drafts, **SIZES) as one:
        return one.prefill(PROMPTS, PARAMS, use_tqdm=False)


@pytest.mark.parametrize("drafts", [0, 2])
def test_states_are_those_of_one_process(drafts: int, found: list[dict[str, Any]]) -> None:
    states, expected = pickle.loads(found[0][f"states {drafts}"]), alone(drafts)
    assert len(states) == len(PROMPTS)
    for state, other in zip(states, expected, strict=True):
        assert (state.token_id, state.logprobs, state.model) == (other.token_id, other.logprobs, other.model)
        assert (state.cache is None) == (other.cache is None)
        if state.cache is None:
            continue
        assert (state.cache.length, state.cache.has_drafts) == (other.cache.length, other.cache.has_drafts)
        pairs = [(state.cache.history, other.cache.history)]
        # Without drafts nobody writes the draft blocks' rings, which are the last ones.
        count = len(other.cache.rings) if drafts else engine_layers(other)
        pairs += zip(state.cache.rings[:count], other.cache.rings[:count], strict=True)
        for name in ("entries", "index_keys", "pending"):
            mine, theirs = getattr(state.cache, name), getattr(other.cache, name)
            pairs += [(mine[layer], theirs[layer]) for layer in theirs]
        assert all(torch.equal(one, two) for one, two in pairs)


def engine_layers(state: RequestState) -> int:
    assert state.cache is not None
    with engine("prefill") as one:
        return one.model.config.n_layers


@pytest.mark.parametrize("drafts", [0, 2])
def test_another_engine_goes_on_with_them(drafts: int, found: list[dict[str, Any]]) -> None:
    with engine(**SIZES) as whole, engine("decode", num_speculative_tokens=drafts, **SIZES) as other:
        texts = plain(whole.generate(PROMPTS, PARAMS, use_tqdm=False))
        assert plain(other.resume(pickle.loads(found[0][f"states {drafts}"]), use_tqdm=False)) == texts


def test_long_prompts_were_spread_and_rank_0_owns_everything(found: list[dict[str, Any]]) -> None:
    size = len(found)
    enough = [length for length in LENGTHS if -(-(length - 1) // SIZES["block_size"]) >= 2 * size]
    assert len(enough) > 2
    assert all(rank["spread 0"] == len(enough) for rank in found)
    assert all(0 < rank["spread 2"] < len(enough) for rank in found) or size > 2
    assert all(pickle.loads(rank["states 0"]) == [] for rank in found[1:])
    assert all(rank["blocks 0"] == SIZES["num_blocks"] for rank in found)
    assert [rank["again 0"] for rank in found] == [1] + [0] * (size - 1)


def test_different_prompts_on_different_ranks_are_an_error(found: list[dict[str, Any]]) -> None:
    assert all(isinstance(rank["differ"], AgreementError) for rank in found)


def lose_a_rank(rank: int, size: int) -> tuple[str, bool]:
    """Rank 1 dies in the middle of a prompt; what rank 0 says, and whether it says it again."""
    with open_engine(size, timeout_s=4.0) as one:
        if rank == 1:
            context_engine.prefill_context = lambda *args, **kwargs: os._exit(1)
        first, second = raised(one, PROMPTS[-1:]), raised(one, PROMPTS[-1:])
        return f"{type(first).__name__}: {first}", first is second


def test_a_lost_rank_is_named_with_its_prompt() -> None:
    (message, is_same), _ = run_ranks(lose_a_rank, 2, may_die=(1,))
    assert message.startswith("PeerLost: rank 0 at prompt 0 of 1")
    assert "rank 1: no sign of life since" in message
    assert is_same


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cp_size": 2}, "engines of role prefill .* got role 'normal' and ep_size 1"),
        ({"cp_size": 2, "ep_size": 2, "role": "prefill"}, "got role 'prefill' and ep_size 2"),
    ],
)
def test_what_is_not_supported_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMEngine.from_pretrained(MODEL, precision="float32", device="cpu", parallel=ParallelConfig(**settings))


def test_a_group_needs_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"cp_size = 2: .* `torchrun --nproc-per-node 2"):
        open_engine(2)
    config, message = (
        EngineConfig(parallel=ParallelConfig(cp_size=2, role="prefill")),
        r"cp_size = 2: open the engine with LLMEngine\.",
    )
    with engine("prefill") as one, pytest.raises(ConfigError, match=message):
        LLMEngine(one.model, one.tokenizer, config)
