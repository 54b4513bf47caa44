"""Faults to plant in a copy of a model, and the module that a comparison should name for each.

They stand for what goes wrong in optimised builds: a wrong pairing, a scale, an order, a coefficient of another place.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn

import deepinfer.model.attention
import deepinfer.model.block
import deepinfer.model.compressor
import deepinfer.model.engram
import deepinfer.model.indexer
import deepinfer.model.moe
import deepinfer.model.plain_forms
import deepinfer.ops.index_scores
from deepinfer.model.attention import Attention
from deepinfer.model.block import Block
from deepinfer.model.compressor import Compressor
from deepinfer.model.draft import DraftAttention
from deepinfer.model.engram import EngramTable, NgramHash
from deepinfer.model.hyper_connection import HyperConnection, Mixes, collapse, spread
from deepinfer.model.indexer import Indexer
from deepinfer.model.linear import StoredMatrix
from deepinfer.model.moe import Experts, SharedExpert
from deepinfer.model.norm import RMSNorm
from deepinfer.model.rope import RotaryEmbedding
from deepinfer.model.router import Router, RouterOutput
from deepinfer.model.transformer import Transformer
from deepinfer.ops.elementwise import sqrt_softplus, swiglu
from deepinfer.ops.quantize import round_fp4_ue8m0
from deepinfer.ops.rotate import rope_frequencies, rotate_last

Plant = Callable[[Transformer, pytest.MonkeyPatch], None]
M = TypeVar("M", bound=nn.Module)


class Fault(NamedTuple):
    """How to plant a fault, and the module (and a name of it) that shows it first."""

    plant: Plant
    module: str
    name: str


def all_of(model: nn.Module, kind: type[M]) -> list[M]:
    return [module for module in model.modules() if isinstance(module, kind)]


def neox_pairs(x: Tensor, rot: Tensor, *, inverse: bool = False) -> Tensor:
    """Channel i is paired with channel i + half, not with its neighbour."""
    half = rot.shape[1]
    kept, rotated = x[..., : -2 * half], x[..., -2 * half :]
    adjacent = rotated.unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)
    turned = rotate_last(adjacent, rot, inverse=inverse)
    return torch.cat((kept, turned.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)), dim=-1)


def wrong_rope_pairing(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deepinfer.model.plain_forms, "rotate_last", neox_pairs)


def wrong_rope_pairing_of_the_indexer(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    def turned(self: Indexer, x: Tensor, rotation: Tensor, norm: nn.Module | None = None) -> Tensor:
        rounding = self.numerics.precision.cached(round_fp4_ue8m0)
        y = neox_pairs(x if norm is None else norm(x), rotation)
        return y if rounding is None else rounding(y)

    patch.setattr(Indexer, "_turned", turned)


def no_yarn(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    model.rope.compress_freqs = rope_frequencies(model.config.attention.rope_head_dim, model.config.rope.compress_theta)


def values_stay_rotated(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    def rotate(x: Tensor, rot: Tensor, *, inverse: bool = False) -> Tensor:
        return x if inverse else rotate_last(x, rot)

    patch.setattr(deepinfer.model.attention, "rotate_last", rotate)


def entries_at_their_last_token(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    forward = RotaryEmbedding.forward

    def at_own_position(self: RotaryEmbedding, positions: Tensor) -> Any:
        tables = forward(self, positions)
        return tables._replace(by_ratio={ratio: table._replace(entry=table.query) for ratio, table in tables.by_ratio.items()})

    patch.setattr(RotaryEmbedding, "forward", at_own_position)


def no_sink(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    for attention in all_of(model, Attention):
        attention.attn_sink.fill_(float("-inf"))


def window_one_larger(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    wider = replace(model.config.attention, window_size=model.config.attention.window_size + 1)
    model.config = replace(model.config, attention=wider)
    for attention in all_of(model, Attention):
        attention.config = wider


def scale_one_exponent_off(path: str) -> Plant:
    """Every E8M0 scale of one matrix is twice as large."""

    def plant(model: Transformer, patch: pytest.MonkeyPatch) -> None:
        matrix = model.get_submodule(path)
        assert isinstance(matrix, StoredMatrix)
        matrix.scale.data.view(torch.uint8).add_(1)
        matrix.keep_scale_bytes()
        matrix.expand(torch.float32)

    return plant


def one_scale_one_exponent_off(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    """Only one block of 32 by 32 of one matrix."""
    matrix = model.get_submodule("layers.6.attn.wkv")
    assert isinstance(matrix, StoredMatrix)
    matrix.scale.data.view(torch.uint8)[0, 0] += 1
    matrix.keep_scale_bytes()
    matrix.expand(torch.float32)


def nibbles_swapped(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    matrix = model.get_submodule("layers.5.ffn.experts.w1")
    assert isinstance(matrix, StoredMatrix)
    packed = matrix.weight.data.view(torch.uint8)
    packed.copy_((packed << 4) | (packed >> 4))
    matrix.expand(torch.float32)


def experts_in_another_order(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    for name in ("w1", "w2", "w3"):
        matrix = model.get_submodule(f"layers.3.ffn.experts.{name}")
        assert isinstance(matrix, StoredMatrix)
        for tensor in (matrix.weight, matrix.scale):
            bytes_ = tensor.data.view(torch.uint8)
            bytes_.copy_(bytes_.roll(1, dims=0))
        matrix.keep_scale_bytes()
        matrix.expand(torch.float32)


def gate_and_up_exchanged(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    def exchanged(gate: Tensor, up: Tensor, limit: float) -> Tensor:
        return swiglu(up, gate, limit)

    for expert in all_of(model, SharedExpert):
        expert.activate = partial(exchanged, limit=model.config.moe.swiglu_limit)


def no_swiglu_limit(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    for experts in all_of(model, Experts):
        experts.activate = partial(swiglu, limit=0)


def bias_in_the_weights(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    def forward(self: Router, x: Tensor) -> RouterOutput:
        scores, ids = (sqrt_softplus(x.float() @ self.values(torch.float32).T) + self.bias).sort(dim=-1, descending=True)
        k = self.moe.n_activated_experts
        weights = scores[:, :k]
        return RouterOutput(weights / weights.sum(dim=1, keepdim=True) * self.moe.route_scale, ids[:, :k])

    patch.setattr(Router, "forward", forward)


def no_gate_bias(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    model.get_submodule("layers.4.ffn.gate").bias.zero_()  # type: ignore[operator, union-attr]


def larger_route_scale(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    for router in all_of(model, Router):
        router.moe = replace(router.moe, route_scale=router.moe.route_scale * 1.01)


def own_pre_mix(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    """`pre` from the same sub-layer, as in V4."""

    def forward(self: Block, streams: Tensor, pre_mix: Tensor, *inputs: Any, **of_padding: Any) -> Any:
        mixes = self.hc_attn(streams)
        y, shared = self.attn(self.attn_norm(collapse(streams, mixes.pre)), *inputs)
        streams = spread(y, streams, mixes)
        mixes = self.hc_ffn(streams)
        return spread(self.ffn(self.ffn_norm(collapse(streams, mixes.pre))), streams, mixes), mixes.pre, shared

    patch.setattr(Block, "forward", forward)


def transposed_comb(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    def transposed(y: Tensor, streams: Tensor, mixes: Mixes) -> Tensor:
        return spread(y, streams, mixes._replace(comb=mixes.comb.transpose(1, 2)))

    patch.setattr(deepinfer.model.block, "spread", transposed)


def one_sinkhorn_round_less(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    for connection in all_of(model, HyperConnection):
        connection.config = replace(connection.config, sinkhorn_iters=connection.config.sinkhorn_iters - 1)


def larger_norm_eps(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    for norm in all_of(model, RMSNorm):
        norm.eps = 1e-4


def one_entry_less(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    for indexer in all_of(model, Indexer):
        indexer.config = replace(indexer.config, topk=indexer.config.topk - 1)


def no_relu(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    def weigh_all(dots: Tensor, weights: Tensor) -> Tensor:
        return (dots * weights[:, :, None]).sum(dim=1)

    for module in (deepinfer.model.indexer, deepinfer.ops.index_scores):
        patch.setattr(module, "weigh_dots", weigh_all)


def no_candidate_filter(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    for indexer in all_of(model, Indexer):
        indexer.is_candidate_source = False


def uniform_pooling(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    """The two tokens of an entry count alike, whatever their gates say."""
    forward = Compressor.forward

    def without_gate(self: Compressor, x: Tensor, *rest: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch, "softmax", lambda gates, dim: torch.full_like(gates, 0.5))
            return forward(self, x, *rest)

    patch.setattr(Compressor, "forward", without_gate)


def engram_pad_id(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    model.token_window.pad_token_id = 0


def engram_columns_in_another_order(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    hash_ = model.get_submodule("layers.4.engram.hash")
    assert isinstance(hash_, NgramHash)
    hash_.offsets = hash_.offsets.roll(1)


def engram_scale(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    table = model.get_submodule("layers.1.engram.embed")
    assert isinstance(table, EngramTable)
    table.scale.data.view(torch.uint8).add_(1)
    table.keep_scale_bytes()


def noise_token(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    draft = model.config.draft
    model.mtp.config = replace(model.config, draft=replace(draft, noise_token_id=draft.noise_token_id - 1))


def no_markov_bias(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    head = model.mtp[-1].get_submodule("markov_head.head")
    assert isinstance(head, StoredMatrix)
    head.weight.data.zero_()
    head.expanded = None


def causal_drafts(model: Transformer, patch: pytest.MonkeyPatch) -> None:
    block = model.config.draft.block_size
    for attention in all_of(model, DraftAttention):
        attend = attention.numerics.ops.attend

        def causal(q: Tensor, kv: Tensor, visible: Tensor, *rest: Any, attend: Any = attend) -> Tensor:
            later = torch.ones(block, block, dtype=torch.bool).triu(1).repeat(q.shape[0] // block, 1)
            visible = visible.clone()
            visible[:, -block:] &= ~later
            return attend(q, kv, visible, *rest)

        attention.numerics = replace(attention.numerics, ops=replace(attention.numerics.ops, attend=causal))


# The first tensor that may differ, for a recording of all tensors of `tiny_config()`.
FAULTS = {
    "wrong RoPE pairing": Fault(wrong_rope_pairing, "layers.0.attn", "layers.0.attn.query"),
    "wrong RoPE pairing in the indexer": Fault(wrong_rope_pairing_of_the_indexer, "layers.2.attn", "layers.2.attn.index_keys"),
    "no YaRN": Fault(no_yarn, "rope", "rope.1.query"),
    "values stay rotated": Fault(values_stay_rotated, "layers.0.attn", "layers.0.attn.wo_a.in"),
    "entries rotated at their last token": Fault(entries_at_their_last_token, "rope", "rope.2.entry"),
    "no sink": Fault(no_sink, "layers.0.attn", "layers.0.attn.heads"),
    "window one larger": Fault(window_one_larger, "layers.0.attn", "layers.0.attn.heads"),
    "scale of an FP8 matrix one exponent off": Fault(
        scale_one_exponent_off("layers.3.attn.wq_b"), "layers.3.attn.wq_b", "layers.3.attn.wq_b"
    ),
    "scale of FP4 experts one exponent off": Fault(
        scale_one_exponent_off("layers.7.ffn.experts.w2"), "layers.7.ffn.experts", "layers.7.ffn.experts"
    ),
    "one scale one exponent off": Fault(one_scale_one_exponent_off, "layers.6.attn.wkv", "layers.6.attn.wkv"),
    "nibbles swapped": Fault(nibbles_swapped, "layers.5.ffn.experts", "layers.5.ffn.experts"),
    "experts in another order": Fault(experts_in_another_order, "layers.3.ffn.experts", "layers.3.ffn.experts"),
    "gate and up exchanged": Fault(gate_and_up_exchanged, "layers.0.ffn.shared_experts.w2", "layers.0.ffn.shared_experts.w2"),
    "no SwiGLU limit": Fault(no_swiglu_limit, "layers.0.ffn.experts", "layers.0.ffn.experts"),
    "bias in the routing weights": Fault(bias_in_the_weights, "layers.0.ffn.gate", "layers.0.ffn.gate.weights"),
    "no gate bias": Fault(no_gate_bias, "layers.4.ffn.gate", "layers.4.ffn.gate.scores"),
    "route scale 1 % larger": Fault(larger_route_scale, "layers.0.ffn.gate", "layers.0.ffn.gate.weights"),
    "pre of the same sub-layer": Fault(own_pre_mix, "layers.0", "layers.0.attn_norm.in"),
    # Behind the embedding all streams are the same, so that the first mixing does not show it.
    "comb transposed": Fault(transposed_comb, "layers.0", "layers.0"),
    # Other layers' coefficients have converged before the last round.
    "one Sinkhorn round less": Fault(one_sinkhorn_round_less, "layers.3.hc_attn", "layers.3.hc_attn.comb"),
    "larger norm epsilon": Fault(larger_norm_eps, "layers.0.attn_norm", "layers.0.attn_norm"),
    "one entry less": Fault(one_entry_less, "layers.2.attn.indexer", "layers.2.attn.indexer.selected"),
    "indexer without ReLU": Fault(no_relu, "layers.2.attn.indexer", "layers.2.attn.indexer.scores"),
    "no candidate filter": Fault(no_candidate_filter, "layers.7.attn.indexer", "layers.7.attn.indexer.scores"),
    "uniform pooling": Fault(uniform_pooling, "layers.2.attn.compressor", "layers.2.attn.compressor.norm.in"),
    "Engram pad id 0": Fault(engram_pad_id, "token_window", "token_window"),
    "Engram columns in another order": Fault(engram_columns_in_another_order, "layers.4.engram.hash", "layers.4.engram.hash"),
    "Engram scale one exponent off": Fault(engram_scale, "layers.1.engram.embed", "layers.1.engram.embed"),
    "DSpark noise token": Fault(noise_token, "mtp", "mtp.inputs"),
    "no Markov bias": Fault(no_markov_bias, "mtp.2.markov_head.head", "mtp.2.markov_head.head"),
    "causal drafts": Fault(causal_drafts, "mtp.0.attn", "mtp.0.attn.wo_a.in"),
}
