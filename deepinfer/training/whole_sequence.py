"""A second reading of `Transformer`: the same modules over whole sequences, without caches and with gradients.

`Transformer.forward_rows` packs rows of any sequences and finds keys row by row. Here all B sequences have T tokens and begin
at position 0, so the window is read in chunks, groups are formed by reshaping, and every expert sees every token (the weights
of the experts that a token did not choose are zero). The order of a layer is that of `deepinfer.model.block.Block`.

Rows are packed as `[B * T, ...]` wherever a module works on rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F

from deepinfer.dims import Bool, Float, Int, Tensor
from deepinfer.model.attention import Attention
from deepinfer.model.block import Block
from deepinfer.model.engram import Engram
from deepinfer.model.hyper_connection import HyperConnection, Mixes, collapse, first_stream, spread
from deepinfer.model.indexer import Indexer
from deepinfer.model.moe import MoE
from deepinfer.model.norm import RMSNorm
from deepinfer.model.rope import Rope
from deepinfer.model.transformer import Layer, Transformer
from deepinfer.ops.quantize import round_fp4_e4m3, round_fp4_ue8m0, round_fp8
from deepinfer.ops.rotate import rotate_last
from deepinfer.ops.select import NEG_INF, candidate_mask, topk_stable
from deepinfer.training.dense_attention import attend_window, attend_with_entries, gather_entries
from deepinfer.training.index_loss import attention_mass, index_divergence
from deepinfer.training.qat import straight_through


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """What to leave out of the model; nothing by default."""

    entries: Literal["selected", "all", "none"] = "selected"
    engram: bool = True
    all_streams: bool = True  # False: a sub-layer reads only the stream with the largest `pre`


@dataclass(frozen=True, slots=True)
class SharedEntries:
    """What a layer hands to those above it; the counterpart of `deepinfer.model.indexer.Shared`."""

    ratio: int = 0
    entries: Float[Tensor, "B C Dh"] | None = None
    keys: Float[Tensor, "B C Di"] | None = None
    gathered: Float[Tensor, "B T N Dh"] | None = None
    seen: Bool[Tensor, "B T N"] | None = None
    candidates: Bool[Tensor, "BT C"] | None = None


@dataclass(slots=True)
class Record:
    """What a forward notes on its way: index losses and expert loads by layer."""

    index_rows: Int[Tensor, " R"] | None = None  # queries sampled for the index loss, if one is wanted
    index_losses: list[Float[Tensor, ""]] = field(default_factory=list)
    loads: dict[int, Float[Tensor, " E"]] = field(default_factory=dict)


class Output(NamedTuple):
    final: Float[Tensor, "BT D"]  # collapsed streams before the final norm
    main_hidden: Float[Tensor, "BT nD"] | None
    record: Record


def layers_of(model: Transformer) -> list[Layer]:
    """The backbone blocks with their type, which `nn.ModuleList` does not know."""
    return cast(list[Layer], list(model.layers))


def read_streams(norm: RMSNorm, streams: Float[Tensor, "T M D"], pre: Float[Tensor, "T M"]) -> Float[Tensor, "T D"]:
    return norm(collapse(streams, pre))


def coefficients(hyper: HyperConnection, streams: Float[Tensor, "T M D"]) -> Mixes:
    return hyper(streams)


def queries(attn: Attention, x: Tensor, rotation: Tensor) -> tuple[Float[Tensor, "T Rq"], Float[Tensor, "T H Dh"]]:
    return attn.queries(x, rotation)


def window_rows(attn: Attention, x: Tensor, rotation: Tensor) -> Float[Tensor, "T Dh"]:
    rows = attn.window_rows(x, rotation)
    return straight_through(round_fp8, rows) if attn.wkv.rounding else rows


def project_output(attn: Attention, out: Float[Tensor, "T H Dh"], rotation: Tensor) -> Float[Tensor, "T D"]:
    return attn.output(out, rotation)


def remember(engram: Engram, streams: Float[Tensor, "T M D"], window: Tensor, pad: Tensor) -> Float[Tensor, "T M D"]:
    return engram(streams, window, pad)


def feed_forward(ffn: MoE, x: Float[Tensor, "T D"]) -> tuple[Float[Tensor, "T D"], Float[Tensor, " E"]]:
    """The output of `MoE.forward` and how many tokens chose each expert."""
    weights, ids = ffn.gate(x)
    experts, shape = ffn.experts, (x.shape[0], ffn.gate.moe.n_routed_experts)
    per_expert = torch.zeros(shape, dtype=weights.dtype, device=x.device).scatter(1, ids, weights)
    chosen = torch.zeros_like(per_expert).scatter(1, ids, 1.0)
    inputs = straight_through(round_fp8, x) if experts.w1.rounding else x
    gate = F.linear(inputs, experts.w1.values(x.dtype).flatten(0, 1))
    up = F.linear(inputs, experts.w3.values(x.dtype).flatten(0, 1))
    hidden = experts.activate(gate, up).unflatten(1, (shape[1], -1)) * per_expert[:, :, None]
    hidden = hidden.to(x.dtype).flatten(1)
    if experts.w2.rounding:
        hidden = straight_through(round_fp8, hidden)
    routed = F.linear(hidden, experts.w2.values(x.dtype).transpose(0, 1).flatten(1))
    return (routed.float() + ffn.shared_experts(x).float()).to(x.dtype), chosen.sum(dim=0)


def index_scores(
    q: Float[Tensor, "B T Hi Di"], weights: Float[Tensor, "B T Hi"], keys: Float[Tensor, "B C Di"]
) -> Float[Tensor, "B T C"]:
    dots = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).unflatten(1, q.shape[1:3])
    return (torch.relu(dots) * weights[..., None]).sum(dim=2)


PIECES: tuple[Callable[..., Any], ...] = (
    read_streams, coefficients, spread, queries, window_rows, project_output, remember, feed_forward, index_scores,
    attend_window, attend_with_entries,
)  # fmt: skip


class WholeSequence:
    """The forward, equal to `Transformer.forward_rows` up to the order of sums.

    `fast` fuses each of `PIECES` once for all layers, and breaks ties between index scores anyhow instead of by position.
    """

    def __init__(self, model: Transformer, fast: bool = False) -> None:
        self.model, self.config, self.fast = model, model.config, fast
        self.run = {piece.__name__: torch.compile(piece, dynamic=False) if fast else piece for piece in PIECES}
        if fast:
            # One graph for each kind of layer and each rounding.
            torch._dynamo.config.recompile_limit = 64

    @property
    def activation_dtype(self) -> torch.dtype:
        return self.model.numerics.precision.activation_dtype

    def __call__(self, token_ids: Int[Tensor, "B T"], ablation: Ablation = Ablation(), record: Record | None = None) -> Output:
        """T may be any length; it is padded to whole windows inside, and padded rows are cut off again."""
        record = record or Record()
        config, length = self.config, token_ids.shape[1]
        token_ids = F.pad(token_ids, (0, -length % config.attention.window_size), value=config.pad_token_id)
        b, t = token_ids.shape
        rope = self.model.rope(torch.arange(t, device=token_ids.device).repeat(b))
        window, pad = self.token_window(token_ids), self.model.token_window.pad
        streams = self.first_streams(token_ids.flatten())
        pre = first_stream(streams)
        shared, features = SharedEntries(), []
        for index, layer in enumerate(layers_of(self.model)):
            if layer.engram is not None and ablation.engram:
                streams = self.run["remember"](layer.engram, streams, window, pad)
            if index in config.draft.target_layer_ids:
                features.append(streams.float().mean(dim=1).to(streams.dtype))

            def attention(x: Tensor, attn: Attention = layer.attn, below: SharedEntries = shared) -> tuple[Tensor, SharedEntries]:
                return self.attention(attn, x, (b, t), rope.table(attn.ratio), below, ablation, record)

            streams, pre, shared = self.block(layer, streams, pre, attention, index, ablation, record)
        kept = torch.arange(b * t, device=token_ids.device).view(b, t)[:, :length].flatten()
        final = collapse(streams, _pre(pre, ablation))
        main_hidden = torch.cat(features, dim=-1) if features else None
        if length < t:
            final = final[kept]
            main_hidden = main_hidden[kept] if main_hidden is not None else None
        return Output(final, main_hidden, record)

    def first_streams(self, token_ids: Int[Tensor, " T"]) -> Float[Tensor, "T M D"]:
        embedded = F.embedding(token_ids, self.model.embed.weight).to(self.activation_dtype)
        return embedded[:, None].expand(-1, self.config.hyper_connection.mult, -1).contiguous()

    def token_window(self, token_ids: Int[Tensor, "B T"]) -> Int[Tensor, "BT Ng"]:
        """The counterpart of `TokenWindow.forward`."""
        window = self.model.token_window
        compressed = window.token_map[token_ids]
        parts = [compressed]
        for distance in range(1, window.size):
            shifted = compressed.roll(distance, dims=1)
            shifted[:, :distance] = window.pad
            parts.append(shifted)
        return torch.stack(parts, dim=-1).flatten(0, 1)

    def block(
        self,
        block: Block,
        streams: Tensor,
        pre: Tensor,
        attention: Callable[[Tensor], tuple[Tensor, SharedEntries]],
        layer: int,
        ablation: Ablation,
        record: Record,
    ) -> tuple[Tensor, Tensor, SharedEntries]:
        """`Block.forward`."""
        run = self.run
        mixes = run["coefficients"](block.hc_attn, streams)
        y, shared = attention(run["read_streams"](block.attn_norm, streams, _pre(pre, ablation)))
        streams = run["spread"](y, streams, mixes)
        ffn_mixes = run["coefficients"](block.hc_ffn, streams)
        y, record.loads[layer] = run["feed_forward"](
            block.ffn, run["read_streams"](block.ffn_norm, streams, _pre(mixes.pre, ablation))
        )
        return run["spread"](y, streams, ffn_mixes), ffn_mixes.pre, shared

    def attention(
        self,
        attn: Attention,
        x: Tensor,
        shape: tuple[int, int],
        rope: Rope,
        shared: SharedEntries,
        ablation: Ablation,
        record: Record,
    ) -> tuple[Float[Tensor, "BT D"], SharedEntries]:
        """`Attention.forward`."""
        a = attn.config
        latent, q = self.run["queries"](attn, x, rope.query)
        kv = self.run["window_rows"](attn, x, rope.query).unflatten(0, shape)
        q = q.unflatten(0, shape)
        fixed = (attn.attn_sink, a.scale, a.window_size)
        if not attn.ratio or ablation.entries == "none":
            out = self.run["attend_window"](q, kv, *fixed)
            return self.run["project_output"](attn, out.flatten(0, 1), rope.query), shared
        if attn.compressor is not None:
            shared = self.publish(attn, x, shape, rope, shared)
        assert shared.entries is not None
        if ablation.entries == "all":
            seen = self.visible(torch.arange(shape[1], device=x.device), shared).expand(shape[0], -1, -1)
            out = self.run["attend_with_entries"](q, kv, shared.entries, seen, *fixed)
        else:
            if attn.indexer is not None:
                shared = self.select(attn.indexer, x, latent, shape, rope, shared)
                if record.index_rows is not None:
                    record.index_losses.append(self.index_loss(attn, x, latent, q, kv, rope, shared, record.index_rows))
            out = self.run["attend_with_entries"](q, kv, shared.gathered, shared.seen, *fixed)
        return self.run["project_output"](attn, out.flatten(0, 1), rope.query), shared

    def publish(self, attn: Attention, x: Tensor, shape: tuple[int, int], rope: Rope, shared: SharedEntries) -> SharedEntries:
        """Entries and index keys of a KV source, groups formed by reshaping."""
        compressor, indexer, ratio = attn.compressor, attn.indexer, attn.ratio
        assert compressor is not None
        assert indexer is not None
        rotation = rope.entry.unflatten(0, shape)[:, ::ratio].flatten(0, 1)
        if ratio == 1:
            latent = compressor.norm(compressor.wkv(x))
        else:
            kv, gates = compressor.wkv(x).unflatten(0, (-1, ratio)), compressor.wgate(x).unflatten(0, (-1, ratio))
            latent = compressor.norm((kv * torch.softmax(gates, dim=1)).sum(dim=1).to(x.dtype))
        entries = rotate_last(latent, rotation)
        if attn.wkv.rounding:
            entries = straight_through(round_fp4_e4m3, entries)
        keys = _index_rounded(indexer, indexer.keys(latent.detach(), rotation))
        by_sequence = (shape[0], shape[1] // ratio)
        return replace(shared, ratio=ratio, entries=entries.unflatten(0, by_sequence), keys=keys.unflatten(0, by_sequence))

    @staticmethod
    def visible(positions: Int[Tensor, " R"], shared: SharedEntries) -> Bool[Tensor, "R C"]:
        assert shared.keys is not None
        return torch.arange(shared.keys.shape[1], device=positions.device) < (positions[:, None] + 1) // shared.ratio

    def index_queries(
        self, indexer: Indexer, x: Float[Tensor, "T D"], latent: Float[Tensor, "T Rq"], rotation: Tensor
    ) -> tuple[Float[Tensor, "T Hi Di"], Float[Tensor, "T Hi"]]:
        ix = indexer.config
        q = rotate_last(indexer.wq_b(latent).unflatten(1, (ix.n_heads, ix.head_dim)), rotation)
        return _index_rounded(indexer, q), indexer.weights_proj(x) * (ix.head_dim**-0.5 * ix.n_heads**-0.5)

    @torch.no_grad()
    def _choose(
        self, indexer: Indexer, x: Tensor, latent: Tensor, shape: tuple[int, int], rope: Rope, shared: SharedEntries
    ) -> tuple[Int[Tensor, "B T N"], Bool[Tensor, "B T N"], Bool[Tensor, "BT C"] | None]:
        assert shared.keys is not None
        ix = indexer.config
        q, weights = self.index_queries(indexer, x, latent, rope.query)
        scores = self.run["index_scores"](q.unflatten(0, shape), weights.unflatten(0, shape), shared.keys)
        positions = torch.arange(shape[1], device=x.device)
        scores = scores.masked_fill(~self.visible(positions, shared), NEG_INF)
        candidates = shared.candidates
        if indexer.is_candidate_source:
            visible = ((positions + 1) // shared.ratio).repeat(shape[0])
            candidates = candidate_mask(scores.flatten(0, 1), visible, ix.candidate_block_size, ix.candidate_topk_blocks)
        elif candidates is not None:
            scores = scores.masked_fill(~candidates.view_as(scores), NEG_INF)
        count = min(ix.topk, scores.shape[-1])
        if self.fast:
            values, ids = scores.topk(count, dim=-1, sorted=False)
        else:
            values, ids = (best.unflatten(0, shape) for best in topk_stable(scores.flatten(0, 1), count))
        return ids, values > NEG_INF, candidates

    def select(
        self, indexer: Indexer, x: Tensor, latent: Tensor, shape: tuple[int, int], rope: Rope, shared: SharedEntries
    ) -> SharedEntries:
        """`Indexer.forward`, and the chosen entries gathered for this layer and those that reuse its choice."""
        assert shared.entries is not None
        ids, seen, candidates = self._choose(indexer, x, latent, shape, rope, shared)
        return replace(shared, gathered=gather_entries(shared.entries, ids), seen=seen, candidates=candidates)

    def index_loss(
        self,
        attn: Attention,
        x: Tensor,
        latent: Tensor,
        q: Float[Tensor, "B T H Dh"],
        kv: Float[Tensor, "B T Dh"],
        rope: Rope,
        shared: SharedEntries,
        rows: Int[Tensor, " R"],
    ) -> Float[Tensor, ""]:
        """Loss of one indexer at the sampled queries."""
        assert attn.indexer is not None
        assert shared.entries is not None
        assert shared.keys is not None
        b, a, visible = q.shape[0], attn.config, self.visible(rows, shared)
        with torch.no_grad():
            mass = attention_mass(q[:, rows], kv, shared.entries, rows, visible, attn.attn_sink, a.scale, a.window_size)

        def sampled(values: Tensor) -> Tensor:
            return values.detach().unflatten(0, (b, -1))[:, rows].flatten(0, 1)

        queries, weights = self.index_queries(attn.indexer, sampled(x), sampled(latent), sampled(rope.query))
        by_sequence = (b, rows.shape[0])
        scores = index_scores(queries.unflatten(0, by_sequence), weights.unflatten(0, by_sequence), shared.keys)
        return index_divergence(scores, mass, visible)


def _pre(pre: Float[Tensor, "T M"], ablation: Ablation) -> Float[Tensor, "T M"]:
    if ablation.all_streams:
        return pre
    return pre * F.one_hot(pre.argmax(dim=1), pre.shape[1])


def _index_rounded(indexer: Indexer, x: Float[Tensor, "... Di"]) -> Float[Tensor, "... Di"]:
    return straight_through(round_fp4_ue8m0, x) if indexer.wq_b.rounding else x
