"""What the model remembers of each sequence, and how rows address it.

| memory | kept for | shape | addressed by |
|---|---|---|---|
| window ring | every layer and draft block | `[slots, ring_rows, Dh]` | slot, position mod ring_rows |
| compressed entries | each KV source | `[blocks * Bs / ratio, Dh]` | block table, entry id |
| index keys | each KV source | `[blocks * Bs / ratio, Di]` | block table, entry id |
| pending group | each ratio-2 source | `[slots, pending_rows, 2, Dh]` float32 | slot, group id mod pending_rows |
| n-gram history | the model, if it has an Engram | `[slots, history_rows]` int64 | slot, position mod history_rows |

Everything is addressed by position, so that undoing rejected draft tokens is nothing but setting a length back: what a later
step may read, it or an earlier confirmed step has written. That needs `max_backtrack` extra rows in rings and history and
enough pending rows for every group that a step may touch. Slot 0 and block 0 are trash: padding rows write there.
Source: specification sections 8.9, 8.10 and 18.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepinfer.config import ModelConfig
from deepinfer.dims import Bool, Float, Int, Shaped, Tensor
from deepinfer.model.numerics import Precision
from deepinfer.model.rows import TRASH_SLOT, Rows

ALL_ROWS = slice(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSizes:
    """How much memory a cache holds; slots and blocks include the trash ones.

    Attributes:
        block_size: tokens a block covers in all KV sources together; a multiple of 2.
        max_backtrack: most rows of a step that may be rejected afterwards.
    """

    num_slots: int
    num_blocks: int
    block_size: int = 64
    max_backtrack: int = 0


@dataclass(frozen=True, slots=True)
class EntryPool:
    """Compressed entries and index keys of one KV source."""

    ratio: int
    entries: Float[Tensor, "P Dh"]
    index_keys: Float[Tensor, "P Di"]

    def addresses(self, rows: Rows, ids: Int[Tensor, "t N"], part: slice = ALL_ROWS) -> Int[Tensor, "t N"]:
        """Pool rows of entry `ids` of the sequences of rows `part`; a negative id gives some row that must not be used."""
        per_block = rows.block_size // self.ratio
        ids = ids.clamp(min=0)
        blocks = rows.block_tables[rows.seq_ids[part, None], ids // per_block]
        return blocks * per_block + ids % per_block

    def write(self, rows: Rows, entries: Float[Tensor, "T Dh"], index_keys: Float[Tensor, "T Di"]) -> None:
        """Store the entry that each row completes; rows that complete none write to the trash block. Mutates the pool."""
        completes = rows.keep_new((rows.positions + 1) % self.ratio == 0)
        address = self.addresses(rows, (rows.positions // self.ratio)[:, None]).squeeze(1)
        address = torch.where(completes, address, TRASH_SLOT)
        self.entries.index_put_((address,), entries)
        self.index_keys.index_put_((address,), index_keys)

    def keys_of_sequences(self, rows: Rows) -> Float[Tensor, "B C Di"]:
        """Index keys of every sequence in entry order; C covers the whole block tables."""
        per_block = rows.block_size // self.ratio
        blocks = self.index_keys.unflatten(0, (-1, per_block))
        return blocks[rows.block_tables].flatten(1, 2)


class LayerCache(NamedTuple):
    """What one layer remembers. Layers of one kind differ in nothing else, so a compiler can treat them alike."""

    ring: Float[Tensor, "slots R Dh"]
    pool: EntryPool | None  # of a KV source
    pending: Float[Tensor, "slots P 2 Dh"] | None  # of a KV source of ratio 2
    last_pool: EntryPool | None  # of the last KV source, for `Numerics.published_index_keys`


class ModelCache:
    """The tensors behind the table above, `layers` by layer. Written by the modules during a forward, and only there."""

    def __init__(self, config: ModelConfig, precision: Precision, sizes: CacheSizes, device: torch.device | str = "cpu") -> None:
        self.sizes = sizes
        dtype, attention = precision.activation_dtype, config.attention
        self.ring_rows = attention.window_size + sizes.max_backtrack
        self.pending_rows = sizes.max_backtrack // 2 + 1
        self.history_rows = max(config.engram.max_ngram_size - 1, 1) + sizes.max_backtrack
        pool_rows = sizes.num_blocks * sizes.block_size

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def pool(layer: int) -> EntryPool:
            ratio = config.compress_ratios[layer]
            widths = attention.head_dim, config.indexer.head_dim
            return EntryPool(ratio, *(zeros(pool_rows // ratio, width) for width in widths))

        pools = {layer: pool(layer) for layer in config.kv_source_layers}
        pending_shape = (sizes.num_slots, self.pending_rows, 2, attention.head_dim)
        self.layers = [
            LayerCache(
                ring=zeros(sizes.num_slots, self.ring_rows, attention.head_dim),
                pool=pools.get(layer),
                pending=zeros(*pending_shape, dtype=torch.float32) if layer in pools and pools[layer].ratio == 2 else None,
                last_pool=pools[config.kv_source_layers[-1]] if pools else None,
            )
            for layer in range(config.n_layers + config.draft.n_layers)
        ]
        self.history = zeros(sizes.num_slots, self.history_rows, dtype=torch.int64)

    @property
    def rings(self) -> list[Float[Tensor, "slots R Dh"]]:
        """Window rings, layer by layer."""
        return [layer.ring for layer in self.layers]

    @property
    def pools(self) -> dict[int, EntryPool]:
        """Entry pools of the KV source layers."""
        return {i: layer.pool for i, layer in enumerate(self.layers) if layer.pool is not None}

    @property
    def pending(self) -> dict[int, Float[Tensor, "slots P 2 Dh"]]:
        """Pending groups of the KV source layers of ratio 2."""
        return {i: layer.pending for i, layer in enumerate(self.layers) if layer.pending is not None}

    def copy_slot(self, source: int, target: int) -> None:
        """Give `target` the windows, pending groups and history of `source`. Mutates `target`'s."""
        for memory in self.slot_tensors():
            memory[target].copy_(memory[source])

    def copy_block(self, source: int, target: int) -> None:
        """Give block `target` the entries and index keys of `source`. Mutates `target`'s."""
        for memory in self.block_tensors():
            memory[target].copy_(memory[source])

    def block_tensors(self) -> list[Shaped[Tensor, "blocks per_block width"]]:
        """Entries and index keys of every KV source as views by block."""
        views = []
        for pool in self.pools.values():
            per_block = self.sizes.block_size // pool.ratio
            views += [pool.entries.unflatten(0, (-1, per_block)), pool.index_keys.unflatten(0, (-1, per_block))]
        return views

    def slot_tensors(self) -> list[Shaped[Tensor, "slots ..."]]:
        """Windows, pending groups and history, by slot."""
        return [*self.rings, *self.pending.values(), self.history]

    def tensors(self) -> list[Tensor]:
        """Every tensor of the cache, for accounting and poisoning."""
        pools = [t for pool in self.pools.values() for t in (pool.entries, pool.index_keys)]
        return [*self.rings, *pools, *self.pending.values(), self.history]


