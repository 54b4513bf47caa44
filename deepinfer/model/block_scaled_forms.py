"""What quantised matrices do where tensor cores multiply block-scaled codes: weights in the checkpoint's layout, nothing packed.

`packed_weights.py` marks the matrices that go this way, by the device's compute capability.
"""

from typing import TYPE_CHECKING

from deepinfer.dims import Float, Int, Tensor
from deepinfer.ops.triton_kernels.block_scaled import block_scaled_experts, block_scaled_linear, quantize_codes

if TYPE_CHECKING:
    from deepinfer.model.linear import StoredMatrix
    from deepinfer.model.moe import Experts


def linear(x: Float[Tensor, "T K"], matrix: "StoredMatrix") -> Float[Tensor, "T N"]:
    """Quantise to codes, then one product."""
    return block_scaled_linear(*quantize_codes(x), *matrix.stored())


def experts(
    x: Float[Tensor, "T D"], weights: Float[Tensor, "T K"], ids: Int[Tensor, "T K"], stack: "Experts"
) -> Float[Tensor, "T K D"]:
    """Quantise, sort, and two products."""
    stored = (*stack.w1.stored(), *stack.w2.stored(), *stack.w3.stored())
    return block_scaled_experts(x, stack.local_ids(ids), weights, *stored, stack.swiglu_limit, stack.holds_all)
