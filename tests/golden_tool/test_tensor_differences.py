"""Single tensors: what counts as a difference, and what is a tie."""

import pytest
import torch

from deepinfer.golden.tensor_differences import TensorDifference, compare_tensors
from deepinfer.golden.tolerances import BY_PRECISION

LIMITS = BY_PRECISION["float32"]
GATE = "layers.0.ffn.gate"


def compare_one(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], name: str) -> TensorDifference:
    return next(t for t in compare_tensors(ours, theirs, "float32", LIMITS, "test") if t.name == name)


def test_weights_are_those_of_the_same_experts() -> None:
    """Another order is no difference, and neither are weights of a row whose experts differ."""
    ours = {f"{GATE}.ids": torch.tensor([[3, 1], [0, 2]]), f"{GATE}.weights": torch.tensor([[0.9, 0.6], [1.0, 0.5]])}
    theirs = {f"{GATE}.ids": torch.tensor([[1, 3], [0, 1]]), f"{GATE}.weights": torch.tensor([[0.6, 0.9], [0.8, 0.7]])}
    assert compare_one(ours, theirs, f"{GATE}.weights").is_within
    theirs[f"{GATE}.weights"][0, 0] = 0.61
    assert not compare_one(ours, theirs, f"{GATE}.weights").is_within


@pytest.mark.parametrize(("score", "is_within"), [(1.0 - 1e-6, True), (1.0 - 1e-2, False)])
def test_a_choice_between_scores_that_hardly_differ_is_a_tie(score: float, is_within: bool) -> None:
    ours = {f"{GATE}.scores": torch.tensor([[2.0, 1.0, score, 0.1]]), f"{GATE}.ids": torch.tensor([[0, 1]])}
    found = compare_one(ours, {f"{GATE}.ids": torch.tensor([[2, 0]])}, f"{GATE}.ids")
    assert found.is_within is is_within
    assert found.jaccard == pytest.approx(1 / 3)


@pytest.mark.parametrize("chosen", [[0, 0], [0, 7], [0, -1]])
def test_a_choice_of_nothing_real_is_no_tie(chosen: list[int]) -> None:
    ours = {f"{GATE}.scores": torch.ones(1, 4), f"{GATE}.ids": torch.tensor([[0, 1]])}
    assert not compare_one(ours, {f"{GATE}.ids": torch.tensor([chosen])}, f"{GATE}.ids").is_within


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_within(value: float) -> None:
    found = compare_one({"norm": torch.ones(2, 3)}, {"norm": torch.tensor([[1.0, 1, 1], [1, value, 1]])}, "norm")
    assert not found.is_within
    assert found.where == (1, 1)


def test_equal_infinities_are_equal() -> None:
    scores = torch.tensor([[1.0, float("-inf")]])
    name = "layers.2.attn.indexer.scores"
    assert compare_one({name: scores}, {name: scores.clone()}, name).relative == 0
    assert not compare_one({name: scores}, {name: -scores}, name).is_within


def test_one_wrong_row_among_many_is_found() -> None:
    ours = torch.ones(10_000, 4)
    theirs = ours.clone()
    theirs[1234, 2] += 2e-4
    found = compare_one({"norm": ours}, {"norm": theirs}, "norm")
    assert found.relative < LIMITS.tensor
    assert not found.is_within
    assert found.where == (1234, 2)
