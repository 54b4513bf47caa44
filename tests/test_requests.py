"""Requests as people make them: fields that meet in one accepted run, requests that cannot be served, and their neighbours."""

import asyncio
import math
import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from deepinfer import LLMEngine, RequestOutput, SamplingParams
from deepinfer.errors import CapacityError, NothingToDraw, Rejected, RequestError
from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.output_processor import OutputProcessor
from deepinfer.runtime.plan import SequenceResult, StepResult, TokenLogprobs
from deepinfer.runtime.request import Request
from deepinfer.runtime.scheduler import Scheduler
from deepinfer.runtime.sequence import Sequence
from deepinfer.tokenizer import Tokenizer
from tests.golden import GOLDEN

EOS, A, B, C, SPACE_A, E_FIRST, E_LAST = 1, 67, 68, 69, 267, 130, 105  # E: the two bytes of an e acute
PROMPT = [9, A, 40, B, 7, 300, 12]
LETTERS = (A, B, C, SPACE_A, E_FIRST, E_LAST)


def load(case: str = "bf16_full", **settings: Any) -> LLMEngine:
    return LLMEngine.from_pretrained(GOLDEN / case, **{"precision": "float32", "device": "cpu"} | settings)


def exact(**settings: Any) -> LLMEngine:
    """An engine whose rows are the same bits in any company, with every draft verified."""
    return load(batch_invariant=True, adaptive_verification=False, block_size=4, **settings)


def generate(engine: LLMEngine, prompts: Any, params: Any) -> list[RequestOutput]:
    return engine.generate(prompts, params, use_tqdm=False)


# ---- several conditions in one accepted run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "run", "kept", "reason", "stop_reason", "text"),
    [
        ({"stop_token_ids": [C]}, [A, B, C, A, B, A], 3, "stop", C, "ab"),
        ({"stop_token_ids": [C]}, [A, B, A, B, C, A], 5, "stop", C, "abab"),
        ({"stop_token_ids": [C]}, [A, B, A, B, A, C], 5, "length", None, "ababa"),
        ({}, [A, EOS, B, C, A], 2, "stop", None, "a"),
        ({"ignore_eos": True}, [A, EOS, B, C, A], 5, "length", None, "abca"),
        ({"stop": "bc"}, [A, B, C, A, B, C], 3, "stop", "bc", "a"),
        ({"stop": "bc", "include_stop_str_in_output": True}, [A, B, C, A, B], 3, "stop", "bc", "abc"),
        ({"stop": ["cab", "ca"]}, [A, C, A, B, C], 3, "stop", "ca", "a"),
        ({"stop": "é"}, [A, E_FIRST, E_LAST, B, C], 3, "stop", "é", "a"),
        ({"stop": "a a"}, [A, SPACE_A, B, C, A], 2, "stop", "a a", ""),
        ({"stop": "ca", "stop_token_ids": [C]}, [A, C, A, B, B], 2, "stop", C, "a"),
        ({"stop": "ac", "stop_token_ids": [C]}, [A, C, A, B, B], 2, "stop", C, "a"),
        ({"stop_token_ids": [C], "include_stop_str_in_output": True}, [A, C, A, B, B], 2, "stop", C, "ac"),
        ({"stop": "xy", "stop_token_ids": [C], "include_stop_str_in_output": True}, [A, C, A, B, B], 2, "stop", C, "ac"),
        ({"stop": "ab", "min_tokens": 3}, [A, B, C, A, B], 5, "stop", "ab", "abc"),
        ({"stop": "bc", "min_tokens": 2}, [A, B, C, A, B], 3, "stop", "bc", "a"),
        ({"stop": "bcab"}, [A, B, C, A, B], 5, "stop", "bcab", "a"),
        ({"stop": "bcabc"}, [A, B, C, A, B, C], 5, "length", None, "abcab"),
        ({"forced_token_ids": [A, EOS, B, C], "stop_token_ids": [C]}, [A, EOS, B, C, A], 4, "stop", C, "ab"),
        ({"forced_token_ids": [A, EOS, B], "stop": "ab"}, [A, EOS, B, C, A], 3, "stop", "ab", ""),
        ({"stop": "ab", "skip_special_tokens": False, "ignore_eos": True}, [A, EOS, B, A, B], 5, "stop", "ab", "a<eos>b"),
    ],
)
@pytest.mark.parametrize("cut", ["at once", "one by one"])
def test_reason_text_and_tokens_agree_wherever_a_run_ends(
    fields: dict[str, Any],
    run: list[int],
    kept: int,
    reason: str,
    stop_reason: int | str | None,
    text: str,
    cut: str,
    golden_tokenizer: Tokenizer,
) -> None:
    params = SamplingParams(max_tokens=5, seed=0, logprobs=0, **fields)
    eos = () if params.ignore_eos else (EOS,)
    request = Request(
        request_id="0",
        prompt=None,
        prompt_token_ids=(5,),
        params=params,
        max_new_tokens=5,
        seed=0,
        eos_token_id=EOS,
        stop_token_ids=frozenset((*eos, *params.stop_token_ids)),
        arrival_s=0.0,
    )
    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=64, block_size=2, num_blocks=30)
    scheduler, sequence = Scheduler(limits), Sequence.open(request, 0, 0, golden_tokenizer)
    outputs = OutputProcessor(golden_tokenizer, "float32", lambda: 0.0)
    seen: list[RequestOutput] = []
    scheduler.add(sequence)
    outputs.open(request, [sequence], seen.append, lambda error: pytest.fail(str(error)))
    for piece in [run] if cut == "at once" else [[token] for token in run]:
        if (plan := scheduler.schedule()) is None:
            break
        around = tuple(TokenLogprobs(logprob=-1.0, rank=1, top=()) for _ in piece)
        result = SequenceResult(token_ids=tuple(piece), logprobs=around)
        outputs.process(scheduler.apply(StepResult(step_seq=plan.step_seq, sequences=(result,))))
    assert all(after.outputs[0].text.startswith(before.outputs[0].text) for before, after in pairwise(seen))
    completion = seen[-1].outputs[0]
    assert completion.token_ids == run[:kept]
    assert (completion.finish_reason, completion.stop_reason, completion.text) == (reason, stop_reason, text)
    assert completion.logprobs is not None
    assert [list(around) for around in completion.logprobs] == [[token] for token in run[:kept]]
    assert completion.cumulative_logprob == -kept


