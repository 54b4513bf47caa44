"""Safetensors files by their headers: what is in them is known, and checked, before a byte of tensor data is read.

Tensor data is read straight into its destination, so that loading needs no memory of its own and a slice of a tensor (some
experts, some table rows) costs only its own bytes. Writing goes through the `safetensors` library.
"""

import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer.dims import Shaped, Tensor
from deepinfer.errors import CheckpointError, CorruptFile

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I64": torch.int64,
    "F16": torch.float16,
    "U8": torch.uint8,
    "I32": torch.int32,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: `nbytes` bytes from `offset` of `path`, in C order."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def read_into(self, destination: Shaped[Tensor, "..."], first_row: int = 0) -> None:
        """Fill a contiguous CPU tensor with rows from `first_row` on (rows of the first dimension). Mutates `destination`."""
        wanted = destination.numel() * destination.element_size()
        row_bytes = self.nbytes // self.shape[0] if self.shape else self.nbytes
        if wanted == 0:
            return
        view = memoryview(destination.view(torch.uint8).reshape(-1).numpy()).cast("B")
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset + first_row * row_bytes)
            done = 0
            while done < wanted:
                count = file.readinto(view[done:])
                if not count:
                    raise CorruptFile(f"{self.path}: ends {wanted - done} bytes early while reading tensor data")
                done += count

    def mapped(self) -> Shaped[Tensor, "..."]:
        """The tensor as a read-only view of the file: only what is touched is read, and the system may drop it again."""
        with self.path.open("rb") as file:
            start = self.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            region = mmap.mmap(file.fileno(), self.offset - start + self.nbytes, access=mmap.ACCESS_COPY, offset=start)
        flat = torch.frombuffer(region, dtype=torch.uint8, count=self.nbytes, offset=self.offset - start)
        return flat.view(DTYPES[self.dtype]).view(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file.

    Raises: CorruptFile if it is truncated, no safetensors file, or its header contradicts itself or the file's size.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CorruptFile(f"{path}: not a safetensors file, or truncated (header of {length} bytes, file of {size})")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CorruptFile(f"{path}: the safetensors header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise CorruptFile(f"{path}: the safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _parse_entry(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _parse_entry(path: Path, name: str, entry: Any, data_start: int, file_size: int) -> StoredTensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        valid = all(isinstance(n, int) and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise CorruptFile(f"{path}: malformed header entry for tensor {name!r}")
    if dtype not in DTYPES:
        raise CorruptFile(f"{path}: tensor {name!r} has dtype {dtype!r}; known are {', '.join(DTYPES)}")
    expected = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    for n in shape:
        expected *= n
    if end - start != expected:
        raise CorruptFile(f"{path}: tensor {name!r} is {dtype} {list(shape)}, which is {expected} bytes, but has {end - start}")
    if data_start + end > file_size:
        raise CorruptFile(f"{path}: truncated: tensor {name!r} ends at byte {data_start + end}, the file at {file_size}")
    return StoredTensor(path, dtype, shape, data_start + start, end - start)


def open_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder: by its index if it has one, else from `model.safetensors`.

    Raises:
        CheckpointError: there is neither, or the index is malformed, names absent files, or disagrees with the files.
        CorruptFile: see `read_header`.
    """
    index_path, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if not index_path.is_file():
        if not single.is_file():
            raise CheckpointError(f"{folder}: neither {INDEX_NAME} nor {SINGLE_NAME} is there")
        return read_header(single)
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
        valid = all(isinstance(name, str) and os.path.basename(name) == name for name in files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index_path}: expected a JSON object with 'weight_map': tensor name -> file name") from error
    if not valid:
        raise CheckpointError(f"{index_path}: file names must be plain names inside the folder")
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(f"{index_path}: names files that are absent: {', '.join(absent[:10])} ({len(absent)} in all)")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in read_header(folder / file).items():
            if weight_map.get(name) == file:
                tensors[name] = stored
    lost = sorted(weight_map.keys() - tensors.keys())
    if lost:
        raise CheckpointError(f"{index_path}: {len(lost)} tensors are not in the file it names for them, first {lost[0]!r}")
    return tensors
