import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer.config import ModelConfig, RopeConfig
from deepinfer.config_json import config_to_json, load_config, parse_config
from deepinfer.errors import CheckpointError, ConfigError, DeepInferError, UnsupportedModel
from deepinfer.presets import flash_slice, tiny_config

DATA = Path(__file__).parent / "data"
PUBLISHED: dict[str, Any] = json.loads((DATA / "published" / "config.json").read_text(encoding="utf-8"))


def changed(**changes: Any) -> dict[str, Any]:
    """The published JSON with values set by dotted key, `__` for the dot; `...` deletes."""
    data = copy.deepcopy(PUBLISHED)
    for path, value in changes.items():
        *sections, key = path.split("__")
        target = data
        for section in sections:
            target = target[section]
        if value is ...:
            del target[key]
        else:
            target[key] = value
    return data


def test_published_config_means_what_the_specification_says() -> None:
    config = load_config(DATA / "published")
    assert (config.dim, config.n_layers, config.vocab_size, config.max_seq_len) == (5120, 40, 129280, 1048576)
    assert config.compress_ratios == (0, 0, *[2] * 18, *[1] * 20, 0, 0, 0)
    assert config.attention.window_size == 128
    assert config.rope == RopeConfig()
    assert config.engram.num_embeddings == (384006168, 384016682)
    assert config.draft_moe.n_activated_experts == 3
    assert [config.kv_source(i) for i in (2, 7, 8, 19, 20, 39)] == [2, 2, 8, 14, 20, 20]
    assert [config.index_source(i) for i in (20, 23, 24, 39)] == [20, 20, 24, 36]
    assert config.image_token_id == 129264
    assert config.quantized


