"""What quantised and plain matrices do, and what goes with it, in the plain form: the definitions.

`Ops` holds one form of each of these operations.

| operation | plain (here) | `inductor_forms.py` | `triton_forms.py` |
|---|---|---|---|
| `linear`, `linears`, `norm_linear` | blockwise sums in float32 | decoded to bfloat16 | `ops/triton_kernels/fp8_linear.py` |
| `grouped_linear` (wo_a) | a product for each group | one batched product | `ops/triton_kernels/fp8_linear.py` |
| `experts` | one after the other, or fixed shapes | gathered or grouped | `ops/triton_kernels/fp4_experts.py` |
| `combine_with_shared` | ascending by expert, the shared one last | the same | `ops/triton_kernels/shared_expert.py` |
| `norm_rotate_round` | one after the other | the same | `ops/triton_kernels/norm_rotate_round.py` |

The rounding of a product depends on the format (section 6): FP8 and FP4 weights see FP8 activations in `native`, bf16 weights
see plain ones.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.ops.quantize import round_fp8
from deepinfer.ops.rotate import rotate_last
from deepinfer.ops.sinkhorn import sum_in_order

if TYPE_CHECKING:
    from deepinfer.model.linear import Linear, StoredMatrix
    from deepinfer.model.moe import Experts
    from deepinfer.model.norm import RMSNorm
    from deepinfer.model.numerics import Numerics

STATIC_ROWS = 256  # of one process; more are a prefill, whose shapes need not be fixed


def product(x: Float[Tensor, "T K"], w: Float[Tensor, "N K"], quantized: bool, numerics: "Numerics") -> Float[Tensor, "T N"]:
    """`x w^T` rounded as `numerics` says for a weight that is stored quantised or not; `w` holds float32 or `x.dtype` values."""
    precision, ops = numerics.precision, numerics.ops
    if quantized and precision.quantize_activations:
        return ops.block_matmul(round_fp8(x).float(), w.float()).to(x.dtype)
    return ops.matmul(x, w.to(x.dtype))


def linear(x: Float[Tensor, "T K"], matrix: "StoredMatrix", numerics: "Numerics") -> Float[Tensor, "T N"]:
    """`x W^T` in the dtype of `x`."""
    quantize = matrix.is_quantized and numerics.precision.quantize_activations
    return product(x, matrix.values(torch.float32 if quantize else x.dtype), matrix.is_quantized, numerics)


def linears(
    x: Float[Tensor, "T K"], matrices: tuple["StoredMatrix", ...], numerics: "Numerics"
) -> tuple[Float[Tensor, "T N"], ...]:
    """`linear` over several matrices of one input."""
    return tuple(numerics.ops.linear(x, matrix, numerics) for matrix in matrices)


def norm_linear(x: Float[Tensor, "T K"], norm: "RMSNorm", matrix: "Linear") -> tuple[Float[Tensor, "T K"], Float[Tensor, "T N"]]:
    """The normalised input, and its product."""
    normed = norm(x)
    return normed, matrix(normed)


def grouped_linear(x: Float[Tensor, "T G K"], matrix: "StoredMatrix", numerics: "Numerics") -> Float[Tensor, "T G R"]:
    """Group g of the input times rows `[g R, (g + 1) R)` of the matrix, without rounding the activations (wo_a, U10)."""
    w = matrix.values(x.dtype).unflatten(0, (x.shape[1], -1))
    return torch.stack([numerics.ops.matmul(x[:, g], w[g]) for g in range(x.shape[1])], dim=1)


def combine(outputs: Float[Tensor, "T K D"], ids: Int[Tensor, "T K"]) -> Float[Tensor, "T D"]:
    """Sum each token's expert outputs in float32 in ascending expert id: an order that no batch, rank or placement changes."""
    order = ids.argsort(dim=1)
    ascending = outputs.gather(1, order[:, :, None].expand_as(outputs)).float()
    return sum_in_order(ascending, 1).squeeze(1)


def combine_with_shared(
    outputs: Float[Tensor, "T K D"], ids: Int[Tensor, "T K"], shared: Float[Tensor, "T D"], x: Float[Tensor, "T D"]
) -> Float[Tensor, "T D"]:
    """The sum over the routed experts, then the shared one's output, in the dtype of the input `x`."""
    return (combine(outputs, ids) + shared.float()).to(x.dtype)