class WindowPlaces(NamedTuple):
    """Where the vectors of some key positions lie: in this step's own rows where it has them, else in the ring."""

    is_own: Bool[Tensor, "t W"]
    own: Int[Tensor, "t W"]  # row of the step
    ring: Int[Tensor, "t W"]  # row of the ring, of all slots behind each other


def window_places(rows: Rows, ring_rows: int, key_positions: Int[Tensor, "T W"], part: slice = ALL_ROWS) -> WindowPlaces:
    """Places of `key_positions` for the sequences of rows `part`. Positions before 0 or after the row give some place.

    Reading the own rows directly lets a chunk be longer than the ring.
    """
    key_positions = key_positions[part]
    distance = rows.positions[part, None] - key_positions
    is_own = (distance >= 0) & (distance <= rows.offsets[part, None])
    row_ids = torch.arange(rows.positions.shape[0], device=key_positions.device)[part, None]
    own = (row_ids - distance.clamp(min=0)).clamp(min=0)
    return WindowPlaces(is_own, own, rows.row_slots[part, None] * ring_rows + key_positions.clamp(min=0) % ring_rows)


class KeyPlaces(NamedTuple):
    """Where the keys of each row lie: those of its window, oldest first, and behind them the selected entries, ascending."""

    places: Int[Tensor, "T S"]  # int32: rows of the step or of the ring for the window, then rows of the pool
    is_own: Bool[Tensor, "T W"]
    visible: Bool[Tensor, "T S"]  # what is not may lie anywhere

    def with_entries(self, pool: EntryPool, rows: Rows, selected: Int[Tensor, "T N"]) -> "KeyPlaces":
        """A window's places, and behind them those of entries; -1 stands for none."""
        places = torch.cat((self.places, pool.addresses(rows, selected).int()), dim=1)
        return KeyPlaces(places, self.is_own, torch.cat((self.visible, selected >= 0), dim=1))


def window_key_places(rows: Rows, window: int, ring_rows: int) -> KeyPlaces:
    """The window's places, alike in all layers."""
    keys, visible = window_positions(rows.positions, window, rows.first_keys)
    found = window_places(rows, ring_rows, keys)
    return KeyPlaces(torch.where(found.is_own, found.own, found.ring).int(), found.is_own, visible)


def look_back(
    rows: Rows,
    own: Shaped[Tensor, "T ..."],
    ring: Shaped[Tensor, "slots R ..."],
    key_positions: Int[Tensor, "T W"],
    part: slice = ALL_ROWS,
) -> Shaped[Tensor, "t W ..."]:
    """Vectors at `key_positions` of the sequences of rows `part`; garbage, which the caller must mask, where there are none."""
    places = window_places(rows, ring.shape[1], key_positions, part)
    is_own = places.is_own.view(*places.is_own.shape, *([1] * (own.dim() - 1)))
    return torch.where(is_own, own[places.own], ring.flatten(0, 1)[places.ring])


def store_latest(rows: Rows, own: Shaped[Tensor, "T ..."], ring: Shaped[Tensor, "slots R ..."]) -> None:
    """Write each sequence's latest rows to its ring, after everything that reads older ones. Mutates `ring`.

    Rows that a later one of the same step would overwrite go to the trash slot, so no place is written twice.
    """
    slot = torch.where(rows.remaining < ring.shape[1], rows.row_slots, TRASH_SLOT)
    ring.index_put_((slot, rows.positions % ring.shape[1]), own)


def window_positions(
    positions: Int[Tensor, " T"], window: int, first_keys: Int[Tensor, " T"] | None = None
) -> tuple[Int[Tensor, "T W"], Bool[Tensor, "T W"]]:
    """Key positions that each query's window holds, oldest first, and which places are real; empty places come last.

    The published prefill order. Published decode puts empty places first while the window fills; one order for all rows is
    what makes a row independent of how its prompt was cut, and the two differ only in which block of 64 a place counts.
    """
    first = (positions - window + 1).clamp(min=0)
    if first_keys is not None:
        first = torch.maximum(first, first_keys)
    keys = first[:, None] + torch.arange(window, device=positions.device)
    return keys, keys <= positions[:, None]
