"""What the config says about who reads a token, against the lists that a model really attends over."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from deepinfer.config_json import load_config
from deepinfer.errors import ConfigError
from deepinfer.model.cache import window_positions
from deepinfer.model.indexer import IndexerOutput
from deepinfer.presets import random_model, tiny_config
from deepinfer.visibility import TokenVisibility, token_visibility
from tests.conftest import DATA

LENGTH = 53
TOKENS = (0, 1, 6, 7, 20, 35, 51, 52)


@cache
def selections() -> dict[int, IndexerOutput]:
    """What each index source of the tiny model picks for a prompt; its filters bite within it."""
    model = random_model(tiny_config(), precision="float32", device="cpu")
    found: dict[int, IndexerOutput] = {}
    for layer in model.config.index_source_layers:
        model.layers[layer].attn.indexer.register_forward_hook(lambda m, i, out, layer=layer: found.update({layer: out}))
    model(torch.randint(3, 200, (LENGTH,), generator=torch.Generator().manual_seed(1)))
    return found


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("layer", range(9))
def test_it_is_what_the_model_attends_over(layer: int, token: int) -> None:
    config = tiny_config()
    said = token_visibility(config, layer, token, LENGTH)
    keys, real = window_positions(torch.arange(LENGTH), config.attention.window_size)
    assert list(said.window) == ((keys == token) & real).any(dim=1).nonzero().flatten().tolist()
    if said.entry is None:
        assert config.compress_ratios[layer] == 0
        return
    chosen = selections()[said.index_source]
    picked = set((chosen.selected == said.entry).any(dim=1).nonzero().flatten().tolist())
    scored = set((chosen.scores[:, said.entry] > float("-inf")).nonzero().flatten().tolist())
    assert set(said.certain) <= picked <= scored <= set(said.selectable)
    # Only the candidate filter takes an entry away that a query sees.
    assert set(said.selectable) - scored <= set(said.filtered)


def test_the_filter_and_the_choice_do_bite_where_it_says_so() -> None:
    """Summed over all tokens, the uncertain ranges are no wider than they must be."""
    config = tiny_config()
    for layer in (3, 7):
        said = [token_visibility(config, layer, token, LENGTH) for token in range(LENGTH - 1)]
        chosen = selections()[said[0].index_source]
        first_choice = min(min(set(v.selectable) - set(v.certain), default=LENGTH) for v in said)
        seen = (torch.arange(LENGTH) + 1) // config.compress_ratios[layer]
        dropped = (chosen.selected >= 0).sum(dim=1) < seen
        assert dropped.nonzero().min() == first_choice
    filtered = min(min(token_visibility(config, 7, token, LENGTH).filtered, default=LENGTH) for token in range(LENGTH))
    hidden = (chosen.scores > float("-inf")).sum(dim=1) < seen
    assert hidden.nonzero().min() == filtered


def test_token_500_of_2000_in_the_published_model() -> None:
    config = load_config(DATA / "published")
    none = range(2000, 2000)
    assert token_visibility(config, 0, 500, 2000) == TokenVisibility(window=range(500, 628))
    assert token_visibility(config, 7, 500, 2000) == TokenVisibility(
        window=range(500, 628),
        entry=250,
        selectable=range(501, 2000),
        certain=range(501, 1025),
        filtered=none,
        kv_source=2,
        index_source=2,
    )
    assert token_visibility(config, 30, 500, 2000) == TokenVisibility(
        window=range(500, 628),
        entry=500,
        selectable=range(500, 2000),
        certain=range(500, 512),
        filtered=none,
        kv_source=20,
        index_source=28,
    )


def test_a_prompt_that_ends_early_cuts_every_range() -> None:
    config = replace(tiny_config(), max_seq_len=64)
    said = token_visibility(config, 3, 6, 7)
    assert (said.window, said.selectable, said.certain) == (range(6, 7), range(7, 7), range(7, 7))


@pytest.mark.parametrize(("layer", "token", "length"), [(9, 0, 1), (-1, 0, 1), (0, 5, 5), (0, -1, 5), (0, 0, 0), (0, 0, 1025)])
def test_what_does_not_exist_is_refused(layer: int, token: int, length: int) -> None:
    with pytest.raises(ConfigError, match=r"layer|token|length"):
        token_visibility(tiny_config(), layer, token, length)