def norm_rotate_round(
    x: Float[Tensor, "T ... D"],
    rotation: Float[Tensor, "T half 2"],
    norm: "RMSNorm | None" = None,
    rounding: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "T ... D"]:
    """What a vector goes through before it is stored or compared: perhaps a norm, a rotation, perhaps a rounding."""
    turned = rotate_last(x if norm is None else norm(x), rotation)
    return turned if rounding is None else rounding(turned)


def experts(
    x: Float[Tensor, "T D"], weights: Float[Tensor, "T K"], ids: Int[Tensor, "T K"], stack: "Experts"
) -> Float[Tensor, "T K D"]:
    """Output of each (token, expert) pair, its routing weight applied before w2; zeros for experts that `stack` does not hold."""
    if not (stack.numerics.ops.static_shapes and x.shape[0] <= stack.static_rows):
        return _one_by_one(x, weights, ids, stack)
    if stack.holds_all and ids.numel() <= len(stack.expert_ids):
        return _gathered(x, weights, ids, stack)
    return every_expert(x, weights, ids, stack)


def _one_by_one(x: Tensor, weights: Tensor, ids: Tensor, stack: "Experts") -> Float[Tensor, "T K D"]:
    """Visit each expert that got a token with all its tokens. Reads counts on the host, so it cannot be captured."""
    out = x.new_zeros((*ids.shape, x.shape[1]))
    chosen = set(ids.unique().tolist())
    for local, expert in enumerate(stack.expert_ids):
        if expert in chosen:
            token, slot = torch.where(ids == expert)
            out[token, slot] = _expert(x[token], weights[token, slot, None], local, stack)
    return out


def _expert(x: Float[Tensor, "n D"], weight: Float[Tensor, "n 1"], local: int, stack: "Experts") -> Float[Tensor, "n D"]:
    quantized, dtype = stack.w1.is_quantized, torch.float32
    gate = product(x, stack.w1.values(dtype, local), quantized, stack.numerics)
    up = product(x, stack.w3.values(dtype, local), quantized, stack.numerics)
    hidden = (stack.numerics.ops.pointwise(stack.activate, gate, up) * weight).to(x.dtype)
    return product(hidden, stack.w2.values(dtype, local), quantized, stack.numerics)


def every_expert(x: Tensor, weights: Tensor, ids: Tensor, stack: "Experts") -> Float[Tensor, "T K D"]:
    """The same with every expert computing every token: fixed shapes, for more pairs than experts and for a compiler."""
    out = x.new_zeros((*ids.shape, x.shape[1]))
    for local, expert in enumerate(stack.expert_ids):
        is_chosen = ids == expert
        weight = (weights * is_chosen).sum(dim=1, keepdim=True)
        out = torch.where(is_chosen[:, :, None], _expert(x, weight, local, stack)[:, None], out)
    return out


def _gathered(x: Tensor, weights: Tensor, ids: Tensor, stack: "Experts") -> Float[Tensor, "T K D"]:
    """The same with the chosen experts' matrices gathered for each pair: fixed shapes, for few tokens."""
    assert stack.holds_all
    t, k = ids.shape
    pairs = ids.flatten()
    per_pair = x[:, None].expand(t, k, -1).flatten(0, 1)
    gate = _pair_product(per_pair, stack.w1, pairs, stack.numerics)
    up = _pair_product(per_pair, stack.w3, pairs, stack.numerics)
    hidden = (stack.numerics.ops.pointwise(stack.activate, gate, up) * weights.flatten()[:, None]).to(x.dtype)
    return _pair_product(hidden, stack.w2, pairs, stack.numerics).unflatten(0, (t, k))


def _pair_product(
    x: Float[Tensor, "P K"], matrix: "StoredMatrix", pairs: Int[Tensor, " P"], numerics: "Numerics"
) -> Float[Tensor, "P N"]:
    rows = [
        product(x[i : i + 1], w, matrix.is_quantized, numerics) for i, w in enumerate(matrix.values(torch.float32, pairs).unbind(0))
    ]
    return torch.cat(rows)
