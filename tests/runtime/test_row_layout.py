"""Rows decided on the device, against the same decisions made one by one."""

import itertools
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.runtime.row_layout import split_drafts


def split_by_hand(survival: list[list[float]], most: list[int], budget: int) -> list[int]:
    """Take the most likely draft that is next in some group, again and again."""
    taken = [0] * len(most)
    for _ in range(budget):
        open_groups = [g for g in range(len(most)) if taken[g] < most[g]]
        if not open_groups:
            break
        best = max(open_groups, key=lambda g: (survival[g][taken[g]], -g))
        taken[best] += 1
    return taken


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 5))
def test_the_most_likely_drafts_get_the_rows(seed: int, groups: int, k: int) -> None:
    generator = random.Random(seed)
    # Few distinct chances, so that ties happen.
    survival = [
        list(itertools.accumulate((generator.choice([1.0, 0.5, 0.25]) for _ in range(k)), lambda a, b: a * b))
        for _ in range(groups)
    ]
    most = [generator.randint(0, k) for _ in range(groups)]
    budget = generator.randint(0, groups * k + 2)
    found = split_drafts(torch.tensor(survival), torch.tensor(most), torch.tensor([budget])).tolist()
    assert found == split_by_hand(survival, most, budget)
    assert sum(found) == min(budget, sum(most))


def test_a_confidence_that_is_not_a_number_counts_as_none() -> None:
    survival = torch.tensor([[float("nan"), float("nan")], [0.1, 0.05]])
    assert split_drafts(survival, torch.tensor([2, 2]), torch.tensor([1])).tolist() == [0, 1]
