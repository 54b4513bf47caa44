import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.ops.select import NEG_INF, _compact, candidate_mask, select_entries, topk_by_keys, topk_stable
from tests.golden import recorded_unit

# Few distinct values, so that ties are common; None is an entry that may not be chosen.
score_rows = st.lists(st.sampled_from([None, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=12)


@pytest.mark.golden
def test_candidates_are_the_recorded_ones() -> None:
    unit = recorded_unit("candidates")
    blocks, block_size = unit["topk_blocks_block_size"].tolist()
    scores, visible = unit["scores"][0], unit["lens"]
    scores = scores.masked_fill(torch.arange(scores.shape[1]) >= visible[:, None], NEG_INF)
    assert torch.equal(candidate_mask(scores, visible, block_size, blocks), unit["mask"][0].bool())


@pytest.mark.golden
def test_candidates_of_a_single_row_are_the_recorded_ones() -> None:
    unit = recorded_unit("candidates_decode")
    scores = unit["scores"][0]
    visible = torch.tensor([scores.shape[1]])
    blocks, block_size = recorded_unit("candidates")["topk_blocks_block_size"].tolist()
    assert torch.equal(candidate_mask(scores, visible, block_size, blocks), unit["mask"][0].bool())


@given(score_rows, st.integers(1, 14))
def test_best_entries_are_chosen_and_ties_go_to_the_lower_index(row: list[float | None], k: int) -> None:
    scores = torch.tensor([[NEG_INF if value is None else value for value in row]])
    ranked = sorted((i for i, value in enumerate(row) if value is not None), key=lambda i: (-float(row[i] or 0), i))
    expected = sorted(ranked[:k])
    chosen = select_entries(scores, k)[0].tolist()
    assert chosen == expected + [-1] * (min(k, len(row)) - len(expected))


@given(score_rows, st.integers(1, 4), st.integers(1, 5), st.integers(0, 12))
def test_kept_blocks_are_the_best_and_the_newest(row: list[float | None], block_size: int, keep: int, visible: int) -> None:
    visible = min(visible, len(row))
    values = [NEG_INF if value is None or i >= visible else value for i, value in enumerate(row)]
    starts = range(0, len(row), block_size)
    best = [max(values[start : start + block_size]) for start in starts]
    if visible:
        best[(visible - 1) // block_size] = float("inf")
    ranked = sorted((i for i, value in enumerate(best) if value > NEG_INF), key=lambda i: (-best[i], i))[:keep]
    expected = [i // block_size in ranked for i in range(len(row))]
    mask = candidate_mask(torch.tensor([values]), torch.tensor([visible]), block_size, keep)
    assert mask[0].tolist() == expected


def test_row_that_sees_nothing_chooses_nothing() -> None:
    scores = torch.full((1, 5), NEG_INF)
    assert select_entries(scores, 3).tolist() == [[-1, -1, -1]]
    assert not candidate_mask(scores, torch.tensor([0]), 2, 2).any()


def test_equal_scores_rank_by_index_however_many_there_are() -> None:
    """`torch.topk` would leave this open."""
    values, ids = topk_stable(torch.zeros(1, 1000), 7)
    assert ids.tolist() == [list(range(7))]
    assert values.tolist() == [[0.0] * 7]


# Every kind of number whose order is not that of its bits.
SPECIAL = (float("nan"), -float("nan"), float("inf"), NEG_INF, 0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3e38, -3e38)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(row=st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=40), k=st.integers(1, 40))
def test_integer_keys_choose_what_a_stable_sort_chooses(dtype: torch.dtype, row: list[float], k: int) -> None:
    scores, k = torch.tensor([row, row[::-1]]).to(dtype), min(k, len(row))
    values, ids = topk_by_keys(scores, k)
    sorted_values, sorted_ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    assert torch.equal(ids, sorted_ids[:, :k])
    assert torch.equal(values.nan_to_num(7), sorted_values[:, :k].nan_to_num(7))


def test_integer_keys_choose_among_many_equal_scores() -> None:
    scores = torch.randn(16, 5000, generator=torch.Generator().manual_seed(1)).mul(2).round()
    assert torch.equal(topk_by_keys(scores, 512)[1], topk_stable(scores, 512)[1])


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_taken_entries_move_to_the_front_in_order(taken: list[bool]) -> None:
    expected = [i for i, is_taken in enumerate(taken) if is_taken]
    found = _compact(torch.tensor([taken, [not t for t in taken]]))
    assert found[0].tolist() == expected + [-1] * (len(taken) - len(expected))
    assert sorted(found.flatten().tolist()) == [-1] * len(taken) + list(range(len(taken)))
