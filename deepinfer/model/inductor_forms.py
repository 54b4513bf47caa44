"""What quantised matrices do, written for a compiler: the same roundings as `plain_forms.py`, other orders of float32 sums.

Only `native` products with quantised weights differ from the plain forms; everything else is passed on to those with fixed shapes.
"""

from typing import TYPE_CHECKING

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.model import plain_forms
from deepinfer.ops import dequantized
from deepinfer.ops.quantize import round_fp8

if TYPE_CHECKING:
    from deepinfer.model.linear import StoredMatrix
    from deepinfer.model.moe import Experts
    from deepinfer.model.numerics import Numerics


def linear(x: Float[Tensor, "T K"], matrix: "StoredMatrix", numerics: "Numerics") -> Float[Tensor, "T N"]:
    """One bfloat16 product: rounded activations and decoded weights are exact in bfloat16."""
    if not (matrix.is_quantized and numerics.precision.quantize_activations):
        return plain_forms.linear(x, matrix, numerics)
    return numerics.ops.matmul(round_fp8(x).bfloat16(), matrix.values(torch.bfloat16)).to(x.dtype)


def grouped_linear(x: Float[Tensor, "T G K"], matrix: "StoredMatrix", numerics: "Numerics") -> Float[Tensor, "T G R"]:
    """All groups in one batched product."""
    return dequantized.grouped_linear(x, matrix.values(x.dtype))


def experts(
    x: Float[Tensor, "T D"], weights: Float[Tensor, "T K"], ids: Int[Tensor, "T K"], stack: "Experts"
) -> Float[Tensor, "T K D"]:
    """By pairs while there are fewer than experts, else by experts."""
    if not (stack.w1.is_quantized and stack.numerics.precision.quantize_activations):
        return plain_forms.every_expert(x, weights, ids, stack)  # the others make code for each number of rows
    local, count = stack.local_ids(ids), len(stack.expert_ids)
    form = dequantized.gathered_experts if ids.numel() <= count else dequantized.grouped_experts
    w1, w2, w3 = stack.w1.stored(), stack.w2.stored(), stack.w3.stored()
    if stack.holds_all:
        return form(x, local, weights, w1, w2, w3, stack.swiglu_limit)
    is_held = local < count
    outputs = form(x, torch.where(is_held, local, 0), weights, w1, w2, w3, stack.swiglu_limit)
    return torch.where(is_held[:, :, None], outputs, 0.0)
