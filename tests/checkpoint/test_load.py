import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.checkpoint import load
from deepinfer.checkpoint.load import load_model
from deepinfer.checkpoint.safetensors_file import StoredTensor, open_checkpoint
from deepinfer.checkpoint.write import random_tensors, save_checkpoint
from deepinfer.config import ModelConfig
from deepinfer.config_json import config_to_json, load_config
from deepinfer.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    CorruptFile,
    DeepInferError,
    TensorMismatch,
    TokenizerError,
)
from deepinfer.presets import byte_tokenizer_json, flash_slice, tiny_config, with_engram

SELECT_FULL = Path(__file__).parents[1] / "data" / "golden" / "select_full"
TOKENS = torch.arange(3, 50)
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a recorded case's checkpoint, to be damaged."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(SELECT_FULL / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if loading comes as far as allocating parameters."""

    def refuse(*args: Any) -> None:
        pytest.fail("parameters were allocated")

    monkeypatch.setattr(load, "fill_parameters", refuse)


def edit_config(folder: Path, **changes: Any) -> None:
    data = json.loads((folder / "config.json").read_text())
    data["text_config"] |= changes
    (folder / "config.json").write_text(json.dumps(data))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.usefixtures("no_allocation")
def test_all_wrong_tensors_are_reported_at_once_before_anything_is_allocated(folder: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["layers.3.attn.wkv.scale"], tensors["mtp.1.hc_ffn_fn"]
        tensors["layers.8.attn.wkv.weight"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.zeros(2)
        tensors["norm.weight"] = torch.zeros(65, dtype=torch.bfloat16)
        tensors["layers.0.ffn.experts.7.w2.weight"] = tensors["layers.0.ffn.experts.7.w2.weight"].view(torch.uint8)

    edit_tensors(folder, damage)
    with pytest.raises(TensorMismatch) as caught:
        load_model(folder)
    error = caught.value
    assert error.missing == ["layers.3.attn.wkv.scale", "mtp.1.hc_ffn_fn"]
    assert sorted(error.unexpected) == ["layers.8.attn.wkv.weight", "model.norm.weight"]
    assert error.mismatched == [
        "layers.0.ffn.experts.7.w2.weight: expected I8 [64, 16], got U8 [64, 16]",
        "norm.weight: expected BF16 [64], got BF16 [65]",
    ]
    for name in (*error.missing, *error.unexpected, *error.mismatched, str(folder)):
        assert name in str(error)


@pytest.mark.usefixtures("no_allocation")
def test_report_of_wrong_tensors_stays_readable(folder: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]

    edit_tensors(folder, damage)
    with pytest.raises(TensorMismatch, match=r"missing \(456\):") as caught:
        load_model(folder)
    assert "... and 436 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 30


def test_vision_tensors_are_known_and_left_alone(folder: Path) -> None:
    plain = load_model(folder, device="cpu")(TOKENS)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("vision.patch_embed.proj.bias", "aligner.w1.weight", "image_start", "image_newline"):
            tensors[name] = torch.zeros(3)
        tensors["layers.0.ffn.gate.bias_vl"].fill_(torch.nan)

    edit_tensors(folder, add)
    assert torch.equal(load_model(folder, device="cpu")(TOKENS), plain)


def cut(folder: Path, size: int) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:size])


def shorter_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(byte_tokenizer_json(280), encoding="utf-8")


