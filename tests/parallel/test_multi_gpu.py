"""A group over NCCL: captured decode steps contain their collectives and give the tokens of steps that are not captured.

With the kernels, compiled and batch-invariant, they are the tokens and log probabilities of one GPU, to the bit.
"""

import os
from typing import Any

# Read when the first product runs; without it the libraries refuse deterministic products.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from deepinfer import LLMEngine, ParallelConfig, SamplingParams
from deepinfer.model.compiled import compilation_count
from deepinfer.parallel.expert_parallel import feed_forwards
from tests.parallel.spawn import run_ranks
from tests.parallel.test_group_engine import MODEL, PARAMS, PROMPTS, TINY, completions, core_of

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices on this machine"),
    pytest.mark.timeout(1200),
    # A compiler warns of many things that are its own.
    pytest.mark.filterwarnings("default"),
]

COMPILING_S = 900.0
# Chunks of every size, and prompts that leave one rank without rows.
MINI_PROMPTS = [[3 + (7 * i + 5 * n) % 240 for i in range(n)] for n in (1, 5, 13, 70, 300)]
MINI_PARAMS = [SamplingParams(max_tokens=8 + 6 * i, temperature=0.8 * (i % 2), ignore_eos=True, logprobs=0) for i in range(5)]
INVARIANT: dict[str, Any] = {"batch_invariant": True, "kernels": "triton", "compile": True}
MINI_SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 512}


def serve(rank: int, size: int) -> dict[str, Any]:
    """Greedy tokens with graphs and without, and what was captured."""
    os.environ["LOCAL_RANK"] = str(rank)
    parallel = ParallelConfig(ep_size=size, num_redundant_experts=-5 % size, eplb_window=10, eplb_period=25, timeout_s=120)
    found: dict[str, Any] = {}
    for graphs in (True, False):
        with LLMEngine.from_pretrained(MODEL, precision="float32", cuda_graphs=graphs, parallel=parallel, **TINY) as engine:
            greedy = [type(p)(max_tokens=p.max_tokens, ignore_eos=True) for p in PARAMS]
            found[f"graphs {graphs}"] = [token_ids for _, token_ids, _, _ in completions(engine, PROMPTS, greedy)]
            found[f"shapes {graphs}"] = list(core_of(engine).worker._static)
    return found


def test_captured_steps_give_the_same_tokens() -> None:
    found = run_ranks(serve, 2)
    assert found[0]["graphs True"] == found[0]["graphs False"]
    assert found[0]["shapes True"]
    assert found[0]["shapes True"] == found[1]["shapes True"]
    assert found[0]["shapes False"] == []


def serve_mini(rank: int, size: int) -> dict[str, Any]:
    """Completions by the kernels, alone or in a group whose experts move, with captured steps and, in a group, without."""
    os.environ["LOCAL_RANK"] = str(rank)
    # Compiled code is guarded by it; in production it is off.
    torch.use_deterministic_algorithms(False)
    settings: dict[str, Any] = {**INVARIANT, **MINI_SIZES}
    if size > 1:
        settings["parallel"] = ParallelConfig(
            ep_size=size, num_redundant_experts=size, eplb_window=10, eplb_period=20, timeout_s=300
        )
    found: dict[str, Any] = {}
    for graphs in (True, False)[:size]:
        rounds, counts, moves = [], [], []
        with LLMEngine.from_pretrained("mini", cuda_graphs=graphs, **settings) as engine:
            for _ in range(3):
                rounds.append(completions(engine, MINI_PROMPTS, MINI_PARAMS))
                counts.append(compilation_count())
                moves.append(len(core_of(engine).balance.rearrangements) if size > 1 else 0)
            found[f"packed {graphs}"] = all(ffn.experts.w2.packed is not None for ffn in feed_forwards(engine.model))
            found[f"shapes {graphs}"] = list(engine._thread.core.worker._static)
        found |= {f"rounds {graphs}": rounds, f"counts {graphs}": counts, f"moves {graphs}": moves}
    return found


@pytest.fixture(scope="module")
def mini() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One GPU, then both."""
    (alone,) = run_ranks(serve_mini, 1, join_s=COMPILING_S)
    return alone, run_ranks(serve_mini, 2, join_s=COMPILING_S)


def test_one_gpu_repeats_itself(mini: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    """In what is drawn greedily; other requests get other seeds each time."""
    first, *others = ([output[1:3] for output in outputs[::2]] for outputs in mini[0]["rounds True"])
    assert all(other == first for other in others)


@pytest.mark.parametrize("graphs", [True, False])
def test_the_kernels_of_a_group_give_the_bits_of_one_gpu(graphs: bool, mini: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    alone, ranks = mini
    assert all(rank[f"packed {graphs}"] for rank in (alone, *ranks) if f"packed {graphs}" in rank)
    for observed, expected in zip(ranks[0][f"rounds {graphs}"], alone["rounds True"], strict=True):
        # Request ids go on counting; tokens, log probabilities and seeds are those of the prompt.
        assert [output[1:] for output in observed] == [output[1:] for output in expected]


@pytest.mark.parametrize("graphs", [True, False])
def test_experts_move_under_what_was_compiled_and_captured(graphs: bool, mini: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    one, other = mini[1]
    assert one[f"moves {graphs}"][2] > 0
    assert one[f"shapes {graphs}"] == other[f"shapes {graphs}"]
    assert bool(one[f"shapes {graphs}"]) == graphs
    for rank in (one, other):
        counts = rank[f"counts {graphs}"]
        assert counts[2] == counts[1] > 0
