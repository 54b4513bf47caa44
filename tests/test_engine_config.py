"""Every setting that cannot be honoured is refused by name, before anything is loaded."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from deepinfer import EngineConfig, LLMEngine
from deepinfer.errors import CapacityError, CheckpointError, ConfigError
from tests.golden import GOLDEN

COUNTS = ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_queued_requests")
OPTIONAL_COUNTS = ("max_model_len", "num_blocks")
STRANGE = ("1", b"1", [1], {}, 1.0, math.nan, math.inf, object(), True, False, 0, -1, 2**31, 10**5000)


def type_of(value: object) -> str:
    """What a test is called by; some of the values have no text."""
    return type(value).__name__


def refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^EngineConfig\.{field} = ") as caught:
        EngineConfig(**{field: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("field", [*COUNTS, *OPTIONAL_COUNTS])
@pytest.mark.parametrize("value", STRANGE, ids=type_of)
def test_a_count_that_is_none_is_refused(field: str, value: Any) -> None:
    refused(field, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(field, None) for field in COUNTS],
        ("block_size", 1),
        ("block_size", 7),
        ("max_model_len", 1),
        ("async_scheduling", 2),
        ("async_scheduling", -1),
        ("async_scheduling", None),
        ("async_scheduling", 1.0),
        ("async_scheduling", "1"),
        ("async_scheduling", []),
        ("batch_invariant", 1),
        ("batch_invariant", None),
        ("batch_invariant", "yes"),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", True),
        ("seed", 0.5),
        ("seed", None),
        ("device", 5),
        ("device", ["cpu"]),
        ("device", b"cpu"),
        ("precision", None),
        ("precision", []),
        ("precision", 32),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(field: str, value: Any) -> None:
    refused(field, value)


@pytest.mark.parametrize("name", ["", "fp32", "Native", "float64", "auto"])
def test_an_unknown_precision_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"precision .*native, float32, float32_kv, bfloat16"):
        EngineConfig(precision=name)


def test_defaults_are_valid_and_cannot_be_changed() -> None:
    config = EngineConfig()
    assert (config.precision, config.max_num_seqs, config.max_num_batched_tokens) == ("native", 64, 2048)
    assert (config.block_size, config.async_scheduling, config.seed) == (64, 1, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 3


def test_a_budget_below_the_number_of_sequences_is_allowed() -> None:
    assert EngineConfig(max_num_batched_tokens=1).max_num_seqs == 64


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown settings max_seqs, tensor_parallel_size; .*max_num_seqs.*num_blocks"):
        LLMEngine.from_pretrained("nowhere", max_seqs=1, tensor_parallel_size=2)


def test_settings_are_checked_before_the_folder() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        LLMEngine.from_pretrained("nowhere", block_size=3)


@pytest.mark.parametrize("place", ["nowhere", Path("nowhere"), ""])
def test_a_model_that_is_nowhere_is_refused(place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        LLMEngine.from_pretrained(place, device="cpu")


@pytest.mark.parametrize("device", ["quux", "cpu:x", "cuda:99", "meta", ""])
def test_a_device_that_is_not_here_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=r"EngineConfig\.device"):
        LLMEngine.from_pretrained(GOLDEN / "swa_tiny", device=device)


def test_a_length_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len = 129: the model's longest sequence is 128"):
        LLMEngine.from_pretrained(GOLDEN / "swa_tiny", device="cpu", max_model_len=129)


@pytest.mark.parametrize(
    "sizes",
    [{"num_blocks": 2**31 - 1}, {"max_num_seqs": 2**31 - 1}, {"num_blocks": 2**31 - 1, "block_size": 2**31 - 2}],
)
def test_a_cache_that_does_not_fit_is_refused_with_its_sizes(sizes: dict[str, int]) -> None:
    with pytest.raises(CapacityError) as caught:
        LLMEngine.from_pretrained(GOLDEN / "bf16_full", device="cpu", **sizes)
    for size in sizes.values():
        assert str(size) in str(caught.value)
