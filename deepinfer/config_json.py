"""A checkpoint's `config.json`, read and written: published keys to `ModelConfig` and back.

Every key is understood, known to have no effect on inference, or refused by name. Source: specification section 2.
"""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from deepinfer.config import (
    QUANT_BLOCK,
    AttentionConfig,
    DraftConfig,
    EngramConfig,
    HyperConnectionConfig,
    IndexerConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
)
from deepinfer.errors import CheckpointError, ConfigError, UnsupportedModel

ARCHITECTURE = "DeepseekV41ForCausalLM"
MODEL_TYPE = "deepseek_v41"

# text_config key -> where its value goes: "part.field" of ModelConfig, or a plain field.
TEXT_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "compress_ratios": "compress_ratios",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "num_attention_heads": "attention.n_heads",
    "head_dim": "attention.head_dim",
    "qk_rope_head_dim": "attention.rope_head_dim",
    "q_lora_rank": "attention.q_lora_rank",
    "o_lora_rank": "attention.o_lora_rank",
    "o_groups": "attention.o_groups",
    "sliding_window": "attention.window_size",
    "moe_intermediate_size": "moe.inter_dim",
    "n_routed_experts": "moe.n_routed_experts",
    "num_experts_per_tok": "moe.n_activated_experts",
    "routed_scaling_factor": "moe.route_scale",
    "swiglu_limit": "moe.swiglu_limit",
    "index_n_heads": "indexer.n_heads",
    "index_head_dim": "indexer.head_dim",
    "index_topk": "indexer.topk",
    "candidate_source_layer_id": "indexer.candidate_source_layer",
    "candidate_topk_blocks": "indexer.candidate_topk_blocks",
    "candidate_block_size": "indexer.candidate_block_size",
    "rope_theta": "rope.theta",
    "compress_rope_theta": "rope.compress_theta",
    "hc_mult": "hyper_connection.mult",
    "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iters",
    "hc_eps": "hyper_connection.eps",
    "engram_layer_ids": "engram.layer_ids",
    "engram_num_embeddings": "engram.num_embeddings",
    "engram_max_ngram_size": "engram.max_ngram_size",
    "engram_vocab_size": "engram.vocab_size",
    "engram_n_heads": "engram.n_heads",
    "engram_head_dim": "engram.head_dim",
    "engram_pad_token_id": "engram.pad_token_id",
    "engram_compressed_vocab_size": "engram.compressed_vocab_size",
    "num_nextn_predict_layers": "draft.n_layers",
    "dspark_block_size": "draft.block_size",
    "dspark_noise_token_id": "draft.noise_token_id",
    "dspark_target_layer_ids": "draft.target_layer_ids",
    "dspark_markov_rank": "draft.markov_rank",
    "dspark_n_routed_experts": "draft.n_routed_experts",
    "dspark_num_experts_per_tok": "draft.n_activated_experts",
}
# Keys whose only published value is implemented; another value is refused.
TEXT_FIXED: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
TEXT_WITHOUT_EFFECT = {"attention_dropout", "initializer_range", "use_cache", "dtype"}
QUANTIZATION_FIXED: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [QUANT_BLOCK, QUANT_BLOCK],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
YARN_KEYS = {
    "factor": "rope.factor",
    "beta_fast": "rope.beta_fast",
    "beta_slow": "rope.beta_slow",
    "original_max_position_embeddings": "rope.original_seq_len",
}
TOP_KEYS = {"bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"}
TOP_WITHOUT_EFFECT = {"transformers_version", "dtype"}
TOP_SECTIONS = {"architectures", "model_type", "text_config", "quantization_config", "vision_config"}

PARTS: dict[str, type] = {
    "attention": AttentionConfig,
    "moe": MoEConfig,
    "indexer": IndexerConfig,
    "rope": RopeConfig,
    "hyper_connection": HyperConnectionConfig,
    "engram": EngramConfig,
    "draft": DraftConfig,
}
# How a value must look, by the type of its field; the key's target is looked up in it.
FIELD_TYPES = {field.name: field.type for field in fields(ModelConfig)} | {
    f"{part}.{field.name}": field.type for part, record in PARTS.items() for field in fields(record)
}
# Keys that a checkpoint without the mechanism may leave out.
OPTIONAL_PREFIXES = ("engram_", "dspark_", "candidate_", "num_nextn_predict_layers")


def load_config(folder: Path | str) -> ModelConfig:
    """Read `config.json` of a checkpoint folder.

    Raises:
        CheckpointError: there is no such file, or it is not a JSON object.
        ConfigError: a key is unknown or missing, or a value cannot be honoured.
    """
    path = Path(folder) / "config.json"
    if not path.parent.is_dir():
        found = "a file" if path.parent.is_file() else "no such folder"
        raise CheckpointError(f"{path.parent}: {found} (expected a checkpoint folder)")
    if not path.is_file():
        raise CheckpointError(f"{path.parent}: no config.json, so this is not a checkpoint folder")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}")
    try:
        return parse_config(data)
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from error


