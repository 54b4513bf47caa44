"""The figures about large groups: the goal for balanced loads is met, and what the command prints is what was measured."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer.bench import simulate
from deepinfer.bench.simulate import imbalance_by_drift, measure_balance, measure_votes, measured_shares, zipf_shares
from deepinfer.cli import main
from deepinfer.parallel.placement import imbalance, place_layer

GOAL = 1.05


@pytest.mark.parametrize("ranks", [64, 128])
@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_zipf_loads_are_balanced_to_the_goal(ranks: int, exponent: float) -> None:
    shares = zipf_shares(2, 384, exponent, np.random.default_rng(0))
    figures = measure_balance("zipf", shares, ranks, 6)
    assert figures.before > 2
    assert figures.after <= GOAL
    assert figures.step_after < figures.step_before
    assert figures.moved > figures.moved_again


@pytest.mark.parametrize(("ranks", "slots"), [(128, 4), (64, 7), (8, 49)])
def test_independent_changes_cost_what_is_estimated(ranks: int, slots: int) -> None:
    rng = np.random.default_rng(ranks)
    expected, found = [], []
    for _ in range(8):
        before = rng.uniform(0.8, 1.2, 384)
        layer = place_layer(before.tolist(), ranks * slots, ranks)
        assert imbalance(before.tolist(), layer, ranks) < 1.003
        for _ in range(10):
            after = before * (1 + 0.05 * rng.standard_normal(384))
            expected.append(imbalance_by_drift(before, after, slots, ranks) - 1)
            found.append(imbalance(after.tolist(), layer, ranks) - 1)
    # Never equal shares, and copies of an expert change together: it comes out a little higher.
    assert 0.95 < np.mean(found) / np.mean(expected) < 1.15


def test_no_change_costs_nothing() -> None:
    before = np.array([3.0, 0, 5, 1])
    assert imbalance_by_drift(before, 2 * before, 2, 2) == 1


def fake_loads(preset: str) -> tuple[np.ndarray, np.ndarray]:
    loads = np.array([[5.0, 1, 9, 3], [1, 1, 1, 1]])
    return loads, loads + 1


def test_measured_loads_keep_their_shape_when_stretched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "measure_loads", fake_loads)
    first, second = measured_shares(16, np.random.default_rng(0))
    assert first.shape == second.shape == (2, 16)
    assert np.allclose(first.sum(axis=1), 1)
    assert first[0].max() / first[0].min() == pytest.approx(9)
    assert first[0].argmax() == second[0].argmax()


def test_loads_of_mini_are_those_of_its_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "MODULES", ("heapq", "queue"))
    monkeypatch.setattr(simulate, "MODULE_TOKENS", 40)
    with torch.inference_mode():
        first, second = simulate.measure_loads("mini")
    assert (first.sum(axis=1) == 40 * 3).all()
    assert (second.sum(axis=1) == 40 * 3).all()
    assert (first != second).any()


def test_votes_are_counted() -> None:
    figures = measure_votes(3, requests_per_rank=2)
    assert figures.requests == 6
    assert figures.prefills > 0
    assert 0 <= figures.empty < 1
    assert figures.longest_wait >= figures.waited >= 0


def test_the_command_prints_and_writes_both_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate, "measure_loads", fake_loads)
    path = tmp_path / "figures.json"
    assert main(["bench", "simulate", "--ranks", "4", "--experts", "8", "--layers", "1", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert [row["loads"] for row in written["balance"]] == ["zipf 0.5", "zipf 1", "mini"]
    assert len(written["votes"]) == 1
    assert "moved_again" in capsys.readouterr().out
