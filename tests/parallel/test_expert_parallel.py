"""Experts on 1, 2 and 4 ranks: the same bits, wherever the experts are and whoever has no rows."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.checkpoint.load import load_model
from deepinfer.model.numerics import reference_ops
from deepinfer.model.transformer import Transformer
from deepinfer.parallel.config import ParallelConfig
from deepinfer.parallel.expert_moves import move_experts, record_of
from deepinfer.parallel.expert_parallel import distribute_experts, feed_forwards
from deepinfer.parallel.load_counter import LoadCounter
from deepinfer.parallel.placement import Placement, place_evenly, place_experts
from deepinfer.parallel.ranks import Ranks
from tests.parallel.spawn import run_ranks

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
MODELS = (("float32", "bf16_full"), ("native", "smooth_full"))


def load(precision: str, folder: str, expert_ids: tuple[int, ...] | None = None) -> Transformer:
    return load_model(GOLDEN / folder, precision, "cpu", ops=reference_ops(batch_invariant=True), expert_ids=expert_ids)


def tokens(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(3, 300, shape, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def compare_with_one_process(rank: int, size: int) -> dict[str, Any]:
    """What the tests below ask of each rank."""
    ranks = Ranks.open(ParallelConfig(ep_size=size, timeout_s=30), torch.device("cpu"))
    found: dict[str, Any] = {"logits": [], "after_moves": [], "records": [], "moves": [], "empty": [], "counts": [], "expected": []}
    for precision, folder in MODELS:
        whole = load(precision, folder)
        moe = whole.config.moe
        # A slot for every expert, and one more for each rank.
        num_slots = -(-moe.n_routed_experts // size) * size + (size if size > 1 else 0)
        num_slots = min(num_slots, moe.n_routed_experts * size)
        placement = place_evenly(whole.config.n_layers, moe.n_routed_experts, num_slots, size)
        part = load(precision, folder, placement.experts_of(0, rank))
        counter = LoadCounter(whole.config.n_layers, moe.n_routed_experts, 1, 1)
        exchanges = distribute_experts(part, ranks, placement, counter)
        ids = tokens(rank, 1 + rank, 9 + rank)
        found["logits"].append(torch.equal(whole(ids), part(ids)))
        counts = asyncio.run(ranks.sum("counts", counter.take()))
        found["counts"].append(counts.sum(dim=1).tolist())
        pairs = sum((1 + r) * (9 + r) for r in range(size)) * moe.n_activated_experts
        found["expected"].append([pairs] * whole.config.n_layers)
        # Only the last rank has rows.
        if rank == size - 1:
            found["empty"].append(torch.equal(whole(ids), part(ids)))
        else:
            part.forward_without_rows()
        new = random_placement(placement, moe.n_routed_experts, seed=size)
        found["moves"].append(move_experts(part, ranks, placement, new).num_moves)
        for exchange in exchanges:
            exchange.switch(new)
        found["after_moves"].append(torch.equal(whole(ids), part(ids)))
        found["records"].append(same_records(whole, part, new, rank))
    ranks.close()
    return found


def random_placement(old: Placement, n_experts: int, seed: int) -> Placement:
    rng = random.Random(seed)
    loads = [[rng.random() ** 4 for _ in range(n_experts)] for _ in old.layers]
    return place_experts(loads, len(old.layers[0]), old)


def same_records(whole: Transformer, part: Transformer, placement: Placement, rank: int) -> bool:
    """Whether each slot holds the bytes of its expert, decoded copies included."""
    equal = True
    for layer, (one, other) in enumerate(zip(feed_forwards(whole), feed_forwards(part), strict=True)):
        for slot, expert in enumerate(placement.experts_of(layer, rank)):
            equal &= torch.equal(record_of(one.experts, expert), record_of(other.experts, slot))
            equal &= torch.equal(one.experts.w2.values(torch.float32, expert), other.experts.w2.values(torch.float32, slot))
    return equal


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda size: f"ep{size}")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(compare_with_one_process, request.param)


def test_logits_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    assert all(rank["logits"] == [True, True] for rank in found)


def test_a_rank_without_rows_serves_the_others(found: list[dict[str, Any]]) -> None:
    assert found[-1]["empty"] == [True, True]


def test_logits_do_not_change_when_experts_move(found: list[dict[str, Any]]) -> None:
    assert all(rank["after_moves"] == [True, True] for rank in found)
    assert min(found[0]["moves"]) > 0


def test_every_slot_holds_the_bytes_of_its_expert(found: list[dict[str, Any]]) -> None:
    assert all(rank["records"] == [True, True] for rank in found)


def test_counts_of_all_ranks_add_up_to_tokens_times_experts(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["counts"] == rank["expected"]
