"""Expert load: the window holds the last steps of a period, and nothing else."""

import pytest
import torch

from deepinfer.parallel.load_counter import LoadCounter


def test_only_the_last_steps_of_a_period_count() -> None:
    counter = LoadCounter(n_layers=2, n_experts=4, window=3, period=5)
    for period in range(2):
        for step in range(5):
            counter.record(0, torch.tensor([[step % 4, 3]]))
            counter.record(1, torch.tensor([[0, 1], [0, 2]]))
            assert counter.end_step() == (step == 4)
        # Steps 2, 3 and 4 of five: experts 2, 3 and 0, and expert 3 each time.
        assert counter.take().tolist() == [[1, 0, 1, 4], [6, 3, 3, 0]], period


@pytest.mark.parametrize("window", [1, 4])
def test_tokens_times_experts_is_the_sum_and_empty_steps_count_as_steps(window: int) -> None:
    counter = LoadCounter(n_layers=1, n_experts=8, window=window, period=4)
    rows = (3, 0, 5, 1)
    for _ in range(2):
        ends = []
        for count in rows:
            counter.record(0, torch.randint(0, 8, (count, 2)))
            ends.append(counter.end_step())
        assert ends == [False, False, False, True]
        assert counter.take().sum() == sum(rows[-window:]) * 2


def test_pairs_of_nobody_are_no_load_and_counts_stay_where_they_are() -> None:
    counter = LoadCounter(n_layers=1, n_experts=2, window=2, period=2)
    place = counter._counts.data_ptr()
    for _ in range(2):
        counter.record(0, torch.tensor([[0, 1], [2, 2]]))
        counter.end_step()
    assert counter.take().tolist() == [[2, 2]]
    assert counter._counts.data_ptr() == place


def test_without_a_period_there_is_no_end() -> None:
    counter = LoadCounter(n_layers=1, n_experts=2, window=4, period=0)
    assert not any(counter.end_step() for _ in range(9))