CONFIGS: dict[str, Callable[[], ModelConfig]] = {
    "published": lambda: load_config(DATA / "published"),
    "select_full": lambda: load_config(DATA / "golden" / "select_full"),
    "swa_tiny": lambda: load_config(DATA / "golden" / "swa_tiny"),
    "bf16_full": lambda: load_config(DATA / "golden" / "bf16_full"),
    "tiny": tiny_config,
    "slice": flash_slice,
    "without YaRN": lambda: replace(tiny_config(), rope=RopeConfig(original_seq_len=0)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_reads_back_equal(name: str) -> None:
    config = CONFIGS[name]()
    assert parse_config(json.loads(json.dumps(config_to_json(config)))) == config


def test_published_keys_are_written_with_their_published_values() -> None:
    written = config_to_json(load_config(DATA / "published"))
    without_effect = {"attention_dropout", "initializer_range", "use_cache"}
    for key, value in PUBLISHED["text_config"].items():
        assert key in without_effect or written["text_config"][key] == value, key
    assert written["quantization_config"] == PUBLISHED["quantization_config"]


REFUSED: dict[str, tuple[dict[str, Any], type[DeepInferError], str]] = {
    "V4": (changed(model_type="deepseek_v4"), UnsupportedModel, "model_type is 'deepseek_v4'.*'deepseek_v41'"),
    "no model type": (changed(model_type=...), UnsupportedModel, "model_type is None"),
    "another class": (changed(architectures=["DeepseekV4ForCausalLM"]), UnsupportedModel, "DeepseekV4ForCausalLM"),
    "unknown at the top": (changed(rope_mode="x", zeta=1), ConfigError, "unknown keys: rope_mode, zeta"),
    "unknown in text_config": (changed(text_config__n_group=8), ConfigError, "unknown keys: text_config.n_group"),
    "unknown in two places": (changed(alpha=1, text_config__beta=1), ConfigError, "alpha, text_config.beta"),
    "unknown in quantization": (
        changed(quantization_config__ignored_layers=[]),
        ConfigError,
        "unknown keys: quantization_config.ignored_layers",
    ),
    "unknown in rope_scaling": (
        changed(text_config__rope_scaling__mscale=1),
        ConfigError,
        r"unknown keys \['mscale'\]",
    ),
    "missing in rope_scaling": (changed(text_config__rope_scaling__factor=...), ConfigError, r"missing keys \['factor'\]"),
    "another rope_scaling": (changed(text_config__rope_scaling__rope_type="linear"), ConfigError, "only null or rope_type 'yarn'"),
    "no text_config": (changed(text_config=...), ConfigError, "text_config: expected an object, got NoneType"),
    "missing": (
        changed(text_config__o_groups=..., text_config__hc_mult=...),
        ConfigError,
        "text_config.o_groups, text_config.hc_mult",
    ),
    "scoring": (changed(text_config__scoring_func="sigmoid"), ConfigError, "scoring_func = 'sigmoid': only 'sqrtsoftplus'"),
    "tied": (changed(text_config__tie_word_embeddings=True), ConfigError, "tie_word_embeddings = True: only False"),
    "key-value heads": (changed(text_config__num_key_value_heads=8), ConfigError, "num_key_value_heads = 8: only 1"),
    "quantization a text": (changed(quantization_config="fp8"), ConfigError, "quantization_config: expected an object, got str"),
    "another format": (changed(quantization_config__expert_dtype="fp8"), ConfigError, "expert_dtype = 'fp8': only 'fp4'"),
    "another tile": (changed(quantization_config__weight_block_size=[128, 128]), ConfigError, "weight_block_size"),
    "fraction": (changed(text_config__hidden_size=5120.5), ConfigError, "text_config.hidden_size = 5120.5: expected an integer"),
    "bool": (changed(text_config__hidden_size=True), ConfigError, "hidden_size = True: expected an integer"),
    "list for a number": (changed(text_config__hidden_size=[5120]), ConfigError, "hidden_size = .*expected an integer"),
    "text for a number": (changed(text_config__rms_norm_eps="1e-6"), ConfigError, "rms_norm_eps = '1e-6': expected a number"),
    "NaN": (changed(text_config__rms_norm_eps=float("nan")), ConfigError, "rms_norm_eps = nan: expected a number"),
    "number for a list": (
        changed(text_config__engram_layer_ids=1),
        ConfigError,
        "engram_layer_ids = 1: expected a list",
    ),
    "list of texts": (changed(text_config__compress_ratios=["0"]), ConfigError, "compress_ratios = .*expected a list of integers"),
    "end token a list": (changed(eos_token_id=[1, 2]), ConfigError, r"eos_token_id = \[1, 2\]: expected an integer"),
    "end token outside": (changed(eos_token_id=129280), ConfigError, "eos_token_id = 129280: outside the vocabulary of 129280"),
    "width": (changed(text_config__hidden_size=5100), ConfigError, "hidden_size = 5100: must be a multiple of 32"),
    "no width": (changed(text_config__hidden_size=0), ConfigError, "dim = 0: must be at least 1"),
    "no layers": (changed(text_config__num_hidden_layers=0), ConfigError, "n_layers = 0: must be at least 1"),
    "ratios too few": (changed(text_config__num_hidden_layers=41), ConfigError, "compress_ratios .*needs 44 entries"),
    "ratio 4": (changed(text_config__compress_ratios=[4] * 43), ConfigError, "only the ratios 0, 1 and 2 exist"),
    "source of ratio 0": (changed(text_config__kv_source_layer_ids=[0, 2, 8, 14, 20]), ConfigError, "compression ratio above 0"),
    "source of another ratio": (
        changed(text_config__kv_source_layer_ids=[2, 8, 14]),
        ConfigError,
        "another ratio than its KV",
    ),
    "source without index": (changed(text_config__index_source_layer_ids=[2, 8, 20]), ConfigError, "must also be an index source"),
    "candidates": (changed(text_config__candidate_source_layer_id=24), ConfigError, "candidate_source_layer_id = 24: must be a KV"),
    "experts": (changed(text_config__num_experts_per_tok=385), ConfigError, "num_experts_per_tok = 385: must lie between 1 and"),
    "groups": (changed(text_config__o_groups=7), ConfigError, "o_groups = 7: must divide num_attention_heads 64"),
    "Engram tables": (changed(text_config__engram_num_embeddings=[1]), ConfigError, "engram_num_embeddings .*one per Engram layer"),
    "Engram order": (changed(text_config__engram_layer_ids=[14, 1]), ConfigError, "engram_layer_ids = .*must ascend"),
    "Engram map": (
        changed(text_config__engram_compressed_vocab_size=0),
        ConfigError,
        "compressed_vocab_size = 0: must be",
    ),
    "Engram incomplete": (changed(text_config__engram_n_heads=...), ConfigError, "n_heads = 0: must be at least 1"),
    "Engram layer": (changed(text_config__engram_layer_ids=[1, 40]), ConfigError, r"engram_layer_ids = .*lie in \[0, 40\)"),
    "draft experts": (changed(text_config__dspark_num_experts_per_tok=200), ConfigError, "dspark_num_experts_per_tok = 200"),
    "draft features": (changed(text_config__dspark_target_layer_ids=[40]), ConfigError, "dspark_target_layer_ids = .*outside"),
    "rope": (changed(text_config__rope_theta=1), ConfigError, "rope_theta = 1.0: must be above 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_config_that_cannot_be_honoured_is_refused_by_name(tmp_path: Path, case: str) -> None:
    data, error, message = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(error, match=message) as caught:
        load_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert type(caught.value) is error


def test_wrong_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, message in (
        (tmp_path / "absent", "absent: no such folder"),
        (tmp_path / "file", "file: a file .expected a checkpoint folder"),
        (tmp_path, "no config.json, so this is not a checkpoint folder"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_config(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, "\udcff"], ids=["empty", "cut", "list", "deep", "no UTF-8"])
def test_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json: (not valid JSON|expected a JSON object)"):
        load_config(tmp_path)


def test_keys_of_absent_mechanisms_may_be_absent() -> None:
    data = changed(text_config__num_nextn_predict_layers=..., text_config__candidate_source_layer_id=...)
    text = data["text_config"]
    for key in [key for key in text if key.startswith(("engram_", "dspark_", "candidate_"))]:
        del text[key]
    text["compress_ratios"] = text["compress_ratios"][:40]
    config = parse_config(data)
    assert config.engram.layer_ids == ()
    assert config.draft.n_layers == 0
    assert config.indexer.candidate_source_layer == -1
