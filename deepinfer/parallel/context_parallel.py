"""One long prompt on several ranks: balanced causal chunks, and what they need of each other.

A prompt is cut into 2c chunks for c ranks; rank i takes chunks i and 2c - 1 - i. A row's attention grows with its position, so a
cheap and a dear chunk together cost every rank the same. Each chunk is a row group of its own, with a ring slot of its own. A layer
needs two things of other ranks: the window rows before each chunk (the halo), and the compressed entries of all earlier tokens.
The former are sent to exactly where they are needed, the latter to everyone. Both are copies in position order, so the result is
that of one rank, to the bit in batch-invariant arithmetic.

The pure functions come first; `prefill_context` runs a model. Draft rings get a rank's own rows alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.errors import ShapeError
from deepinfer.model.cache import CacheSizes, EntryPool, ModelCache
from deepinfer.model.rows import Rows, pack_rows
from deepinfer.model.transformer import Transformer
from deepinfer.parallel.ranks import Ranks

FIRST_SLOT, LAST_SLOT = 1, 2  # of a rank's two chunks; the prompt's state ends in the last one of rank 0


class Chunk(NamedTuple):
    """Positions `[start, end)` of a prompt."""

    start: int
    end: int


def cut_prompt(length: int, num_ranks: int, align: int) -> list[Chunk]:
    """2 x `num_ranks` chunks that begin at multiples of `align`, as equal as that allows, longer ones first.

    Raises: ShapeError if the prompt is too short to give every chunk a token.
    """
    count = 2 * num_ranks
    units = -(-length // align)
    if units < count:
        raise ShapeError(f"a prompt of {length} tokens has {units} units of {align}; {num_ranks} ranks need at least {count}")
    ends = [align * ((i + 1) * (units // count) + min(i + 1, units % count)) for i in range(count)]
    return [Chunk(start, min(end, length)) for start, end in zip([0, *ends], ends, strict=False)]


def chunks_of(chunks: Sequence[Chunk], rank: int) -> tuple[Chunk, Chunk]:
    """The two chunks of a rank, earlier one first."""
    return chunks[rank], chunks[len(chunks) - 1 - rank]


def causal_work(chunk: Chunk) -> int:
    """Key positions that the rows of a chunk may see, in all."""
    return sum(range(chunk.start + 1, chunk.end + 1))


def halo(chunk: Chunk, reach: int) -> range:
    """Positions before a chunk that its rows look back to."""
    return range(max(chunk.start - reach, 0), chunk.start)


def halo_sends(chunks: Sequence[Chunk], reach: int, source: int, target: int) -> list[list[int]]:
    """For each chunk of rank `target`, the positions of its halo that rank `source` computes, ascending."""
    own = [range(*chunk) for chunk in chunks_of(chunks, source)]
    return [[p for p in halo(chunk, reach) if any(p in part for part in own)] for chunk in chunks_of(chunks, target)]


class ContextParallel:
    """The exchanges of a prompt's layers; a `ContextExchange`. Rows are this rank's two chunks, in order."""

    def __init__(self, ranks: Ranks, chunks: Sequence[Chunk], reach: int, device: torch.device) -> None:
        self.ranks, self.chunks, self.device = ranks, chunks, device
        # Positions that each rank sends here, and which of this rank's rows it sends to each rank.
        plans = [[halo_sends(chunks, reach, s, t) for t in range(ranks.size)] for s in range(ranks.size)]
        row_of = {p: row for row, p in enumerate(p for chunk in chunks_of(chunks, ranks.rank) for p in range(*chunk))}
        outgoing = [[row_of[p] for of_chunk in plan for p in of_chunk] for plan in plans[ranks.rank]]
        incoming = [plans[source][ranks.rank] for source in range(ranks.size)]
        self._sent, self._received = [len(rows) for rows in outgoing], [sum(map(len, plan)) for plan in incoming]
        self._rows = self._tensor([row for rows in outgoing for row in rows])
        self._positions = self._tensor([p for plan in incoming for of_chunk in plan for p in of_chunk])
        slots = (FIRST_SLOT, LAST_SLOT)
        self._slots = self._tensor([slots[i] for plan in incoming for i, of_chunk in enumerate(plan) for _ in of_chunk])
        self._counts = [sum(end - start for start, end in chunks_of(chunks, rank)) for rank in range(ranks.size)]
        everyone = [p for rank in range(ranks.size) for chunk in chunks_of(chunks, rank) for p in range(*chunk)]
        self._everyone = self._tensor(everyone)

    def _tensor(self, values: list[int]) -> Int[Tensor, " n"]:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def fill_halo(self, kv: Float[Tensor, "T Dh"], ring: Float[Tensor, "slots R Dh"]) -> None:
        """Bring the window rows before each chunk into the ring of its slot. Collective; mutates `ring`."""
        halo_rows = self.ranks.exchange(kv[self._rows], self._sent, self._received)
        ring[self._slots, self._positions % ring.shape[1]] = halo_rows

    def write_entries(self, pool: EntryPool, rows: Rows, entries: Float[Tensor, "T Dh"], index_keys: Float[Tensor, "T Di"]) -> None:
        """Store the entries that the rows of all ranks complete, in this rank's own pool. Collective; mutates the pool."""
        joined = torch.cat((entries, index_keys), dim=1)
        size = self.ranks.size
        every = self.ranks.exchange(joined.repeat(size, 1), [joined.shape[0]] * size, self._counts)
        # All chunks are of one sequence, whose blocks are those of the first group.
        everyone = replace(rows, positions=self._everyone, seq_ids=torch.zeros_like(self._everyone))
        pool.write(everyone, every[:, : entries.shape[1]], every[:, entries.shape[1] :])


