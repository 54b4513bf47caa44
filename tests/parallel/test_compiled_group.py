"""Compiled layers whose experts are in several processes: the exchange stays outside, layers share their code as they do alone."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer import LLMEngine, ParallelConfig
from deepinfer.model.compiled import compilation_count, compile_model, forget_compiled, uncompiled
from deepinfer.model.numerics import inductor_ops, reference_ops
from deepinfer.model.transformer import Transformer
from deepinfer.ops.matmul import without_onednn
from deepinfer.parallel.expert_parallel import distribute_experts, feed_forwards
from deepinfer.parallel.load_counter import LoadCounter
from deepinfer.parallel.placement import place_evenly
from deepinfer.presets import random_model, tiny_config
from tests.parallel.spawn import run_ranks
from tests.parallel.test_group_engine import MODEL, PARAMS, PROMPTS, TINY, completions, core_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning"),
    pytest.mark.timeout(900),
]

WINDOWS_ONLY = MODEL.parent / "swa_tiny"  # three layers of one kind
OPS = {"plain": reference_ops(static_shapes=True), "inductor": inductor_ops()}


class Alone:
    """A group of one, which exchanges with itself."""

    rank, size = 0, 1

    def exchange_evenly(self, rows: Tensor) -> Tensor:
        return rows.clone()

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return rows.clone()


def grouped_model(ops: str, precision: str = "native") -> Transformer:
    """Compiled without code generation, so that its bits are those of the model as it is written."""
    ranks: Any = Alone()
    model = random_model(tiny_config(), precision=precision, device="cpu", ops=OPS[ops])
    config = model.config
    n_experts = config.moe.n_routed_experts
    placement = place_evenly(config.n_layers, n_experts, n_experts, 1)
    distribute_experts(model, ranks, placement, LoadCounter(config.n_layers, n_experts, 1, 0))
    torch.compiler.reset()
    compile_model(model, backend="aot_eager")
    return model


@torch.inference_mode()
@pytest.mark.parametrize(("ops", "precision"), [("plain", "float32"), ("inductor", "native")])
def test_all_layers_share_the_code_of_a_half_in_two_parts(ops: str, precision: str) -> None:
    """It gives the bits of the half as it is written, for any number of rows and in both forms of the exchange."""
    model = grouped_model(ops, precision)
    config, count = model.config, 0
    for layer in model.layers:
        for tokens, is_even in ((5, False), (5, True), (9, False), (2, True)):
            streams = torch.randn(tokens, config.hyper_connection.mult, config.dim).to(model.numerics.precision.activation_dtype)
            pre_mix, is_padding = torch.rand(tokens, config.hyper_connection.mult), torch.arange(tokens) == 1
            inputs = (layer, streams, pre_mix, is_padding, is_even)
            with without_onednn():
                observed = layer.stages.feed(*inputs)
                with uncompiled(model):
                    expected = type(layer).stages.feed(*inputs)
            assert torch.equal(observed[0], expected[0])
            assert torch.equal(observed[1], expected[1])
        count = count or compilation_count()
        assert compilation_count() == count


@torch.inference_mode()
def test_pairs_that_are_too_few_for_a_compiler_get_company() -> None:
    model = grouped_model("inductor")
    ffn = feed_forwards(model)[0]
    experts = ffn.experts
    x, weights = torch.randn(6, model.config.dim).bfloat16(), torch.rand(6, 2)
    ids = torch.stack([torch.randperm(model.config.moe.n_routed_experts)[:2] for _ in range(6)])
    places = [(i, j) for i in range(6) for j in range(2)]
    ffn.exchange(experts, x, weights, ids)
    ffn.exchange(experts, x, weights, ids.masked_fill(torch.tensor(places)[:, 0].view(6, 2) > 0, experts.nobody))
    count = compilation_count()
    for kept in (0, 1, 2, 3):
        given = torch.full_like(ids, experts.nobody)
        for place in places[:kept]:
            given[place] = ids[place]
        outputs = ffn.exchange(experts, x, weights, given)
        expected = experts.forward(x, weights, given)
        assert torch.equal(outputs[0, 0], expected[0, 0])
        assert torch.equal(outputs, expected.masked_fill((given == experts.nobody)[:, :, None], 0))
    assert compilation_count() == count


def test_what_is_compiled_can_be_undone() -> None:
    model = grouped_model("plain", "float32")
    forget_compiled(model)
    assert all("stages" not in vars(layer) or layer.stages is type(layer).stages for layer in model.layers)
    assert all(ffn.experts._compiled_call_impl is None for ffn in feed_forwards(model))


def serve(rank: int, size: int, folder: Path, backend: str) -> dict[str, Any]:
    """Completions of compiled layers, alone or in a group whose experts move, and graphs that were compiled for them."""
    settings: dict[str, Any] = {"precision": "float32", "device": "cpu", "kernels": "inductor", "compile": True, **TINY}
    if size > 1:
        redundant = 0 if folder == WINDOWS_ONLY else -5 % size
        settings["parallel"] = ParallelConfig(
            ep_size=size, num_redundant_experts=redundant, eplb_window=5, eplb_period=10, timeout_s=240
        )
    found: dict[str, Any] = {"outputs": [], "counts": [], "moves": []}
    with pytest.MonkeyPatch.context() as patch:
        for where in ("engine", "parallel.group_engine"):
            patch.setattr(f"deepinfer.{where}.compile_model", partial(compile_model, backend=backend))
        with LLMEngine.from_pretrained(folder, **settings) as engine:
            for _ in range(2):
                found["outputs"].append(completions(engine, PROMPTS, PARAMS))
                found["counts"].append(compilation_count())
                if size > 1:
                    found["moves"].append(len(core_of(engine).balance.rearrangements))
    return found


@pytest.mark.parametrize(
    ("folder", "backend"),
    [(WINDOWS_ONLY, "eager"), pytest.param(MODEL, "inductor", marks=pytest.mark.slow)],
    ids=["graphs", "generated code"],
)
@pytest.mark.filterwarnings("default")
def test_a_group_of_compiled_ranks_gives_the_tokens_of_one_process(folder: Path, backend: str) -> None:
    torch.compiler.reset()
    alone, ranks = serve(0, 1, folder, backend), run_ranks(serve, 2, folder, backend)
    for ours, theirs in zip(ranks[0]["outputs"], alone["outputs"], strict=True):
        assert [output[:2] for output in ours] == [output[:2] for output in theirs]
        assert [output[2] for output in ours] == pytest.approx([output[2] for output in theirs], abs=1e-3)
    for rank in ranks:
        # Experts moved between the two rounds, into the storage that the compiled code reads.
        assert rank["moves"][1] > rank["moves"][0]
        assert rank["counts"][1] == rank["counts"][0] > 0
