"""CPU stand-ins for the Triton kernels: the plain definitions, over the packed words by the kernels' rules for reading them.

Products are in fixed row tiles, so a row's bits do not depend on its company, as on the device. What a model over them computes is
therefore plain batch-invariant arithmetic; what is tested is everything between the model and the kernels. Needs triton to be
installed, no GPU.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.model import hyper_connection
from deepinfer.model.hyper_connection import Mixes
from deepinfer.model.numerics import ROW_TILE
from deepinfer.model.plain_forms import combine_with_shared
from deepinfer.model.router import SUM_FLOOR
from deepinfer.ops import elementwise, select
from deepinfer.ops.attend import attend
from deepinfer.ops.elementwise import rms_norm, swiglu, without_tail
from deepinfer.ops.formats import dequantize_fp4, dequantize_fp8
from deepinfer.ops.index_scores import weigh_dots
from deepinfer.ops.matmul import block_matmul, matmul
from deepinfer.ops.quantize import round_fp4_e4m3, round_fp4_ue8m0, round_fp8
from deepinfer.ops.rotate import rotate_last
from deepinfer.ops.sinkhorn import sinkhorn
from deepinfer.ops.triton_kernels.packing import (
    WGMMA,
    PackedMatrix,
    channel_places,
    permute_channels,
    separate_rows,
    unpack_fp4,
    unpack_fp8,
)

tiled = partial(matmul, row_tile=ROW_TILE)
tiled_blocks = partial(block_matmul, row_tile=ROW_TILE)


def quantize(x: Tensor, instruction: int, pdl: bool = True) -> tuple[Tensor, Tensor]:
    """Rounded channels in the order of an instruction's operand, each row in units of a power of two that float16 holds."""
    values = permute_channels(round_fp8(x.float()), instruction)
    factor = torch.exp2(values.abs().amax(dim=1).clamp(min=1e-4).log2().floor() - 8)
    return (values / factor[:, None]).half(), factor


def norm_quantize(x: Tensor, gain: Tensor, eps: float, instruction: int, pdl: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """See `norm_quantize_activations`."""
    y = rms_norm(x, gain, eps)
    return y, *quantize(y, instruction)


def in_order(x: Tensor) -> Tensor:
    """Channels as they stand in the model."""
    return x[..., channel_places(x.shape[-1], WGMMA)]


def linear(
    x16: Tensor,
    factor: Tensor,
    words: Tensor,
    scales: Tensor,
    exponents: Tensor,
    arrivals: Tensor,
    invariant: bool = True,
    pdl: bool = True,
) -> Tensor:
    """See `fp8_linear`."""
    w = dequantize_fp8(*unpack_fp8(PackedMatrix(words, scales, exponents)))
    return tiled_blocks(in_order(x16.float() * factor[:, None]), w).bfloat16()


def linear_bf16(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    exponents: Tensor,
    arrivals: Tensor,
    groups: int,
    invariant: bool = True,
    pdl: bool = True,
) -> Tensor:
    """See `fp8_linear_bf16`."""
    w = dequantize_fp8(*unpack_fp8(PackedMatrix(words, scales, exponents), bf16=True)).bfloat16().unflatten(0, (groups, -1))
    return torch.cat([tiled(in_order(x)[:, g], w[g]) for g in range(groups)], dim=1)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up_words: Tensor,
    up_scales: Tensor,
    up_exponents: Tensor,
    down_words: Tensor,
    down_scales: Tensor,
    down_exponents: Tensor,
    limit: float,
    holds_all: bool = True,
    invariant: bool = True,
    pdl: bool = True,
) -> Tensor:
    """See `fp4_experts`."""
    up, down = PackedMatrix(up_words, up_scales, up_exponents), PackedMatrix(down_words, down_scales, down_exponents)
    up, down = (dequantize_fp4(*unpack_fp4(packed)) for packed in (up, down))
    w1, w3 = separate_rows(up)
    out = x.new_zeros((*ids.shape, x.shape[1]))
    for expert in range(down.shape[0]):
        token, slot = torch.where(ids == expert)
        if token.numel():
            rows = round_fp8(x[token]).float()
            gate, value = (tiled_blocks(rows, w[expert]).bfloat16() for w in (w1, w3))
            hidden = (without_tail(partial(swiglu, limit=limit), gate, value) * weights[token, slot, None]).bfloat16()
            out[token, slot] = tiled_blocks(round_fp8(hidden).float(), down[expert]).bfloat16()
    assert not holds_all or bool((ids < down.shape[0]).all())
    return out


def norm_rotate_round(x: Tensor, rotation: Tensor, gain: Tensor | None, eps: float, rounding: int, pdl: bool = True) -> Tensor:
    """See `norm_rotate_round.norm_rotate_round`."""
    y = rotate_last(x if gain is None else rms_norm(x, gain, eps), rotation)
    return (lambda v: v, round_fp8, round_fp4_ue8m0, round_fp4_e4m3)[rounding](y)


def collapse_norm(streams: Tensor, pre: Tensor, gain: Tensor, eps: float, pdl: bool = True) -> Tensor:
    """See `residual_streams.collapse_norm`."""
    return rms_norm(hyper_connection.collapse(streams, pre), gain, eps)


