"""Products with quantised weights in pure PyTorch, written for a compiler: weights are decoded to bfloat16 on the way.

FP8 activations and FP8 and FP4 weights are exact in bfloat16, so products are exact too; what differs from `block_matmul` is the
order of float32 sums. Nothing here looks at a value from the host. Scales come as bytes, because the compiler's code generators
do not know float8_e8m0fnu.
"""

import torch
import torch.nn.functional as F

from deepinfer.dims import Float, Int, Shaped, Tensor, UInt8
from deepinfer.ops.elementwise import swiglu
from deepinfer.ops.formats import BLOCK, decode_e8m0, dequantize_fp4, dequantize_fp8
from deepinfer.ops.quantize import round_fp8


def linear_fp8(x: Float[Tensor, "T K"], weight: Shaped[Tensor, "N K"], scale: UInt8[Tensor, "Nb Kb"]) -> Float[Tensor, "T N"]:
    """`round_fp8(x) W^T` in the dtype of `x`."""
    return F.linear(round_fp8(x).bfloat16(), dequantize_fp8(weight, scale).bfloat16()).to(x.dtype)


def grouped_linear(x: Float[Tensor, "T G K"], w: Float[Tensor, "GR K"]) -> Float[Tensor, "T G R"]:
    """Group g of the input times rows `[g R, (g + 1) R)` of the matrix, as one batched product."""
    return torch.bmm(x.transpose(0, 1), w.unflatten(0, (x.shape[1], -1)).mT).transpose(0, 1)


def pair_product(
    x: Float[Tensor, "P K"], weight: Shaped[Tensor, "E N half"], scale: UInt8[Tensor, "E N Kb"], experts: Int[Tensor, " P"]
) -> Float[Tensor, "P N"]:
    """Row p of `x` times the matrix of expert `experts[p]`, float32. One pass over the bytes: nothing decoded is stored.

    Even and odd channels are summed apart, so that the two codes of a byte need not be put side by side.
    """
    codes = weight.view(torch.uint8)[experts].unflatten(-1, (-1, BLOCK // 2)).to(torch.int32)  # P N Kb 16
    scales = decode_e8m0(scale[experts])[..., None]
    channels = x.float()[:, None].unflatten(-1, (-1, BLOCK // 2, 2))
    terms = e2m1_value(codes & 15) * channels[..., 0] + e2m1_value(codes >> 4) * channels[..., 1]
    return (terms * scales).sum(dim=(-1, -2))


def e2m1_value(code: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Values of 4-bit codes (int32) by bits instead of a table; bit for bit those of `decode_e2m1`.

    Exponent and mantissa moved under float32's give the value times 2^-126, where 0.5 is a subnormal number.
    """
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.view(torch.float32) * 2.0**126


ExpertWeights = tuple[Shaped[Tensor, "E N half"], UInt8[Tensor, "E N Kb"]]


def gathered_experts(
    x: Float[Tensor, "T D"],
    ids: Int[Tensor, "T K"],
    weights: Float[Tensor, "T K"],
    w1: ExpertWeights,
    w2: ExpertWeights,
    w3: ExpertWeights,
    limit: float,
) -> Float[Tensor, "T K D"]:
    """Each pair of token and expert by itself: reads an expert once for each of its tokens, best while they are few."""
    pairs, rounded = ids.flatten(), round_fp8(x).repeat_interleave(ids.shape[1], dim=0)
    gate, up = (pair_product(rounded, *w, pairs).to(x.dtype) for w in (w1, w3))
    hidden = (swiglu(gate, up, limit) * weights.flatten()[:, None]).to(x.dtype)
    return pair_product(round_fp8(hidden), *w2, pairs).to(x.dtype).unflatten(0, ids.shape)


def grouped_experts(
    x: Float[Tensor, "T D"],
    ids: Int[Tensor, "T K"],
    weights: Float[Tensor, "T K"],
    w1: ExpertWeights,
    w2: ExpertWeights,
    w3: ExpertWeights,
    limit: float,
) -> Float[Tensor, "T K D"]:
    """Pairs sorted by expert, then one grouped product for each matrix: decodes every expert, best when most have tokens.

    Stores one decoded stack of matrices at a time.
    """
    order = ids.flatten().argsort(stable=True)
    experts = torch.arange(w1[0].shape[0], device=ids.device)
    ends = torch.searchsorted(ids.flatten()[order], experts, right=True).to(torch.int32)

    def product(rows: Tensor, w: ExpertWeights) -> Tensor:
        return torch._grouped_mm(rows.bfloat16(), dequantize_fp4(*w).bfloat16().mT, offs=ends).to(x.dtype)

    rounded = round_fp8(x)[order // ids.shape[1]]
    hidden = (swiglu(product(rounded, w1), product(rounded, w3), limit) * weights.flatten()[order, None]).to(x.dtype)
    outputs = product(round_fp8(hidden), w2)
    return outputs[order.argsort()].unflatten(0, ids.shape)