STOPPING = SamplingParams(temperature=1.0, seed=3, max_tokens=30, logprobs=1, prompt_logprobs=1, allowed_token_ids=LETTERS)
MIXED = [
    replace(STOPPING, stop=["ca", "b b"], n=2),
    replace(STOPPING, stop="éa", include_stop_str_in_output=True, seed=4),
    replace(STOPPING, stop=["abc", "cc"], min_tokens=6, presence_penalty=0.7, seed=5),
    replace(STOPPING, allowed_token_ids=None, forced_token_ids=[A, 1, B, 77], stop_token_ids=[B, 77], seed=6),
    replace(STOPPING, bad_words=["ab", "ca", "é"], frequency_penalty=1.0, max_tokens=9, seed=7),
    replace(STOPPING, allowed_token_ids=None, logit_bias={A: 9.0, B: 9.0, 1: 8.0}, repetition_penalty=1.3, seed=8),
]


def everything(output: RequestOutput) -> list[Any]:
    return [(replace(c, accepted_per_step=None)) for c in output.outputs] + [output.prompt_logprobs]


@cache
def mixed_alone() -> list[list[Any]]:
    with exact(async_scheduling=0, max_num_seqs=1) as engine:
        return [everything(generate(engine, PROMPT[: 3 + i % 4], params)[0]) for i, params in enumerate(MIXED)]


