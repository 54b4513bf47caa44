"""Host tensors to the device in few transfers that nobody waits for."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from deepinfer.dims import Shaped, Tensor

Record = TypeVar("Record", bound=Any)


def pack(tensors: Sequence[Shaped[Tensor, "..."]], device: torch.device) -> Shaped[Tensor, " n"]:
    """Tensors of one dtype, flattened behind each other; pinned if an accelerator will read them.

    From pageable memory the host would wait for the copy.
    """
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return packed if device.type == "cpu" else packed.pin_memory()


def unpack(packed: Shaped[Tensor, " n"], like: Sequence[Shaped[Tensor, "..."]]) -> list[Shaped[Tensor, "..."]]:
    """Views of `packed` in the shapes of the tensors that it was packed from."""
    parts = packed.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def to_device(tensors: Sequence[Shaped[Tensor, "..."]], device: torch.device) -> list[Shaped[Tensor, "..."]]:
    """Copies on the device, one transfer for each dtype."""
    moved: list[Tensor] = list(tensors)
    for dtype in {tensor.dtype for tensor in tensors}:
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        group = [tensors[i] for i in places]
        for i, tensor in zip(places, unpack(pack(group, device).to(device, non_blocking=True), group), strict=True):
            moved[i] = tensor
    return moved


def host_copy(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """A copy on the host, made without waiting; valid once an event recorded after it has passed."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def move_record(record: Record, device: torch.device) -> Record:
    """A copy of a dataclass whose tensors are on the device; other fields stay."""
    tensors = {f.name: value for f in fields(record) if isinstance(value := getattr(record, f.name), Tensor)}
    if not tensors:
        return record
    moved: Record = replace(record, **dict(zip(tensors, to_device(list(tensors.values()), device), strict=True)))
    return moved
