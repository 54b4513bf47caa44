"""Prefill in one engine, decode in another: the outputs of one engine that does both, to the bit."""

import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import LLMEngine, ParallelConfig, Rejected, RequestOutput, SamplingParams
from deepinfer.checkpoint.load import load_model
from deepinfer.model.numerics import reference_ops
from deepinfer.model.transformer import Transformer
from deepinfer.parallel import hand_over
from deepinfer.parallel.hand_over import RequestState
from deepinfer.tokenizer import Tokenizer
from tests.parallel.spawn import run_ranks

MODEL = Path(__file__).parent.parent / "data" / "golden" / "bf16_full"
# Odd and even, shorter and longer than the window of 12, and across block edges.
PROMPTS = [[3 + (7 * i + 5 * n) % 300 for i in range(n)] for n in (1, 2, 3, 8, 15, 16, 17, 31, 40)]
PARAMS = [
    SamplingParams(max_tokens=3 + 2 * i, temperature=0.9 * (i % 2), ignore_eos=i % 3 > 0, logprobs=1, min_tokens=i % 4)
    for i in range(len(PROMPTS))
]


@cache
def model(precision: str = "float32") -> Transformer:
    return load_model(MODEL, precision, "cpu", ops=reference_ops(batch_invariant=True))


def engine(role: str = "normal", of: Transformer | None = None, **settings: Any) -> LLMEngine:
    sizes = {"block_size": 4, "num_blocks": 60, "max_num_seqs": 4, "max_num_batched_tokens": 12, "max_model_len": 64}
    from deepinfer import EngineConfig

    config = EngineConfig(parallel=ParallelConfig(role=role), batch_invariant=True, **(sizes | settings))
    return LLMEngine(of or model(), Tokenizer.from_folder(MODEL), config)


def plain(outputs: list[RequestOutput]) -> list[Any]:
    """What must be equal: everything but times, the request's name, and how drafts fared."""
    return [(o.prompt_token_ids, [replace(c, accepted_per_step=None) for c in o.outputs], o.finished) for o in outputs]


@cache
def states(drafts: int = 0) -> tuple[RequestState, ...]:
    with engine("prefill", num_speculative_tokens=drafts) as one:
        return tuple(one.prefill(PROMPTS, PARAMS, use_tqdm=False))


@cache
def expected() -> list[Any]:
    with engine() as one:
        return plain(one.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("depth", [0, 1], ids=["plain", "overlapped"])
def test_the_text_is_that_of_one_engine(drafts: int, depth: int) -> None:
    with engine("decode", num_speculative_tokens=drafts, async_scheduling=depth, block_size=8, num_blocks=40) as other:
        assert plain(other.resume(states(drafts), use_tqdm=False)) == expected()
        stats = other.stats()
        assert stats.preemptions == 0
        prompt_rows = sum(map(len, PROMPTS))
        assert stats.scheduled_tokens < sum(p.max_tokens or 0 for p in PARAMS) * (1 + drafts) < prompt_rows * (1 + drafts)


def test_a_short_cache_makes_states_wait_and_sequences_recompute() -> None:
    with engine("decode", num_blocks=18, max_num_seqs=3) as other:
        assert plain(other.resume(states(), use_tqdm=False)) == expected()
        stats = other.stats()
        assert stats.preemptions > 0
        assert stats.free_blocks == stats.usable_blocks


def continue_elsewhere(rank: int, size: int, data: bytes) -> list[Any]:
    with engine("decode") as other:
        return plain(other.resume(pickle.loads(data), use_tqdm=False))


def test_a_state_goes_on_in_another_process() -> None:
    assert run_ranks(continue_elsewhere, 1, pickle.dumps(list(states()))) == [expected()]


@pytest.mark.parametrize("part", ["rings", "entries", "index_keys", "pending", "history"])
def test_every_part_of_the_state_is_needed(part: str) -> None:
    def without(state: RequestState) -> RequestState:
        if state.cache is None:
            return state
        value = getattr(state.cache, part)
        if isinstance(value, dict):
            emptied: Any = {key: torch.zeros_like(tensor) for key, tensor in value.items()}
        elif isinstance(value, list):
            emptied = [torch.zeros_like(tensor) for tensor in value]
        else:
            emptied = torch.zeros_like(value)
        return replace(state, cache=replace(state.cache, **{part: emptied}))

    with engine("decode") as other:
        assert plain(other.resume([without(state) for state in states()], use_tqdm=False)) != expected()


def test_requests_that_end_with_their_first_token_are_over() -> None:
    (first,) = (state.token_id for state in states()[3:4])
    params = [
        SamplingParams(max_tokens=1, temperature=0),
        SamplingParams(stop_token_ids=[first], max_tokens=9, temperature=PARAMS[3].temperature, seed=states()[3].request.seed),
    ]
    with engine() as one, engine("prefill") as left, engine("decode") as right:
        whole = plain(one.generate([PROMPTS[3]] * 2, params, use_tqdm=False))
        handed = left.prefill([PROMPTS[3]] * 2, params, use_tqdm=False)
        assert [state.cache for state in handed] == [None, None]
        outputs = right.resume(handed, use_tqdm=False)
        assert plain(outputs) == whole
        assert [o.outputs[0].finish_reason for o in outputs] == ["length", "stop"]


def test_stop_strings_go_on_where_they_were() -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, seed=5)
    with engine() as one, engine("prefill") as left, engine("decode") as right:
        text = one.generate([PROMPTS[8]], params, use_tqdm=False)[0].outputs[0].text
        assert len(text) > 8
        for stop in (text[:1], text[:3], text[4:6]):
            for include in (False, True):
                wanted = replace(params, stop=[stop], include_stop_str_in_output=include)
                whole = one.generate([PROMPTS[8]], wanted, use_tqdm=False)
                assert whole[0].outputs[0].stop_reason == stop
                assert plain(right.resume(left.prefill([PROMPTS[8]], wanted, use_tqdm=False), use_tqdm=False)) == plain(whole)