@pytest.mark.parametrize(
    "settings",
    [
        {"async_scheduling": 1},
        {"async_scheduling": 0, "num_speculative_tokens": 3},
        {"async_scheduling": 1, "num_speculative_tokens": 3, "num_blocks": 16, "max_num_batched_tokens": 9, "max_num_seqs": 5},
        {"async_scheduling": 1, "num_speculative_tokens": 2, "num_blocks": 16},
    ],
    ids=["ahead", "drafts", "tight with drafts ahead", "drafts ahead"],
)
def test_all_of_an_output_is_the_same_in_any_company_ahead_and_with_drafts(settings: dict[str, int]) -> None:
    with exact(**settings) as engine:
        found = generate(engine, [PROMPT[: 3 + i % 4] for i in range(len(MIXED))], MIXED)
        stats = engine.stats()
    assert [everything(output) for output in found] == mixed_alone()
    assert (stats.preemptions > 0) == ("num_blocks" in settings)
    assert (stats.accepted_tokens > 0) == ("num_speculative_tokens" in settings)
    reasons = {(c.finish_reason, type(c.stop_reason)) for output in found for c in output.outputs}
    assert reasons >= {("stop", str), ("stop", int), ("length", type(None))}
    for output, params in zip(found, MIXED, strict=True):
        assert output.prompt_logprobs is not None
        assert [around and next(iter(around)) for around in output.prompt_logprobs] == [None, *output.prompt_token_ids[1:]]
        for completion in output.outputs:
            assert completion.logprobs is not None
            assert [next(iter(around)) for around in completion.logprobs] == completion.token_ids
            chosen = [around[token].logprob for around, token in zip(completion.logprobs, completion.token_ids, strict=True)]
            assert completion.cumulative_logprob == pytest.approx(sum(chosen))
            hidden = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
            whole = engine.tokenizer.decode(completion.token_ids[:-1] if hidden else completion.token_ids)
            assert whole.startswith(completion.text)
            if isinstance(completion.stop_reason, str):
                assert completion.stop_reason in whole
                assert completion.text.endswith(completion.stop_reason) == params.include_stop_str_in_output
            else:
                assert completion.text == whole


def test_a_stream_takes_no_text_back() -> None:
    params = replace(STOPPING, stop=["abcabcabc", "c c c"], max_tokens=40)
    with load() as engine:

        async def texts() -> list[str]:
            return [output.outputs[0].text async for output in engine.stream(PROMPT, params)]

        seen = asyncio.run(texts())
        (final,) = generate(engine, PROMPT, params)
    assert all(after.startswith(before) for before, after in pairwise(seen))
    assert seen[-1] == final.outputs[0].text


# ---- log probabilities --------------------------------------------------------------------------------------------------


def test_log_probabilities_may_cover_the_whole_vocabulary_where_the_engine_allows_it() -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    with load(max_logprobs=-1) as engine:
        (output,) = generate(engine, PROMPT, params)
        row = torch.log_softmax(engine.model(torch.tensor(PROMPT)), dim=-1)
    assert output.outputs[0].logprobs is not None
    assert output.prompt_logprobs is not None
    for position, around in enumerate([*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]):
        assert around is not None
        assert set(around) == set(range(320))
        assert [around[i].logprob for i in range(320)] == pytest.approx(row[position].tolist(), abs=1e-4)
        assert sorted(entry.rank or 0 for entry in around.values()) == list(range(1, 321))


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("wanted", "limit", "served"), [(20, 20, True), (21, 20, False), (-1, 20, False), (3, 2, False), (50, -1, True)]
)
def test_more_log_probabilities_than_the_engine_gives_are_refused(field: str, wanted: int, limit: int, served: bool) -> None:
    params = SamplingParams(max_tokens=1, **{field: wanted})
    with load("swa_tiny", max_logprobs=limit) as engine:
        if served:
            generate(engine, PROMPT, params)
        else:
            with pytest.raises(Rejected, match=rf"^{field} of prompt 0: {wanted} is more than .* max_logprobs = {limit}"):
                generate(engine, PROMPT, params)


