"""The seam in front of the Triton kernels, with CPU stand-ins for the kernels that read the packed words by their rules.

The stand-ins sum in the order of the plain forms, so a model over them must give the plain bits: what is checked is everything
between the model and the kernels. Needs triton to be installed, no GPU.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deepinfer.model.moe import Experts
from deepinfer.model.numerics import Ops, reference_ops, triton_ops
from deepinfer.model.plain_forms import combine
from deepinfer.model.transformer import Transformer
from deepinfer.ops.elementwise import swiglu
from deepinfer.ops.formats import dequantize_fp4, dequantize_fp8
from deepinfer.ops.matmul import block_matmul, matmul
from deepinfer.ops.quantize import round_fp8
from deepinfer.ops.triton_kernels.packing import (
    WGMMA,
    PackedMatrix,
    channel_places,
    permute_channels,
    separate_rows,
    unpack_fp4,
    unpack_fp8,
)
from deepinfer.presets import random_model
from tests.kernels import packable_config

pytest.importorskip("triton", reason="triton is not installed")

IDS = torch.randint(277, (2, 21), generator=torch.Generator().manual_seed(0))


def quantize(x: Tensor, instruction: int, pdl: bool = True) -> tuple[Tensor, Tensor]:
    values = permute_channels(round_fp8(x.float()), instruction)
    factor = torch.exp2(values.abs().amax(dim=1).clamp(min=1e-4).log2().floor() - 8)
    return (values / factor[:, None]).half(), factor


def in_order(x: Tensor) -> Tensor:
    return x[..., channel_places(x.shape[-1], WGMMA)]


def linear(
    x16: Tensor, factor: Tensor, words: Tensor, scales: Tensor, exponents: Tensor, arrivals: Tensor, pdl: bool = True
) -> Tensor:
    w = dequantize_fp8(*unpack_fp8(PackedMatrix(words, scales, exponents)))
    return block_matmul(in_order(x16.float() * factor[:, None]), w).bfloat16()


def linear_bf16(
    x: Tensor, words: Tensor, scales: Tensor, exponents: Tensor, arrivals: Tensor, groups: int, pdl: bool = True
) -> Tensor:
    w = dequantize_fp8(*unpack_fp8(PackedMatrix(words, scales, exponents), bf16=True)).bfloat16().unflatten(0, (groups, -1))
    return torch.cat([matmul(in_order(x)[:, g], w[g]) for g in range(groups)], dim=1)


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
    pdl: bool = True,
) -> Tensor:
    up, down = PackedMatrix(up_words, up_scales, up_exponents), PackedMatrix(down_words, down_scales, down_exponents)
    up, down = (dequantize_fp4(*unpack_fp4(packed)) for packed in (up, down))
    w1, w3 = separate_rows(up)
    out = x.new_zeros((*ids.shape, x.shape[1]))
    for expert in range(down.shape[0]):
        token, slot = torch.where(ids == expert)
        if token.numel():
            rows = round_fp8(x[token]).float()
            gate, value = (block_matmul(rows, w[expert]).bfloat16() for w in (w1, w3))
            hidden = (swiglu(gate, value, limit) * weights[token, slot, None]).bfloat16()
            out[token, slot] = block_matmul(round_fp8(hidden).float(), down[expert]).bfloat16()
    assert holds_all == bool((ids < down.shape[0]).all())
    return out


@pytest.fixture(scope="module", autouse=True)
def _stand_ins() -> None:
    from deepinfer.ops.triton_kernels import fp4_experts, fp8_linear, routing
    from deepinfer.ops.triton_kernels import quantize as activations

    activations.quantize_activations.register_kernel("cpu", quantize)
    fp8_linear.fp8_linear.register_kernel("cpu", linear)
    fp8_linear.fp8_linear_bf16.register_kernel("cpu", linear_bf16)
    fp4_experts.fp4_experts.register_kernel("cpu", experts)
    routing.combine_experts.register_kernel("cpu", lambda outputs, ids, pdl=True: combine(outputs, ids))


def kernel_ops() -> Ops:
    """The operations that have stand-ins here; everything else plain."""
    names = ("linear", "linears", "grouped_linear", "experts", "combine", "packs_weights")
    fast = triton_ops()
    return replace(reference_ops(), **{name: getattr(fast, name) for name in names})


def model_pair() -> tuple[Transformer, Transformer]:
    """The packed model behind the kernels and the plain one, without the Engrams: their projections cannot be packed."""
    packed = random_model(packable_config(), device="cpu", ops=kernel_ops())
    plain = random_model(packable_config(), device="cpu", ops=reference_ops())
    for model in (packed, plain):
        for layer in model.layers:
            layer.engram = None
    return packed, plain


@torch.no_grad()
def test_a_model_over_the_kernels_gives_the_plain_bits() -> None:
    packed, plain = model_pair()
    assert packed.layers[0].ffn.experts.w1.packed is not None
    assert torch.equal(packed(IDS), plain(IDS))


@torch.no_grad()
def test_experts_that_are_held_elsewhere_reach_the_kernels_as_such() -> None:
    packed, plain = (
        random_model(packable_config(), device="cpu", ops=ops, expert_ids=(1, 4, 6)) for ops in (kernel_ops(), reference_ops())
    )
    x, weights = torch.randn(5, 256).bfloat16(), torch.rand(5, 2)
    ids = torch.tensor([[0, 1], [4, 6], [7, 4], [2, 3], [6, 5]])
    stacks: list[Experts] = [model.layers[0].ffn.experts for model in (packed, plain)]
    assert torch.equal(*(stack(x, weights, ids) for stack in stacks))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_feed_forward_over_the_kernels_is_one_graph(dynamic: bool) -> None:
    packed, _ = model_pair()
    ffn = packed.layers[0].ffn
    torch.compiler.reset()
    compiled = torch.compile(ffn, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (3, 8):
        x = torch.randn(tokens, 256).bfloat16()
        assert torch.equal(compiled(x), ffn(x))
