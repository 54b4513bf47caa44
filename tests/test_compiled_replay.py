"""Compiled layers under everything that changes which rows run: stored prefixes, replays, tails, preemption, drafts."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from deepinfer import LLMEngine, SamplingParams
from deepinfer.checkpoint.load import load_model
from deepinfer.engine_config import EngineConfig
from deepinfer.model.compiled import compilation_count, compile_model
from deepinfer.model.numerics import inductor_ops
from deepinfer.model.transformer import Transformer
from deepinfer.outputs import ReplayMode
from deepinfer.runtime.device import InlineDevice
from tests.runtime.harness import GOLDEN, Harness, make_request, tiny_model, tiny_tokenizer

PARAMS = SamplingParams(max_tokens=6, temperature=0.7, seed=3, ignore_eos=True, logprobs=0)
# Around the window of 12 rows, every place in a ratio-2 group, and more than all windows together.
LENGTHS = (1, 2, 3, 12, 13, 25, 49, 83)
MODES: list[tuple[ReplayMode, int, int]] = [
    ("full", 0, 0),
    ("full", 0, 3),
    ("exact", 8, 0),
    ("exact", 8, 3),
    ("exact", 0, 3),
    ("bounded", 0, 0),
    ("bounded", 0, 3),
]

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]


def compiled_model(backend: str) -> Transformer:
    torch.compiler.reset()
    model = load_model(GOLDEN / "bf16_full", "float32", "cpu", ops=inductor_ops())
    compile_model(model, backend=backend)
    return model


@pytest.fixture(scope="module")
def traced() -> Iterator[Transformer]:
    """Graphs alone, without code generation."""
    yield compiled_model("eager")
    torch.compiler.reset()


def some_tokens(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(3 + (13 * i * i + 7 * i + 29 * salt) % 310 for i in range(length))


def serve(model: Transformer, mode: ReplayMode, snapshots: int, drafts: int) -> tuple[list[list[int]], list[int]]:
    """Texts of prompts that begin alike, some preempted, in chunks of up to 40 rows; graphs compiled after each."""
    harness = Harness(
        InlineDevice(),
        depth=1,
        budget=40,
        num_blocks=120,
        model=model,
        replay=mode,
        prefix_caching=mode != "full",
        num_ring_snapshots=snapshots,
        num_speculative_tokens=drafts,
    )
    harness.worker.warm_up(lambda what: nullcontext())
    counts = []
    for length in (9, *LENGTHS):
        sequences = [
            harness.add(make_request(f"{length}/{salt}", some_tokens(length) + some_tokens(4, salt), PARAMS)) for salt in (1, 2, 3)
        ]
        step = 0
        while harness.step():
            step += 1
            if step % 4 == 0 and harness.scheduler.running:
                harness.scheduler._preempt(harness.scheduler.running[-1])
        assert all(sequence.num_output_tokens == PARAMS.max_tokens for sequence in sequences)
        counts.append(compilation_count())
    recovery = harness.scheduler.recovery.counters
    assert (recovery.cached_tokens > 0) == (mode != "full")
    assert (recovery.replayed_tokens > 0) == (mode == "bounded" or (mode == "exact" and not snapshots))
    assert (recovery.truncated_rows > 0) == (mode != "full")
    assert harness.scheduler.counters.preemptions > 0
    return [sequence.output_token_ids for sequence in harness.sequences], counts


def check_mode(model: Transformer, mode: ReplayMode, snapshots: int, drafts: int) -> None:
    texts, counts = serve(model, mode, snapshots, drafts)
    expected, _ = serve(tiny_model(batch_invariant=False), mode, snapshots, drafts)
    assert texts == expected
    assert len(set(counts)) == 1, f"compiled anew: {counts}"


@pytest.mark.parametrize(
    ("mode", "snapshots", "drafts"),
    [pytest.param(*mode, marks=[] if mode[2] else [pytest.mark.slow]) for mode in MODES],
)
def test_traced_layers_give_the_plain_text_and_are_traced_once(
    traced: Transformer, mode: ReplayMode, snapshots: int, drafts: int
) -> None:
    check_mode(traced, mode, snapshots, drafts)


def test_one_trace_serves_steps_with_and_without_replays(traced: Transformer) -> None:
    """Memory of the same sizes, so that only the rows differ."""
    counts = [serve(traced, mode, 0, 3)[1][-1] for mode in ("full", "bounded", "exact")]
    assert len(set(counts)) == 1


def test_the_thread_of_an_engine_compiles_like_the_one_that_made_the_model(traced: Transformer) -> None:
    """Settings of the compiler belong to a thread: with other ones each length would be compiled anew."""
    config = EngineConfig(
        precision="float32", block_size=4, num_blocks=77, max_num_seqs=5, replay="exact", enable_prefix_caching=True
    )
    prompts = [list(some_tokens(length)) for length in (9, 21, 30, 100)]

    def texts(model: Transformer) -> tuple[list[list[int]], int]:
        with LLMEngine(model, tiny_tokenizer(), config) as engine:
            first = engine.generate(prompts[0], PARAMS, use_tqdm=False)
            count = compilation_count()
            outputs = [*first, *engine.generate(prompts[1:], PARAMS, use_tqdm=False)]
        return [output.outputs[0].token_ids for output in outputs], compilation_count() - count

    expected, _ = texts(tiny_model(batch_invariant=False))
    assert texts(traced) == (expected, 0)


def test_the_warm_up_knows_short_sequences_and_long_ones() -> None:
    """An index that keeps all entries of a short sequence has code of its own."""
    model = compiled_model("eager")
    kept = replace(model.config.indexer, topk=24, candidate_topk_blocks=24)
    model.config = replace(model.config, indexer=kept)
    for layer in model.layers:
        if layer.attn.indexer is not None:
            layer.attn.indexer.config = kept
    harness = Harness(InlineDevice(), depth=1, num_blocks=40, model=model, replay="exact", prefix_caching=True)
    harness.worker.warm_up(lambda what: nullcontext())
    count = compilation_count()
    for length in (9, 100):
        harness.add(make_request(str(length), some_tokens(length, salt=length), PARAMS))
        harness.run()
        assert compilation_count() == count, length
    torch.compiler.reset()


@pytest.mark.slow
def test_generated_code_gives_the_plain_text_and_is_generated_once() -> None:
    model = compiled_model("inductor")
    for mode, snapshots, drafts in MODES:
        check_mode(model, mode, snapshots, drafts)
    torch.compiler.reset()
