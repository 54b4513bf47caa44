from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.config_json import load_config
from deepinfer.model.cache import CacheSizes, ModelCache, window_positions
from deepinfer.model.draft import DraftAttention
from deepinfer.model.numerics import Numerics, precision_named, reference_ops
from deepinfer.model.rope import RotaryEmbedding
from tests.golden import GOLDEN, recorded_unit

WINDOW, BLOCK = 8, 4


def listed(positions: Tensor) -> list[list[int]]:
    """Key positions of each query's window, -1 for an empty place."""
    keys, visible = window_positions(positions, WINDOW)
    return torch.where(visible, keys, -1).tolist()


@pytest.mark.golden
def test_window_of_a_prompt_has_the_recorded_order() -> None:
    unit = recorded_unit("window_idx")
    assert listed(torch.arange(20)) == unit["prefill_w8_n20"].tolist()
    # Published lists are no longer than the prompt; here they always have the window's length.
    short = [row + [-1] * (WINDOW - len(row)) for row in unit["prefill_w8_n5"].tolist()]
    assert listed(torch.arange(5)) == short


@pytest.mark.golden
@pytest.mark.parametrize("position", [1, 3, 7, 8, 13, 16])
def test_window_of_a_single_query_sees_the_recorded_slots_in_their_order(position: int) -> None:
    """Published decode puts empty places first, this one puts them last; what is between them is the same list."""
    slots = [slot for slot in recorded_unit("window_idx")[f"decode_w8_pos{position}"][0].tolist() if slot >= 0]
    assert [key % WINDOW for key in listed(torch.tensor([position]))[0] if key >= 0] == slots


@pytest.mark.golden
@pytest.mark.parametrize("position", [2, 7, 8, 20])
def test_drafts_see_the_ring_in_slot_order_and_then_each_other(position: int) -> None:
    expected = recorded_unit("window_idx")[f"dspark_w8_b4_pos{position}"].tolist()
    seen: list[tuple[Tensor, Tensor]] = []

    def spy(q: Tensor, kv: Tensor, visible: Tensor, *_: Any) -> Tensor:
        seen.append((kv, visible))
        return torch.zeros_like(q)

    config = load_config(GOLDEN / "select_full")
    config = replace(
        config,
        attention=replace(config.attention, window_size=WINDOW),
        draft=replace(config.draft, block_size=BLOCK),
    )
    numerics = Numerics(precision=precision_named("float32"), ops=replace(reference_ops(), attend=spy))
    layer = config.n_layers
    attention = DraftAttention(config, layer, numerics)
    for parameter in attention.parameters():
        parameter.view(torch.uint8).zero_()
    memory = ModelCache(config, numerics.precision, CacheSizes(num_slots=2, num_blocks=2)).layers[layer]
    # Every ring row holds its slot number in channel 0; draft rows, whose projection is zero, hold 0.
    memory.ring[1, :, 0] = torch.arange(WINDOW, dtype=torch.float32)
    rope = RotaryEmbedding(config)(torch.arange(position + 1, position + 1 + BLOCK))
    attention(torch.randn(BLOCK, config.dim), rope, torch.tensor([position]), torch.tensor([1]), memory)
    kv, visible = seen[0]
    places = torch.cat((kv[:, :WINDOW, 0], torch.arange(WINDOW, WINDOW + BLOCK).expand(BLOCK, -1)), dim=1)
    assert [row[taken].tolist() for row, taken in zip(places, visible, strict=True)] == expected
