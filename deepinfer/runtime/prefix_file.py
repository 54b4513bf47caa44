"""Stored prefixes in a file that another process can load: safetensors, with a manifest that says what they belong to.

| tensor | holds |
|---|---|
| `manifest` | JSON as bytes: version, root, digests of blocks, endings, sha256 of every other tensor |
| `blocks.N` | entries or index keys of all stored blocks, in the manifest's order; N counts `ModelCache.block_tensors` |
| `slots.N` | rings, pending groups or history of all kept slots; N counts `ModelCache.slot_tensors` |

The root is a digest of the model's weights, the precision and whatever else entries depend on: a file with another one is refused.
A refused file changes nothing; prompts are then simply computed.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deepinfer.checkpoint.safetensors_file import StoredTensor, as_bytes, read_header, write_safetensors
from deepinfer.dims import Tensor
from deepinfer.errors import CheckpointError, PrefixFileError
from deepinfer.model.cache import ModelCache
from deepinfer.runtime.prefix_cache import DIGEST_BYTES, Ending, PrefixCache
from deepinfer.runtime.shared_ids import SharedIdPool

VERSION = 1


def save_prefixes(path: Path, cache: PrefixCache, memory: ModelCache) -> int:
    """Write everything that is stored; returns tokens in full blocks. Nothing may be in flight.

    The file is complete or not there: it is written beside its place first.

    Raises: PrefixFileError if it cannot be written.
    """
    stored, endings = cache.stored_blocks, cache.stored_endings
    blocks = [*stored.values(), *(e.block for e in endings if e.block is not None)]
    slots = [e.slot for e in endings if e.slot is not None]
    tensors = {f"blocks.{n}": _rows(t, blocks) for n, t in enumerate(memory.block_tensors())}
    tensors |= {f"slots.{n}": _rows(t, slots) for n, t in enumerate(memory.slot_tensors())}
    manifest = {
        "version": VERSION,
        "root": cache.root.hex(),
        "blocks": [digest.hex() for digest in stored],
        "endings": [[e.digest.hex(), e.num_blocks, e.tokens, e.block is not None, e.slot is not None] for e in endings],
        "sha256": {name: _sha256(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(manifest).encode()
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        write_safetensors(unfinished, {**tensors, "manifest": torch.frombuffer(bytearray(text), dtype=torch.uint8)})
        unfinished.replace(path)
    except (CheckpointError, OSError) as error:
        raise PrefixFileError(f"{path}: cannot be written ({error})") from error
    return len(stored) * cache.block_size


def _rows(tensor: Tensor, ids: list[int]) -> Tensor:
    return tensor[torch.tensor(ids, dtype=torch.int64, device=tensor.device)].cpu().contiguous()


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor)).hexdigest()


@dataclass(frozen=True, slots=True)
class _Contents:
    """A file that has passed every check."""

    digests: list[bytes]
    endings: list[tuple[bytes, int, tuple[int, ...], bool, bool]]
    blocks: list[Tensor]
    slots: list[Tensor]


def load_prefixes(path: Path, cache: PrefixCache, blocks: SharedIdPool, slots: SharedIdPool, memory: ModelCache) -> int:
    """Take the prefixes of a file into the cache, as far as memory is free; returns tokens in full blocks.

    Nothing may be in flight.

    Raises: PrefixFileError if the file is damaged, of another version, or of another model or setting; the cache is then unchanged.
    """
    try:
        contents = _read(path, cache.root, memory)
    except CheckpointError as error:
        raise PrefixFileError(f"{path}: {error}") from error
    known = cache.stored_blocks
    wanted = [n for n, digest in enumerate(contents.digests) if digest not in known][: blocks.num_free - blocks.num_idle]
    taken = blocks.take(len(wanted))
    _place(memory.block_tensors(), taken, contents.blocks, wanted)
    cache.add_blocks([contents.digests[n] for n in wanted], taken)
    # The end of a prefix goes before its beginning.
    blocks.give_back(reversed(taken))
    block_row, slot_row = len(contents.digests), 0
    for digest, num_blocks, tokens, has_block, has_slot in contents.endings:
        ending = Ending(digest, num_blocks, tokens, None, None)
        has_room = blocks.num_free - blocks.num_idle >= has_block and slots.num_free - slots.num_idle >= has_slot
        if has_room and not cache.has_ending(digest, tokens):
            if has_block:
                ending = replace(ending, block=blocks.take(1)[0])
                _place(memory.block_tensors(), [ending.block], contents.blocks, [block_row])
            if has_slot:
                ending = replace(ending, slot=slots.take(1)[0])
                _place(memory.slot_tensors(), [ending.slot], contents.slots, [slot_row])
            cache.add_ending(ending)
            blocks.give_back([] if ending.block is None else [ending.block])
            slots.give_back([] if ending.slot is None else [ending.slot])
        block_row, slot_row = block_row + has_block, slot_row + has_slot
    return len(wanted) * cache.block_size


def _place(memory: list[Tensor], ids: Sequence[int | None], contents: list[Tensor], rows: list[int]) -> None:
    for target, source in zip(memory, contents, strict=True):
        place = torch.tensor(ids, dtype=torch.int64, device=target.device)
        target[place] = source[rows].to(target.device)


def _read(path: Path, root: bytes, memory: ModelCache) -> _Contents:
    header = read_header(path)
    if "manifest" not in header:
        raise PrefixFileError(f"{path}: no manifest, so this is not a file of stored prefixes")
    manifest = _manifest(path, header["manifest"])
    if manifest["root"] != root.hex():
        raise PrefixFileError(
            f"{path}: of another model, precision, block size or replay mode: expected root {root.hex()}, got {manifest['root']}"
        )
    try:
        digests = [_digest(text) for text in manifest["blocks"]]
        endings = [(_digest(d), int(n), tuple(int(t) for t in ts), bool(b), bool(s)) for d, n, ts, b, s in manifest["endings"]]
        sums = dict(manifest["sha256"])
    except (KeyError, TypeError, ValueError) as error:
        raise PrefixFileError(f"{path}: malformed manifest ({error})") from error
    num_blocks, num_slots = len(digests) + sum(e[3] for e in endings), sum(e[4] for e in endings)

    def read(kind: str, like: list[Tensor], count: int) -> list[Tensor]:
        return [_tensor(path, header, f"{kind}.{n}", (count, *t.shape[1:]), t.dtype, sums) for n, t in enumerate(like)]

    blocks = read("blocks", memory.block_tensors(), num_blocks)
    slots = read("slots", memory.slot_tensors(), num_slots)
    return _Contents(digests, endings, blocks, slots)


def _digest(text: str) -> bytes:
    digest = bytes.fromhex(text)
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"digest {text!r} has {len(digest)} bytes, expected {DIGEST_BYTES}")
    return digest


def _manifest(path: Path, stored: StoredTensor) -> dict[str, Any]:
    text = torch.empty(stored.shape, dtype=torch.uint8)
    try:
        stored.read_into(text)
        manifest = json.loads(bytes(text.tolist()))
        version, _ = manifest["version"], manifest["root"]
    except (ValueError, KeyError, TypeError) as error:
        raise PrefixFileError(f"{path}: malformed manifest ({error})") from error
    if version != VERSION:
        raise PrefixFileError(f"{path}: version {version!r}, expected {VERSION}")
    return dict(manifest)


def _tensor(
    path: Path, header: dict[str, StoredTensor], name: str, shape: tuple[int, ...], dtype: torch.dtype, sums: dict[str, str]
) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    stored = header.get(name)
    if stored is None or stored.shape != shape or stored.nbytes != tensor.nbytes:
        found = "nothing" if stored is None else f"{stored.dtype} {list(stored.shape)}"
        raise PrefixFileError(f"{path}: {name}: expected {dtype} {list(shape)}, got {found}")
    stored.read_into(tensor)
    if _sha256(tensor) != sums.get(name):
        raise PrefixFileError(f"{path}: {name} is damaged: its sha256 is not the manifest's")
    return tensor
