"""Attention of one layer: a sliding window of raw rows and, in compressed layers, a selection of compressed entries.

One softmax runs over both. There is one key-value head, and key and value are the same vector, so a rotated value is turned
back after the weighted sum. Source: specification section 8.
"""

import torch
from torch import nn

from deepinfer.config import ModelConfig
from deepinfer.dims import Bool, Float, Int, Tensor
from deepinfer.model.cache import ALL_ROWS, LayerCache, look_back, store_latest, window_positions
from deepinfer.model.compressor import Compressor
from deepinfer.model.indexer import Indexer, Shared
from deepinfer.model.linear import Linear
from deepinfer.model.norm import RMSNorm
from deepinfer.model.numerics import Numerics
from deepinfer.model.rope import Rope, RopeTables
from deepinfer.model.rows import Rows
from deepinfer.ops.quantize import round_fp4_e4m3, round_fp8
from deepinfer.ops.rotate import rotate_last

ATTEND_ROWS = 256  # rows attended at once: bounds the gathered copy of their keys


class Attention(nn.Module):
    """Queries, window rows, compressed entries and the grouped output projection of one layer.

    The layer's role follows from the config: window only (ratio 0); a KV source owns a `compressor`; an index source owns an
    `indexer`; any other compressed layer reuses what `Shared` brings from below.
    """

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics) -> None:
        super().__init__()
        self.config, self.numerics = config.attention, numerics
        self.ratio = config.compress_ratios[layer]
        a, fmt = config.attention, "fp8" if config.quantized else "bf16"
        self.wq_a = Linear(config.dim, a.q_lora_rank, fmt, numerics)
        self.q_norm = RMSNorm(a.q_lora_rank, config.norm_eps)
        self.wq_b = Linear(a.q_lora_rank, a.n_heads * a.head_dim, fmt, numerics)
        self.wkv = Linear(config.dim, a.head_dim, fmt, numerics)
        self.kv_norm = RMSNorm(a.head_dim, config.norm_eps)
        self.attn_sink = nn.Parameter(torch.empty(a.n_heads, dtype=torch.float32), requires_grad=False)
        self.wo_a = Linear(a.n_heads * a.head_dim // a.o_groups, a.o_groups * a.o_lora_rank, fmt, numerics)
        self.wo_b = Linear(a.o_groups * a.o_lora_rank, config.dim, fmt, numerics)
        self.compressor = Compressor(config, layer, numerics) if layer in config.kv_source_layers else None
        self.indexer = Indexer(config, layer, numerics) if layer in config.index_source_layers else None

    def forward(
        self, x: Float[Tensor, "T D"], rows: Rows, rope: RopeTables, shared: Shared, cache: LayerCache
    ) -> tuple[Float[Tensor, "T D"], Shared]:
        """Attention output of the collapsed and normalised input `x`, and what the layers above share.

        Mutates this layer's ring and, in a KV source, its entry pool.
        """
        table = rope.table(self.ratio)
        query_latent, q, kv = self.project(x, table.query)
        shared = self._publish_entries(x, rows, table, shared, cache)
        if self.indexer is not None:
            chosen = self.indexer(x, query_latent, table.query, rows, shared, cache)
            candidates = shared.candidates if chosen.candidates is None else chosen.candidates
            window = shared.window
            shared = Shared(shared.pool, chosen.selected, candidates)
            shared = shared if window is None else shared.with_places(window, rows)
        if rows.context is not None:
            rows.context.fill_halo(kv, cache.ring)
        out = self._attend(q, kv, rows, shared, cache)
        store_latest(rows, kv, cache.ring)
        return self.output(out, table.query), shared

    def project(
        self, x: Float[Tensor, "T D"], rotation: Float[Tensor, "T half 2"]
    ) -> tuple[Float[Tensor, "T Rq"], Float[Tensor, "T H Dh"], Float[Tensor, "T Dh"]]:
        """`queries` and `window_rows` of the same input, which a fast form reads once for both."""
        low_rank, raw = self.numerics.ops.linears(x, (self.wq_a, self.wkv), self.numerics)
        return *self._heads(low_rank, rotation), self._rows(raw, rotation)

    def queries(
        self, x: Float[Tensor, "T D"], rotation: Float[Tensor, "T half 2"]
    ) -> tuple[Float[Tensor, "T Rq"], Float[Tensor, "T H Dh"]]:
        """The query latent, which the indexer shares, and the rotated query heads; no norm on the heads (V4 had one)."""
        return self._heads(self.wq_a(x), rotation)

    def _heads(
        self, low_rank: Float[Tensor, "T Rq"], rotation: Float[Tensor, "T half 2"]
    ) -> tuple[Float[Tensor, "T Rq"], Float[Tensor, "T H Dh"]]:
        latent, flat = self.numerics.ops.norm_linear(low_rank, self.q_norm, self.wq_b)
        heads = flat.unflatten(1, (self.config.n_heads, self.config.head_dim))
        return latent, self.numerics.ops.norm_rotate_round(heads, rotation)

    def window_rows(self, x: Float[Tensor, "T D"], rotation: Float[Tensor, "T half 2"]) -> Float[Tensor, "T Dh"]:
        """Raw key-value rows as the window keeps them: normalised, rotated, rounded to FP8."""
        return self._rows(self.wkv(x), rotation)

    def _rows(self, raw: Float[Tensor, "T Dh"], rotation: Float[Tensor, "T half 2"]) -> Float[Tensor, "T Dh"]:
        return self.numerics.ops.norm_rotate_round(raw, rotation, self.kv_norm, self.numerics.precision.cached(round_fp8))

    def output(self, out: Float[Tensor, "T H Dh"], rotation: Float[Tensor, "T half 2"]) -> Float[Tensor, "T D"]:
        """Turn the values back and project: heads in groups to a low rank, then all ranks to the model width."""
        turned = rotate_last(out, rotation, inverse=True)
        groups = turned.flatten(1).unflatten(1, (self.config.o_groups, -1))
        return self.wo_b(self.wo_a.forward_groups(groups).flatten(1))

    def _publish_entries(self, x: Float[Tensor, "T D"], rows: Rows, table: Rope, shared: Shared, cache: LayerCache) -> Shared:
        """In a KV source: compress, store entries and index keys, and make its pool the current one."""
        if self.compressor is None:
            return shared
        assert self.indexer is not None  # the config guarantees it
        latent = self.compressor(x, rows, cache)
        rounding = self.numerics.precision.cached(round_fp4_e4m3)
        entries = self.numerics.ops.norm_rotate_round(latent, table.entry, rounding=rounding)
        pool = cache.pool
        assert pool is not None
        index_keys = self.indexer.keys(latent, table.entry)
        if rows.context is None:
            pool.write(rows, entries, index_keys)
        else:
            rows.context.write_entries(pool, rows, entries, index_keys)
        # Without the choice among the last source's entries: this source makes its own.
        return Shared(pool, candidates=shared.candidates, window=shared.window)

    def _attend(
        self, q: Float[Tensor, "T H Dh"], kv: Float[Tensor, "T Dh"], rows: Rows, shared: Shared, cache: LayerCache
    ) -> Float[Tensor, "T H Dh"]:
        """Attend over each row's list: the window oldest first, then the selected entries in ascending order."""
        if self.numerics.ops.attend_in_place is not None:
            return self._attend_in_place(q, kv, shared, cache)
        # A compiler wants no loop over rows; it serves steps of bounded size.
        count = q.shape[0]
        parts = [ALL_ROWS] if self.numerics.ops.static_shapes else [slice(i, i + ATTEND_ROWS) for i in range(0, count, ATTEND_ROWS)]
        results = [self._attend_rows(part, q, kv, rows, shared, cache) for part in parts]
        return results[0] if len(results) == 1 else torch.cat(results)

    def _attend_in_place(
        self, q: Float[Tensor, "T H Dh"], kv: Float[Tensor, "T Dh"], shared: Shared, cache: LayerCache
    ) -> Float[Tensor, "T H Dh"]:
        """The same over where the list's vectors lie, without a copy of them."""
        attend, listed = self.numerics.ops.attend_in_place, shared.listed if self.ratio else shared.window
        assert attend is not None
        assert listed is not None
        ring = pool = cache.ring.flatten(0, 1)
        if self.ratio:
            assert shared.pool is not None
            pool = shared.pool.entries
        return attend(q, kv, ring, pool, *listed, self.attn_sink, self.config.scale)

    def _attend_rows(
        self, part: slice, q: Float[Tensor, "T H Dh"], kv: Float[Tensor, "T Dh"], rows: Rows, shared: Shared, cache: LayerCache
    ) -> Float[Tensor, "t H Dh"]:
        keys, visible = window_positions(rows.positions, self.config.window_size, rows.first_keys)
        listed = look_back(rows, kv, cache.ring, keys, part)
        seen = visible[part]
        if self.ratio:
            listed, seen = self._with_entries(listed, seen, part, rows, shared)
        return self.numerics.ops.attend(q[part], listed, seen, self.attn_sink, self.config.scale)

    @staticmethod
    def _with_entries(
        listed: Float[Tensor, "t W Dh"], seen: Bool[Tensor, "t W"], part: slice, rows: Rows, shared: Shared
    ) -> tuple[Float[Tensor, "t S Dh"], Bool[Tensor, "t S"]]:
        assert shared.pool is not None
        assert shared.selected is not None
        selected: Int[Tensor, "t N"] = shared.selected[part]
        entries = shared.pool.entries[shared.pool.addresses(rows, selected, part)]
        return torch.cat((listed, entries), dim=1), torch.cat((seen, selected >= 0), dim=1)
