import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.checkpoint.load import load_model
from deepinfer.checkpoint.safetensors_file import DTYPE_NAMES, INDEX_NAME, SINGLE_NAME, open_checkpoint
from deepinfer.checkpoint.tensor_map import stored_specs
from deepinfer.checkpoint.write import ENGRAM_ROW_STD, random_tensors, save_checkpoint
from deepinfer.config_json import load_config
from deepinfer.errors import CheckpointError, TensorMismatch, TokenizerError
from deepinfer.ops.formats import dequantize_fp4, dequantize_fp8, dequantize_rows_fp8
from deepinfer.presets import byte_tokenizer_json, random_model, tiny_config

PUBLISHED = Path(__file__).parents[1] / "data" / "published"
CONFIG = tiny_config()
TOKENIZER = byte_tokenizer_json(CONFIG.vocab_size)
TENSORS = dict(random_tensors(CONFIG, seed=0))
TOKENS = torch.arange(3, 60)


def save(folder: Path, tensors: dict[str, Tensor] | Iterator[tuple[str, Tensor]] = TENSORS, **options: int) -> None:
    save_checkpoint(folder, CONFIG, tensors, TOKENIZER, **options)


def any_index(name: str) -> str:
    """`name` without the numbers of layer, draft block and expert, whether written out or as a pattern of the index."""
    return re.sub(r"\b(layers|mtp|experts)\.(\d+|\{.*?\})", r"\1.*", name)


def test_every_tensor_of_the_published_index_is_made_and_no_other() -> None:
    made = Counter((any_index(s.name), s.shape, DTYPE_NAMES[s.dtype]) for s in stored_specs(load_config(PUBLISHED)))
    listed: Counter[tuple[str, tuple[int, ...], str]] = Counter()
    for line in (PUBLISHED / "tensor-index.tsv").read_text().splitlines()[1:]:
        name, shape, dtype, count, _ = line.split("\t")
        if not name.startswith(("vision.", "aligner.", "image_")):
            listed[any_index(name), tuple(json.loads(shape)), dtype] += int(count)
    assert made == listed


def test_saved_tensors_and_config_read_back_equal(tmp_path: Path) -> None:
    save(tmp_path)
    assert load_config(tmp_path) == CONFIG
    stored = open_checkpoint(tmp_path)
    assert stored.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        value = torch.empty_like(tensor)
        stored[name].read_into(value)
        assert torch.equal(value.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", SINGLE_NAME, "sha256.json", "tokenizer.json"]


def test_shards_stay_below_their_limit_and_mean_the_same(tmp_path: Path) -> None:
    save(tmp_path / "single")
    save(tmp_path / "shards", max_shard_bytes=200_000)
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 5
    index = json.loads((tmp_path / "shards" / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    assert index["weight_map"].keys() == TENSORS.keys()
    for file in files:
        named = [name for name, where in index["weight_map"].items() if where == file]
        assert len(named) == 1 or sum(TENSORS[name].nbytes for name in named) <= 200_000
    whole, parts = (load_model(tmp_path / name, device="cpu")(TOKENS) for name in ("single", "shards"))
    assert torch.equal(whole, parts)


def test_pairs_are_consumed_one_shard_at_a_time(tmp_path: Path) -> None:
    written: list[int] = []

    def pairs() -> Iterator[tuple[str, Tensor]]:
        for pair in TENSORS.items():
            written.append(len(list(tmp_path.glob(".writing-*/shard-*"))))
            yield pair

    save(tmp_path, pairs(), max_shard_bytes=200_000)
    assert written[0] == 0
    assert written[-1] > 5


def test_new_checkpoint_replaces_the_old_one_without_leftovers(tmp_path: Path) -> None:
    save(tmp_path, max_shard_bytes=200_000)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        SINGLE_NAME,
        "notes.txt",
        "sha256.json",
        "tokenizer.json",
    ]
    save(tmp_path, max_shard_bytes=200_000)
    assert not (tmp_path / SINGLE_NAME).exists()
    load_model(tmp_path, device="cpu")


def test_interrupted_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted() -> Iterator[tuple[str, Tensor]]:
        yield from list(TENSORS.items())[:50]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, interrupted(), max_shard_bytes=10_000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_would_not_load_is_not_saved(tmp_path: Path) -> None:
    few = {name: tensor for name, tensor in TENSORS.items() if name != "norm.weight"}
    with pytest.raises(TensorMismatch, match=r"norm\.weight"):
        save(tmp_path, few)
    with pytest.raises(TokenizerError, match=r"278 tokens, but config\.json says vocab_size 277"):
        save_checkpoint(tmp_path, CONFIG, TENSORS, byte_tokenizer_json(CONFIG.vocab_size + 1))
    with pytest.raises(CheckpointError, match=r"'norm\.weight' was given twice"):
        save(tmp_path, iter([*TENSORS.items(), ("norm.weight", TENSORS["norm.weight"])]))
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path / "file" / "folder")


def test_random_tensors_depend_on_seed_and_name_alone() -> None:
    again, other = dict(random_tensors(CONFIG, seed=0)), dict(random_tensors(CONFIG, seed=1))
    some = dict(random_tensors(CONFIG, seed=0, expert_ids=(5, 2)))
    for name, tensor in TENSORS.items():
        bits = tensor.reshape(-1).view(torch.uint8)
        assert torch.equal(again[name].reshape(-1).view(torch.uint8), bits), name
        assert tensor.numel() < 32 or not torch.equal(other[name].reshape(-1).view(torch.uint8), bits), name
        assert name not in some or torch.equal(some[name].reshape(-1).view(torch.uint8), bits), name
    left_out = re.compile(r"layers\.\d+\.ffn\.experts\.(?![25]\.)")
    assert TENSORS.keys() - some.keys() == {name for name in TENSORS if left_out.match(name)}


def test_random_weights_have_the_spread_of_their_width() -> None:
    for name, tensor in TENSORS.items():
        if not name.endswith(".weight") or tensor.numel() < 4096 or (name.endswith("embed.weight") and "engram" not in name):
            continue
        scale = TENSORS.get(name.removesuffix("weight") + "scale")
        if scale is None:
            values = tensor.float()
        elif tensor.dtype == torch.int8:
            values = dequantize_fp4(tensor, scale)
        else:
            values = (dequantize_rows_fp8 if "engram.embed" in name else dequantize_fp8)(tensor, scale)
        expected = ENGRAM_ROW_STD if "engram.embed" in name else values.shape[-1] ** -0.5
        assert values.isfinite().all(), name
        assert math.isclose(values.std().item(), expected, rel_tol=0.35), (name, values.std().item(), expected)


@pytest.mark.parametrize("quantized", [True, False])
def test_random_model_is_what_its_saved_tensors_load_to(tmp_path: Path, quantized: bool) -> None:
    config = replace(CONFIG, quantized=quantized)
    save_checkpoint(tmp_path, config, random_tensors(config, seed=3), TOKENIZER)
    assert torch.equal(load_model(tmp_path, device="cpu")(TOKENS), random_model(config, seed=3, device="cpu")(TOKENS))
