"""Prompt log probabilities, hidden states and experts: those of the bare model, however its rows were cut and repeated."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from deepinfer.checkpoint.load import load_model
from deepinfer.model.compiled import compile_model
from deepinfer.runtime.device import InlineDevice
from deepinfer.runtime.fuzz_device import FuzzDevice
from deepinfer.runtime.observations import SCORED_AT_ONCE, StepObservations, recorded_experts, stage_observations
from deepinfer.runtime.output_processor import features_of
from deepinfer.sampling_params import SamplingParams
from tests.runtime.harness import GOLDEN, Harness, make_request, reference_outcome, tiny_model

PROMPTS = [tuple(3 + (11 * i + 3 * length) % 310 for i in range(length)) for length in (1, 2, 9, 23)]
WATCHED = SamplingParams(
    max_tokens=9, temperature=1.0, seed=2, logprobs=0, prompt_logprobs=2, return_hidden_states=True, return_routed_experts=True
)
PLAIN = replace(WATCHED, prompt_logprobs=None, return_hidden_states=False, return_routed_experts=False)


@cache
def whole_sequence(token_ids: tuple[int, ...]) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Log probabilities, hidden states and experts of the bare model for a whole text."""
    model = tiny_model()
    with recorded_experts(model, wanted=True) as experts, torch.inference_mode():
        final = model.forward_rows(*model.whole_sequences(torch.tensor(token_ids))).final
        logprobs = torch.log_softmax(model.logits(final), dim=-1)
    return logprobs, final.numpy(), torch.stack(experts, dim=1).numpy()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("drafts", [0, 3])
def test_what_was_seen_is_the_same_in_chunks_ahead_behind_drafts_and_after_preemption(depth: int, drafts: int) -> None:
    harness = Harness(
        FuzzDevice(depth + drafts), depth=depth, num_speculative_tokens=drafts, num_blocks=30, budget=7, max_num_seqs=3
    )
    for index, prompt in enumerate(PROMPTS):
        harness.add(make_request(str(index), prompt, WATCHED))
        harness.add(make_request(f"other {index}", prompt, PLAIN))
    for count in range(200):
        if not harness.step():
            break
        if count in (3, 9, 13, 24) and harness.scheduler.running:
            harness.scheduler._preempt(harness.scheduler.running[count % len(harness.scheduler.running)])
    assert harness.scheduler.counters.preemptions > 0
    assert harness.scheduler.counters.chunked_prefills > 0
    for sequence in harness.sequences:
        prompt, params = sequence.request.prompt_token_ids, sequence.request.params
        assert harness.outcome(sequence) == reference_outcome(prompt, params)
        hidden, experts = features_of(sequence)
        if params == PLAIN:
            assert (hidden, experts, sequence.prompt_scores) == (None, None, [])
            continue
        logprobs, final, chosen = whole_sequence(tuple(sequence.token_ids))
        assert hidden is not None
        assert experts is not None
        np.testing.assert_array_equal(hidden, final[:-1])
        np.testing.assert_array_equal(experts, chosen[:-1])
        assert len(sequence.prompt_scores) == len(prompt) - 1
        for position, around in enumerate(sequence.prompt_scores):
            row = logprobs[position]
            assert around.logprob == float(row[prompt[position + 1]])
            assert [token for token, _ in around.top] == row.sort(descending=True, stable=True).indices[:2].tolist()
            assert around.rank == 1 + int((row > around.logprob).sum())


def test_experts_of_compiled_layers_are_recorded_too() -> None:
    model = load_model(GOLDEN / "bf16_full", "float32", "cpu")
    compile_model(model, backend="eager")
    token_ids = torch.tensor(PROMPTS[2])
    _, _, expected = whole_sequence(PROMPTS[2])
    with recorded_experts(model, wanted=True) as experts, torch.inference_mode():
        model.forward_rows(*model.whole_sequences(token_ids))
    np.testing.assert_array_equal(torch.stack(experts, dim=1).numpy(), expected)


def test_a_long_chunk_is_scored_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference_outcome(PROMPTS[-1], WATCHED).prompt_scores
    monkeypatch.setattr("deepinfer.runtime.observations.SCORED_AT_ONCE", 5)
    harness = Harness(InlineDevice(), depth=0)
    sequence = harness.add(make_request("0", PROMPTS[-1], WATCHED))
    harness.run()
    assert SCORED_AT_ONCE > len(expected) > 5
    assert sequence.prompt_scores == expected


def test_known_prompt_scores_are_not_computed_again_after_a_preemption() -> None:
    harness = Harness(InlineDevice(), depth=0, budget=8)
    sequence = harness.add(make_request("0", PROMPTS[-1], WATCHED))
    harness.step()
    harness.step()
    known = len(sequence.prompt_scores)
    assert known == 16
    harness.scheduler._preempt(sequence)
    plan = harness.scheduler.schedule()
    assert plan is not None
    assert len(plan.sequences[0].scored) == 0


def test_only_the_first_completion_scores_the_prompt() -> None:
    harness = Harness(InlineDevice(), depth=0)
    request = make_request("0", PROMPTS[-1], replace(WATCHED, n=2))
    first, second = (harness.add(request, index) for index in range(2))
    harness.run()
    assert (len(first.prompt_scores), len(second.prompt_scores)) == (22, 0)


def test_a_step_that_nobody_watches_stages_and_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepObservations, "take", lambda *_: pytest.fail("taken"))
    monkeypatch.setattr(StepObservations, "score", lambda *_: pytest.fail("scored"))
    harness = Harness(InlineDevice(), depth=1)
    harness.add(make_request("0", PROMPTS[-1], PLAIN))
    plan = harness.scheduler.schedule()
    assert plan is not None
    assert stage_observations(plan, 320) is None
    assert not tiny_model().layers[0].ffn.gate._forward_hooks
