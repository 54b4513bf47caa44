"""A group over the Triton kernels' seam, with stand-ins on the CPU: packed, compiled, batch-invariant, and one process's bits.

Needs triton to be installed, no GPU. What the kernels do is the matter of `test_gpu_kernels.py` and `test_multi_gpu.py`.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import ConfigError, EngineConfig, LLMEngine, ParallelConfig, SamplingParams
from deepinfer.backends import Backend
from deepinfer.checkpoint.write import random_tensors, save_checkpoint
from deepinfer.model.block import choose, feed_in_two, finish
from deepinfer.model.compiled import compilation_count, compile_function, compile_model, is_compiled
from deepinfer.model.numerics import triton_ops
from deepinfer.model.packed_weights import pack_model
from deepinfer.parallel.expert_parallel import feed_forwards
from deepinfer.presets import byte_tokenizer_json, random_model
from tests.kernels import packable_config
from tests.parallel.spawn import run_ranks
from tests.parallel.test_group_engine import completions, core_of

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

PROMPTS = [[3 + (7 * i + 5 * n) % 250 for i in range(n)] for n in (1, 30, 13, 3)]
PARAMS = [SamplingParams(max_tokens=5 + 3 * i, temperature=0.8 * (i % 2), ignore_eos=True, logprobs=0) for i in range(4)]
SETTINGS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 128, "num_blocks": 12}
HOLDER, BROKEN_LAYER = 1, 2


def on_the_cpu(config: EngineConfig, device: torch.device) -> Backend:
    """What a CUDA device would be given."""
    return Backend(triton_ops(batch_invariant=config.batch_invariant), config.compile is True, "triton")


def open_engine(folder: Path, size: int, **settings: Any) -> LLMEngine:
    if size > 1:
        settings["parallel"] = ParallelConfig(ep_size=size, eplb_window=5, eplb_period=10, timeout_s=240)
    return LLMEngine.from_pretrained(folder, device="cpu", batch_invariant=True, kernels="triton", **SETTINGS, **settings)


def serve(rank: int, size: int, folder: Path, compiles: bool) -> dict[str, Any]:
    """Completions over the kernels' stand-ins."""
    from tests.kernel_stand_ins import register

    register()
    found: dict[str, Any] = {"outputs": [], "counts": [], "moves": []}
    with pytest.MonkeyPatch.context() as patch:
        for where in ("engine", "parallel.group_engine"):
            patch.setattr(f"deepinfer.{where}.choose_backend", on_the_cpu)
            patch.setattr(f"deepinfer.{where}.compile_model", partial(compile_model, backend="eager"))
        # Drafts go through blocks that no rank shares.
        with open_engine(folder, size, compile=compiles, num_speculative_tokens=2 * compiles) as engine:
            found["packed"] = all(ffn.experts.w2.packed is not None for ffn in feed_forwards(engine.model))
            found["compiled"] = is_compiled(engine.model)
            for _ in range(2):
                found["outputs"].append(completions(engine, PROMPTS, PARAMS))
                found["counts"].append(compilation_count())
                if size > 1:
                    found["moves"].append(len(core_of(engine).balance.rearrangements))
    return found


def refuse(rank: int, size: int, folder: Path) -> str:
    """The error of a group of which one rank holds an expert that no kernel takes."""
    from deepinfer.checkpoint import load

    def spoil_and_pack(model: Any, **settings: Any) -> int:
        if rank == HOLDER:
            feed_forwards(model)[BROKEN_LAYER].experts.w3.scale.view(torch.uint8)[1, 7, 0] = 60
        return pack_model(model, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepinfer.parallel.group_engine.choose_backend", on_the_cpu)
        patch.setattr(load, "pack_model", spoil_and_pack)
        with pytest.raises(ConfigError) as error:
            open_engine(folder, size)
    return str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in the published format."""
    path, config = tmp_path_factory.mktemp("packable") / "model", packable_config()
    save_checkpoint(path, config, random_tensors(config, 0), byte_tokenizer_json(config.vocab_size))
    return path


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["as written", "compiled"])
def test_a_group_over_the_kernels_gives_the_bits_of_one_process(folder: Path, compiles: bool) -> None:
    torch.compiler.reset()
    alone, ranks = serve(0, 1, folder, compiles), run_ranks(serve, 2, folder, compiles)
    assert ranks[0]["outputs"] == alone["outputs"]
    for rank in (alone, *ranks):
        assert rank["packed"]
        assert rank["compiled"] == compiles
        assert rank["counts"][0] == rank["counts"][1]
    assert ranks[0]["moves"][1] > ranks[0]["moves"][0]


def test_all_ranks_refuse_what_one_cannot_pack(folder: Path) -> None:
    for message in run_ranks(refuse, 2, folder):
        assert f"layers.{BROKEN_LAYER}.ffn.experts cannot be packed for the kernels, because of what rank {HOLDER} holds" in message


@pytest.mark.slow
@torch.inference_mode()
def test_generated_code_of_the_two_parts_gives_the_bits_of_the_whole_half() -> None:
    """One process compiles the half in one piece, a group in two: sums may not be cut in another way."""
    from tests.kernel_stand_ins import register

    register()
    torch.compiler.reset()
    model = random_model(packable_config(), device="cpu", ops=triton_ops(batch_invariant=True))
    compile_model(model)
    config, layer = model.config, model.layers[0]
    whole, in_two = layer.stages.feed, feed_in_two(compile_function(choose), compile_function(finish))
    for tokens in (64, 7, 300):
        streams = torch.randn(tokens, config.hyper_connection.mult, config.dim).bfloat16()
        pre_mix, is_padding = torch.rand(tokens, config.hyper_connection.mult), torch.arange(tokens) == 1
        expected = whole(layer, streams, pre_mix, is_padding, False)
        observed = in_two(layer, streams, pre_mix, is_padding, False)
        assert all(torch.equal(*pair) for pair in zip(observed, expected, strict=True))
