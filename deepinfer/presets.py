"""Models that need no download: configurations with random weights, and the byte tokenizer that goes with them.

| preset | what | for |
|---|---|---|
| `tiny_config()` | takes every branch of the model, seconds on a CPU | tests, notebooks, `deepinfer new-tiny` |
| `flash_slice()` | the published widths with few layers and small Engram tables | benchmarks |
"""

import json
from dataclasses import replace
from functools import cache

import tokenizers
import torch

from deepinfer.checkpoint.load import check_engram_tables, default_device, finish_model, refuse_what_does_not_fit
from deepinfer.checkpoint.tensor_map import meta_model, tensor_specs
from deepinfer.checkpoint.write import random_tensors
from deepinfer.config import (
    AttentionConfig,
    DraftConfig,
    EngramConfig,
    IndexerConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
)
from deepinfer.errors import ConfigError
from deepinfer.model.numerics import Numerics, Ops, precision_named, reference_ops
from deepinfer.model.packed_weights import Agree, alone
from deepinfer.model.transformer import Transformer
from deepinfer.ops.ngram_hash import hash_primes
from deepinfer.token_map import build_token_map
from deepinfer.tokenizer import BYTE_OF_CHARACTER, Tokenizer

SPECIAL_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
# The release's control tokens, none of them flagged special there, and their published ids.
CONTROL_TOKENS = {
    "<｜System｜>": 128799,
    "<｜fim▁hole｜>": 128800,
    "<｜fim▁begin｜>": 128801,
    "<｜fim▁end｜>": 128802,
    "<｜User｜>": 128803,
    "<｜Assistant｜>": 128804,
    "<|EOT|>": 128805,
    "<think>": 128821,
    "</think>": 128822,
    "｜DSML｜": 128825,
    "<｜latest_reminder｜>": 128828,
    "<｜action｜>": 128829,
    "<｜query｜>": 128830,
    "<｜authority｜>": 128831,
    "<｜domain｜>": 128832,
    "<｜title｜>": 128836,
    "<｜read_url｜>": 128845,
    "<｜deepseek_image｜>": 129264,
}
PUBLISHED_VOCAB_SIZE = 129280
MAX_NGRAM_SIZE = 4
FIRST_CONTROL_ID = len(SPECIAL_TOKENS) + len(BYTE_OF_CHARACTER)
SMALLEST_VOCAB_SIZE = FIRST_CONTROL_ID + len(CONTROL_TOKENS)


def control_token_id(token: str, vocab_size: int) -> int:
    """Id of a control token in a byte tokenizer: the published one if the vocabulary reaches there, else behind the bytes."""
    if vocab_size >= PUBLISHED_VOCAB_SIZE:
        return CONTROL_TOKENS[token]
    return FIRST_CONTROL_ID + list(CONTROL_TOKENS).index(token)


def byte_tokenizer_json(vocab_size: int = SMALLEST_VOCAB_SIZE) -> str:
    """A tokenizer of bytes without merges: `tokenizer.json` text with the published special and control tokens.

    Ids that are left over belong to placeholders, which no text encodes to.

    Raises: ConfigError if `vocab_size` is too small.
    """
    if vocab_size < SMALLEST_VOCAB_SIZE:
        raise ConfigError(f"vocab_size = {vocab_size}: bytes and control tokens need {SMALLEST_VOCAB_SIZE}")
    added = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    added |= {token: control_token_id(token, vocab_size) for token in CONTROL_TOKENS}
    vocab = dict(added)
    vocab |= {character: len(SPECIAL_TOKENS) + i for i, character in enumerate(BYTE_OF_CHARACTER)}
    taken = set(vocab.values())
    vocab |= {f"place▁holder▁no▁{i}": i for i in range(vocab_size) if i not in taken}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags, "special": token in SPECIAL_TOKENS}
            for token, i in sorted(added.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    return json.dumps(tokenizer, ensure_ascii=False)


@cache
def compressed_vocab_size(vocab_size: int) -> int:
    """Compressed ids that the byte tokenizer of this size gives: what its models say as `engram_compressed_vocab_size`."""
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(byte_tokenizer_json(vocab_size)))
    without_engram = replace(_tiny_base(), vocab_size=vocab_size)
    return int(build_token_map(tokenizer, without_engram).max()) + 1


def with_engram(config: ModelConfig, layer_ids: tuple[int, ...], vocab_size: int, n_heads: int, head_dim: int) -> ModelConfig:
    """`config` with an Engram whose table and map sizes follow from these numbers and from the byte tokenizer."""
    compressed = compressed_vocab_size(config.vocab_size)
    engram = four_gram_engram(layer_ids, compressed, config.pad_token_id, vocab_size, n_heads, head_dim)
    return replace(config, engram=engram)


def four_gram_engram(
    layer_ids: tuple[int, ...], compressed_vocab_size: int, pad_token_id: int, vocab_size: int, n_heads: int, head_dim: int
) -> EngramConfig:
    """Two- to four-grams, `n_heads` hashes each, each with rows for the next prime from `vocab_size` on."""
    primes = hash_primes(layer_ids, MAX_NGRAM_SIZE, n_heads, vocab_size)
    return EngramConfig(
        layer_ids=layer_ids,
        num_embeddings=tuple(sum(columns) for columns in primes),
        max_ngram_size=MAX_NGRAM_SIZE,
        vocab_size=vocab_size,
        n_heads=n_heads,
        head_dim=head_dim,
        pad_token_id=pad_token_id,
        compressed_vocab_size=compressed_vocab_size,
    )


