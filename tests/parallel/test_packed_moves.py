"""EPLB over experts that are packed for kernels: every byte arrives, once, and where captured steps look for it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.model.moe import Experts
from deepinfer.model.packed_weights import pack_experts
from deepinfer.parallel.expert_moves import move_layer, record_of
from deepinfer.parallel.expert_parallel import ExpertParallel
from deepinfer.parallel.load_counter import LoadCounter
from deepinfer.parallel.placement import Placement, place_evenly, plan_moves
from tests.kernels import random_activations
from tests.model.test_forms import quantized_experts
from tests.parallel.in_process import CapturingDevice, ThreadRanks, run_threads
from tests.parallel.test_expert_parallel import random_placement

N_EXPERTS = 8


def packed_experts(expert_ids: tuple[int, ...] | None = None) -> Experts:
    stack = quantized_experts(expert_ids)
    pack_experts(stack)
    return stack


def stored(stack: Experts, member: int) -> list[Tensor]:
    """Weight and scale bytes of an expert in the checkpoint's layout."""
    return [part for matrix in (stack.w1, stack.w2, stack.w3) for part in matrix.stored(member)]


def addresses(stack: Experts) -> list[int]:
    return [tensor.data_ptr() for matrix in (stack.w1, stack.w2, stack.w3) for tensor in matrix.packed.tensors()]


def move_twice(ranks: ThreadRanks, first: Placement, second: Placement, whole: Experts, stacks: list[Experts]) -> dict[str, Any]:
    """There and back again."""
    stack = stacks[ranks.rank]
    before, found = addresses(stack), {"held": [], "moves": 0}
    for old, new in ((first, second), (second, first)):
        moves = plan_moves(old, new)
        found["moves"] += len(moves)
        move_layer(stack, ranks, new.slots_per_rank, moves)  # type: ignore[arg-type]
        for slot, expert in enumerate(new.experts_of(0, ranks.rank)):
            pairs = zip(stored(stack, slot), stored(whole, expert), strict=True)
            found["held"].append(all(torch.equal(one, other) for one, other in pairs))
    found["stays"] = addresses(stack) == before
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_slot_holds_its_expert_and_buffers_stay(size: int) -> None:
    first = place_evenly(1, N_EXPERTS, 4 * size if size > 2 else 10, size)  # with replicas
    second = random_placement(first, N_EXPERTS, seed=size)
    stacks = [packed_experts(first.experts_of(0, rank)) for rank in range(size)]
    for rank, found in enumerate(run_threads(move_twice, size, first, second, quantized_experts(), stacks)):
        assert found["moves"] >= 4
        assert all(found["held"]), f"rank {rank}: {found['held']}"
        assert found["stays"]


def test_an_expert_moves_once() -> None:
    plain, packed = quantized_experts(), packed_experts()
    # A byte a row for its exponent is all that packing adds.
    rows = 2 * packed.w1.out_features + packed.w2.out_features
    assert record_of(packed, 0).numel() == record_of(plain, 0).numel() + rows


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def exchange_evenly(self, rows: Tensor) -> Tensor:
        return rows.clone()

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return rows.clone()


@torch.inference_mode()
def test_a_captured_layer_goes_on_with_experts_that_have_moved() -> None:
    ranks: Any = Alone()
    old = place_evenly(1, N_EXPERTS, N_EXPERTS, 1)
    new = Placement(((3, 1, 7, 0, 6, 5, 2, 4),), 1)
    stack, expected = packed_experts(), packed_experts()
    stack.address_by_slot(1)
    exchange = ExpertParallel(0, ranks, old, LoadCounter(1, N_EXPERTS, 1, 0), torch.device("cpu"))
    x, weights, ids = random_activations(5, 256), torch.rand(5, 2), torch.stack([torch.randperm(8)[:2] for _ in range(5)])
    outputs = torch.empty(5, 2, 256, dtype=x.dtype)
    replay = CapturingDevice().capture(lambda: outputs.copy_(exchange(stack, x, weights, ids, is_even=True)))  # type: ignore[arg-type, return-value]
    for placement in (old, new):
        if placement is new:
            move_layer(stack, ranks, N_EXPERTS, plan_moves(old, new))
            exchange.switch(new)
        ids.copy_(ids.flip(0))
        replay()
        assert torch.equal(outputs, expected(x, weights, ids))
