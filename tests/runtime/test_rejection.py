"""Rejection verification: tokens have the target's distribution, and the test would notice if they had not."""

from collections.abc import Callable

import pytest
import torch

from deepinfer.ops.noise import DRAFT, gumbel
from deepinfer.runtime import step_sampler as sampler_module
from deepinfer.runtime.device import InlineDevice
from deepinfer.runtime.fuzz_device import FuzzDevice
from deepinfer.runtime.verify import reject
from deepinfer.sampling_params import SamplingParams
from tests.runtime.harness import Harness, make_request, reference

VOCAB, DRAWS = 8, 20_000
# 99.99 % points of chi-square with 7 and 15 degrees of freedom.
CRITICAL_7, CRITICAL_15 = 29.9, 44.3
Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def emitted(rule: Rule, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """How often each token comes out of one verified draft, over many seeds."""
    seeds, positions = torch.arange(DRAWS), torch.full((DRAWS,), 17)
    target, draft = p.log().expand(DRAWS, -1), q.log().expand(DRAWS, -1)
    drafted = (draft + gumbel(seeds, positions, VOCAB, DRAFT)).argmax(dim=1)
    drawn = (target + gumbel(seeds, positions, VOCAB)).argmax(dim=1)
    _, tokens = rule(target, draft, drafted, drawn, seeds, positions)
    return torch.bincount(tokens, minlength=VOCAB).double()


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    draws = torch.softmax(torch.randn(10, VOCAB, generator=generator, dtype=torch.float64) * 1.5, dim=1)
    return [(p, q) for p, q in zip(draws[:5], draws[5:], strict=True)] + [(draws[0], draws[0])]


@pytest.mark.parametrize("pair", range(6))
def test_tokens_have_the_distribution_of_the_target(pair: int) -> None:
    p, q = pairs()[pair]
    assert chi_square(emitted(reject, p, q), p * DRAWS) < CRITICAL_7


def accept_too_often(target: torch.Tensor, draft: torch.Tensor, drafted: torch.Tensor, *rest: torch.Tensor) -> object:
    accepted, tokens = reject(target + 0.1, draft, drafted, *rest)
    return accepted, tokens


def redraw_from_the_target(
    target: torch.Tensor, draft: torch.Tensor, drafted: torch.Tensor, drawn: torch.Tensor, *rest: object
) -> object:
    accepted, _ = reject(target, draft, drafted, drawn, *rest)  # type: ignore[arg-type]
    return accepted, torch.where(accepted, drafted, drawn)


@pytest.mark.parametrize("rule", [accept_too_often, redraw_from_the_target])
def test_a_biased_rule_is_noticed(rule: Rule) -> None:
    assert sum(chi_square(emitted(rule, p, q), p * DRAWS) > CRITICAL_7 for p, q in pairs()[:5]) >= 3


def test_an_equal_draft_is_always_accepted_and_an_impossible_one_never() -> None:
    seeds, positions = torch.arange(500), torch.zeros(500, dtype=torch.int64)
    even = torch.full((500, VOCAB), 1 / VOCAB).log()
    drafted = seeds % VOCAB
    accepted, tokens = reject(even, even, drafted, drafted, seeds, positions)
    assert accepted.all()
    assert torch.equal(tokens, drafted)
    certain = torch.full((500, VOCAB), float("-inf"))
    certain[:, 0] = 0.0
    accepted, tokens = reject(certain, even, drafted, torch.zeros_like(drafted), seeds, positions)
    assert torch.equal(accepted, drafted == 0)
    assert not tokens.any()


PROMPT = (5, 40, 7)


def later_tokens(verification: str, drafts: int, count: int = 480) -> torch.Tensor:
    """Tokens three to five of many completions, counted in sixteen classes."""
    harness = Harness(
        InlineDevice(),
        depth=0,
        num_speculative_tokens=drafts,
        num_blocks=400,
        max_num_seqs=60,
        budget=400,
        verification=verification,
    )
    for seed in range(count):
        params = SamplingParams(max_tokens=5, temperature=1.2, seed=1000 * seed, ignore_eos=True, top_k=12)
        harness.add(make_request(str(seed), PROMPT, params))
    harness.run()
    tokens = torch.tensor([sequence.output_token_ids[2:5] for sequence in harness.sequences if sequence.num_output_tokens == 5])
    assert harness.scheduler.counters.accepted > 0 or drafts == 0
    return torch.bincount((tokens % 16).flatten(), minlength=16).double()


def two_samples(first: torch.Tensor, second: torch.Tensor) -> float:
    """Chi-square of two counts of equal size against a common distribution."""
    both = first + second
    return float(((first - second) ** 2 / both.clamp(min=1)).sum())


@pytest.fixture(scope="module")
def plain_tokens() -> torch.Tensor:
    return later_tokens("match", 0)


def test_runs_with_rejection_have_the_distribution_of_plain_ones(plain_tokens: torch.Tensor) -> None:
    assert two_samples(later_tokens("rejection", 3), plain_tokens) < CRITICAL_15


def test_runs_that_accept_every_draft_have_not(plain_tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def gullible(target: torch.Tensor, draft: torch.Tensor, drafted: torch.Tensor, *rest: torch.Tensor) -> object:
        return torch.ones_like(drafted, dtype=torch.bool), drafted

    monkeypatch.setattr(sampler_module, "reject", gullible)
    assert two_samples(later_tokens("rejection", 3), plain_tokens) > CRITICAL_15


@pytest.mark.parametrize("depth", [0, 1])
def test_greedy_requests_are_the_same_under_rejection(depth: int) -> None:
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=0)
    prompts = [tuple(3 + (9 * i + length) % 300 for i in range(length)) for length in (2, 9, 12)]
    harness = Harness(FuzzDevice(depth), depth=depth, num_speculative_tokens=3, num_blocks=60, verification="rejection")
    for index, prompt in enumerate(prompts):
        harness.add(make_request(str(index), prompt, params))
    harness.run()
    for sequence, prompt in zip(harness.sequences, prompts, strict=True):
        assert (sequence.output_token_ids, harness.logprobs[sequence.seq_id]) == reference(prompt, params)


def test_equal_runs_give_equal_tokens() -> None:
    def tokens() -> list[list[int]]:
        harness = Harness(FuzzDevice(4), depth=1, num_speculative_tokens=3, num_blocks=60, verification="rejection")
        for index in range(3):
            harness.add(make_request(str(index), PROMPT, SamplingParams(max_tokens=16, temperature=1.0, seed=index)))
        harness.run()
        return [sequence.output_token_ids for sequence in harness.sequences]

    assert tokens() == tokens()
