"""The same question gives the same answer: alone or in company, again, cold or warm, through any door, with drafts or without.

Each case is a fault that other engines had; the comment says which kind.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from deepinfer import LLMEngine, Rejected, SamplingParams
from tests.test_requests import PROMPT, exact, generate, load

SAMPLED = SamplingParams(max_tokens=10, temperature=1.0, seed=7, logprobs=1, ignore_eos=True)
COMPANY = [[3 + (17 * i + j) % 300 for j in range(1 + i % 9)] for i in range(40)]


def answer(output: Any) -> tuple[list[int], list[float]]:
    completion = output.outputs[0]
    chosen = zip(completion.token_ids, completion.logprobs, strict=True)
    return completion.token_ids, [around[token].logprob for token, around in chosen]


def alone(engine: LLMEngine) -> Any:
    return answer(generate(engine, PROMPT, SAMPLED)[0])


# A batch beyond 8 or beyond a graph's size takes other kernels, and rows change with their company.
def in_company(count: int) -> Callable[[LLMEngine], Any]:
    def ask(engine: LLMEngine) -> Any:
        others = [SamplingParams(max_tokens=12, temperature=1.0, seed=i) for i in range(count)]
        return answer(generate(engine, [*COMPANY[:count], PROMPT], [*others, SAMPLED])[-1])

    return ask


# Of many equal requests at once, some differ.
def all_at_once(engine: LLMEngine) -> Any:
    answers = [answer(output) for output in generate(engine, [PROMPT] * 33, SAMPLED)]
    assert all(each == answers[0] for each in answers)
    return answers[0]


# A seed is taken by one door and dropped by another.
def through_agenerate(engine: LLMEngine) -> Any:
    return answer(asyncio.run(engine.agenerate(PROMPT, SAMPLED)))


def through_stream(engine: LLMEngine) -> Any:
    async def last() -> Any:
        return [output async for output in engine.stream(PROMPT, SAMPLED)][-1]

    return answer(asyncio.run(last()))


# A second, cached run differs from the first.
def again(engine: LLMEngine) -> Any:
    first = alone(engine)
    assert alone(engine) == first
    return first


DOORS = {
    "again": again,
    "all at once": all_at_once,
    "agenerate": through_agenerate,
    "stream": through_stream,
} | {f"in company of {count}": in_company(count) for count in (1, 7, 8, 15, 16, 31, 32)}
ENGINES: dict[str, dict[str, Any]] = {
    "overlapped": {},
    "plain loop": {"async_scheduling": 0},
    "drafts": {"num_speculative_tokens": 3},
    "small steps": {"max_num_batched_tokens": 34, "max_num_seqs": 33},
    "prefix cache": {"enable_prefix_caching": True, "replay": "exact"},
}


@pytest.fixture(scope="module")
def expected() -> Any:
    with exact(async_scheduling=0, max_num_seqs=1) as engine:
        return alone(engine)


@pytest.mark.parametrize("settings", ENGINES)
def test_one_request_has_one_answer(settings: str, expected: Any) -> None:
    with exact(**ENGINES[settings]) as engine:
        assert {name: ask(engine) for name, ask in DOORS.items()} == dict.fromkeys(DOORS, expected)


def test_requests_without_a_seed_differ_from_each_other_and_can_be_repeated() -> None:
    unseeded = SamplingParams(max_tokens=10, temperature=1.0, ignore_eos=True)
    with load(seed=3) as engine:
        outputs = [output.outputs[0] for output in generate(engine, [PROMPT] * 6, unseeded)]
        assert len({completion.seed for completion in outputs}) == len({tuple(c.token_ids) for c in outputs}) == 6
        for completion in outputs:
            params = SamplingParams(max_tokens=10, temperature=1.0, ignore_eos=True, seed=completion.seed)
            assert generate(engine, PROMPT, params)[0].outputs[0].token_ids == completion.token_ids
    with load(seed=3) as engine:
        assert [o.outputs[0].token_ids for o in generate(engine, [PROMPT] * 6, unseeded)] == [c.token_ids for c in outputs]


def test_completions_of_one_request_draw_from_streams_of_their_own() -> None:
    with exact() as engine:
        (output,) = generate(engine, PROMPT, SamplingParams(n=4, max_tokens=10, temperature=1.0, seed=20, ignore_eos=True))
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
        for completion in output.outputs:
            params = SamplingParams(max_tokens=10, temperature=1.0, seed=20 + completion.index, ignore_eos=True)
            assert generate(engine, PROMPT, params)[0].outputs[0].token_ids == completion.token_ids


def test_a_field_that_is_not_known_or_not_used_is_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(Rejected, match="seed"):
        SamplingParams(seed="7")  # type: ignore[arg-type]
