"""What quantised matrices do, by the Triton kernels of `ops/triton_kernels`, over weights that `packed_weights.py` has packed.

On devices that multiply block-scaled codes themselves, matrices stay as they are and go through `block_scaled_forms.py`.
A matrix that could not be packed, and every precision but `native`, goes through the forms for a compiler instead.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from deepinfer.dims import Bool, Float, Int, Tensor
from deepinfer.model import block_scaled_forms, inductor_forms, plain_forms
from deepinfer.ops.attend import attend as plain_attend
from deepinfer.ops.quantize import round_fp4_e4m3, round_fp4_ue8m0, round_fp8
from deepinfer.ops.triton_kernels import attention, residual_streams
from deepinfer.ops.triton_kernels import float32_linear as float32
from deepinfer.ops.triton_kernels import hyper_mix as mixing
from deepinfer.ops.triton_kernels import index_scores as index
from deepinfer.ops.triton_kernels import norm_rotate_round as finishing
from deepinfer.ops.triton_kernels import route as routing
from deepinfer.ops.triton_kernels.fp4_experts import fp4_experts
from deepinfer.ops.triton_kernels.fp8_linear import fp8_linear, fp8_linear_bf16
from deepinfer.ops.triton_kernels.packing import WGMMA, permute_channels
from deepinfer.ops.triton_kernels.quantize import norm_quantize_activations, quantize_activations
from deepinfer.ops.triton_kernels.shared_expert import combine_with_shared
from deepinfer.ops.triton_kernels.shared_expert import shared_expert as beside_the_experts

if TYPE_CHECKING:
    from deepinfer.model.cache import EntryPool
    from deepinfer.model.hyper_connection import HyperConnection, Mixes
    from deepinfer.model.linear import Float32Linear, Linear, PackedWeights, StoredMatrix
    from deepinfer.model.moe import Experts, SharedExpert
    from deepinfer.model.norm import RMSNorm
    from deepinfer.model.numerics import Numerics, Rounding
    from deepinfer.model.router import Router
    from deepinfer.model.rows import Rows

LEAST_WIDTH = 16  # of an operand of a tensor core


def linear(x: Float[Tensor, "T K"], matrix: "StoredMatrix", numerics: "Numerics") -> Float[Tensor, "T N"]:
    """Quantise, then one product. bfloat16 weights, and what could not be packed, have the product of `float32_linear`."""
    if matrix.fmt == "bf16":
        return float32.float32_linear(x, matrix.weight).to(x.dtype)
    if not numerics.precision.quantize_activations:
        return inductor_forms.linear(x, matrix, numerics)
    if matrix.block_scaled:
        return block_scaled_forms.linear(x, matrix)
    if matrix.packed is None:
        return float32.float32_linear(round_fp8(x).bfloat16(), matrix.values(torch.bfloat16)).to(x.dtype)
    return _product(x, matrix.packed, numerics)[:, : matrix.out_features]


def linears(
    x: Float[Tensor, "T K"], matrices: tuple["StoredMatrix", ...], numerics: "Numerics"
) -> tuple[Float[Tensor, "T N"], ...]:
    """Matrices that were packed together are one product."""
    joined = matrices[0].joined
    if joined is None or any(matrix.joined is not joined for matrix in matrices):
        return tuple(linear(x, matrix, numerics) for matrix in matrices)
    packed: list[PackedWeights] = [matrix.packed for matrix in matrices]
    parts = _product(x, joined, numerics).split([part.padded_rows for part in packed], dim=1)
    return tuple(y[:, : matrix.out_features] for y, matrix in zip(parts, matrices, strict=True))


def norm_linear(x: Float[Tensor, "T K"], norm: "RMSNorm", matrix: "Linear") -> tuple[Float[Tensor, "T K"], Float[Tensor, "T N"]]:
    """The norm in the launch that quantises, where the matrix is packed without padding."""
    packed = matrix.packed
    if packed is None or packed.padded_channels != x.shape[1]:
        return plain_forms.norm_linear(x, norm, matrix)
    normed, *quantized = norm_quantize_activations(x, norm.weight, norm.eps, WGMMA)
    invariant = matrix.numerics.ops.batch_invariant
    return normed, fp8_linear(*quantized, *packed.tensors(), packed.arrivals, invariant)[:, : matrix.out_features]


def _product(x: Float[Tensor, "T K"], packed: "PackedWeights", numerics: "Numerics") -> Float[Tensor, "T Np"]:
    quantized = quantize_activations(_padded(x, packed), WGMMA)
    return fp8_linear(*quantized, *packed.tensors(), packed.arrivals, numerics.ops.batch_invariant)


def _padded(x: Float[Tensor, "... K"], packed: "PackedWeights") -> Float[Tensor, "... Kp"]:
    """Zeros for the channels that a matrix got when it was packed."""
    missing = packed.padded_channels - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def grouped_linear(x: Float[Tensor, "T G K"], matrix: "StoredMatrix", numerics: "Numerics") -> Float[Tensor, "T G R"]:
    """One launch for all groups; a matrix that could not be packed has a product for each."""
    groups = x.shape[1]
    if matrix.packed is None:
        weights = matrix.values(torch.bfloat16).unflatten(0, (groups, -1))
        return torch.stack([float32.float32_linear(x[:, g], weights[g]) for g in range(groups)], dim=1).to(x.dtype)
    permuted = permute_channels(_padded(x, matrix.packed), WGMMA)
    y = fp8_linear_bf16(permuted, *matrix.packed.tensors(), matrix.packed.arrivals, groups, numerics.ops.batch_invariant)
    return y.unflatten(1, (groups, -1))


def experts(
    x: Float[Tensor, "T D"], weights: Float[Tensor, "T K"], ids: Int[Tensor, "T K"], stack: "Experts"
) -> Float[Tensor, "T K D"]:
    """Three launches for all pairs."""
    if stack.w2.block_scaled:
        return block_scaled_forms.experts(x, weights, ids, stack)
    if stack.w2.packed is None or stack.w1.packed is None:
        return inductor_forms.experts(x, weights, ids, stack)
    up, down = stack.w1.packed, stack.w2.packed
    matrices = (*up.tensors(), *down.tensors())
    # Padding rows have no expert, so that not every pair is computed.
    invariant = stack.numerics.ops.batch_invariant
    y = fp4_experts(_padded(x, up), stack.local_ids(ids), weights, *matrices, stack.swiglu_limit, False, invariant)
    return y[..., : x.shape[1]]


def combine(
    outputs: Float[Tensor, "T K D"], ids: Int[Tensor, "T K"], shared: Float[Tensor, "T D"], x: Float[Tensor, "T D"]
) -> Float[Tensor, "T D"]:
    """One launch, behind whatever computes `shared`."""
    return combine_with_shared(outputs, ids, shared, x)


def shared_expert(x: Float[Tensor, "T D"], expert: "SharedExpert") -> Float[Tensor, "T D"]:
    """Beside the routed experts where its matrices are packed without padding, which would need a copy of `x`."""
    up, down = expert.w1.joined, expert.w2.packed
    if up is None or down is None or up.padded_channels != x.shape[1]:
        return expert.plain(x)
    first: int = expert.w1.packed.padded_rows  # type: ignore[union-attr]  # where the whole is packed, so are its parts
    matrices = (*up.tensors(), up.arrivals, *down.tensors(), down.arrivals)
    invariant = expert.numerics.ops.batch_invariant
    return beside_the_experts(x, *matrices, first, expert.w1.out_features, expert.swiglu_limit, invariant)


def norm_rotate_round(
    x: Float[Tensor, "T ... D"],
    rotation: Float[Tensor, "T half 2"],
    norm: "RMSNorm | None" = None,
    rounding: "Rounding | None" = None,
) -> Float[Tensor, "T ... D"]:
    """One launch; the plain form for vectors that do not divide into groups."""
    if x.shape[-1] % finishing.LEAST_CHANNELS:
        return plain_forms.norm_rotate_round(x, rotation, norm, rounding)
    kind = finishing.NOT
    if rounding is round_fp8:
        kind = finishing.FP8
    elif rounding is round_fp4_ue8m0:
        kind = finishing.FP4_UE8M0
    elif rounding is round_fp4_e4m3:
        kind = finishing.FP4_E4M3
    elif rounding is not None:
        return plain_forms.norm_rotate_round(x, rotation, norm, rounding)
    gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    return finishing.norm_rotate_round(x, rotation, gain, eps, kind)


def attend(
    q: Float[Tensor, "T H Dh"], kv: Float[Tensor, "T S Dh"], visible: Bool[Tensor, "T S"], sink: Float[Tensor, " H"], scale: float
) -> Float[Tensor, "T H Dh"]:
    """Chunks of the list in parallel; the plain form for channels that no kernel takes."""
    if not _is_tile(q.shape[2]):
        return plain_attend(q, kv, visible, sink, scale)
    return attention.attend(q, kv, visible, sink, scale)


def attend_in_place(
    q: Float[Tensor, "T H Dh"],
    own: Float[Tensor, "T Dh"],
    ring: Float[Tensor, "R Dh"],
    pool: Float[Tensor, "P Dh"],
    places: Int[Tensor, "T S"],
    is_own: Bool[Tensor, "T W"],
    visible: Bool[Tensor, "T S"],
    sink: Float[Tensor, " H"],
    scale: float,
    *,
    invariant: bool,
) -> Float[Tensor, "T H Dh"]:
    """One launch, and one that merges chunks of long lists; the plain form of a gathered list for channels that no kernel takes."""
    if _is_tile(q.shape[2]):
        return attention.attend_in_place(q, own, ring, pool, places, is_own, visible, sink, scale, invariant)
    window, entries = places.split((is_own.shape[1], places.shape[1] - is_own.shape[1]), dim=1)
    limit = own.shape[0] - 1  # a row of the ring need not be one of the step
    listed = torch.where(is_own[:, :, None], own[window.clamp(max=limit)], ring[window.masked_fill(is_own, 0)])
    return plain_attend(q, torch.cat((listed, pool[entries]), dim=1), visible, sink, scale)


def float32_linear(x: Float[Tensor, "T K"], matrix: "Float32Linear", numerics: "Numerics") -> Float[Tensor, "T N"]:
    """bfloat16 weights as they are stored."""
    return float32.float32_linear(x, matrix.weight)


def hyper_mix(
    streams: Float[Tensor, "T M D"], hyper: "HyperConnection"
) -> tuple[Float[Tensor, "T M"], Float[Tensor, "T M"], Float[Tensor, "T M M"]]:
    """Two launches beside the sub-layer, which `spread` ends."""
    c = hyper.config
    return mixing.hyper_mix(streams, hyper.fn, hyper.base, hyper.scale, hyper.norm_eps, c.eps, c.sinkhorn_iters)


def collapse_norm(streams: Float[Tensor, "T M D"], pre: Float[Tensor, "T M"], norm: "RMSNorm") -> Float[Tensor, "T D"]:
    """One launch."""
    return residual_streams.collapse_norm(streams, pre, norm.weight, norm.eps)


def spread(y: Float[Tensor, "T D"], streams: Float[Tensor, "T M D"], mixes: "Mixes") -> Float[Tensor, "T M D"]:
    """One launch, behind those of `hyper_mix`."""
    return residual_streams.spread(y, streams, mixes.post, mixes.comb)


def route(logits: Float[Tensor, "T E"], router: "Router") -> tuple[Float[Tensor, "T K"], Int[Tensor, "T K"]]:
    """One launch."""
    return routing.route(logits, router.bias, router.moe.n_activated_experts, router.moe.route_scale)


def index_scores(
    q: Float[Tensor, "T Hi Di"], weights: Float[Tensor, "T Hi"], pool: "EntryPool", rows: "Rows", n_visible: Int[Tensor, " T"]
) -> Float[Tensor, "T C"]:
    """One launch over the paged keys. Heads are padded to a tile: one of weight 0 adds nothing."""
    missing = -q.shape[1] % LEAST_WIDTH
    if missing:
        q, weights = F.pad(q, (0, 0, 0, missing)), F.pad(weights, (0, missing))
    per_block = rows.block_size // pool.ratio
    return index.index_scores(q, weights, pool.index_keys, rows.block_tables, rows.seq_ids, n_visible, per_block)


def _is_tile(width: int) -> bool:
    return width >= LEAST_WIDTH and width & (width - 1) == 0
