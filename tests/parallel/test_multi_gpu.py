"""A group over NCCL: captured decode steps contain their collectives and give the tokens of steps that are not captured."""

import os
from typing import Any

# Read when the first product runs; without it the libraries refuse deterministic products.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from deepinfer import LLMEngine, ParallelConfig
from tests.parallel.spawn import run_ranks
from tests.parallel.test_group_engine import MODEL, PARAMS, PROMPTS, TINY, completions, core_of

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices on this machine"),
    pytest.mark.timeout(600),
]


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
