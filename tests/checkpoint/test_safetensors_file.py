import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer.checkpoint.safetensors_file import (
    DTYPE_NAMES,
    INDEX_NAME,
    SINGLE_NAME,
    StoredTensor,
    open_checkpoint,
    read_header,
    write_safetensors,
)
from deepinfer.errors import CheckpointError, CorruptFile


def example_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    bits = {name: torch.randint(0, 200, (6, 16), dtype=torch.uint8, generator=generator) for name in DTYPE_NAMES.values()}
    tensors = {name: bits[name].flatten().view(dtype).view(6, -1) for dtype, name in DTYPE_NAMES.items()}
    return tensors | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}


def read(stored: StoredTensor) -> Tensor:
    dtype = {name: dtype for dtype, name in DTYPE_NAMES.items()}[stored.dtype]
    value = torch.empty(stored.shape, dtype=dtype)
    stored.read_into(value)
    return value


def same_bytes(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("writer", [save_file, lambda tensors, path: write_safetensors(path, tensors)], ids=["library", "own"])
def test_what_either_writer_wrote_both_readers_read(tmp_path: Path, writer: Any) -> None:
    tensors, path = example_tensors(), tmp_path / "x.safetensors"
    writer(tensors, path)
    by_library, own = load_file(path), read_header(path)
    assert by_library.keys() == own.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bytes(by_library[name], tensor), name
        assert same_bytes(read(own[name]), tensor), name
        if tensor.numel():
            assert same_bytes(own[name].mapped(), tensor), name


def test_rows_are_read_from_their_place(tmp_path: Path) -> None:
    tensor = torch.arange(60, dtype=torch.float32).view(10, 6)
    write_safetensors(tmp_path / "x", {"a": torch.zeros(3), "b": tensor})
    rows = torch.empty(2, 6)
    read_header(tmp_path / "x")["b"].read_into(rows, first_row=7)
    assert torch.equal(rows, tensor[7:9])


def test_tensors_lie_at_multiples_of_their_element_size(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(2), "c": torch.zeros(1)})
    for stored in read_header(tmp_path / "x").values():
        assert stored.offset % {"F32": 4, "U8": 1}[stored.dtype] == 0


def test_unknown_dtype_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'a' has dtype torch\.complex64"):
        write_safetensors(tmp_path / "x", {"a": torch.zeros(1, dtype=torch.complex64)})


