"""The seam in front of the Triton kernels, with CPU stand-ins for the kernels that read the packed words by their rules.

The stand-ins sum in the order of the plain forms, so a model over them must give the plain bits: what is checked is everything
between the model and the kernels (`tests/kernel_stand_ins.py`). Needs triton to be installed, no GPU.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.config import ModelConfig
from deepinfer.model.attention import Attention
from deepinfer.model.cache import CacheSizes
from deepinfer.model.compiled import compilation_count, compile_function, compile_model, set_up_compiler
from deepinfer.model.linear import StoredMatrix
from deepinfer.model.moe import Experts
from deepinfer.model.numerics import Ops, reference_ops, triton_ops
from deepinfer.model.rows import pack_rows
from deepinfer.model.transformer import Transformer
from deepinfer.presets import random_model, tiny_config
from tests.kernels import packable_config

pytest.importorskip("triton", reason="triton is not installed")

IDS = torch.randint(277, (2, 21), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def _stand_ins() -> None:
    from tests.kernel_stand_ins import register

    register()


def kernel_ops() -> Ops:
    """The operations that have stand-ins here; everything else plain."""
    names = ("linear", "linears", "grouped_linear", "experts", "combine", "shared_expert", "packs_weights")
    names += ("norm_linear", "norm_rotate_round", "collapse_norm", "spread")
    fast = triton_ops()
    return replace(reference_ops(batch_invariant=True), **{name: getattr(fast, name) for name in names})


def model_pair(config: ModelConfig) -> tuple[Transformer, Transformer]:
    """The packed model behind the kernels and the plain one."""
    plain = reference_ops(batch_invariant=True)
    return random_model(config, device="cpu", ops=kernel_ops()), random_model(config, device="cpu", ops=plain)


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
        random_model(packable_config(), device="cpu", ops=ops, expert_ids=(1, 4, 6))
        for ops in (kernel_ops(), reference_ops(batch_invariant=True))
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
    observed = attend_in_place(q, own, ring, pool, torch.cat((near, far), dim=1).int(), is_own, visible, sink, 0.2, invariant=True)
    assert torch.equal(observed, attend(q, listed, visible, sink, 0.2))


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


class Invariances(TorchDispatchMode):
    """What each of our operations that can promise it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, set[bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for place, argument in enumerate(func._schema.arguments):
            if argument.name == "invariant":
                value = args[place] if place < len(args) else (kwargs or {}).get("invariant", argument.default_value)
                self.asked.setdefault(func._schema.name.split("::")[1], set()).add(value)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_only_batch_invariant_arithmetic_asks_for_rows_that_do_not_depend_on_others(batch_invariant: bool) -> None:
    model = random_model(packable_config(), device="cpu", ops=triton_ops(batch_invariant=batch_invariant))
    with Invariances() as found:
        model(IDS)
    operations = ("attend_in_place", "fp4_experts", "fp8_linear", "fp8_linear_bf16", "shared_expert")
    assert found.asked == {name: {batch_invariant} for name in operations}