DAMAGES: dict[str, tuple[Callable[[Path], Any], type[DeepInferError], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), CheckpointError, "no config.json"),
    "no tensors": (lambda f: (f / "model.safetensors").unlink(), CheckpointError, "neither model.safetensors.index.json nor"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), TokenizerError, "tokenizer.json"),
    "tokenizer no JSON": (lambda f: (f / "tokenizer.json").write_text("{"), TokenizerError, "format of the tokenizers library"),
    "another tokenizer": (shorter_tokenizer, TokenizerError, "has 280 tokens, but config.json says vocab_size 320"),
    "cut in the header": (lambda f: cut(f, 100), CorruptFile, "model.safetensors: .*truncated"),
    "cut in the data": (lambda f: cut(f, 900_000), CorruptFile, "model.safetensors: truncated: tensor"),
    "one byte short": (lambda f: cut(f, -1), CorruptFile, "model.safetensors: truncated: tensor"),
    "empty": (lambda f: cut(f, 0), CorruptFile, "model.safetensors: not a safetensors file"),
    "index of absent files": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"norm.weight": "model-1.safetensors"}}'),
        CheckpointError,
        "names files that are absent: model-1.safetensors",
    ),
    "Engram map": (
        lambda f: edit_config(f, engram_compressed_vocab_size=269),
        TokenizerError,
        "gives 268 compressed ids, but config.json says engram_compressed_vocab_size 269",
    ),
    "Engram moduli": (
        lambda f: edit_config(f, engram_vocab_size=90),
        ConfigError,
        r"engram_num_embeddings = \[434, 606\]: .*engram_vocab_size 90",
    ),
    "Engram table": (
        lambda f: edit_config(f, engram_num_embeddings=[434, 607]),
        ConfigError,
        r"engram_num_embeddings = \[434, 607\]: .* add up to \[434, 606\]",
    ),
    "another width": (lambda f: edit_config(f, moe_intermediate_size=64), TensorMismatch, "wrong shape or dtype"),
    "more layers": (
        lambda f: edit_config(f, num_hidden_layers=9, compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0]),
        TensorMismatch,
        "missing",
    ),
}


@pytest.mark.usefixtures("no_allocation")
@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_folder_is_refused_before_anything_is_allocated(folder: Path, case: str) -> None:
    damage, error, message = DAMAGES[case]
    damage(folder)
    with pytest.raises(error, match=message) as caught:
        load_model(folder)
    assert type(caught.value) is error


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "precision": ({"precision": "fp8"}, "precision 'fp8': expected one of native, float32"),
    "engram": ({"engram": "disk"}, "engram = 'disk': expected one of"),
    "layers": ({"layers": 9}, "layers = 9: the model has 8"),
    "no layers": ({"layers": 0}, "layers = 0: the model has 8"),
    "expert": ({"expert_ids": [3, 8]}, r"expert_ids: \[8\]; expected distinct ids below 8"),
    "expert twice": ({"expert_ids": [3, 3]}, "expert_ids: repeated ids"),
}


@pytest.mark.usefixtures("no_allocation")
@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_option_that_cannot_be_honoured_is_refused_by_name(case: str) -> None:
    options, message = BAD_OPTIONS[case]
    with pytest.raises(ConfigError, match=message):
        load_model(SELECT_FULL, **options)


def test_allocation_that_fails_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the CPU's allocator says; asking it for too much would succeed where memory is overcommitted.
    message = (
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    )

    def fail(*args: Any) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(load, "fill_parameters", fail)
    with pytest.raises(CapacityError, match=r"select_full: its 0\.0 GiB of tensors do not fit on cpu"):
        load_model(SELECT_FULL, device="cpu")


@pytest.fixture
def tensors_read(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[Path, int], int]:
    """Bytes read from each place of each file."""
    read: dict[tuple[Path, int], int] = {}
    original = StoredTensor.read_into

    def noting(self: StoredTensor, destination: torch.Tensor, first_row: int = 0) -> None:
        place = (self.path, self.offset)
        read[place] = read.get(place, 0) + destination.nbytes
        original(self, destination, first_row)

    monkeypatch.setattr(StoredTensor, "read_into", noting)
    return read