def parse_config(data: dict[str, Any]) -> ModelConfig:
    """Translate the published keys, refusing by name what is not understood."""
    if data.get("model_type") != MODEL_TYPE:
        raise UnsupportedModel(
            f"model_type is {data.get('model_type')!r}; this package implements {MODEL_TYPE!r} (DeepSeek-V4.1-Flash) only"
        )
    if data.get("architectures", [ARCHITECTURE]) != [ARCHITECTURE]:
        raise UnsupportedModel(f"architectures is {data['architectures']!r}, expected [{ARCHITECTURE!r}]")
    text = data.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"text_config: expected an object, got {type(text).__name__}")
    known_text = TEXT_KEYS.keys() | TEXT_FIXED.keys() | TEXT_WITHOUT_EFFECT | {"rope_scaling"}
    unknown = sorted(data.keys() - TOP_KEYS - TOP_WITHOUT_EFFECT - TOP_SECTIONS)
    unknown += [f"text_config.{key}" for key in sorted(text.keys() - known_text)]
    if unknown:
        raise ConfigError(f"unknown keys: {', '.join(unknown)}")
    missing = [f"text_config.{key}" for key in TEXT_KEYS if key not in text and not key.startswith(OPTIONAL_PREFIXES)]
    if missing:
        raise ConfigError(f"missing keys: {', '.join(missing)}")
    _check_fixed(text, TEXT_FIXED, "text_config.")

    values: dict[str, Any] = {key: data[key] for key in TOP_KEYS if key in data}
    parts: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    for key, target in TEXT_KEYS.items():
        if key in text:
            _store(values, parts, target, _checked_value(f"text_config.{key}", text[key], target))
    _read_rope_scaling(text.get("rope_scaling"), values, parts)
    quantization = data.get("quantization_config")
    if quantization is not None:
        if not isinstance(quantization, dict):
            raise ConfigError(f"quantization_config: expected an object, got {type(quantization).__name__}")
        extra = sorted(quantization.keys() - QUANTIZATION_FIXED.keys())
        if extra:
            raise ConfigError(f"unknown keys: {', '.join('quantization_config.' + key for key in extra)}")
        _check_fixed(quantization, QUANTIZATION_FIXED, "quantization_config.")
    for key in TOP_KEYS & values.keys():
        if not (type(values[key]) is int or (key == "image_token_id" and values[key] is None)):
            raise ConfigError(f"{key} = {values[key]!r}: expected an integer")
    built = {name: PARTS[name](**part) for name, part in parts.items()}
    return ModelConfig(**values, **built, quantized=quantization is not None)


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The published form of a configuration; `parse_config` of it gives the configuration back."""
    text: dict[str, Any] = {"model_type": TEXT_FIXED["model_type"]}
    for key, target in TEXT_KEYS.items():
        text[key] = _load(config, target)
    text |= TEXT_FIXED
    if config.rope.original_seq_len:
        text["rope_scaling"] = {"rope_type": "yarn"} | {key: _load(config, target) for key, target in YARN_KEYS.items()}
    data: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE, "dtype": "bfloat16"}
    data |= {key: getattr(config, key) for key in sorted(TOP_KEYS) if getattr(config, key) is not None}
    data["text_config"] = text
    if config.quantized:
        data["quantization_config"] = dict(QUANTIZATION_FIXED)
    return data


def _checked_value(name: str, value: Any, target: str) -> Any:
    kind = FIELD_TYPES[target]
    if kind is int:
        if type(value) is not int:
            raise ConfigError(f"{name} = {value!r}: expected an integer")
        return value
    if kind is float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ConfigError(f"{name} = {value!r}: expected a number")
        return float(value)
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise ConfigError(f"{name} = {value!r}: expected a list of integers")
    return tuple(value)


def _read_rope_scaling(scaling: Any, values: dict[str, Any], parts: dict[str, dict[str, Any]]) -> None:
    if scaling is None:
        parts["rope"]["original_seq_len"] = 0
        return
    if not isinstance(scaling, dict) or scaling.get("rope_type") != "yarn":
        raise ConfigError(f"text_config.rope_scaling = {scaling!r}: only null or rope_type 'yarn' is implemented")
    unknown = sorted(scaling.keys() - YARN_KEYS.keys() - {"rope_type"})
    missing = sorted(YARN_KEYS.keys() - scaling.keys())
    if unknown or missing:
        raise ConfigError(f"text_config.rope_scaling: unknown keys {unknown}, missing keys {missing}")
    for key, target in YARN_KEYS.items():
        _store(values, parts, target, _checked_value(f"text_config.rope_scaling.{key}", scaling[key], target))


def _check_fixed(section: dict[str, Any], fixed: dict[str, Any], prefix: str) -> None:
    for key, expected in fixed.items():
        if section.get(key, expected) != expected:
            raise ConfigError(f"{prefix}{key} = {section[key]!r}: only {expected!r} is implemented")


def _store(values: dict[str, Any], parts: dict[str, dict[str, Any]], target: str, value: Any) -> None:
    part, _, name = target.rpartition(".")
    (parts[part] if part else values)[name] = value


def _load(config: ModelConfig, target: str) -> Any:
    part, _, name = target.rpartition(".")
    value = getattr(getattr(config, part) if part else config, name)
    return list(value) if isinstance(value, tuple) else value
