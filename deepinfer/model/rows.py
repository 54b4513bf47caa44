"""The query rows of one forward: all sequences packed, with where each row stands beside it.

A prefill chunk, a decode step and the verification of drafts are the same forward with other rows. Rows of one sequence are
consecutive and their positions ascend by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepinfer.dims import Bool, Float, Int, Tensor
from deepinfer.errors import ShapeError

TRASH_SLOT = 0  # ring slot and cache block that padding rows write to; nothing reads them


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed query rows.

    Attributes:
        token_ids: the token fed in each row.
        positions: its absolute 0-based position.
        seq_ids: which sequence of this step the row belongs to, an index into `slots` and `block_tables`.
        offsets: rows of the same sequence before this one in this step.
        remaining: rows of the same sequence after this one in this step.
        slots: ring slot of each sequence.
        block_tables: cache blocks of each sequence, in position order; unused places hold the trash block.
        block_size: tokens in a cache block.
        window_starts: first position of each sequence whose window rows exist, where a replay began; None: all begin at 0.
        write_floors: position of each sequence below which entries and pending groups stay as they are stored; None: 0.
        context: if other ranks run other rows of the same sequence in the same forward.
        is_even: every rank of a group runs this many rows, padding included, so that experts need no counts to be exchanged.
    """

    token_ids: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]
    seq_ids: Int[Tensor, " T"]
    offsets: Int[Tensor, " T"]
    remaining: Int[Tensor, " T"]
    slots: Int[Tensor, " B"]
    block_tables: Int[Tensor, "B blocks"]
    block_size: int
    window_starts: Int[Tensor, " B"] | None = None
    write_floors: Int[Tensor, " B"] | None = None
    context: "ContextExchange | None" = None
    is_even: bool = False

    @property
    def max_tokens(self) -> int:
        """Positions that the block tables of this step can address: an upper bound of every key position."""
        return self.block_tables.shape[1] * self.block_size

    @property
    def row_slots(self) -> Int[Tensor, " T"]:
        """Ring slot of each row."""
        return self.slots[self.seq_ids]

    @property
    def first_keys(self) -> Int[Tensor, " T"] | None:
        """First position that the window of each row may hold; None: 0."""
        return None if self.window_starts is None else self.window_starts[self.seq_ids]

    def keep_new(self, is_new: Bool[Tensor, " T"]) -> Bool[Tensor, " T"]:
        """`is_new` without the rows that only replay: what those would write is stored already, and better."""
        return is_new if self.write_floors is None else is_new & (self.positions >= self.write_floors[self.seq_ids])


class ContextExchange(Protocol):
    """Brings what rows need of the same sequence's rows on other ranks, layer by layer."""

    def fill_halo(self, kv: Float[Tensor, "T Dh"], ring: Float[Tensor, "slots R Dh"]) -> None:
        """Before attention: write the window rows in front of each row group into its ring."""
        ...

    def write_entries(self, pool: Any, rows: Rows, entries: Float[Tensor, "T Dh"], index_keys: Float[Tensor, "T Di"]) -> None:
        """Instead of `pool.write(rows, ..)`: store the entries of all ranks' rows."""
        ...


def pack_rows(
    chunks: Sequence[tuple[Sequence[int] | Int[Tensor, " n"], int]],
    slots: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device | str = "cpu",
) -> Rows:
    """Pack `(token ids, first position)` of each sequence into rows.

    Block tables are cut to the blocks that the step can reach and padded with the trash block.
    """
    if not len(chunks) == len(slots) == len(block_tables):
        raise ShapeError(f"{len(chunks)} chunks, {len(slots)} slots, {len(block_tables)} block tables: counts must agree")
    tokens, positions, seq_ids, offsets, remaining, needed = [], [], [], [], [], 1
    for seq_id, (ids, start) in enumerate(chunks):
        ids = torch.as_tensor(ids, dtype=torch.int64)
        n = ids.shape[0]
        steps = torch.arange(n)
        tokens.append(ids)
        positions.append(steps + start)
        seq_ids.append(torch.full((n,), seq_id))
        offsets.append(steps)
        remaining.append(n - 1 - steps)
        reached = -(-(start + n) // block_size)
        if reached > len(block_tables[seq_id]):
            raise ShapeError(f"sequence {seq_id} reaches position {start + n - 1}, its {len(block_tables[seq_id])} blocks do not")
        needed = max(needed, reached)
    table = torch.full((len(chunks), needed), TRASH_SLOT)
    for seq_id, blocks in enumerate(block_tables):
        part = torch.as_tensor(blocks[:needed])
        table[seq_id, : part.shape[0]] = part

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).to(device) if parts else torch.zeros(0, dtype=torch.int64, device=device)

    return Rows(
        token_ids=joined(tokens),
        positions=joined(positions),
        seq_ids=joined(seq_ids),
        offsets=joined(offsets),
        remaining=joined(remaining),
        slots=torch.as_tensor(slots, dtype=torch.int64, device=device),
        block_tables=table.to(device),
        block_size=block_size,
    )
