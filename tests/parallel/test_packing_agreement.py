"""Ranks that hold different experts pack the same layers: what one of them cannot pack stays as it is on all."""

from functools import partial
from typing import Any

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.model.numerics import reference_ops
from deepinfer.model.packed_weights import pack_model
from deepinfer.model.transformer import Transformer
from deepinfer.parallel.expert_moves import record_of
from deepinfer.parallel.expert_parallel import feed_forwards
from deepinfer.parallel.packing_agreement import agree_on_packing
from deepinfer.parallel.placement import place_evenly
from deepinfer.presets import random_model
from tests.kernels import packable_config
from tests.parallel.in_process import ThreadRanks, run_threads

BROKEN_LAYER, HOLDER = 3, 1


def share_of(rank: int, batch_invariant: bool) -> Transformer:
    """The experts of one of two ranks; an expert of one of them has scales that no operand can take."""
    config = packable_config()
    placement = place_evenly(config.n_layers, config.moe.n_routed_experts, config.moe.n_routed_experts, 2)
    ops = reference_ops(batch_invariant=batch_invariant)
    model = random_model(config, device="cpu", ops=ops, expert_ids=placement.experts_of(0, rank))
    if rank == HOLDER:
        feed_forwards(model)[BROKEN_LAYER].experts.w3.scale.view(torch.uint8)[1, 7, 0] = 60
    return model


def packed_layers(model: Transformer) -> list[bool]:
    return [ffn.experts.w2.packed is not None for ffn in feed_forwards(model)]


def pack(ranks: ThreadRanks, models: list[Transformer]) -> dict[str, Any]:
    model, agree = models[ranks.rank], partial(agree_on_packing, ranks)
    try:
        refused, error = pack_model(model, agree=agree), None  # type: ignore[arg-type]
    except ConfigError as refusal:
        refused, error = None, str(refusal)
    records = [record_of(ffn.experts, 0).numel() for ffn in feed_forwards(model)]
    return {"refused": refused, "error": error, "packed": packed_layers(model), "records": records}


def test_a_layer_is_packed_on_all_ranks_or_on_none() -> None:
    models = [share_of(rank, batch_invariant=False) for rank in range(2)]
    one, other = run_threads(pack, 2, models)
    expected = [layer != BROKEN_LAYER for layer in range(len(models[0].layers))]
    assert one["packed"] == other["packed"] == expected
    assert one["records"] == other["records"]
    assert one["refused"] == other["refused"] > 0


def test_batch_invariant_arithmetic_is_refused_by_all_ranks() -> None:
    models = [share_of(rank, batch_invariant=True) for rank in range(2)]
    one, other = run_threads(pack, 2, models)
    for found in (one, other):
        assert f"layers.{BROKEN_LAYER}.ffn.experts cannot be packed for the kernels, because of what rank 1 holds" in found["error"]
        assert not any(found["packed"])
    # The holder also knows what is wrong with them.
    assert "spread over" in other["error"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_by_itself_would_pack_what_it_can(rank: int) -> None:
    model = share_of(rank, batch_invariant=False)
    pack_model(model)
    assert packed_layers(model)[BROKEN_LAYER] == (rank != HOLDER)
