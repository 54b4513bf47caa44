import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from deepinfer.checkpoint.load import check_engram_tables
from deepinfer.checkpoint.tensor_map import stored_specs
from deepinfer.config import ModelConfig
from deepinfer.config_json import load_config
from deepinfer.errors import ConfigError
from deepinfer.model.indexer import Indexer, IndexerOutput
from deepinfer.presets import (
    CONTROL_TOKENS,
    SMALLEST_VOCAB_SIZE,
    SPECIAL_TOKENS,
    byte_tokenizer_json,
    flash_slice,
    random_model,
    tiny_config,
)
from deepinfer.token_map import build_token_map
from deepinfer.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
TOKENS = torch.randint(3, 259, (150,), generator=torch.Generator().manual_seed(0))


def byte_tokenizer(vocab_size: int = SMALLEST_VOCAB_SIZE) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(byte_tokenizer_json(vocab_size)))


@pytest.mark.parametrize("vocab_size", [SMALLEST_VOCAB_SIZE, 320, 129280])
def test_byte_tokenizer_has_every_byte_and_the_published_control_tokens(vocab_size: int, published_tokenizer: Tokenizer) -> None:
    tokenizer = byte_tokenizer(vocab_size)
    assert len(tokenizer) == vocab_size
    assert {tokenizer.token_bytes(i) for i in range(3, 259)} == {bytes([byte]) for byte in range(256)}
    text = "Zoë wrote 一 <line>\n\t🙂\x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text.encode())
    for i, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer.encode(token) == published_tokenizer.encode(token) == [i]
    assert tokenizer.special_ids == {0, 1, 2}
    for token, published_id in CONTROL_TOKENS.items():
        assert published_tokenizer.encode(token) == [published_id], token
        assert published_id not in published_tokenizer.special_ids
        (found,) = tokenizer.encode(token)
        assert found == published_id or vocab_size < 129280
        assert tokenizer.decode([found]) == token


def test_byte_tokenizer_refuses_a_vocabulary_that_is_too_small() -> None:
    with pytest.raises(ConfigError, match="vocab_size = 276: bytes and control tokens need 277"):
        byte_tokenizer_json(276)


@pytest.mark.parametrize("make", [tiny_config, flash_slice], ids=["tiny", "slice"])
def test_engram_sizes_follow_their_rules(make: Callable[[], ModelConfig]) -> None:
    config = make()
    check_engram_tables(config)
    token_map = build_token_map(byte_tokenizer(config.vocab_size), config)
    assert int(token_map.max()) + 1 == config.engram.compressed_vocab_size


def test_tiny_config_has_every_kind_of_layer() -> None:
    c = tiny_config()
    compressed = [i for i in range(c.n_layers) if c.compress_ratios[i]]
    assert set(c.compress_ratios[: c.n_layers]) == {0, 1, 2}
    assert {c.compress_ratios[i] for i in c.kv_source_layers} == {1, 2}
    assert len(c.kv_source_layers) > 2
    assert set(c.index_source_layers) > set(c.kv_source_layers)
    reuse = [i for i in compressed if i not in c.index_source_layers]
    assert {c.index_source(i) in c.kv_source_layers for i in reuse} == {True, False}
    assert c.indexer.candidate_source_layer in c.kv_source_layers
    assert len(c.engram.layer_ids) == 2
    assert c.draft.n_layers == 3
    assert c.quantized


def test_selections_of_the_tiny_model_bite() -> None:
    """Every index source leaves entries out, and the candidate filter changes what a later source chooses."""
    model = random_model(tiny_config(), device="cpu")
    checked: list[int] = []
    indexers = {layer: model.layers[layer].attn.indexer for layer in model.config.index_source_layers}

    def check(module: Indexer, inputs: tuple[Any, ...], output: IndexerOutput) -> None:
        *values, shared, cache = inputs
        n_reachable = output.scores.isfinite().sum(dim=1)
        assert (n_reachable > module.config.topk).any()
        if shared.candidates is not None and not module.is_candidate_source:
            unfiltered = module.forward(*values, replace(shared, candidates=None), cache)
            assert (unfiltered.scores.isfinite().sum(dim=1) > n_reachable).any()
            assert not torch.equal(unfiltered.selected, output.selected)
        checked.append(next(layer for layer, indexer in indexers.items() if indexer is module))

    for indexer in indexers.values():
        indexer.register_forward_hook(check)
    model(TOKENS)
    assert checked == [2, 4, 5, 7]


@pytest.mark.parametrize("precision", ["native", "float32", "float32_kv", "bfloat16"])
def test_activations_of_the_tiny_model_are_of_order_one(precision: str) -> None:
    model = random_model(tiny_config(), precision=precision, device="cpu")
    spreads: list[float] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: spreads.append(output[0].float().std().item()))
    logits = model(TOKENS)
    assert logits.isfinite().all()
    assert 0.8 < logits.std().item() < 1.25
    assert all(0.7 < spread < 4 for spread in spreads), spreads


def test_random_model_with_some_experts_has_the_same_ones() -> None:
    whole, part = random_model(tiny_config(), device="cpu"), random_model(tiny_config(), device="cpu", expert_ids=(4, 1))
    for name in ("w1", "w2", "w3"):
        full, held = (getattr(model.layers[3].ffn.experts, name) for model in (whole, part))
        assert torch.equal(full.weight[[4, 1]], held.weight)
        assert torch.equal(full.scale.view(torch.uint8)[[4, 1]], held.scale.view(torch.uint8))


def test_slice_has_the_published_shapes() -> None:
    """Layer by layer, all tensors but the Engram tables look as in the published model."""
    published = {spec.name: (spec.shape, spec.dtype) for spec in stored_specs(load_config(DATA / "published"))}
    like = {0: 0, 1: 1, 2: 14, 3: 3, 4: 4, 5: 20, 6: 21, 7: 24}
    for spec in stored_specs(flash_slice()):
        if ".engram.embed." in spec.name:
            assert spec.shape[1:] == published[spec.name.replace("layers.2.", "layers.14.")][0][1:]
            continue
        name = re.sub(r"^layers\.(\d+)", lambda found: f"layers.{like[int(found[1])]}", spec.name)
        assert (spec.shape, spec.dtype) == published[name], spec.name


@pytest.mark.parametrize("n_layers", [6, 7, 8, 12, 40])
def test_slice_of_any_depth_has_every_kind_of_layer(n_layers: int) -> None:
    c = flash_slice(n_layers)
    assert c.compress_ratios[:2] == (0, 0)
    assert {c.compress_ratios[i] for i in c.kv_source_layers} == {1, 2}
    assert c.index_source_layers[-1] > c.indexer.candidate_source_layer == c.kv_source_layers[-1]
    assert c.compress_ratios[3] == 2


def test_slice_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"n_layers = 5: .* at least 6"):
        flash_slice(5)
