"""Expert load: the window holds the last steps of a period, and nothing else."""

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
        assert counter.total().tolist() == [[1, 0, 1, 4], [6, 3, 3, 0]], period


def test_tokens_times_experts_is_the_sum_and_empty_steps_count_as_steps() -> None:
    counter = LoadCounter(n_layers=1, n_experts=8, window=4, period=4)
    rows = (3, 0, 5, 1)
    ends = []
    for count in rows:
        counter.record(0, torch.randint(0, 8, (count, 2)))
        ends.append(counter.end_step())
    assert ends == [False, False, False, True]
    assert counter.total().sum() == sum(rows) * 2


def test_without_a_period_nothing_is_recorded() -> None:
    counter = LoadCounter(n_layers=1, n_experts=2, window=4, period=0)
    counter.record(0, torch.tensor([[0]]))
    assert not counter.end_step()
    assert counter.total().sum() == 0
