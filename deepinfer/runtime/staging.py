"""Tensors between host and device in few transfers that nobody waits for."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch

from deepinfer.dims import Shaped, Tensor, UInt8

Record = TypeVar("Record", bound=Any)
Record_co = TypeVar("Record_co", bound=Any, covariant=True)


def pack(tensors: Sequence[Shaped[Tensor, "..."]], out: UInt8[Tensor, " n"] | None = None) -> UInt8[Tensor, " n"]:
    """The bytes of tensors of any dtypes behind each other, those of large elements first, so that each is aligned."""
    return torch.cat([_bytes(tensors[i]) for i in _largest_first(tensors)], out=out)


def unpack(packed: UInt8[Tensor, " n"], like: Sequence[Shaped[Tensor, "..."]]) -> list[Shaped[Tensor, "..."]]:
    """Views of `packed` with the dtypes and shapes of the tensors that it was packed from, in their order."""
    order, views = _largest_first(like), list(like)
    for i, part in zip(order, packed.split([like[i].nbytes for i in order]), strict=True):
        views[i] = part.view(like[i].dtype).view(like[i].shape)
    return views


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:
        # A single element may have any stride, and counts as contiguous.
        flat = flat.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def _largest_first(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].itemsize)


def staged(packed: UInt8[Tensor, " n"], device: torch.device) -> UInt8[Tensor, " n"]:
    """Host bytes that the device can read while the host goes on: from pageable memory it would wait for the copy."""
    return packed if device.type == "cpu" else packed.pin_memory()


def to_device(tensors: Sequence[Shaped[Tensor, "..."]], device: torch.device) -> list[Shaped[Tensor, "..."]]:
    """Copies on the device, in one transfer."""
    return unpack(staged(pack(tensors), device).to(device, non_blocking=True), tensors) if tensors else []


def host_copy(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """A copy on the host, made without waiting; valid once an event recorded after it has passed."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _tensors_of(record: Any) -> dict[str, Tensor]:
    return {f.name: value for f in fields(record) if isinstance(value := getattr(record, f.name), Tensor)}


def move_record(record: Record, device: torch.device) -> Record:
    """A copy of a dataclass whose tensors are on the device; other fields stay."""
    tensors = _tensors_of(record)
    moved: Record = replace(record, **dict(zip(tensors, to_device(list(tensors.values()), device), strict=True)))
    return moved


@dataclass(frozen=True, slots=True, eq=False)
class Packed(Generic[Record_co]):
    """A dataclass whose tensors are views of `packed`, so that one copy moves them all."""

    record: Record_co
    packed: UInt8[Tensor, " n"]

    @classmethod
    def of(cls, record: Record) -> "Packed[Record]":
        """Copies of the tensors of a dataclass."""
        return cls._over(pack(list(_tensors_of(record).values())), record)

    def fill(self, record: Any) -> None:
        """Take over the tensors of another such dataclass, of the same shapes. Mutates these."""
        pack(list(_tensors_of(record).values()), out=self.packed)

    @classmethod
    def _over(cls, packed: UInt8[Tensor, " n"], like: Record) -> "Packed[Record]":
        tensors = _tensors_of(like)
        return cls(replace(like, **dict(zip(tensors, unpack(packed, list(tensors.values())), strict=True))), packed)

    def to_host(self) -> Record_co:
        """A host copy, made without waiting; valid once an event recorded after it has passed."""
        return self._over(host_copy(self.packed), self.record).record