def test_subset_of_experts_reads_only_their_bytes(tensors_read: dict[tuple[Path, int], int]) -> None:
    whole = load_model(SELECT_FULL, device="cpu")
    tensors_read.clear()
    part = load_model(SELECT_FULL, device="cpu", expert_ids=[6, 1])
    stored = open_checkpoint(SELECT_FULL)
    names = {(t.path, t.offset): name for name, t in stored.items()}
    read = {names[place]: count for place, count in tensors_read.items()}
    assert all(count == stored[name].nbytes for name, count in read.items())
    not_held = re.compile(r"layers\.\d+\.ffn\.experts\.(?![61]\.)|.*\.bias_vl$")
    assert stored.keys() - read.keys() == {name for name in stored if not_held.match(name)}
    for (name, held), full in zip(part.named_parameters(), whole.parameters(), strict=True):
        is_stack = ".experts." in name and name.startswith("layers.")
        expected = full.view(torch.uint8)[[6, 1]] if is_stack else full.view(torch.uint8)
        assert torch.equal(held.view(torch.uint8), expected), name


def test_outputs_of_two_halves_of_the_experts_add_up() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    models = [load_model(SELECT_FULL, "float32", "cpu", expert_ids=ids) for ids in (None, range(4), (7, 5, 6, 4))]
    weights, ids = models[0].layers[2].ffn.gate(x)
    whole, low, high = (model.layers[2].ffn.experts(x, weights, ids) for model in models)
    assert torch.equal(whole, low + high)


def test_first_layers_alone_read_only_their_bytes_and_give_their_outputs(tensors_read: dict[tuple[Path, int], int]) -> None:
    whole = load_model(SELECT_FULL, "float32", "cpu")
    tensors_read.clear()
    part = load_model(SELECT_FULL, "float32", "cpu", layers=4)
    stored = open_checkpoint(SELECT_FULL)
    read = {name for name, t in stored.items() if (t.path, t.offset) in tensors_read}
    kept = {name for name in stored if name.startswith(("layers.0.", "layers.1.", "layers.2.", "layers.3."))}
    assert read == {name for name in kept if not name.endswith("bias_vl")} | {"embed.weight", "norm.weight", "head.weight"}
    assert part.config == replace(part.config, n_layers=4, kv_source_layers=(2,), index_source_layers=(2,))
    outputs = []
    for model in (whole, part):
        handle = model.layers[3].register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
        model(TOKENS)
        handle.remove()
    assert torch.equal(*outputs)


@pytest.mark.parametrize("engram", ["host", "mapped"])
def test_engram_tables_elsewhere_give_equal_logits(engram: str) -> None:
    here, there = (load_model(SELECT_FULL, device="cpu", engram=place) for place in ("device", engram))
    assert torch.equal(here(TOKENS), there(TOKENS))


def test_mapped_tables_are_not_read(tensors_read: dict[tuple[Path, int], int]) -> None:
    load_model(SELECT_FULL, device="cpu", engram="mapped")
    stored = open_checkpoint(SELECT_FULL)
    read = {name for name, t in stored.items() if (t.path, t.offset) in tensors_read}
    assert {name for name in stored if ".engram.embed." in name}.isdisjoint(read)
    assert "layers.1.engram.wkv.weight" in read


def test_decoded_copies_are_kept_only_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    small = load_model(SELECT_FULL, device="cpu")
    assert small.layers[0].attn.wkv.expanded is not None
    monkeypatch.setattr(load, "EXPAND_LIMIT_BYTES", 1000)
    large = load_model(SELECT_FULL, device="cpu")
    assert large.layers[0].attn.wkv.expanded is None
    assert torch.equal(small(TOKENS), large(TOKENS))


