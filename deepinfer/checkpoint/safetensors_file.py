"""Safetensors files by their headers: what is in them is known, and checked, before a byte of tensor data is read.

Tensor data is read straight into its destination, so that loading needs no memory of its own and a slice of a tensor (some
experts, some table rows) costs only its own bytes. Writing copies nothing either.

Format: 8 bytes header length, little-endian; a JSON header, name -> dtype, shape and byte range behind the header; the data.
"""

import json
import math
import mmap
import os
from collections.abc import Mapping
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
        view = as_bytes(destination)
        if not view:
            return
        row_bytes = self.nbytes // self.shape[0] if self.shape else self.nbytes
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset + first_row * row_bytes)
                done = 0
                while done < len(view):
                    count = file.readinto(view[done:])
                    if not count:
                        raise CorruptFile(f"{self.path}: ends {len(view) - done} bytes early while reading tensor data")
                    done += count
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from error

    def empty(self) -> Shaped[Tensor, "..."]:
        """A CPU tensor to read it into."""
        return torch.empty(self.shape, dtype=DTYPES[self.dtype])

    def mapped(self) -> Shaped[Tensor, "..."]:
        """The tensor as a private view of the file: only what is touched is read, and the system may drop it again."""
        start = self.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            with self.path.open("rb") as file:
                # Copy-on-write, because torch wants a writable buffer; nothing writes to it.
                region = mmap.mmap(file.fileno(), self.offset - start + self.nbytes, access=mmap.ACCESS_COPY, offset=start)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: cannot be mapped into memory ({error})") from error
        flat = torch.frombuffer(region, dtype=torch.uint8, count=self.nbytes, offset=self.offset - start)
        return flat.view(DTYPES[self.dtype]).view(self.shape)


def as_bytes(tensor: Shaped[Tensor, "..."]) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    assert tensor.is_contiguous()
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def write_safetensors(path: Path, tensors: Mapping[str, Shaped[Tensor, "..."]]) -> None:
    """Write one file; widest dtypes first, so that every tensor is aligned to its element size.

    Raises: CheckpointError if a dtype has no name in the format, or the file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in ordered:
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{path}: tensor {name!r} has dtype {tensor.dtype}; known are {', '.join(map(str, DTYPE_NAMES))}")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for _, tensor in ordered:
                file.write(as_bytes(tensor.cpu().contiguous()))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror})") from error


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
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path}: the safetensors header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise CorruptFile(f"{path}: the safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _parse_entry(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_layout(path, tensors, 8 + length, size)
    return tensors


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        valid = isinstance(dtype, str) and isinstance(shape, list) and all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise CorruptFile(f"{path}: malformed header entry for tensor {name!r}")
    if dtype not in DTYPES:
        raise CorruptFile(f"{path}: tensor {name!r} has dtype {dtype!r}; known are {', '.join(DTYPES)}")
    expected = DTYPES[dtype].itemsize * math.prod(shape)
    if end - start != expected:
        raise CorruptFile(f"{path}: tensor {name!r} is {dtype} {shape}, which is {expected} bytes, but has {end - start}")
    return StoredTensor(path, dtype, tuple(shape), data_start + start, end - start)


def _check_layout(path: Path, tensors: Mapping[str, StoredTensor], data_start: int, file_size: int) -> None:
    """The format has the tensors side by side from the header to the end of the file: no gap, no byte twice."""
    end = data_start
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if stored.offset + stored.nbytes > file_size:
            last = stored.offset + stored.nbytes
            raise CorruptFile(f"{path}: truncated: tensor {name!r} ends at byte {last}, the file at {file_size}")
        if stored.offset != end:
            raise CorruptFile(f"{path}: tensor {name!r} begins at byte {stored.offset}, the one before it ends at {end}")
        end += stored.nbytes
    if end != file_size:
        raise CorruptFile(f"{path}: has {file_size - end} bytes behind its last tensor")


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
    except OSError as error:
        raise CheckpointError(f"{index_path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index_path}: expected a JSON object with 'weight_map': tensor name -> file name") from error
    if not valid:
        raise CheckpointError(f"{index_path}: file names must be plain names inside the folder")
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(f"{index_path}: names files that are absent: {', '.join(absent[:10])} ({len(absent)} in all)")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        stored = read_header(folder / file)
        extra = [name for name in stored if weight_map.get(name) != file]
        if extra:
            raise CheckpointError(f"{index_path}: {len(extra)} tensors of {file} are not listed for it, first {extra[0]!r}")
        tensors |= stored
    lost = sorted(weight_map.keys() - tensors.keys())
    if lost:
        raise CheckpointError(f"{index_path}: {len(lost)} tensors are not in the file it names for them, first {lost[0]!r}")
    return tensors
