"""The budget finds the number of drafts that promises the most tokens a second, and none where none pay."""

import random
from collections.abc import Callable

import pytest

from deepinfer.runtime.draft_budget import REFRESH_STEPS, TRIAL_AFTER, TRIAL_STEPS, DraftBudget, draft_counts
from deepinfer.runtime.plan import SchedulerOutputs, SequencePlan, StepKind

K = 5
StepTime = Callable[[int], float]  # drafts for each sequence -> seconds


def run(
    budget: DraftBudget, batch: int, survival: tuple[float, ...], step_time: StepTime, steps: int, kind: StepKind = StepKind.DECODE
) -> list[int]:
    """Steady decode in which drafts stand as their confidence says; returns the drafts of each step."""
    chosen, generator, offered = [], random.Random(0), 0
    for _ in range(steps):
        each = budget.drafts_each([survival] * batch)
        rows = min(each, offered) * batch
        proposes, offered = each > 0, K if each > 0 else 0
        plan = SchedulerOutputs(step_seq=0, kind=kind, sequences=(SEQUENCE,) * batch, draft_rows=rows, proposes=proposes)
        verified = survival[: rows // batch]
        accepted = sum(generator.random() < chance for _ in range(batch) for chance in verified)
        budget.observe(plan, step_time(rows // batch), accepted, batch * sum(verified))
        chosen.append(each)
    return chosen


SEQUENCE: SequencePlan = None  # type: ignore[assignment]  # only counted
LIKELY = tuple(0.9**i for i in range(1, K + 1))
UNLIKELY = tuple(0.3**i for i in range(1, K + 1))


def free(each: int) -> float:
    """Rows cost nothing: memory-bound decode."""
    return 1.0


def dear(each: int) -> float:
    """Every row costs as much as the first: a saturated device."""
    return 1.0 + each


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_free_rows_are_all_used(batch: int) -> None:
    assert set(run(DraftBudget(K), batch, LIKELY, free, 120)[60:]) == {K}


@pytest.mark.parametrize("batch", [1, 4, 64])
@pytest.mark.parametrize("survival", [LIKELY, UNLIKELY])
def test_saturation_ends_drafting(batch: int, survival: tuple[float, ...]) -> None:
    assert set(run(DraftBudget(K), batch, survival, dear, 120)[60:]) == {0}


def test_between_the_two_it_takes_the_best_of_its_numbers() -> None:
    def step_time(each: int) -> float:
        return 1.0 + 0.25 * each

    survival = (0.9, 0.7, 0.4, 0.1, 0.05)
    rates = {each: (1 + sum(survival[:each])) / step_time(each) for each in draft_counts(K)}
    assert max(rates, key=lambda each: rates[each]) == 3
    assert set(run(DraftBudget(K), 8, survival, step_time, 200)[100:]) == {3}


@pytest.mark.parametrize(("step_time", "expected"), [(free, K), (dear, 0)])
def test_batches_that_shrink_quickly_are_no_time_for_trials(step_time: StepTime, expected: int) -> None:
    budget = DraftBudget(K)
    run(budget, 16, LIKELY, step_time, 60)
    for batch in (8, 4, 2, 1):
        assert set(run(budget, batch, LIKELY, step_time, TRIAL_AFTER)) == {expected}, batch
    # One that lasts is measured.
    assert set(run(budget, 8, LIKELY, step_time, 60)) > {expected}


@pytest.mark.parametrize("most", range(6))
def test_none_and_all_drafts_are_among_the_numbers(most: int) -> None:
    counts = draft_counts(most)
    assert (counts[0], counts[-1]) == (0, most)
    assert list(counts) == sorted(set(counts))


def test_confidence_that_promises_too_much_is_corrected() -> None:
    budget, each_time = DraftBudget(K), (lambda each: 1.0 + 0.15 * each)
    for _ in range(120):
        each = budget.drafts_each([LIKELY] * 4)
        plan = SchedulerOutputs(step_seq=0, kind=StepKind.DECODE, sequences=(SEQUENCE,) * 4, draft_rows=4 * each, proposes=each > 0)
        budget.observe(plan, each_time(each), 0, 4 * sum(LIKELY[:each]))
    assert each == 0


def test_a_budget_is_measured_again_after_a_while() -> None:
    budget = DraftBudget(K)
    assert set(run(budget, 4, LIKELY, dear, 100)[60:]) == {0}
    # The device has become fast; nothing says so but another measurement.
    assert set(run(budget, 4, LIKELY, free, 2 * REFRESH_STEPS)[-50:]) == {K}


def test_a_first_slow_step_of_a_shape_does_not_count() -> None:
    calls = {each: 0 for each in range(K + 1)}

    def capturing(each: int) -> float:
        calls[each] += 1
        return 100.0 if calls[each] <= 2 else 1.0

    assert set(run(DraftBudget(K), 4, LIKELY, capturing, 200)[100:]) == {K}


def test_prefill_steps_are_not_measured() -> None:
    budget = DraftBudget(K)
    run(budget, 4, LIKELY, dear, 60, kind=StepKind.PREFILL)
    assert all(not times.seconds for times in budget._times.values())


def test_trials_are_few() -> None:
    chosen = run(DraftBudget(K), 4, UNLIKELY, dear, REFRESH_STEPS)
    assert sum(each > 0 for each in chosen) <= 4 * (TRIAL_STEPS + 2)