class ContextResult(NamedTuple):
    """A rank's part of a prefilled prompt.

    Attributes:
        positions: of this rank's rows.
        final: their collapsed hidden rows (see `Transformer.logits`).
        cache: all entries; on rank 0 also the rings, pending groups and history after the prompt, in slot `LAST_SLOT`. Its block
            table is 1, 2, 3, ..
    """

    positions: Int[Tensor, " T"]
    final: Float[Tensor, "T D"]
    cache: ModelCache


def prefill_context(
    model: Transformer,
    ranks: Ranks,
    token_ids: Int[Tensor, " n"],
    *,
    block_size: int = 64,
    room: int = 0,
    observes_drafts: bool = False,
) -> ContextResult:
    """Run one prompt on all ranks of a group. Collective: every rank gives the same prompt.

    Args:
        room: positions behind the prompt that the cache holds too.
        observes_drafts: fill the draft blocks' rings; on rank 0 they are complete if the last chunk is no shorter than a window.

    Raises: ShapeError if the prompt has fewer than two blocks for each rank.
    """
    length = token_ids.shape[0]
    chunks = cut_prompt(length, ranks.size, block_size)
    num_blocks = -(-(length + room) // block_size)
    cache = model.new_cache(CacheSizes(num_slots=3, num_blocks=1 + num_blocks, block_size=block_size))
    blocks = range(1, 1 + num_blocks)
    own = chunks_of(chunks, ranks.rank)
    parts = [(token_ids[start:end].cpu(), start) for start, end in own]
    rows = pack_rows(parts, (FIRST_SLOT, LAST_SLOT), (blocks, blocks), block_size, model.device)
    # Tables reach to the end of the prompt, also where this rank's rows do not.
    table = torch.tensor([*blocks], dtype=torch.int64, device=model.device)
    rows = replace(rows, block_tables=table.expand(2, -1))
    for slot, chunk in zip((FIRST_SLOT, LAST_SLOT), own, strict=True):
        before = torch.tensor(list(halo(chunk, cache.history_rows)), dtype=torch.int64, device=model.device)
        cache.history[slot, before % cache.history_rows] = model.token_window.token_map[token_ids.to(model.device)[before]]
    context = ContextParallel(ranks, chunks, model.config.attention.window_size - 1, model.device)
    hidden = model.forward_rows(replace(rows, context=context), cache)
    if observes_drafts:
        assert hidden.main_hidden is not None
        model.observe_draft(hidden.main_hidden, rows, cache)
    return ContextResult(rows.positions, hidden.final, cache)
