"""Placement: what holds for any loads, what exact cases give, and how close to the best it comes."""

import random
from itertools import combinations, product

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from deepinfer.errors import ConfigError
from deepinfer.parallel.placement import (
    Placement,
    count_replicas,
    imbalance,
    keep_in_place,
    pack_ranks,
    place_evenly,
    place_experts,
    place_layer,
    plan_moves,
    rank_loads,
    swap_down,
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], int, int]:
    """Loads, slots and ranks that fit each other; ties and zeros are common."""
    experts = draw(st.integers(1, 24))
    ranks = draw(st.integers(1, 8))
    per_rank = draw(st.integers(-(-experts // ranks), experts))
    load = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 10_000))
    return draw(st.lists(load.map(float), min_size=experts, max_size=experts)), per_rank * ranks, ranks


@given(cases())
@settings(max_examples=300)
def test_every_expert_has_a_slot_and_every_rank_equally_many(case: tuple[list[float], int, int]) -> None:
    loads, slots, ranks = case
    layer = place_layer(loads, slots, ranks)
    assert len(layer) == slots
    assert set(layer) == set(range(len(loads)))
    assert layer == place_layer(loads, slots, ranks)
    assert sum(rank_loads(loads, layer, ranks)) == pytest.approx(sum(loads))
    assert imbalance(loads, layer, ranks) >= 1 - 1e-9


@given(cases())
@settings(max_examples=200)
def test_swaps_never_raise_the_fullest_rank(case: tuple[list[float], int, int]) -> None:
    loads, slots, num_ranks = case
    copies = count_replicas(loads, slots, num_ranks)
    assert sum(copies) == slots
    assert max(copies) <= num_ranks
    ranks = pack_ranks(loads, copies, slots // num_ranks, num_ranks)
    before = imbalance(loads, [e for rank in ranks for e in rank], num_ranks)
    doubles = sum(len(rank) - len(set(rank)) for rank in ranks)
    swap_down(loads, copies, ranks)
    assert imbalance(loads, [e for rank in ranks for e in rank], num_ranks) <= before + 1e-9
    assert sum(len(rank) - len(set(rank)) for rank in ranks) <= doubles


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_moves_turn_the_old_placement_into_the_new(case: tuple[list[float], int, int], random: object) -> None:
    loads, slots, ranks = case
    old = place_evenly(2, len(loads), slots, ranks)
    new = place_experts([loads, [0.0] * len(loads)], slots, old)
    held = [list(layer) for layer in old.layers]
    for move in plan_moves(old, new):
        held[move.layer][move.target] = old.layers[move.layer][move.source]
    assert tuple(map(tuple, held)) == new.layers
    assert new.layers[1] == old.layers[1], "no load, no reason to move"
    assert all(move.layer == 0 for move in plan_moves(old, new))


def test_replicas_of_an_expert_lie_on_different_ranks() -> None:
    layer = place_layer([100.0, 1, 1, 1, 1, 1], 8, 4)
    holders = [slot // 2 for slot, expert in enumerate(layer) if expert == 0]
    assert len(holders) == len(set(holders)) == 3


def test_ties_go_to_the_lower_id() -> None:
    assert place_layer([0.0] * 4, 6, 2) == (0, 1, 2, 0, 1, 3)
    assert place_layer([5.0, 5, 5, 5], 4, 2) == (0, 2, 1, 3)
    assert count_replicas([7.0, 7, 7], 5, 4) == [2, 2, 1]


def test_a_known_case_stays_as_it_is() -> None:
    loads = [90.0, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    layer = place_layer(loads, 16, 4)
    assert layer == (10, 8, 5, 7, 11, 1, 9, 4, 0, 5, 4, 6, 10, 1, 3, 2)
    assert imbalance(loads, layer, 4) == pytest.approx(1.0, abs=0.03)


def test_no_load_gives_no_division_by_zero() -> None:
    assert imbalance([0.0, 0.0], (0, 1), 2) == 1.0


@pytest.mark.parametrize(("experts", "slots", "ranks"), [(4, 3, 1), (4, 6, 4), (2, 8, 2)])
def test_sizes_that_do_not_fit_are_refused(experts: int, slots: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"{slots} expert slots"):
        place_layer([1.0] * experts, slots, ranks)


def best_imbalance(loads: list[float], ranks: int) -> float:
    """Of all ways to split experts without replicas over two ranks of equal size."""
    assert ranks == 2
    half = len(loads) // 2
    best = min(
        max(sum(loads[i] for i in chosen), sum(loads) - sum(loads[i] for i in chosen))
        for chosen in combinations(range(len(loads)), half)
    )
    return best / (sum(loads) / 2)


def test_close_to_the_best_of_all_placements() -> None:
    worst = 0.0
    for seed in range(60):
        loads = [float((seed * 7919 + i * 104729) % 997 + 1) for i in range(8)]
        worst = max(worst, imbalance(loads, place_layer(loads, 8, 2), 2) / best_imbalance(loads, 2))
    assert worst < 1.02


def test_experts_stay_where_they_are_when_only_ranks_are_renamed() -> None:
    old = (0, 1, 2, 3, 4, 5)
    assert keep_in_place(old, (5, 4, 1, 0, 3, 2), 3) == old
    assert keep_in_place(old, (5, 0, 1, 4, 3, 2), 3)[2:4] == (2, 3)


def test_a_small_drift_moves_few_experts_and_a_large_one_all_that_it_takes() -> None:
    rng = random.Random(0)
    loads = [1000.0 + 10 * i for i in range(48)]
    rng.shuffle(loads)
    settled = place_experts([loads], 56, place_evenly(1, 48, 56, 8))
    drifted = [load * rng.uniform(0.9, 1.1) for load in loads]
    near = place_experts([drifted], 56, settled)
    assert imbalance(drifted, near.layers[0], 8) < imbalance(drifted, settled.layers[0], 8)
    assert imbalance(drifted, near.layers[0], 8) < 1.02
    assert 0 < len(plan_moves(settled, near)) <= 12
    turned = [load * (30 if i == 5 else 1) for i, load in enumerate(loads)]
    far = place_experts([turned], 56, settled)
    assert imbalance(turned, far.layers[0], 8) < 1.02
    assert far.layers[0].count(5) > settled.layers[0].count(5)
    renamed_nothing = Placement((place_layer(turned, 56, 8),), 8)
    assert len(plan_moves(settled, far)) < 0.8 * len(plan_moves(settled, renamed_nothing))


def test_the_digest_tells_placements_apart() -> None:
    placements = [Placement((layer,), 2) for layer in product(range(3), repeat=4)]
    assert len({p.digest for p in placements}) == len(placements)
