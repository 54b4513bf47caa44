"""Which compressed entries each query attends to.

A KV source owns index keys; an index source scores them with its own queries and keeps the best `topk`. One layer, the
candidate source, also publishes the blocks of entries that later index sources choose from.
Source: specification sections 8.6 and 8.7.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from deepinfer.config import ModelConfig
from deepinfer.dims import Bool, Float, Int, Tensor
from deepinfer.model.cache import EntryPool, KeyPlaces, LayerCache
from deepinfer.model.linear import Linear
from deepinfer.model.norm import RMSNorm
from deepinfer.model.numerics import ROW_TILE, Numerics
from deepinfer.model.rows import Rows
from deepinfer.ops.index_scores import index_scores, weigh_dots
from deepinfer.ops.quantize import round_fp4_ue8m0
from deepinfer.ops.select import NEG_INF

ENTRY_TILE = 64  # entries scored by one product in batch-invariant arithmetic


@dataclass(frozen=True, slots=True)
class Shared:
    """What a layer hands to the layers above it in the same forward (section 8.8). Values, never stored on a module."""

    pool: EntryPool | None = None  # entries and index keys of the latest KV source
    selected: Int[Tensor, "T N"] | None = None  # entry ids of the latest index source, ascending, -1 behind them
    candidates: Bool[Tensor, "T C"] | None = None  # entries that later index sources may choose
    # Where keys lie, for attention in place: of the window, and of the window with the selected entries.
    window: KeyPlaces | None = None
    listed: KeyPlaces | None = None

    def with_places(self, window: KeyPlaces, rows: Rows) -> "Shared":
        """The same with places of `rows`."""
        is_listed = self.pool is not None and self.selected is not None
        listed = window.with_entries(self.pool, rows, self.selected) if is_listed else None  # type: ignore[arg-type]
        return Shared(self.pool, self.selected, self.candidates, window, listed)


class IndexerOutput(NamedTuple):
    """What one index source decided."""

    selected: Int[Tensor, "T N"]
    candidates: Bool[Tensor, "T C"] | None  # only from the candidate source
    scores: Float[Tensor, "T C"]  # as used for the choice: -inf is unreachable or filtered out


class Indexer(nn.Module):
    """Scores and selection of one index source layer; with `wk` and `k_norm` if the layer also owns the keys."""

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics) -> None:
        super().__init__()
        self.config, self.numerics = config.indexer, numerics
        self.is_candidate_source = layer == config.indexer.candidate_source_layer
        ix = config.indexer
        fmt = "fp8" if config.quantized else "bf16"
        self.wq_b = Linear(config.attention.q_lora_rank, ix.n_heads * ix.head_dim, fmt, numerics)
        self.weights_proj = Linear(config.dim, ix.n_heads, "bf16", numerics)
        if layer in config.kv_source_layers:
            self.wk = Linear(config.attention.head_dim, ix.head_dim, "bf16", numerics)
            self.k_norm = RMSNorm(ix.head_dim, config.norm_eps)

    def keys(self, latent: Float[Tensor, "T Dh"], entry_rotation: Float[Tensor, "T half 2"]) -> Float[Tensor, "T Di"]:
        """Index keys from the latents before rotation; rotated at the entry's own position."""
        return self._turned(self.wk(latent), entry_rotation, self.k_norm)

    def forward(
        self,
        x: Float[Tensor, "T D"],
        query_latent: Float[Tensor, "T Rq"],
        rotation: Float[Tensor, "T half 2"],
        rows: Rows,
        shared: Shared,
        cache: LayerCache,
    ) -> IndexerOutput:
        """Choose entries for each row among the visible ones of `shared.pool` (and of `shared.candidates`, if there are any)."""
        assert shared.pool is not None
        ix, ratio, ops = self.config, shared.pool.ratio, self.numerics.ops
        q = self._turned(self.wq_b(query_latent).unflatten(1, (ix.n_heads, ix.head_dim)), rotation)
        weights = self.weights_proj(x) * (ix.head_dim**-0.5 * ix.n_heads**-0.5)
        n_visible = (rows.positions + 1) // ratio
        if (fast := ops.index_scores) is not None:
            scores = fast(q, weights, shared.pool, rows, n_visible)
        else:
            scores = self._scores(q, weights, shared.pool.keys_of_sequences(rows), rows.seq_ids)
            if self.numerics.published_index_keys and ratio == 2:
                scores = self._with_published_keys(scores, q, weights, rows, cache)
            entry = torch.arange(scores.shape[1], device=scores.device)
            scores = scores.masked_fill(entry >= n_visible[:, None], NEG_INF)
        candidates = None
        if self.is_candidate_source:
            # The source itself chooses among all visible entries; the mask is for the layers above.
            candidates = ops.candidate_mask(scores, n_visible, ix.candidate_block_size, ix.candidate_topk_blocks)
        elif shared.candidates is not None:
            scores = scores.masked_fill(~shared.candidates, NEG_INF)
        # An entry outside the candidates is never chosen, even if fewer than topk candidates exist (specification U3).
        return IndexerOutput(ops.select_entries(scores, ix.topk), candidates, scores)

    def _turned(
        self, x: Float[Tensor, "T ... Di"], rotation: Float[Tensor, "T half 2"], norm: RMSNorm | None = None
    ) -> Float[Tensor, "T ... Di"]:
        rounding = self.numerics.precision.cached(round_fp4_ue8m0)
        return self.numerics.ops.norm_rotate_round(x, rotation, norm, rounding)

    def _scores(
        self, q: Float[Tensor, "T Hi Di"], weights: Float[Tensor, "T Hi"], keys: Float[Tensor, "B C Di"], seq_ids: Int[Tensor, " T"]
    ) -> Float[Tensor, "T C"]:
        """`sum_h relu(q_h . k_c) * w_h`, each step rounded to the activation dtype as published (specification U2)."""
        ops = self.numerics.ops
        if keys.shape[0] == 1 and not ops.batch_invariant:
            t, hi, _ = q.shape
            dots = ops.matmul(q.flatten(0, 1), keys[0]).unflatten(0, (t, hi))
            return weigh_dots(dots, weights)
        if not ops.batch_invariant:
            return index_scores(q, weights, keys, seq_ids)
        # The shape of a product may not depend on how many entries the company has.
        count = keys.shape[1]
        keys = F.pad(keys, (0, 0, 0, -count % ENTRY_TILE))
        parts = []
        for start in range(0, q.shape[0], ROW_TILE):
            part = slice(start, start + ROW_TILE)
            tiles = keys[seq_ids[part]].split(ENTRY_TILE, dim=1)
            scores = [weigh_dots(ops.batched_matmul(q[part], tile.transpose(1, 2)), weights[part]) for tile in tiles]
            parts.append(torch.cat(scores, dim=1)[:, :count])
        return torch.cat(parts)

    def _with_published_keys(
        self, scores: Tensor, q: Tensor, weights: Tensor, rows: Rows, cache: LayerCache
    ) -> Float[Tensor, "T C"]:
        """Scores as the published decode computes them at positions that leave a group incomplete (specification U1)."""
        assert cache.last_pool is not None
        foreign = self._scores(q, weights, cache.last_pool.keys_of_sequences(rows), rows.seq_ids)
        is_decode = (rows.offsets == 0) & (rows.remaining == 0) & (rows.positions > 0)
        incomplete = is_decode & (rows.positions % 2 == 0)
        return torch.where(incomplete[:, None], foreign[:, : scores.shape[1]], scores)
