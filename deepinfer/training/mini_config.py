"""The architecture of `mini`: every mechanism of the release, at sizes that bite within a context of 2048 tokens.

| layers | ratio | role |
|---|---|---|
| 0, 1 | 0 | window only; Engram before layer 1 |
| 2, 3 | 2 | KV and index source; reuses it |
| 4 | 2 | second KV and index source; Engram before it, as in the release |
| 5, 6 | 1 | KV and index source whose best blocks are the candidates; reuses it |
| 7 | 1 | own index inside the candidates of layer 5 |
| 8, 9, 10 | 0 | draft blocks |
"""

from deepinfer.config import (
    AttentionConfig,
    DraftConfig,
    EngramConfig,
    IndexerConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
)
from deepinfer.presets import four_gram_engram

TRAIN_LENGTH = 2048
ENGRAM_LAYERS = (1, 4)


def engram_config(layer_ids: tuple[int, ...], compressed_vocab_size: int, pad_token_id: int, table_size: int) -> EngramConfig:
    """Two hashes for each of the 2-, 3- and 4-grams; every hash has its own `table_size` rows, up to the next prime."""
    return four_gram_engram(layer_ids, compressed_vocab_size, pad_token_id, table_size, n_heads=2, head_dim=32)


def mini_config(
    vocab_size: int, compressed_vocab_size: int, noise_token_id: int, image_token_id: int | None = None, pad_token_id: int = 2
) -> ModelConfig:
    """The configuration for a tokenizer of `vocab_size` tokens, of which `compressed_vocab_size` differ for Engram."""
    return ModelConfig(
        vocab_size=vocab_size,
        dim=256,
        n_layers=8,
        max_seq_len=4096,
        attention=AttentionConfig(
            n_heads=8, head_dim=64, rope_head_dim=32, q_lora_rank=128, o_lora_rank=64, o_groups=2, window_size=64
        ),
        moe=MoEConfig(inter_dim=128, n_routed_experts=16, n_activated_experts=3),
        compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0),
        kv_source_layers=(2, 4, 5),
        index_source_layers=(2, 4, 5, 7),
        indexer=IndexerConfig(
            n_heads=4, head_dim=32, topk=64, candidate_source_layer=5, candidate_topk_blocks=16, candidate_block_size=8
        ),
        rope=RopeConfig(theta=10000.0, compress_theta=40000.0, original_seq_len=1024, factor=4.0),
        engram=engram_config(ENGRAM_LAYERS, compressed_vocab_size, pad_token_id, table_size=2000),
        draft=DraftConfig(
            n_layers=3,
            block_size=5,
            noise_token_id=noise_token_id,
            target_layer_ids=(5, 6, 7),
            markov_rank=32,
            n_routed_experts=6,
            n_activated_experts=2,
        ),
        pad_token_id=pad_token_id,
        image_token_id=image_token_id,
    )
