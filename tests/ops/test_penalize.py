"""Penalties against the formulas in plain Python, one token at a time."""

import random

import torch

from deepinfer.ops.penalize import add_counts, penalize


def penalized(logit: float, count: int, in_prompt: bool, repetition: float, frequency: float, presence: float) -> float:
    if in_prompt or count:
        logit = logit / repetition if logit > 0 else logit * repetition
    return logit - frequency * count - presence * (count > 0)


def test_penalties_are_those_of_the_formulas() -> None:
    rng = random.Random(0)
    for _ in range(50):
        rows, vocab = rng.randint(1, 5), rng.randint(1, 40)
        outputs = [[rng.randrange(vocab) for _ in range(rng.randint(0, 30))] for _ in range(rows)]
        prompts = [set(rng.choices(range(vocab), k=rng.randint(1, 5))) for _ in range(rows)]
        factors = [
            [rng.choice(options) for _ in range(rows)] for options in ([1.0, 0.5, 2.0], [0.0, 0.25, -1.5], [0.0, 2.0, -0.75])
        ]
        logits = torch.randn(rows, vocab)
        counts = torch.zeros(rows, vocab, dtype=torch.int32)
        for row, tokens in enumerate(outputs):
            add_counts(counts, torch.full((len(tokens),), row), torch.tensor(tokens, dtype=torch.int64))
        in_prompt = torch.tensor([[token in prompt for token in range(vocab)] for prompt in prompts])
        found = penalize(logits, counts, in_prompt | (counts > 0), *map(torch.tensor, factors))
        expected = [
            [
                penalized(float(logits[row, t]), outputs[row].count(t), t in prompts[row], *(f[row] for f in factors))
                for t in range(vocab)
            ]
            for row in range(rows)
        ]
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_rows_without_a_penalty_keep_their_bits_and_masked_tokens_stay_masked() -> None:
    logits = torch.randn(4, 30)
    logits[:, 7] = float("-inf")
    counts = torch.randint(0, 4, (4, 30), dtype=torch.int32)
    one, zero = torch.ones(4), torch.zeros(4)
    assert torch.equal(penalize(logits, counts, counts > 0, one, zero, zero), logits)
    assert bool((penalize(logits, counts, counts > 0, one * 1.3, one, -one)[:, 7] == float("-inf")).all())


def test_a_missing_token_counts_nothing() -> None:
    counts = add_counts(torch.zeros(2, 3, dtype=torch.int32), torch.tensor([0, 0, 1, 1]), torch.tensor([0, -1, -1, 2]))
    assert counts.tolist() == [[1, 0, 0], [0, 0, 1]]
