"""A compiled engine's sampler: compiled once, before the first request, and drawing what the one that is written draws."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from deepinfer import SamplingParams
from deepinfer.checkpoint.load import load_model
from deepinfer.model.compiled import compilation_count, compile_function, compile_model
from deepinfer.model.numerics import inductor_ops
from deepinfer.model.transformer import Transformer
from deepinfer.runtime import static_forward, static_sampler, step_sampler
from deepinfer.runtime.device import InlineDevice, Thunk
from tests.runtime.harness import GOLDEN, Harness, Outcome, make_request

KINDS = {
    "greedy": SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
    "random": SamplingParams(max_tokens=8, temperature=0.9, seed=3, ignore_eos=True),
    "filtered": SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, top_k=40, seed=5, logprobs=3, ignore_eos=True),
    "scored": SamplingParams(max_tokens=8, temperature=0, logprobs=1, ignore_eos=True),
}
BATCHES = (1, 2, 3, 7)

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]


class WarmDevice(InlineDevice):
    """Runs what it would capture when that is made, so that it is compiled then."""

    def capture(self, fn: Thunk) -> Thunk:
        fn()
        return fn


def compiled_model(backend: str) -> Transformer:
    torch.compiler.reset()
    model = load_model(GOLDEN / "bf16_full", "float32", "cpu", ops=inductor_ops())
    compile_model(model, backend=backend)
    return model


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Transformer]:
    """Graphs alone, without code generation."""
    for module in (static_forward, static_sampler):
        monkeypatch.setattr(module, "compile_function", partial(compile_function, backend="eager"))
    yield compiled_model("eager")
    torch.compiler.reset()


def open_harness(model: Transformer, drafts: int) -> Harness:
    harness = Harness(
        WarmDevice(), depth=1, num_blocks=200, decode_buckets=(1, 2, 4, 8), model=model, num_speculative_tokens=drafts
    )
    harness.worker.warm_up(lambda what: nullcontext())
    return harness


def outcomes(harness: Harness) -> dict[tuple[str, int], list[Outcome]]:
    """What requests of each kind give in each batch, one after the other."""
    found = {}
    for kind, params in KINDS.items():
        for batch in BATCHES:
            first = len(harness.sequences)
            for index in range(batch):
                prompt = [3 + (13 * i + 7 * index) % 300 for i in range(2 + index)]
                harness.add(make_request(f"{kind}/{batch}/{index}", prompt, params))
            harness.run()
            found[kind, batch] = [harness.outcome(sequence) for sequence in harness.sequences[first:]]
    return found


def check_sampler(model: Transformer, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(step_sampler, "MOST_STATIC_ROWS", 0)
        written = open_harness(model, drafts)
        before = compilation_count()
        expected = outcomes(written)
        assert compilation_count() == before
    harness = open_harness(model, drafts)
    assert compilation_count() == before + 1, "the sampler is one graph, whatever the batch"
    found = outcomes(harness)
    for case, lone in expected.items():
        for outcome, other in zip(found[case], lone, strict=True):
            assert outcome.token_ids == other.token_ids, case
            # Logits of a padded batch: a product in float32 is not summed alike for every number of rows.
            assert outcome.logprobs == pytest.approx(other.logprobs, abs=1e-4), case
    assert compilation_count() == before + 1, "compiled after the warm-up"


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_sampler_is_traced_once_and_draws_what_is_written(
    traced: Transformer, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_sampler(traced, drafts, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 3])
def test_generated_code_of_the_sampler_draws_what_is_written(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sampler(compiled_model("inductor"), drafts, monkeypatch)
    torch.compiler.reset()
