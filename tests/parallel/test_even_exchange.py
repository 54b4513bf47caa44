"""The exchange with fixed shapes: the bits of one process and of the exchange by counts, and nothing that a graph cannot hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.model.moe import Experts, MoE, here
from deepinfer.model.transformer import Transformer
from deepinfer.parallel.expert_parallel import ExpertParallel, distribute_experts, feed_forwards
from deepinfer.parallel.load_counter import LoadCounter
from deepinfer.parallel.placement import Placement, place_evenly
from tests.parallel.in_process import CapturingDevice, HostRead, ThreadRanks, run_threads
from tests.parallel.test_expert_parallel import MODELS, load

ROWS = 5


def placement_for(model: Transformer, size: int) -> Placement:
    """Replicas on all ranks but of a group of one."""
    n_experts = model.config.moe.n_routed_experts
    num_slots = min(-(-n_experts // size) * size + size, n_experts * size)
    return place_evenly(model.config.n_layers, n_experts, num_slots, size)


def rows_of(rank: int, model: Transformer) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(ROWS, model.config.dim, generator=generator)
    return x.to(model.numerics.precision.activation_dtype)


def compare(ranks: ThreadRanks, precision: str, folder: str) -> dict[str, bool]:
    """Rank r has r rows of padding."""
    whole = load(precision, folder)
    placement = placement_for(whole, ranks.size)
    part = load(precision, folder, placement.experts_of(0, ranks.rank))
    counter = LoadCounter(whole.config.n_layers, whole.config.moe.n_routed_experts, 1, 1)
    (exchange, *_) = distribute_experts(part, ranks, placement, counter)  # type: ignore[arg-type]
    one, other, x = feed_forwards(whole)[0], feed_forwards(part)[0], rows_of(ranks.rank, whole)
    weights, ids = one.gate(x)
    is_padding = torch.arange(ROWS) >= ROWS - ranks.rank
    kept, given = ~is_padding, ids.masked_fill(is_padding[:, None], one.experts.nobody)
    expected = one.experts(x, weights, ids)
    evenly = exchange(other.experts, x, weights, given, is_even=True)
    by_count = exchange(other.experts, x, weights, given)
    of_nobody = evenly[is_padding]
    return {
        "pairs": torch.equal(evenly[kept], expected[kept]),
        "by count": torch.equal(evenly, by_count),
        "nobody": not of_nobody.any(),
        "layer": torch.equal(other(x, is_padding, True)[kept], one(x)[kept]),
        "counts": int(counter.take().sum()) == 3 * int(kept.sum()) * ids.shape[1],
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("precision", "folder"), MODELS)
def test_the_bits_of_one_process(precision: str, folder: str, size: int) -> None:
    for rank, found in enumerate(run_threads(compare, size, precision, folder)):
        assert all(found.values()), f"rank {rank}: {found}"


class Alone:
    """A rank whose peers send what it sends itself."""

    rank, size = 1, 2

    def exchange_evenly(self, rows: Tensor) -> Tensor:
        return rows.flip(0)

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return rows.new_zeros(sum(received), *rows.shape[1:])


def open_layer(ranks: Any, folder: str = "bf16_full") -> tuple[Experts, ExpertParallel, Tensor, Tensor, Tensor]:
    model = load("float32", folder)
    x = rows_of(0, model)
    weights, ids = feed_forwards(model)[0].gate(x)
    placement = placement_for(model, ranks.size)
    part = load("float32", folder, placement.experts_of(0, ranks.rank))
    counter = LoadCounter(model.config.n_layers, model.config.moe.n_routed_experts, 1, 1)
    (exchange, *_) = distribute_experts(part, ranks, placement, counter)
    return feed_forwards(part)[0].experts, exchange, x, weights, ids


def fake_experts(experts: Experts) -> Callable[..., Tensor]:
    """Something that no expert's loop over its tokens gets in the way of."""
    return lambda x, weights, ids: x[:, None] * weights[:, :, None] * (ids < len(experts.expert_ids))[:, :, None]


@torch.no_grad()
def test_nothing_is_read_on_the_host() -> None:
    experts, exchange, x, weights, ids = open_layer(Alone())
    compute = fake_experts(experts)

    def step(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return exchange(compute, x, weights, ids, is_even=True)  # type: ignore[arg-type]

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, weights, ids), step(x, weights, ids))
    torch.compiler.reset()


@torch.inference_mode()
def test_the_exchange_by_counts_cannot_be_captured() -> None:
    experts, exchange, x, weights, ids = open_layer(Alone())
    with pytest.raises(HostRead):
        CapturingDevice().capture(lambda: exchange(fake_experts(experts), x, weights, ids))  # type: ignore[arg-type, func-returns-value]


@torch.inference_mode()
def test_tables_of_a_new_placement_stand_where_the_old_ones_stood() -> None:
    _, exchange, *_ = open_layer(Alone())
    places = [table.data_ptr() for table in (exchange._slots, exchange._num_replicas)]
    n_experts = len(exchange._slots) - 1
    for redundant in (0, n_experts - 1):
        # All further slots to one expert, which is the most that a placement can do.
        layer = [*range(n_experts), *[redundant] * (exchange.num_slots - n_experts)]
        exchange.switch(Placement((tuple(layer),) * 4, 2))
        assert [table.data_ptr() for table in (exchange._slots, exchange._num_replicas)] == places
        ids = torch.full((exchange.num_slots, 1), redundant)
        assert set(exchange.choose_slots(ids).flatten().tolist()) == {s for s, e in enumerate(layer) if e == redundant}


@torch.inference_mode()
def test_one_process_takes_no_notice() -> None:
    model = load("float32", "bf16_full")
    ffn: MoE = feed_forwards(model)[0]
    x = rows_of(0, model)
    assert ffn.exchange is here
    assert torch.equal(ffn(x, torch.ones(ROWS, dtype=torch.bool), True), ffn(x))
