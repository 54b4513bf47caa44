"""What quantised matrices do, by the Triton kernels of `ops/triton_kernels`, over weights that `packed_weights.py` has packed.

On devices that multiply block-scaled codes themselves, matrices stay as they are and go through `block_scaled_forms.py`.
A matrix that could not be packed, and every precision but `native`, goes through the forms for a compiler instead.
"""

from typing import TYPE_CHECKING

from deepinfer.dims import Float, Int, Tensor
from deepinfer.model import block_scaled_forms, inductor_forms
from deepinfer.ops.triton_kernels.fp4_experts import fp4_experts
from deepinfer.ops.triton_kernels.fp8_linear import fp8_linear, fp8_linear_bf16
from deepinfer.ops.triton_kernels.packing import WGMMA, permute_channels
from deepinfer.ops.triton_kernels.quantize import quantize_activations
from deepinfer.ops.triton_kernels.routing import combine_experts

if TYPE_CHECKING:
    from deepinfer.model.linear import StoredMatrix
    from deepinfer.model.moe import Experts
    from deepinfer.model.numerics import Numerics


def linear(x: Float[Tensor, "T K"], matrix: "StoredMatrix", numerics: "Numerics") -> Float[Tensor, "T N"]:
    """Quantise, then one product."""
    if matrix.block_scaled:
        return block_scaled_forms.linear(x, matrix)
    if matrix.packed is None:
        return inductor_forms.linear(x, matrix, numerics)
    return fp8_linear(*quantize_activations(x, WGMMA), *matrix.packed.tensors(), matrix.packed.arrivals)


def linears(
    x: Float[Tensor, "T K"], matrices: tuple["StoredMatrix", ...], numerics: "Numerics"
) -> tuple[Float[Tensor, "T N"], ...]:
    """Matrices that were packed together are one product."""
    joined = matrices[0].joined
    if joined is None or any(matrix.joined is not joined for matrix in matrices):
        return tuple(linear(x, matrix, numerics) for matrix in matrices)
    y = fp8_linear(*quantize_activations(x, WGMMA), *joined.tensors(), joined.arrivals)
    return y.split([matrix.out_features for matrix in matrices], dim=1)


def grouped_linear(x: Float[Tensor, "T G K"], matrix: "StoredMatrix", numerics: "Numerics") -> Float[Tensor, "T G R"]:
    """One launch for all groups."""
    if matrix.packed is None:
        return inductor_forms.grouped_linear(x, matrix, numerics)
    groups = x.shape[1]
    y = fp8_linear_bf16(permute_channels(x, WGMMA), *matrix.packed.tensors(), matrix.packed.arrivals, groups)
    return y.unflatten(1, (groups, -1))


def experts(
    x: Float[Tensor, "T D"], weights: Float[Tensor, "T K"], ids: Int[Tensor, "T K"], stack: "Experts"
) -> Float[Tensor, "T K D"]:
    """Three launches for all pairs."""
    if stack.w2.block_scaled:
        return block_scaled_forms.experts(x, weights, ids, stack)
    if stack.w2.packed is None or stack.w1.packed is None:
        return inductor_forms.experts(x, weights, ids, stack)
    up, down = stack.w1.packed.tensors(), stack.w2.packed.tensors()
    return fp4_experts(x, stack.local_ids(ids), weights, *up, *down, stack.swiglu_limit, stack.holds_all)


def combine(outputs: Float[Tensor, "T K D"], ids: Int[Tensor, "T K"]) -> Float[Tensor, "T D"]:
    """One launch."""
    return combine_experts(outputs, ids)
