"""Where each expert's copies live: pure functions from loads to slots, with stable ties. No torch.

Every rank holds the same number of expert slots; slots are numbered through the ranks. The published balancer (EPLB) works in the
same steps: replicate the experts with the largest load for each copy, then pack copies onto ranks, largest first. Three
more are ours: swaps that lower the fullest rank; an old placement is kept where swaps alone make it good; and else ranks and slots
are renamed so that as many experts as possible stay where they are.
The model has no expert groups, so there is no packing of groups onto nodes.

Ties go to the lower id everywhere, so equal loads give equal placements on every rank and with every library version.
"""

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from deepinfer.errors import ConfigError

# A swap must gain this share of the mean, or rounding could make it swap for ever.
LEAST_GAIN = 1e-9
# Worth of not moving an expert: how much worse than a new placement an old one with a few swaps may be.
TOLERATED_IMBALANCE = 0.002


@dataclass(frozen=True)
class Placement:
    """The expert in each slot, layer by layer.

    Attributes:
        layers: `layers[layer][slot]` is an expert id; rank r holds slots `[r * slots_per_rank, (r + 1) * slots_per_rank)`.
    """

    layers: tuple[tuple[int, ...], ...]
    num_ranks: int

    @property
    def slots_per_rank(self) -> int:
        return len(self.layers[0]) // self.num_ranks

    def experts_of(self, layer: int, rank: int) -> tuple[int, ...]:
        """Expert ids in a rank's slots."""
        return self.layers[layer][rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    def slots_of_experts(self, layer: int) -> list[list[int]]:
        """Slots of each expert, ascending."""
        slots: list[list[int]] = [[] for _ in range(max(self.layers[layer]) + 1)]
        for slot, expert in enumerate(self.layers[layer]):
            slots[expert].append(slot)
        return slots

    @cached_property
    def digest(self) -> int:
        """63 bits that ranks compare to know that they hold the same placement."""
        text = repr((self.layers, self.num_ranks)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Move(NamedTuple):
    """Copy the expert of `source` in the old placement to `target` in the new one."""

    layer: int
    source: int
    target: int


def place_evenly(n_layers: int, n_experts: int, num_slots: int, num_ranks: int) -> Placement:
    """The placement before any load is known: experts in order, then replicas that wrap around."""
    check_sizes(n_experts, num_slots, num_ranks)
    layer = place_layer([0.0] * n_experts, num_slots, num_ranks)
    return Placement((layer,) * n_layers, num_ranks)


def place_experts(loads: Sequence[Sequence[float]], num_slots: int, old: Placement) -> Placement:
    """A placement for the loads of each expert, `[layers][experts]`, close to the old one.

    A layer that a few swaps balance almost as well as a new placement keeps its replicas and gets the swaps.
    """
    layers, num_ranks = [], old.num_ranks
    for layer, of_layer in enumerate(loads):
        new = place_layer(of_layer, num_slots, num_ranks)
        good_enough = imbalance(of_layer, new, num_ranks) + TOLERATED_IMBALANCE
        swapped = swap_layer(of_layer, old.layers[layer], num_ranks, good_enough)
        is_good = imbalance(of_layer, swapped, num_ranks) <= good_enough
        layers.append(swapped if is_good else keep_in_place(old.layers[layer], new, num_ranks))
    return Placement(tuple(layers), num_ranks)


def swap_layer(loads: Sequence[float], layer: Sequence[int], num_ranks: int, good_enough: float) -> tuple[int, ...]:
    """The same replicas, improved by swaps alone until the imbalance is `good_enough`; all other slots stay as they are."""
    copies = np.bincount(np.asarray(layer), minlength=len(loads)).tolist()
    ranks = np.asarray(layer).reshape(num_ranks, -1).tolist()
    swap_down(loads, copies, ranks, good_enough)
    return tuple(expert for rank in ranks for expert in rank)


def place_layer(loads: Sequence[float], num_slots: int, num_ranks: int) -> tuple[int, ...]:
    """The expert in each slot of one layer. Raises ConfigError if the sizes do not fit."""
    check_sizes(len(loads), num_slots, num_ranks)
    copies = count_replicas(loads, num_slots, num_ranks)
    ranks = pack_ranks(loads, copies, num_slots // num_ranks, num_ranks)
    swap_down(loads, copies, ranks)
    return tuple(expert for rank in ranks for expert in rank)


def check_sizes(n_experts: int, num_slots: int, num_ranks: int) -> None:
    """Raise ConfigError unless every expert has a slot and every rank equally many."""
    if num_slots < n_experts or num_slots % num_ranks or num_slots > n_experts * num_ranks:
        raise ConfigError(
            f"{num_slots} expert slots: expected a multiple of {num_ranks} ranks, from {n_experts} (one for each expert) to "
            f"{n_experts * num_ranks} (one for each expert and rank)"
        )


def count_replicas(loads: Sequence[float], num_slots: int, num_ranks: int) -> list[int]:
    """Copies of each expert: each further slot goes to the largest load for each copy, at most one copy a rank."""
    copies = [1] * len(loads)
    heap = [(-load, 1, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(num_slots - len(loads)):
        _, count, expert = heapq.heappop(heap)
        copies[expert] = count + 1
        if count + 1 < num_ranks:
            heapq.heappush(heap, (-loads[expert] / (count + 1), count + 1, expert))
    return copies


def pack_ranks(loads: Sequence[float], copies: Sequence[int], slots_per_rank: int, num_ranks: int) -> list[list[int]]:
    """Copies onto ranks, largest load first, each to the emptiest rank that has a slot and, if one can be found, no other copy."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    emptiest = [(0.0, 0, rank) for rank in range(num_ranks)]  # load, slots used, rank: of ranks that have a slot
    order = sorted(range(len(loads)), key=lambda expert: (-loads[expert] / copies[expert], expert))
    for expert in order:
        for _ in range(copies[expert]):
            skipped = []
            while emptiest and expert in ranks[emptiest[0][2]]:
                skipped.append(heapq.heappop(emptiest))
            filled, used, rank = heapq.heappop(emptiest) if emptiest else skipped.pop(0)
            ranks[rank].append(expert)
            if used + 1 < slots_per_rank:
                heapq.heappush(emptiest, (filled + loads[expert] / copies[expert], used + 1, rank))
            for entry in skipped:
                heapq.heappush(emptiest, entry)
    return ranks


def swap_down(loads: Sequence[float], copies: Sequence[int], ranks: list[list[int]], good_enough: float = 1.0) -> None:
    """Swap single copies between the fullest rank and another one while that lowers the fullest of the two. Mutates `ranks`.

    Stops at an imbalance of `good_enough`.
    """
    experts = np.array(ranks)
    share = np.asarray(loads, dtype=np.float64) / np.asarray(copies)
    held = share[experts]
    mean = float(held.sum()) / len(ranks)
    least = LEAST_GAIN * max(mean, np.finfo(np.float64).tiny)
    for _ in range(experts.size):
        filled = held.sum(axis=1)
        full = int(filled.argmax())
        if filled[full] <= good_enough * mean:
            break
        # Axes: slot of the full rank, other rank, slot of the other rank.
        moved = held[full][:, None, None] - held[None]
        after = np.maximum(filled[full] - moved, filled[None, :, None] + moved)
        # A second copy on one rank would be of no use.
        doubles_full = np.isin(experts, experts[full])
        doubles_rank = (experts[None] == experts[full][:, None, None]).any(axis=2)
        after = np.where(doubles_full[None] | doubles_rank[:, :, None], np.inf, after)
        after[:, full] = np.inf
        best = int(after.argmin())
        slot, rank, other = np.unravel_index(best, after.shape)
        if not after[slot, rank, other] < filled[full] - least:
            break
        experts[full, slot], experts[rank, other] = experts[rank, other], experts[full, slot]
        held[full, slot], held[rank, other] = held[rank, other], held[full, slot]
    ranks[:] = experts.tolist()


def keep_in_place(old: Sequence[int], new: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """`new` with its ranks renamed and its slots reordered so that experts stay where they are, as far as a greedy match finds."""
    per_rank = len(new) // num_ranks
    groups = [list(new[i * per_rank : (i + 1) * per_rank]) for i in range(num_ranks)]
    held = [old[i * per_rank : (i + 1) * per_rank] for i in range(num_ranks)]
    common = _incidence(held) @ _incidence(groups).T
    group_of: dict[int, int] = {}
    taken: set[int] = set()
    # The largest overlap first; among equal ones the lower rank, then the lower group.
    for flat in np.argsort(-common, axis=None, kind="stable").tolist():
        rank, group = divmod(flat, num_ranks)
        if rank not in group_of and group not in taken:
            group_of[rank] = group
            taken.add(group)
    slots: list[int] = []
    for rank in range(num_ranks):
        left = list(groups[group_of[rank]])
        row: list[int | None] = []
        for expert in held[rank]:
            stays = expert in left
            row.append(expert if stays else None)
            if stays:
                left.remove(expert)
        incoming = iter(left)
        slots += [next(incoming) if expert is None else expert for expert in row]
    return tuple(slots)


def _incidence(ranks: Sequence[Sequence[int]]) -> np.ndarray:
    """1 where a rank (row) holds an expert (column)."""
    matrix = np.zeros((len(ranks), max(max(rank) for rank in ranks) + 1), dtype=np.int64)
    for row, experts in zip(matrix, ranks, strict=True):
        row[list(experts)] = 1
    return matrix


def plan_moves(old: Placement, new: Placement) -> list[Move]:
    """The copies that turn `old` into `new`: from the rank itself where it has one, else from a holder chosen in turn."""
    moves = []
    for layer, experts in enumerate(new.layers):
        holders = old.slots_of_experts(layer)
        for target, expert in enumerate(experts):
            if old.layers[layer][target] == expert:
                continue
            rank = target // new.slots_per_rank
            own = [slot for slot in holders[expert] if slot // new.slots_per_rank == rank]
            source = own[0] if own else holders[expert][target % len(holders[expert])]
            moves.append(Move(layer, source, target))
    return moves


def rank_loads(loads: Sequence[float], layer: Sequence[int], num_ranks: int) -> list[float]:
    """Load of each rank when the copies of an expert share its load equally."""
    experts = np.asarray(layer)
    share = np.asarray(loads, dtype=np.float64) / np.maximum(np.bincount(experts, minlength=len(loads)), 1)
    return share[experts].reshape(num_ranks, -1).sum(axis=1).tolist()


def imbalance(loads: Sequence[float], layer: Sequence[int], num_ranks: int) -> float:
    """Load of the fullest rank over the mean: 1 is perfect, and also what no load at all gives."""
    of_ranks = rank_loads(loads, layer, num_ranks)
    mean = sum(of_ranks) / num_ranks
    return max(of_ranks) / mean if mean > 0 else 1.0
