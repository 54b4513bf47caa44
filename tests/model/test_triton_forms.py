"""The seam in front of the Triton kernels, with CPU stand-ins for the kernels that read the packed words by their rules.

The stand-ins sum in the order of the plain forms, so a model over them must give the plain bits: what is checked is everything
between the model and the kernels. Needs triton to be installed, no GPU.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from deepinfer.config import ModelConfig
from deepinfer.model.attention import Attention
from deepinfer.model.cache import CacheSizes
from deepinfer.model.compiled import compilation_count, compile_function, compile_model, set_up_compiler
from deepinfer.model.hyper_connection import Mixes, collapse, spread
from deepinfer.model.linear import StoredMatrix
from deepinfer.model.moe import Experts
from deepinfer.model.numerics import Ops, reference_ops, triton_ops
from deepinfer.model.plain_forms import combine_with_shared
from deepinfer.model.rows import pack_rows
from deepinfer.model.transformer import Transformer
from deepinfer.ops.elementwise import rms_norm, swiglu
from deepinfer.ops.formats import dequantize_fp4, dequantize_fp8
from deepinfer.ops.matmul import block_matmul, matmul
from deepinfer.ops.quantize import round_fp4_e4m3, round_fp4_ue8m0, round_fp8
from deepinfer.ops.rotate import rotate_last
from deepinfer.ops.triton_kernels.packing import (
    WGMMA,
    PackedMatrix,
    channel_places,
    permute_channels,
    separate_rows,
    unpack_fp4,
    unpack_fp8,
)
from deepinfer.presets import random_model, tiny_config
from tests.kernels import packable_config

pytest.importorskip("triton", reason="triton is not installed")

IDS = torch.randint(277, (2, 21), generator=torch.Generator().manual_seed(0))


def quantize(x: Tensor, instruction: int, pdl: bool = True) -> tuple[Tensor, Tensor]:
    values = permute_channels(round_fp8(x.float()), instruction)
    factor = torch.exp2(values.abs().amax(dim=1).clamp(min=1e-4).log2().floor() - 8)
    return (values / factor[:, None]).half(), factor


def norm_quantize(x: Tensor, gain: Tensor, eps: float, instruction: int, pdl: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    y = rms_norm(x, gain, eps)
    return y, *quantize(y, instruction)


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
    assert not holds_all or bool((ids < down.shape[0]).all())
    return out


@pytest.fixture(scope="module", autouse=True)
def _stand_ins() -> None:
    from deepinfer.ops.triton_kernels import (
        attention,
        float32_linear,
        fp4_experts,
        fp8_linear,
        hyper_mix,
        index_scores,
        norm_rotate_round,
        residual_streams,
        route,
        select,
        shared_expert,
    )
    from deepinfer.ops.triton_kernels import quantize as activations

    activations.quantize_activations.register_kernel("cpu", quantize)
    activations.norm_quantize_activations.register_kernel("cpu", norm_quantize)
    fp8_linear.fp8_linear.register_kernel("cpu", linear)
    fp8_linear.fp8_linear_bf16.register_kernel("cpu", linear_bf16)
    fp4_experts.fp4_experts.register_kernel("cpu", experts)
    float32_linear.float32_linear.register_kernel("cpu", lambda x, w, pdl=True: matmul(x, w.to(x.dtype)).float())
    norm_rotate_round.norm_rotate_round.register_kernel("cpu", finish)
    residual_streams.collapse_norm.register_kernel("cpu", lambda s, pre, w, eps, pdl=True: rms_norm(collapse(s, pre), w, eps))
    residual_streams.spread.register_kernel("cpu", lambda y, s, post, comb: spread(y, s, Mixes(post, post, comb)))
    shared_expert.shared_expert.register_kernel("cpu", shared)
    shared_expert.combine_with_shared.register_kernel("cpu", combine_with_shared)
    # Of these only the shapes matter here.
    attention.attend_in_place.register_kernel("cpu", lambda q, *others: torch.zeros_like(q))
    hyper_mix.hyper_mix.register_kernel("cpu", mix)
    index_scores.index_scores.register_kernel("cpu", score)
    route.route.register_kernel("cpu", choose)
    select.select_entries.register_kernel("cpu", lambda scores, k: torch.zeros(scores.shape[0], k, dtype=torch.int64))
    select.candidate_mask.register_kernel("cpu", lambda scores, visible, size, count: torch.ones_like(scores, dtype=torch.bool))


def finish(x: Tensor, rotation: Tensor, gain: Tensor | None, eps: float, rounding: int, pdl: bool = True) -> Tensor:
    y = rotate_last(x if gain is None else rms_norm(x, gain, eps), rotation)
    return (lambda v: v, round_fp8, round_fp4_ue8m0, round_fp4_e4m3)[rounding](y)


def shared(x: Tensor, *matrices_and_sizes: Any) -> Tensor:
    *matrices, first, width, limit = matrices_and_sizes
    gate_up = linear(*quantize(x, WGMMA), *matrices[:4])
    hidden = swiglu(gate_up[:, :width], gate_up[:, first : first + width], limit).to(x.dtype)
    return linear(*quantize(F.pad(hidden, (0, matrices[4].shape[1] * 64 - width)), WGMMA), *matrices[4:])


def mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    t, m, _ = streams.shape
    return torch.ones(t, m), torch.ones(t, m), torch.ones(t, m, m)


def score(q: Tensor, weights: Tensor, keys: Tensor, tables: Tensor, seq_ids: Tensor, n_visible: Tensor, per_block: int) -> Tensor:
    return q.new_zeros(q.shape[0], tables.shape[1] * per_block)


def choose(logits: Tensor, bias: Tensor, count: int, scale: float, pdl: bool = True) -> tuple[Tensor, Tensor]:
    return torch.ones(logits.shape[0], count), torch.arange(count).repeat(logits.shape[0], 1)


def kernel_ops() -> Ops:
    """The operations that have stand-ins here; everything else plain."""
    names = ("linear", "linears", "grouped_linear", "experts", "combine", "shared_expert", "packs_weights")
    names += ("norm_linear", "norm_rotate_round", "collapse_norm", "spread")
    fast = triton_ops()
    return replace(reference_ops(), **{name: getattr(fast, name) for name in names})


def model_pair(config: ModelConfig) -> tuple[Transformer, Transformer]:
    """The packed model behind the kernels and the plain one."""
    return random_model(config, device="cpu", ops=kernel_ops()), random_model(config, device="cpu", ops=reference_ops())


@torch.no_grad()
@pytest.mark.parametrize("config", [packable_config(), tiny_config()], ids=["whole tiles", "padded"])
def test_a_model_over_the_kernels_gives_the_plain_bits(config: ModelConfig) -> None:
    packed, plain = model_pair(config)
    grouped = {m.wo_a for m in packed.modules() if isinstance(m, Attention)}  # packed only where each group fills its tiles
    quantized, its = ([m for m in model.modules() if isinstance(m, StoredMatrix) and m.is_quantized] for model in (packed, plain))
    assert all(matrix.packed is not None for matrix in quantized if matrix not in grouped)
    assert torch.equal(packed(IDS), plain(IDS))
    for mine, other in zip(quantized, its, strict=True):
        assert torch.equal(mine.values(torch.float32), other.values(torch.float32))


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
    packed, _ = model_pair(packable_config())
    ffn = packed.layers[0].ffn
    torch.compiler.reset()
    compiled = torch.compile(ffn, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (3, 8):
        x = torch.randn(tokens, 256).bfloat16()
        assert torch.equal(compiled(x), ffn(x))


@torch.inference_mode()
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")
def test_the_compiler_begins_forks_before_what_they_run_beside() -> None:
    """Results do not depend on it, but a fork that begins where it is waited for saves no time."""
    block = random_model(packable_config(), device="cpu", ops=triton_ops()).layers[0]
    torch.compiler.reset()
    set_up_compiler()
    streams = torch.randn(5, 4, 256).bfloat16()
    _, (code,) = run_and_get_code(compile_function(type(block).stages.feed), block, streams, torch.rand(5, 4), None, False)
    begin, collapse, *others, end = re.findall(r"= torch\.ops\.deepinfer\.(\w+)", code)
    assert (begin, collapse, end) == ("hyper_mix", "collapse_norm", "spread")
    assert others == ["shared_expert", "float32_linear", "route", "fp4_experts", "combine_with_shared"]


@torch.inference_mode()
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_layers_over_the_kernels_are_compiled_once_for_every_number_of_rows(batch_invariant: bool) -> None:
    model = random_model(tiny_config(), device="cpu", ops=triton_ops(batch_invariant=batch_invariant))
    torch.compiler.reset()
    compile_model(model, backend="eager")
    before = compilation_count()
    cache = model.new_cache(CacheSizes(num_slots=10, num_blocks=100))

    def run(lengths: list[int]) -> None:
        # Behind the first block: engines pad tables to more than one. There are fewer entries than may be chosen, then more.
        chunks = [(torch.arange(length) % 250 + 3, 70) for length in lengths]
        tables = [range(1 + 16 * i, 17 + 16 * i) for i in range(len(lengths))]
        rows = pack_rows(chunks, range(1, len(lengths) + 1), tables, 64, model.device)
        hidden = model.forward_rows(rows, cache)
        model.logits(hidden.final)
        model.observe_draft(hidden.main_hidden, rows, cache)
        model.propose_draft(rows.token_ids[: len(lengths)], rows.positions[: len(lengths)], rows.slots, cache)

    run([3, 2])
    run([7, 11, 5])
    count = compilation_count()
    for lengths in ([1, 1], [1, 1, 1, 1, 1], [17, 2], [64, 3, 1], [150, 5, 7, 9, 16], [900, 2]):
        run(lengths)
    assert compilation_count() == count
    # Both halves of every kind of layer, and the little that runs between layers.
    assert count - before < 25


def test_a_list_that_lies_in_three_places_is_attended_as_its_copy_where_no_kernel_takes_its_channels() -> None:
    from deepinfer.model.triton_forms import attend_in_place
    from deepinfer.ops.attend import attend

    own, ring, pool, q = torch.randn(5, 48), torch.randn(30, 48), torch.randn(40, 48), torch.randn(5, 3, 48)
    is_own = torch.rand(5, 8) < 0.5
    near, far = torch.where(is_own, torch.randint(5, (5, 8)), torch.randint(30, (5, 8))), torch.randint(40, (5, 6))
    visible, sink = torch.rand(5, 14) < 0.7, torch.randn(3)
    window = [
        torch.stack([(own if mine else ring)[i] for mine, i in zip(*row, strict=True)]) for row in zip(is_own, near, strict=True)
    ]
    listed = torch.cat((torch.stack(window), pool[far]), dim=1)
    observed = attend_in_place(q, own, ring, pool, torch.cat((near, far), dim=1).int(), is_own, visible, sink, 0.2)
    assert torch.equal(observed, attend(q, listed, visible, sink, 0.2))
