"""A model of a few thousand parameters with every mechanism, for tests of training."""

import torch

from deepinfer.config import AttentionConfig, DraftConfig, IndexerConfig, ModelConfig, MoEConfig, RopeConfig
from deepinfer.model.transformer import Transformer
from deepinfer.training.initialize import initialize
from deepinfer.training.mini_config import engram_config
from deepinfer.training.qat import build_trainable


def micro_config(vocab_size: int = 320, compressed_vocab_size: int = 300) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        dim=64,
        n_layers=6,
        max_seq_len=512,
        attention=AttentionConfig(
            n_heads=4, head_dim=32, rope_head_dim=16, q_lora_rank=32, o_lora_rank=32, o_groups=2, window_size=8
        ),
        moe=MoEConfig(inter_dim=32, n_routed_experts=8, n_activated_experts=2),
        compress_ratios=(0, 2, 2, 1, 1, 1, 0, 0),
        kv_source_layers=(1, 3),
        index_source_layers=(1, 3, 5),
        indexer=IndexerConfig(
            n_heads=2, head_dim=32, topk=6, candidate_source_layer=3, candidate_topk_blocks=3, candidate_block_size=4
        ),
        rope=RopeConfig(compress_theta=20000.0, original_seq_len=64, factor=4.0),
        engram=engram_config((1, 3), compressed_vocab_size, 2, table_size=50),
        draft=DraftConfig(
            n_layers=2,
            block_size=3,
            noise_token_id=5,
            target_layer_ids=(4, 5),
            markov_rank=32,
            n_routed_experts=4,
            n_activated_experts=2,
        ),
    )


def micro_model(activation_dtype: torch.dtype = torch.float32, seed: int = 0, config: ModelConfig | None = None) -> Transformer:
    config = config or micro_config()
    model = build_trainable(config, activation_dtype, "cpu")
    initialize(model, seed)
    model.token_window.token_map = torch.arange(config.vocab_size) % config.engram.compressed_vocab_size
    with torch.no_grad():
        for parameter in model.parameters():
            # Fresh values are close to symmetric in many places; noise makes every term matter.
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + 1)) * 0.05)
    return model