def test_a_forced_continuation_is_scored_with_the_models_own_log_probabilities() -> None:
    continuation = [5, 1, 300, 300, 7, 2]
    params = SamplingParams(temperature=0.3, seed=1, max_tokens=len(continuation), forced_token_ids=continuation, logprobs=0)
    with load(num_speculative_tokens=3, adaptive_verification=False) as engine:
        (output,) = generate(engine, PROMPT, params)
        rows = torch.log_softmax(engine.model(torch.tensor(PROMPT + continuation[:-1])), dim=-1)[len(PROMPT) - 1 :]
        accepted = engine.stats().accepted_tokens
    (completion,) = output.outputs
    assert completion.token_ids == continuation
    assert completion.logprobs is not None
    scores = [around[token].logprob for around, token in zip(completion.logprobs, continuation, strict=True)]
    assert scores == pytest.approx([float(row[token]) for row, token in zip(rows, continuation, strict=True)], abs=1e-4)
    assert accepted > 0, "forced tokens are drafted as well"


def test_features_come_back_with_the_finished_output_and_only_if_asked_for() -> None:
    params = SamplingParams(temperature=0, max_tokens=4, return_hidden_states=True, return_routed_experts=True, n=2)
    with load() as engine:
        (output, plain) = generate(engine, [PROMPT, PROMPT], [params, replace(params, return_hidden_states=False)])
        config = engine.model.config
    for completion in output.outputs:
        assert completion.hidden_states is not None
        assert completion.routed_experts is not None
        assert completion.hidden_states.shape == (len(PROMPT) + 3, config.dim)
        assert completion.routed_experts.shape == (len(PROMPT) + 3, config.n_layers, config.moe.n_activated_experts)
    assert plain.outputs[0].hidden_states is None
    assert plain.outputs[0].routed_experts is not None


# ---- requests that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("drafts", [0, 3])
def test_logits_that_are_no_numbers_end_their_request_by_name_and_no_other(depth: int, drafts: int) -> None:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12)
    with load(async_scheduling=depth, num_speculative_tokens=drafts) as engine:
        (alone,) = generate(engine, PROMPT[:5], params)
        engine.model.embed.weight.data[300] = math.nan

        async def both() -> list[Any]:
            bad = replace(params, n=2)
            return await asyncio.gather(engine.agenerate(PROMPT[:5], params), engine.agenerate(PROMPT, bad), return_exceptions=True)

        good, failed = asyncio.run(both())
        assert isinstance(failed, NothingToDraw)
        assert "request 3: the model's logits are not finite (found nan)" in str(failed)
        assert good.outputs[0].token_ids == alone.outputs[0].token_ids
        engine.flush()
        assert engine.stats().free_blocks == engine.stats().usable_blocks
        assert generate(engine, PROMPT[:5], params)[0].outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_request_that_has_forbidden_every_token_ends_by_name() -> None:
    params = SamplingParams(temperature=0, max_tokens=12, allowed_token_ids=(A, B), bad_words=["aa", "ab", "ba", "bb"])
    with load() as engine:
        with pytest.raises(NothingToDraw, match="request 1: no token can be drawn"):
            generate(engine, PROMPT, params)
        generate(engine, PROMPT, replace(params, bad_words=["aa", "ba"]))


def test_prompts_beside_one_that_fails_keep_their_outputs() -> None:
    fine = SamplingParams(temperature=0, max_tokens=12, n=2)
    bad = replace(fine, allowed_token_ids=(A, B), bad_words=["aa", "ab", "ba", "bb"], n=1)
    prompts = [PROMPT, PROMPT[:5], PROMPT[:7], PROMPT[:9]]
    with load() as engine:
        alone = [o.outputs[0].token_ids for o in generate(engine, prompts, fine)]
        with pytest.raises(NothingToDraw, match="request 6: no token can be drawn") as caught:
            engine.generate(prompts, [fine, bad, fine, bad], use_tqdm=False)
        engine.flush()
    error = caught.value
    assert error.prompt_index == 1
    assert [note.split(":")[0] for note in error.__notes__] == ["prompt 3"]
    assert error.outputs is not None
    assert all(output.finished for output in error.outputs)
    assert [o.outputs[0].finish_reason for o in error.outputs] == ["length", "error", "length", "error"]
    assert [o.outputs[0].token_ids for o in error.outputs[::2]] == alone[::2]
    # What has failed keeps what it had.
    assert all(o.outputs[0].token_ids in ([A], [B]) for o in error.outputs[1::2])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allowed_token_ids": [320]}, r"allowed_token_ids of prompt 0: \[320\] are outside the vocabulary"),
        ({"forced_token_ids": [5, 1000]}, r"forced_token_ids of prompt 0: \[1000\]"),
        ({"logit_bias": {320: 1.0}}, r"logit_bias of prompt 0: \[320\]"),
        ({"allowed_token_ids": [A, B], "bad_words": ["a", "b"]}, "allowed_token_ids of prompt 0: .*bad_words"),
        ({"allowed_token_ids": [1, A], "stop_token_ids": [A], "min_tokens": 1}, "min_tokens of prompt 0: .*allowed_token_ids"),
    ],
)
def test_fields_that_leave_nothing_or_do_not_fit_the_model_are_refused(fields: dict[str, Any], message: str) -> None:
    with load("swa_tiny") as engine, pytest.raises(Rejected, match=message):
        generate(engine, PROMPT, SamplingParams(**fields))