def test_a_prefill_engine_gives_its_memory_back_and_needs_room_for_the_prompt_only() -> None:
    with engine("prefill", num_blocks=11) as one:
        assert len(one.prefill([[5] * 40], SamplingParams(max_tokens=20), use_tqdm=False)) == 1
        assert one.stats().free_blocks == 11
        assert not one._thread.core.exports._states
        assert not one._thread.core.exports._caches


def test_the_size_of_a_state_is_that_of_its_tokens() -> None:
    short, long = (state.cache for state in (states()[3], states()[8]))
    assert short is not None
    assert long is not None
    assert [ring.shape[0] for ring in long.rings] == [12] * len(long.rings)
    assert [ring.shape[0] for ring in short.rings] == [8] * len(short.rings)
    ratios = model().config.compress_ratios
    assert all(entries.shape[0] == 40 // ratios[layer] for layer, entries in long.entries.items())
    assert long.num_bytes > short.num_bytes


@pytest.mark.parametrize(
    ("role", "call", "message"),
    [
        ("decode", lambda e: e.generate([[5]]), "generate needs ParallelConfig.role = 'normal'; this engine's is 'decode'"),
        ("prefill", lambda e: e.resume([]), "resume needs"),
        ("normal", lambda e: e.prefill([[5]]), "prefill needs"),
        ("prefill", lambda e: e.prefill([[5]], SamplingParams(n=2)), "n = 1"),
        ("prefill", lambda e: e.prefill([[5]], SamplingParams(prompt_logprobs=0)), "no structured outputs, prompt log"),
        ("decode", lambda e: e.resume([5]), "what LLMEngine.prefill returns, got int"),
    ],
)
def test_calls_that_do_not_fit_the_role_are_refused(role: str, call: Any, message: str) -> None:
    with engine(role) as one, pytest.raises(Rejected, match=message):
        call(one)


def test_states_of_another_model_or_without_drafts_are_refused() -> None:
    with engine("decode", of=model("float32_kv")) as other, pytest.raises(Rejected, match="another model or precision"):
        other.resume(states())
    with engine("decode", num_speculative_tokens=2) as other, pytest.raises(Rejected, match="without drafts"):
        other.resume(states())


def test_an_open_group_travels_only_when_there_is_one() -> None:
    groups = torch.arange(12.0).view(3, 2, 2)
    assert torch.equal(hand_over.open_group(groups, 5), groups[2])
    assert torch.equal(hand_over.open_group(groups, 6), torch.zeros(2, 2))