# The peak is VmHWM: what getrusage calls the peak includes that of the parent at the time of the fork.
MEASURE = """
import json, pathlib, re, sys, time, torch
from deepinfer.checkpoint.load import load_model
from deepinfer.presets import random_model, tiny_config
tokens = torch.arange(3, 4)
random_model(tiny_config(), device="cpu")(tokens)  # what the libraries take at first use is not the model's
peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
base, start = peak(), time.perf_counter()
model = load_model(sys.argv[1], device="cpu", engram=sys.argv[2])
loaded, load_s = peak(), time.perf_counter() - start
start = time.perf_counter()
logits = model(tokens)
facts = {"base": base, "loading": loaded - base, "load_s": load_s, "token": peak() - base, "token_s": time.perf_counter() - start}
print(json.dumps(facts | {"finite": bool(logits.isfinite().all()), "std": float(logits.std())}))
"""


def write_random(folder: Path, config: ModelConfig) -> None:
    save_checkpoint(folder, config, random_tensors(config, seed=0), byte_tokenizer_json(config.vocab_size), max_shard_bytes=2**30)


def measure(folder: Path, engram: str) -> dict[str, float]:
    command = [sys.executable, "-c", MEASURE, str(folder), engram]
    root = Path(load.__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    facts: dict[str, float] = json.loads(done.stdout)
    return facts


@pytest.fixture(scope="module")
def medium_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 400 MB, mostly FP4, so that decoded copies are beyond the limit and none is kept."""
    tiny = tiny_config()
    moe = replace(tiny.moe, inter_dim=512, n_routed_experts=160)
    config = with_engram(replace(tiny, dim=256, moe=moe), layer_ids=(1, 4), vocab_size=30_000, n_heads=2, head_dim=256)
    folder = tmp_path_factory.mktemp("medium")
    write_random(folder, config)
    return folder


@needs_proc
@pytest.mark.parametrize("engram", ["device", "mapped"])
def test_peak_memory_while_loading_is_the_tensors_and_nothing_else(medium_folder: Path, engram: str) -> None:
    stored = open_checkpoint(medium_folder)
    held = sum(t.nbytes for name, t in stored.items() if engram == "device" or ".engram.embed." not in name)
    everything = sum(t.nbytes for t in stored.values())
    assert everything > 350e6
    assert everything - sum(t.nbytes for name, t in stored.items() if ".engram.embed." not in name) > 90e6
    facts = measure(medium_folder, engram)
    print(f"{engram}: {held / 1e6:.0f} MB of tensors, loading took {facts['loading'] / 1e6:.0f} MB more than before")
    assert held * 0.9 < facts["loading"] < held * 1.02 + 10e6


def two_published_layers() -> ModelConfig:
    """A window layer and a ratio-2 source with an Engram, in the published widths, all 384 experts; no draft blocks."""
    config = flash_slice()
    cut = replace(
        config,
        n_layers=2,
        compress_ratios=(0, 2),
        kv_source_layers=(1,),
        index_source_layers=(1,),
        indexer=replace(config.indexer, candidate_source_layer=-1),
        engram=replace(config.engram, layer_ids=(), num_embeddings=()),
        draft=replace(config.draft, n_layers=0),
    )
    return with_engram(cut, layer_ids=(1,), vocab_size=16_000, n_heads=8, head_dim=256)


@needs_proc
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_layers_of_published_widths_run_a_token_in_24_gb() -> None:
    """Needs 18 GB of disk, which are given back at once, and 24 GB of memory."""
    if shutil.disk_usage(tempfile.gettempdir()).free < 30e9:
        pytest.skip("too little free disk")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random(folder, two_published_layers())
        assert load_config(folder).moe.n_routed_experts == 384
        size = sum(path.stat().st_size for path in folder.iterdir())
        facts = measure(folder, "device")
    print(f"{size / 1e9:.2f} GB of files; {json.dumps(facts)}")
    assert facts["finite"]
    assert facts["base"] + facts["loading"] < size * 1.02 + 1e9
    assert facts["base"] + facts["token"] < 24e9


def test_config_that_is_written_is_the_one_that_is_read(folder: Path) -> None:
    config = load_config(folder)
    (folder / "config.json").write_text(json.dumps(config_to_json(config)))
    assert load_model(folder, device="cpu").config == config
