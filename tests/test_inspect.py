import json
import shutil
from pathlib import Path

import pytest
import torch

from deepinfer.checkpoint.safetensors_file import StoredTensor
from deepinfer.cli.inspect import format_report
from deepinfer.errors import CheckpointError, ConfigError, TensorMismatch
from deepinfer.inspect_checkpoint import Report, inspect_checkpoint

DATA = Path(__file__).parent / "data"
SELECT_FULL = DATA / "golden" / "select_full"


@pytest.fixture(scope="module")
def published() -> Report:
    return inspect_checkpoint(DATA / "published")


def test_published_totals_are_those_of_the_specification(published: Report) -> None:
    assert not published.has_tensors
    assert published.backbone_parameters == 551_880_835_184
    assert published.engram_table_parameters == 196_613_849_600
    assert published.draft_parameters == 14_225_362_530
    # All bytes of the release's tensors, less those of its 485,268,480 vision parameters in bfloat16.
    assert sum(part.bytes for part in published.parts) == 510_286_023_000 - 2 * 485_268_480


def test_published_cache_sizes_are_those_of_the_specification(published: Report) -> None:
    packed, held = published.cache
    assert packed.per_token == 890
    assert packed.per_sequence == 528 * 128 * 43
    assert held.per_token == 2.5 * (512 + 128) * 2


def test_published_layers_are_those_of_the_specification(published: Report) -> None:
    roles = [row.role for row in published.layers]
    assert [i for i, role in enumerate(roles) if role == "window only"] == [0, 1]
    assert [i for i, role in enumerate(roles) if role.startswith("full")] == [2, 8, 14, 20]
    assert roles[20] == "full, candidate source"
    assert [i for i, role in enumerate(roles) if role == "reindex"] == [24, 28, 32, 36]
    assert [i for i, role in enumerate(roles) if role == "draft"] == [40, 41, 42]
    assert [row.layer for row in published.layers if row.has_engram] == [1, 14]
    row = published.layers[30]
    assert (row.ratio, row.kv_source, row.index_source, row.experts, row.experts_per_token) == (1, 20, 28, 384, 6)
    assert published.layers[40].experts == 128


def test_published_model_fits_where_its_bytes_do(published: Report) -> None:
    by_name = {part.name: part.bytes for part in published.parts}
    total = sum(by_name.values())
    replicated = total - by_name["Engram tables"] - by_name["experts"]
    for f in published.fits:
        usable = f.memory_gb * 0.9e9
        assert f.holds_all == (total <= usable)
        assert f.holds_all_but_tables == (total - by_name["Engram tables"] <= usable)
        assert f.expert_parallel_ranks is not None
        assert replicated + by_name["experts"] / f.expert_parallel_ranks <= usable
        assert replicated + by_name["experts"] / (f.expert_parallel_ranks / 2) > usable
        assert f.cache_tokens > 0
    assert [f.expert_parallel_ranks for f in published.fits] == [128, 8, 4, 4]


def test_stored_and_computed_sizes_agree(tmp_path: Path) -> None:
    shutil.copy(SELECT_FULL / "config.json", tmp_path)
    stored, computed = inspect_checkpoint(SELECT_FULL), inspect_checkpoint(tmp_path)
    assert (stored.has_tensors, computed.has_tensors) == (True, False)
    assert stored.parts == computed.parts


def test_no_tensor_data_is_read_or_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        pytest.fail("tensor data was read")

    monkeypatch.setattr(StoredTensor, "read_into", refuse)
    monkeypatch.setattr(StoredTensor, "mapped", refuse)
    original = torch.zeros

    def small(*shape: int, **options: object) -> torch.Tensor:
        tensor = original(*shape, **options)
        assert tensor.is_meta or tensor.nbytes < 2_000_000
        return tensor

    monkeypatch.setattr(torch, "zeros", small)
    inspect_checkpoint(SELECT_FULL)
    inspect_checkpoint(DATA / "published")


def test_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        inspect_checkpoint(tmp_path)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(SELECT_FULL / name, tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    data["text_config"]["moe_intermediate_size"] = 64
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(TensorMismatch):
        inspect_checkpoint(tmp_path)
    data["text_config"]["engram_num_embeddings"] = [1, 2]
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="engram_num_embeddings"):
        inspect_checkpoint(tmp_path)


def test_unquantised_checkpoint_and_one_without_compression_can_be_inspected() -> None:
    plain = inspect_checkpoint(DATA / "golden" / "bf16_full")
    sizes = {part.name: part for part in plain.parts}
    assert sizes["experts"].bytes == 2 * sizes["experts"].parameters
    window_only = inspect_checkpoint(DATA / "golden" / "swa_tiny")
    assert window_only.cache[0].per_token == window_only.cache[1].per_token == 0
    assert format_report(window_only)


def test_text_names_what_matters(published: Report) -> None:
    text = format_report(published)
    for words in ("config only, sizes are computed", "551,880,835,184", "196,613,849,600", "14,225,362,530", "890.0", "reindex"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 132