@pytest.fixture
def whole_file(tmp_path: Path) -> bytes:
    write_safetensors(tmp_path / "whole", {"first": torch.zeros(40), "second": torch.ones(7, 5)})
    return (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("cut", [0, 4, 7, 8, 9, 60, "header", "header+1", "middle", -1])
def test_truncated_file_is_refused(tmp_path: Path, whole_file: bytes, cut: int | str) -> None:
    header_end = 8 + int.from_bytes(whole_file[:8], "little")
    named = {"header": header_end, "header+1": header_end + 1, "middle": (header_end + len(whole_file)) // 2}
    path = tmp_path / "cut"
    path.write_bytes(whole_file[: named[cut] if isinstance(cut, str) else cut])
    with pytest.raises(CorruptFile, match=r"cut: .*truncated|cut: the safetensors header is not valid JSON"):
        read_header(path)


def test_file_that_shrinks_after_its_header_was_read_is_refused(tmp_path: Path, whole_file: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(whole_file)
    stored = read_header(path)["second"]
    path.write_bytes(whole_file[:-3])
    with pytest.raises(CorruptFile, match="ends 3 bytes early"):
        read(stored)


def test_file_that_vanishes_after_its_header_was_read_is_an_error_of_ours(tmp_path: Path, whole_file: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(whole_file)
    stored = read_header(path)["second"]
    path.unlink()
    for attempt in (lambda: read(stored), stored.mapped):
        with pytest.raises(CheckpointError, match="No such file"):
            attempt()


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


BAD_HEADERS = {
    "garbage": (b"\xff\xfe\x00garbage", "not valid JSON"),
    "deep": (b"[" * 100_000, "not valid JSON"),
    "list": (b"[]", "not a JSON object"),
    "entry no object": ({"a": 3}, "malformed header entry for tensor 'a'"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "malformed header entry for tensor 'a'"),
    "dtype a list": ({"a": entry(dtype=["F32"])}, "malformed header entry for tensor 'a'"),
    "shape text": ({"a": entry(shape="2")}, "malformed header entry for tensor 'a'"),
    "shape negative": ({"a": entry(shape=[-2])}, "malformed header entry for tensor 'a'"),
    "shape fraction": ({"a": entry(shape=[2.0])}, "malformed header entry for tensor 'a'"),
    "three offsets": ({"a": entry(data_offsets=[0, 4, 8])}, "malformed header entry for tensor 'a'"),
    "unknown dtype": ({"a": entry(dtype="F4")}, "'a' has dtype 'F4'; known are F32"),
    "size and shape differ": ({"a": entry(shape=[3])}, r"'a' is F32 \[3\], which is 12 bytes, but has 8"),
    "behind the file": ({"a": entry(shape=[4], data_offsets=[0, 16])}, "truncated: tensor 'a' ends"),
    "overlap": ({"a": entry(), "b": entry(shape=[1], data_offsets=[4, 8])}, "'b' begins at byte"),
    "gap": ({"a": entry(shape=[1], data_offsets=[4, 8])}, "'a' begins at byte"),
    "data left over": ({"a": entry(shape=[1], data_offsets=[0, 4])}, "has 4 bytes behind its last tensor"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_header_is_refused_by_name(tmp_path: Path, case: str) -> None:
    header, message = BAD_HEADERS[case]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CorruptFile, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_header_length_beyond_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff" * 32)
    with pytest.raises(CorruptFile, match="not a safetensors file, or truncated"):
        read_header(tmp_path / "x")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "one.safetensors", {"a": torch.zeros(2)})
    write_safetensors(tmp_path / "two.safetensors", {"b": torch.ones(2)})
    return tmp_path


def write_index(folder: Path, index: Any) -> None:
    (folder / INDEX_NAME).write_text(index if isinstance(index, str) else json.dumps(index))


BAD_INDEXES: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", "expected a JSON object with 'weight_map'"),
    "a list": ([], "expected a JSON object with 'weight_map'"),
    "no map": ({"metadata": {}}, "expected a JSON object with 'weight_map'"),
    "map a list": ({"weight_map": ["a"]}, "expected a JSON object with 'weight_map'"),
    "file a list": ({"weight_map": {"a": ["one.safetensors"]}}, "expected a JSON object with 'weight_map'"),
    "file outside": ({"weight_map": {"a": "../one.safetensors"}}, "plain names inside the folder"),
    "file absent": (
        {"weight_map": {"a": "one.safetensors", "b": "three.safetensors"}},
        r"names files that are absent: three.safetensors \(1 in all\)",
    ),
    "tensor elsewhere": ({"weight_map": {"a": "two.safetensors", "b": "two.safetensors"}}, "1 tensors are not in the file .* 'a'"),
    "tensor nowhere": (
        {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}},
        "1 tensors are not in the file .* 'c'",
    ),
    "tensor not listed": ({"weight_map": {"b": "two.safetensors", "c": "one.safetensors"}}, "1 tensors of one.* not listed .* 'a'"),
}


@pytest.mark.parametrize("case", BAD_INDEXES)
def test_bad_index_is_refused_by_name(sharded: Path, case: str) -> None:
    index, message = BAD_INDEXES[case]
    write_index(sharded, index)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(sharded)
    assert INDEX_NAME in str(caught.value)


def test_index_leads_to_each_file(sharded: Path) -> None:
    write_index(sharded, {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    found = open_checkpoint(sharded)
    assert {name: stored.path.name for name, stored in found.items()} == {"a": "one.safetensors", "b": "two.safetensors"}


def test_folder_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"neither {INDEX_NAME} nor {SINGLE_NAME}"):
        open_checkpoint(tmp_path)
