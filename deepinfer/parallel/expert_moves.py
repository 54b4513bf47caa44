"""Rearranging experts between two steps: every rank turns its slots from the old placement into the new one.

An expert moves as one record: the bytes of its three matrices with their scales, as they are stored; all ranks store alike, packed
for kernels or not. Outgoing records are copied into a buffer before any slot is written, so the order of moves does not matter.
Collective, layer by layer.
"""

from typing import NamedTuple

import torch

from deepinfer.dims import Tensor, UInt8
from deepinfer.model.linear import StoredMatrix
from deepinfer.model.moe import Experts
from deepinfer.model.transformer import Transformer
from deepinfer.parallel.expert_parallel import feed_forwards
from deepinfer.parallel.placement import Move, Placement, plan_moves
from deepinfer.parallel.ranks import Ranks


class MoveCost(NamedTuple):
    """What a rearrangement took, of the whole group: slots that changed, and bytes that went to another rank."""

    num_moves: int
    sent_bytes: int


@torch.inference_mode()
def move_experts(model: Transformer, ranks: Ranks, old: Placement, new: Placement) -> MoveCost:
    """Bring the experts of `new` into this rank's slots. Collective; mutates the experts' parameters in place.

    Parameters keep their addresses, so a captured graph that reads them goes on working.
    """
    moves, sent_bytes = plan_moves(old, new), 0
    for layer, ffn in enumerate(feed_forwards(model)):
        of_layer = [move for move in moves if move.layer == layer]
        if of_layer:
            move_layer(ffn.experts, ranks, new.slots_per_rank, of_layer)
            away = sum(move.source // new.slots_per_rank != move.target // new.slots_per_rank for move in of_layer)
            sent_bytes += away * record_of(ffn.experts, 0).numel()
    return MoveCost(len(moves), sent_bytes)


def move_layer(experts: Experts, ranks: Ranks, slots_per_rank: int, moves: list[Move]) -> None:
    """The moves of one layer, known to every rank: what goes where needs no message."""
    outgoing = sorted((m for m in moves if m.source // slots_per_rank == ranks.rank), key=lambda m: m.target)
    incoming = [m for m in moves if m.target // slots_per_rank == ranks.rank]
    # They arrive by rank of their source, and from one rank in the order of their targets.
    incoming.sort(key=lambda m: (m.source // slots_per_rank, m.target))
    sent, received = [0] * ranks.size, [0] * ranks.size
    for move in outgoing:
        sent[move.target // slots_per_rank] += 1
    for move in incoming:
        received[move.source // slots_per_rank] += 1
    empty = record_of(experts, 0)[None][:0]
    records = torch.cat([empty, *(record_of(experts, move.source % slots_per_rank)[None] for move in outgoing)])
    for move, record in zip(incoming, ranks.exchange(records, sent, received), strict=True):
        store_record(experts, move.target % slots_per_rank, record)


def matrices(experts: Experts) -> tuple[StoredMatrix, ...]:
    """What an expert consists of. Packed, gate and up are one buffer, which moves once."""
    return (experts.w1, experts.w2, experts.w3) if experts.w1.packed is None else (experts.w1, experts.w2)


def record_of(experts: Experts, slot: int) -> UInt8[Tensor, " bytes"]:
    """The stored bytes of one expert."""
    return torch.cat([matrix.record(slot) for matrix in matrices(experts)])


def store_record(experts: Experts, slot: int, record: UInt8[Tensor, " bytes"]) -> None:
    """Make a slot hold the expert of a record. Mutates the parameters."""
    parts = record.split([matrix.record(slot).numel() for matrix in matrices(experts)])
    for matrix, part in zip(matrices(experts), parts, strict=True):
        matrix.store_record(slot, part)