def tiny_config() -> ModelConfig:
    """Every branch of the model in widths of 64: all ratios, several sources of each kind, filters that bite, drafts.

    Layers 2, 4 and 5 own entries (5 of ratio 1, the candidate source), 3, 6 and 8 reuse a selection, 7 selects anew.
    """
    return with_engram(_tiny_base(), layer_ids=(1, 4), vocab_size=60, n_heads=2, head_dim=32)


def _tiny_base() -> ModelConfig:
    noise = control_token_id("<｜System｜>", SMALLEST_VOCAB_SIZE)
    return ModelConfig(
        vocab_size=SMALLEST_VOCAB_SIZE,
        dim=64,
        n_layers=9,
        max_seq_len=1024,
        attention=AttentionConfig(
            n_heads=4, head_dim=32, rope_head_dim=16, q_lora_rank=32, o_lora_rank=32, o_groups=2, window_size=16
        ),
        # A clamp that order-1 activations reach.
        moe=MoEConfig(inter_dim=32, n_routed_experts=8, n_activated_experts=2, swiglu_limit=1.5),
        compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0),
        kv_source_layers=(2, 4, 5),
        index_source_layers=(2, 4, 5, 7),
        indexer=IndexerConfig(
            n_heads=4, head_dim=32, topk=8, candidate_source_layer=5, candidate_topk_blocks=3, candidate_block_size=4
        ),
        rope=RopeConfig(original_seq_len=256, factor=4.0),
        draft=DraftConfig(
            n_layers=3,
            block_size=5,
            noise_token_id=noise,
            target_layer_ids=(6, 7, 8),
            markov_rank=32,
            n_routed_experts=4,
            n_activated_experts=2,
        ),
        image_token_id=control_token_id("<｜deepseek_image｜>", SMALLEST_VOCAB_SIZE),
    )


def flash_slice(n_layers: int = 8) -> ModelConfig:
    """The published widths in `n_layers` backbone blocks of every kind and three draft blocks, with small Engram tables.

    Two window layers, then equal shares of ratio 2 and ratio 1; each share begins with the source of its entries, the second
    one also selects anew every fourth layer.

    Raises: ConfigError if the layers are too few for that.
    """
    if n_layers < 6:
        raise ConfigError(f"n_layers = {n_layers}: a slice with every kind of layer has at least 6")
    pairs = (n_layers - 2) // 2
    last_source = 2 + pairs
    step = min(4, n_layers - last_source - 1)
    config = ModelConfig(
        vocab_size=PUBLISHED_VOCAB_SIZE,
        dim=5120,
        n_layers=n_layers,
        max_seq_len=2**20,
        attention=AttentionConfig(
            n_heads=64, head_dim=512, rope_head_dim=64, q_lora_rank=1280, o_lora_rank=1024, o_groups=8, window_size=128
        ),
        moe=MoEConfig(inter_dim=2304, n_routed_experts=384, n_activated_experts=6),
        compress_ratios=(0, 0, *[2] * pairs, *[1] * (n_layers - last_source), 0, 0, 0),
        kv_source_layers=(2, last_source),
        index_source_layers=(2, *range(last_source, n_layers, step)),
        indexer=IndexerConfig(
            n_heads=32,
            head_dim=128,
            topk=512,
            candidate_source_layer=last_source,
            candidate_topk_blocks=2048,
            candidate_block_size=8,
        ),
        draft=DraftConfig(
            n_layers=3,
            block_size=5,
            noise_token_id=CONTROL_TOKENS["<｜System｜>"],
            target_layer_ids=(n_layers - 3, n_layers - 2, n_layers - 1),
            markov_rank=256,
            n_routed_experts=128,
            n_activated_experts=3,
        ),
        image_token_id=CONTROL_TOKENS["<｜deepseek_image｜>"],
    )
    return with_engram(config, layer_ids=(1, 2), vocab_size=16000, n_heads=8, head_dim=256)


def random_model(
    config: ModelConfig,
    seed: int = 0,
    precision: str = "native",
    device: torch.device | str | None = None,
    *,
    ops: Ops | None = None,
    expert_ids: tuple[int, ...] | None = None,
    agree: Agree = alone,
) -> Transformer:
    """A model with the weights of `random_tensors`, made on the device; its token map is the byte tokenizer's.

    `agree`: see `pack_model`.
    """
    check_engram_tables(config)
    target = torch.device(device) if device is not None else default_device()
    model = meta_model(config, Numerics(precision=precision_named(precision), ops=ops or reference_ops()), expert_ids)
    specs = {spec.name: spec for spec in tensor_specs(model)}
    with refuse_what_does_not_fit("random weights", target):
        for name, value in random_tensors(config, seed, target, expert_ids):
            if name not in specs:
                continue
            spec = specs[name]
            assert spec.parameter is not None
            owner, _, attribute = spec.parameter.rpartition(".")
            module = model.get_submodule(owner)
            if spec.member is None:
                setattr(module, attribute, torch.nn.Parameter(value, requires_grad=False))
                continue
            stack = module.get_parameter(attribute)
            if stack.is_meta:
                stack = torch.nn.Parameter(torch.empty_like(stack, device=target), requires_grad=False)
                setattr(module, attribute, stack)
            stack.data[spec.member].copy_(value)
    token_map = None
    if config.engram.layer_ids:
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(byte_tokenizer_json(config.vocab_size)))
        token_map = build_token_map(tokenizer, config)
    return finish_model(model, token_map, target, agree)
