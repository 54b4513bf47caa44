"""Drawing tokens: against a reference in plain Python, in distribution, and independent of who else is in the batch."""

import math
import random
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from deepinfer.ops.sample import filter_logits, largest_in_stages, sample, token_logprobs

NEG_INF = float("-inf")


def kept_by_reference(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Ids that survive: min-p, then top-k, then top-p; equal probabilities rank by lower id."""
    highest = max(logits)
    weights = {i: math.exp(x - highest) for i, x in enumerate(logits)}
    ranked = sorted((i for i in weights if weights[i] >= min_p), key=lambda i: (-logits[i], i))
    if top_k > 0:
        ranked = ranked[:top_k]
    total, mass, kept = sum(weights[i] for i in ranked), 0.0, set()
    for i in ranked:
        if kept and mass >= top_p * total:
            break
        kept.add(i)
        mass += weights[i]
    return kept


def kept(logits: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[set[int]]:
    count = len(logits)
    filtered = filter_logits(logits, torch.full((count,), top_k), torch.full((count,), top_p), torch.full((count,), min_p))
    is_kept = filtered > NEG_INF
    torch.testing.assert_close(filtered[is_kept], logits[is_kept], rtol=0, atol=0)
    return [set(row.nonzero().flatten().tolist()) for row in is_kept]


def draw(
    logits: Tensor,
    *,
    temperature: float | Iterable[float] = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    count = len(logits)
    temperatures = [temperature] * count if isinstance(temperature, float) else list(temperature)
    return sample(
        logits,
        torch.tensor(temperatures),
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
        torch.arange(count) if seeds is None else seeds,
        torch.zeros(count, dtype=torch.int64) if positions is None else positions,
    )


def test_filters_keep_what_a_plain_reference_keeps() -> None:
    rng = random.Random(0)
    for _ in range(200):
        vocab = rng.choice([1, 2, 5, 33, 320])
        # Multiples of a quarter tie often, and are far enough apart that no sum of masses is close to a bound by rounding.
        logits = [rng.randint(-8, 8) / 4 for _ in range(vocab)]
        top_k, top_p, min_p = (
            rng.choice([0, 1, 2, vocab, vocab + 7]),
            rng.choice([1.0, 0.87, 0.31, 1e-9]),
            rng.choice([0.0, 0.13, 1.0]),
        )
        assert kept(torch.tensor([logits]), top_k, top_p, min_p) == [kept_by_reference(logits, top_k, top_p, min_p)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 3}, {1, 2, 4}),
        ({"top_p": 0.01}, {1}),
        ({"top_p": 0.5}, {1, 2}),
        ({"min_p": 1.0}, {1, 2, 4}),
        ({"top_k": 2, "top_p": 0.1}, {1}),
    ],
)
def test_equal_probabilities_rank_by_lower_id(options: dict[str, float], expected: set[int]) -> None:
    assert kept(torch.tensor([[0.0, 3.0, 3.0, 1.0, 3.0]]), **options) == [expected]


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-30}, {"min_p": 1.0}])
def test_most_probable_token_always_stays(options: dict[str, float]) -> None:
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(1))
    assert kept(logits, **options) == [{int(i)} for i in logits.argmax(dim=1)]


def test_tokens_that_may_not_be_drawn_stay_out() -> None:
    logits = torch.full((50, 8), NEG_INF)
    logits[:, 5] = 0.0
    for options in ({}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.5}):
        for temperature in (0.0, 1e-9, 1.0, 1e6):
            assert draw(logits, temperature=temperature, **options).tolist() == [5] * 50


def test_greedy_takes_the_first_largest_logit() -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0, 7.0], [2.0, 2.0, 2.0, 2.0], [-5.0, -9.0, -5.0, -4.0]])
    assert draw(logits, temperature=0.0).tolist() == [1, 0, 3]
    assert sample(logits, *[torch.zeros(3)] * 6, any_random=False).tolist() == [1, 0, 3]


@pytest.mark.parametrize("size", [2, 5, 20])
def test_the_first_largest_in_two_stages_is_the_first_of_all(size: int) -> None:
    x = torch.randn(500, 100, generator=torch.Generator().manual_seed(3)).round()
    x[0] = NEG_INF
    x[1, 37] = x[1, 99] = float("nan")
    assert (x == x.amax(dim=1, keepdim=True)).sum(dim=1).float().mean() > 1.2, "equals are what this is about"
    assert torch.equal(largest_in_stages(x, size), x.argmax(dim=1))


def test_a_single_kept_token_is_drawn_at_any_temperature() -> None:
    logits = torch.randn(32, 40, generator=torch.Generator().manual_seed(2))
    best = logits.argmax(dim=1)
    for temperature in (0.01, 1.0, 100.0):
        assert torch.equal(draw(logits, temperature=temperature, top_k=1), best)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}])
def test_draws_follow_the_filtered_distribution(temperature: float, options: dict[str, float]) -> None:
    count, logits = 20_000, torch.tensor([2.0, 1.5, 1.0, 0.5, 0.25, 0.0, -0.5, -1.0])
    allowed = kept_by_reference(
        (logits / temperature).tolist(), *[options.get(n, d) for n, d in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))]
    )
    mask = torch.tensor([i in allowed for i in range(8)])
    expected = torch.softmax((logits / temperature).masked_fill(~mask, NEG_INF), dim=0) * count
    # Half of the rows vary the seed, half the position.
    half = torch.arange(count // 2)
    drawn = draw(
        logits.expand(count, 8),
        temperature=temperature,
        seeds=torch.cat([half, torch.zeros_like(half)]),
        positions=torch.cat([torch.zeros_like(half), half]),
        **options,
    )
    counts = torch.bincount(drawn, minlength=8)
    assert counts[~mask].sum() == 0
    statistic = float(((counts - expected)[mask] ** 2 / expected[mask]).sum())
    # Up to 7 degrees of freedom: above 30 about once in 10,000 times.
    assert statistic < 30


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    generator = torch.Generator().manual_seed(3)
    count, vocab = 24, 320
    logits = torch.randn(count, vocab, generator=generator) * 3
    columns = {
        "temperature": torch.tensor([0.0, 0.3, 1.0, 2.0] * 6),
        "top_k": torch.tensor([0, 5, 0, 50, 1, 0] * 4),
        "top_p": torch.tensor([1.0, 0.9, 0.5] * 8),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.02] * 6),
        "seeds": torch.randint(0, 2**40, (count,), generator=generator),
        "positions": torch.randint(0, 1000, (count,), generator=generator),
    }
    together = sample(logits, **columns)
    for rows in ([0], [7], list(range(5, 12)), torch.randperm(count, generator=generator).tolist()):
        assert torch.equal(sample(logits[rows], **{name: column[rows] for name, column in columns.items()}), together[rows])


def test_what_the_host_knows_of_a_batch_does_not_change_a_token() -> None:
    logits = torch.randn(16, 100, generator=torch.Generator().manual_seed(4))
    seeds, zeros, ones = torch.arange(16), torch.zeros(16), torch.ones(16)
    columns = (zeros.long(), ones, zeros, seeds, seeds)
    assert torch.equal(sample(logits, ones, *columns, any_filter=False), sample(logits, ones, *columns, any_filter=True))
    assert torch.equal(sample(logits, zeros, *columns, any_random=False), sample(logits, zeros, *columns, any_random=True))


def test_filtered_logits_of_a_row_do_not_depend_on_its_batch_mates() -> None:
    logits = torch.randn(40, 320, generator=torch.Generator().manual_seed(5))
    top_k, top_p, min_p = torch.tensor([0, 9] * 20), torch.tensor([0.9, 1.0, 0.3, 0.7] * 10), torch.tensor([0.0, 0.05] * 20)
    together = filter_logits(logits, top_k, top_p, min_p)
    for row in range(0, 40, 7):
        part = slice(row, row + 1)
        assert torch.equal(filter_logits(logits[part], top_k[part], top_p[part], min_p[part]), together[part])


def test_log_probabilities_and_ranks_are_those_of_a_sorted_softmax() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(6))
    logits[0, 10:20] = 4.0  # ties: the lower id ranks first
    tokens = torch.tensor([14, 0, 49, 7, 7, 3])
    chosen, ranks, top, top_ids = token_logprobs(logits, tokens, 12)
    expected = torch.log_softmax(logits, dim=1)
    for row, token in enumerate(tokens.tolist()):
        order = sorted(range(50), key=lambda i: (-float(expected[row, i]), i))
        assert int(ranks[row]) == order.index(token) + 1
        assert top_ids[row].tolist() == order[:12]
    torch.testing.assert_close(chosen, expected.gather(1, tokens[:, None]).squeeze(1), rtol=0, atol=0)
    torch.testing.assert_close(top, expected.gather(1, top_ids), rtol=0, atol=0)
    assert int(ranks[0]) == 5


def test_no_top_tokens_are_an_empty_table() -> None:
    _, ranks, top, top_ids = token_logprobs(torch.randn(3, 5), torch.tensor([0, 1, 2]), 0)
    assert ranks.shape == (3,)
    assert top.shape == top_ids.shape == (3, 0)
