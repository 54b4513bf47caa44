"""Votes: every combination of two and three ranks, the second confirmation, and the bound on waiting."""

from itertools import product

import pytest

from deepinfer.errors import AgreementError
from deepinfer.parallel.config import ParallelConfig, PrefillVote
from deepinfer.parallel.voting import Ballot, Motion, check_ballots, confirm, decide

# (wants_prefill, num_decodable, has_work): what a rank can be in
STATES = [(0, 0, 0), (0, 0, 1), (0, 2, 1), (1, 0, 1), (1, 3, 1)]


def ballots(states: tuple[tuple[int, int, int], ...]) -> list[Ballot]:
    return [Ballot(4, 9, wants, decodable, 5 * decodable, has_work) for wants, decodable, has_work in states]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("vote", list(PrefillVote))
def test_every_combination_of_ranks(ranks: int, vote: PrefillVote) -> None:
    config = ParallelConfig(prefill_vote=vote, prefill_interval_all=2, prefill_interval_any=5)
    for states, since in product(product(STATES, repeat=ranks), range(8)):
        motion, num_groups = decide(ballots(states), since, config)
        working = [state for state in states if state[2]]
        wants = [bool(state[0]) for state in working]
        assert num_groups == max(state[1] for state in states)
        all_fires = vote != "any" and wants and all(wants) and since >= 2
        any_fires = vote != "all" and any(wants) and since >= 5
        if not working:
            assert motion is Motion.STOP
        elif all_fires:
            assert motion is Motion.PREFILL_ALL
        elif any_fires or (any(wants) and num_groups == 0):
            assert motion is Motion.PREFILL_ANY
        else:
            assert motion is (Motion.DECODE if num_groups else Motion.DRAIN)


def test_an_idle_rank_does_not_hold_back_an_all_vote() -> None:
    config = ParallelConfig(prefill_vote="all")
    assert decide(ballots(((1, 1, 1), (0, 0, 0))), 99, config).motion is Motion.PREFILL_ALL
    assert decide(ballots(((1, 1, 1), (0, 2, 1))), 99, config).motion is Motion.DECODE


def test_an_all_vote_needs_every_confirmation_and_an_any_vote_one() -> None:
    for wanted, reserved in product(product((False, True), repeat=3), repeat=2):
        fallback = [confirm(m, wanted, reserved, 1) for m in (Motion.PREFILL_ALL, Motion.PREFILL_ANY)]
        stands_all = all(has for wants, has in zip(wanted, reserved, strict=True) if wants)
        assert fallback[0] is (Motion.PREFILL_ALL if stands_all else Motion.DECODE)
        assert fallback[1] is (Motion.PREFILL_ANY if any(reserved) else Motion.DECODE)
    assert confirm(Motion.PREFILL_ANY, (True,), (False,), 0) is Motion.DRAIN


def test_no_prefill_comes_before_its_interval_while_anybody_decodes() -> None:
    config = ParallelConfig(prefill_interval_all=3, prefill_interval_any=7)
    for states in product(STATES, repeat=2):
        if not any(state[1] for state in states):
            continue
        for since in range(3):
            assert decide(ballots(states), since, config).motion in (Motion.DECODE, Motion.STOP)


def test_ranks_at_different_iterations_or_placements_are_an_error() -> None:
    one = Ballot(4, 9, 0, 0, 0, 1)
    check_ballots([one, one])
    with pytest.raises(AgreementError, match=r"iteration: \{0: 4, 1: 5\}"):
        check_ballots([one, one._replace(iteration=5)])
    with pytest.raises(AgreementError, match="digest"):
        check_ballots([one, one._replace(digest=8)])
