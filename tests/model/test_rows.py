import pytest
import torch

from deepinfer.errors import ShapeError
from deepinfer.model.rows import TRASH_SLOT, pack_rows


def test_rows_know_where_they_stand() -> None:
    rows = pack_rows([([7, 8, 9], 5), ([4], 0)], slots=[3, 1], block_tables=[[6, 2, 5], [4]], block_size=4)
    assert rows.token_ids.tolist() == [7, 8, 9, 4]
    assert rows.positions.tolist() == [5, 6, 7, 0]
    assert rows.seq_ids.tolist() == [0, 0, 0, 1]
    assert rows.offsets.tolist() == [0, 1, 2, 0]
    assert rows.remaining.tolist() == [2, 1, 0, 0]
    assert rows.row_slots.tolist() == [3, 3, 3, 1]


def test_block_tables_are_cut_to_what_the_step_reaches_and_filled_with_trash() -> None:
    rows = pack_rows([([7, 8, 9], 5), ([4], 0)], slots=[3, 1], block_tables=[[6, 2, 5], [4]], block_size=4)
    assert rows.block_tables.tolist() == [[6, 2], [4, TRASH_SLOT]]
    assert rows.max_tokens == 8


def test_no_rows_are_rows_too() -> None:
    rows = pack_rows([], slots=[], block_tables=[], block_size=4)
    assert rows.token_ids.shape == (0,)
    assert rows.token_ids.dtype == torch.int64


@pytest.mark.parametrize(
    ("chunks", "slots", "tables", "message"),
    [
        ([([1], 0)], [1, 2], [[1]], "counts must agree"),
        ([([1], 0)], [1], [], "counts must agree"),
        ([([1, 2, 3], 2)], [1], [[1]], "reaches position 4"),
    ],
    ids=["slots", "tables", "blocks"],
)
def test_rows_that_do_not_fit_are_refused(
    chunks: list[tuple[list[int], int]], slots: list[int], tables: list[list[int]], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        pack_rows(chunks, slots, tables, block_size=4)
