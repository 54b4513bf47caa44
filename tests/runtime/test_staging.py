"""Tensors of any kind travel together and arrive as they were."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deepinfer.runtime.staging import Packed, move_record, pack, to_device, unpack

TENSORS = {
    "bool": torch.tensor([True, False, True]),
    "int64": torch.arange(6).view(2, 3),
    "bfloat16": torch.tensor([[1.5], [-2.0], [float("nan")]], dtype=torch.bfloat16),
    "empty": torch.zeros((4, 0)),
    "float32": torch.tensor(3.25),
    "column": torch.arange(12).view(4, 3)[:, 1],
    "one of many": torch.arange(320).view(1, 320)[:, :1],
    "transposed": torch.arange(6, dtype=torch.float64).view(2, 3).t(),
    "uint8": torch.arange(5, dtype=torch.uint8),
}
ORDERS = [list(TENSORS), list(TENSORS)[::-1], ["one of many"], ["empty"], ["bool", "column"]]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("names", ORDERS, ids="-".join)
def test_what_is_packed_comes_out_as_it_was(names: list[str]) -> None:
    tensors = [TENSORS[name] for name in names]
    packed = pack(tensors)
    assert packed.shape == (sum(tensor.nbytes for tensor in tensors),)
    assert same(unpack(packed, tensors), tensors)
    assert same(to_device(tensors, torch.device("cpu")), tensors)


def test_nothing_needs_no_transfer() -> None:
    assert to_device([], torch.device("cpu")) == []


@dataclass(frozen=True)
class Sample:
    ids: Tensor
    scores: Tensor | None
    note: str


def test_a_record_is_one_buffer_and_its_host_copy_another() -> None:
    record = Sample(torch.tensor([3, 4]), torch.tensor([0.5]), "kept")
    packed = Packed.of(record)
    host = packed.to_host()
    packed.packed.zero_()
    assert packed.record.ids.tolist() == [0, 0]
    assert (host.ids.tolist(), host.scores.tolist(), host.note) == ([3, 4], [0.5], "kept")
    assert record.ids.tolist() == [3, 4]


def test_a_record_without_some_tensors_moves_the_others() -> None:
    moved = move_record(Sample(torch.tensor([3]), None, "kept"), torch.device("cpu"))
    assert (moved.ids.tolist(), moved.scores, moved.note) == ([3], None, "kept")