def spread(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `residual_streams.spread`."""
    return hyper_connection.spread(y, streams, Mixes(post, post, comb))


def shared_expert(x: Tensor, *arguments: Any) -> Tensor:
    """See `shared_expert.shared_expert`: eight tensors, three numbers, and what does not matter here."""
    matrices, (first, width, limit) = arguments[:8], arguments[8:11]
    gate_up = linear(*quantize(x, WGMMA), *matrices[:4])
    gate, up = gate_up[:, :width], gate_up[:, first : first + width]
    hidden = without_tail(partial(swiglu, limit=limit), gate, up).to(x.dtype)
    return linear(*quantize(F.pad(hidden, (0, matrices[4].shape[1] * 64 - width)), WGMMA), *matrices[4:])


def attend_in_place(
    q: Tensor,
    own: Tensor,
    ring: Tensor,
    pool: Tensor,
    places: Tensor,
    is_own: Tensor,
    visible: Tensor,
    sink: Tensor,
    scale: float,
    invariant: bool = True,
    pdl: bool = True,
) -> Tensor:
    """See `attention.attend_in_place`."""
    near, far = places.long().split((is_own.shape[1], places.shape[1] - is_own.shape[1]), dim=1)
    window = torch.where(is_own[:, :, None], own[near.clamp(max=own.shape[0] - 1)], ring[near.masked_fill(is_own, 0)])
    return attend(q, torch.cat((window, pool[far]), dim=1), visible, sink, scale, ROW_TILE)


def hyper_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `hyper_mix.hyper_mix`."""
    m, flat = streams.shape[1], streams.flatten(1).float()
    raw = tiled(flat, fn) * torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + norm_eps)
    sigmoid = partial(without_tail, torch.sigmoid)
    logits = (raw[:, 2 * m :] * scale[2] + base[2 * m :]).unflatten(1, (m, m))
    return tuple(
        Mixes(
            pre=sigmoid(raw[:, :m] * scale[0] + base[:m]) + eps,
            post=2 * sigmoid(raw[:, m : 2 * m] * scale[1] + base[m : 2 * m]),
            comb=sinkhorn(logits, iterations, eps),
        )
    )


def index_scores(
    q: Tensor, weights: Tensor, keys: Tensor, tables: Tensor, seq_ids: Tensor, n_visible: Tensor, per_block: int
) -> Tensor:
    """See `index_scores.index_scores`; a product for each head and entry, so that no shape matters."""
    entry = torch.arange(tables.shape[1] * per_block)
    listed = keys[tables[seq_ids][:, entry // per_block] * per_block + entry % per_block]
    dots = (q.float()[:, :, None] * listed.float()[:, None]).sum(dim=-1).to(q.dtype)
    return weigh_dots(dots, weights).masked_fill(entry >= n_visible[:, None], float("-inf"))


def route(logits: Tensor, bias: Tensor, count: int, scale: float, pdl: bool = True) -> tuple[Tensor, Tensor]:
    """See `route.route`."""
    scores = without_tail(elementwise.sqrt_softplus, logits)
    _, ids = select.topk_stable(scores + bias, count)
    weights = scores.gather(1, ids)
    return weights / (weights.sum(dim=1, keepdim=True) + SUM_FLOOR) * scale, ids.contiguous()


def select_entries(scores: Tensor, k: int) -> Tensor:
    """See `triton_kernels.select.select_entries`."""
    found = select.select_entries(scores, k)
    return F.pad(found, (0, k - found.shape[1]), value=-1)


def register() -> None:
    """Let the kernels' operations run here from now on, in this process."""
    from deepinfer.ops.triton_kernels import attention, float32_linear, fp4_experts, fp8_linear, residual_streams
    from deepinfer.ops.triton_kernels import hyper_mix as mixing
    from deepinfer.ops.triton_kernels import index_scores as index
    from deepinfer.ops.triton_kernels import norm_rotate_round as finishing
    from deepinfer.ops.triton_kernels import quantize as activations
    from deepinfer.ops.triton_kernels import route as router
    from deepinfer.ops.triton_kernels import select as selection
    from deepinfer.ops.triton_kernels import shared_expert as shared

    for operation, stand_in in (
        (activations.quantize_activations, quantize),
        (activations.norm_quantize_activations, norm_quantize),
        (fp8_linear.fp8_linear, linear),
        (fp8_linear.fp8_linear_bf16, linear_bf16),
        (fp4_experts.fp4_experts, experts),
        (float32_linear.float32_linear, lambda x, w, pdl=True: tiled(x.float(), w.float())),
        (shared.shared_expert, shared_expert),
        (shared.combine_with_shared, combine_with_shared),
        (finishing.norm_rotate_round, norm_rotate_round),
        (residual_streams.collapse_norm, collapse_norm),
        (residual_streams.spread, spread),
        (attention.attend_in_place, attend_in_place),
        (mixing.hyper_mix, hyper_mix),
        (index.index_scores, index_scores),
        (router.route, route),
        (selection.select_entries, select_entries),
        (selection.candidate_mask, select.candidate_mask),
    ):
        operation.register_kernel("cpu", stand_in)