# ---- malformed requests beside good ones --------------------------------------------------------------------------------

STRANGE: list[Any] = [
    None, True, -1, 0, 1, 3, 2**31, 2**63, 10**5000, 0.5, 1.5, -0.5, math.nan, math.inf, -math.inf, 1e308, "", "a", "\ud800", b"a",
    [], [1], [320], [-1], [1.5], [None], [[1]], ["a"], [""], ["\udfff"], {}, {1: 2}, {"a": 1}, {320: 1.0}, {5: math.nan}, object(),
    1j, (), (1, 2), range(3),
]  # fmt: skip
STRANGE_PROMPTS: list[Any] = [
    *STRANGE, [5] * 127, [5] * 128, [5] * 100_000, [0, 1, 2], [True], "a" * 5000, {"prompt_token_ids": []},
    {"prompt_token_ids": "a"}, {"prompt": "a"}, {"prompt_token_ids": [1], "multi_modal_data": 5}, [129264],
]  # fmt: skip
NAMES = list(SamplingParams.__dataclass_fields__)


def strange_request(rng: random.Random) -> tuple[Any, dict[str, Any]]:
    """A prompt and fields of which at least one was not meant for its place."""
    fields: dict[str, Any] = {"max_tokens": 3, "seed": rng.randrange(10)}
    is_prompt_strange = rng.random() < 0.3
    prompt = rng.choice(STRANGE_PROMPTS) if is_prompt_strange else rng.choice(["def", [5, 6], "a b"])
    for name in rng.sample(NAMES, rng.randint(0 if is_prompt_strange else 1, 3)):
        fields[name] = rng.choice(STRANGE)
    return prompt, fields


def test_a_thousand_malformed_requests_are_refused_or_served_and_disturb_nobody() -> None:
    rng = random.Random(0)
    good = SamplingParams(temperature=1.0, seed=11, max_tokens=15, stop=["zq"], presence_penalty=0.5, logprobs=1, ignore_eos=True)
    refusals, served = [], 0
    with load("swa_tiny", num_blocks=40, block_size=8, max_num_seqs=6, max_model_len=64) as engine:

        async def attempt(prompt: Any, fields: dict[str, Any]) -> RequestOutput:
            return await engine.agenerate(prompt, SamplingParams(**fields))

        async def crowd(requests: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
            tries = [attempt(*request) for request in requests]
            return await asyncio.gather(engine.agenerate("x = ", good), *tries, return_exceptions=True)

        (expected,) = generate(engine, "x = ", good)
        for _ in range(10):
            undisturbed, *results = asyncio.run(crowd([strange_request(rng) for _ in range(100)]))
            assert undisturbed.outputs[0].text == expected.outputs[0].text
            assert undisturbed.outputs[0].token_ids == expected.outputs[0].token_ids
            for result in results:
                if isinstance(result, RequestOutput):
                    served += 1
                    assert result.finished
                else:
                    assert isinstance(result, RequestError | CapacityError | NothingToDraw), repr(result)
                    refusals.append(str(result))
        engine.flush()
        assert engine.stats().free_blocks == engine.stats().usable_blocks
    assert len(refusals) + served == 1000
    assert len(refusals) > 700
    assert served > 30
    assert all(0 < len(message) < 400 and "\n" not in message for message in refusals)
