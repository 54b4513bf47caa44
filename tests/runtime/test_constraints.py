"""What may be drawn depends on confirmed tokens and the drafts before a row, and on nothing else."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.runtime import loop as loop_module
from deepinfer.runtime.constraints import Continuations, SamplerInputs, build_sampler_inputs
from deepinfer.runtime.fuzz_device import FuzzDevice
from deepinfer.runtime.plan import SchedulerOutputs
from deepinfer.runtime.sequence import Sequence
from deepinfer.sampling_checks import tokenize_bad_words
from deepinfer.sampling_params import SamplingParams
from tests.runtime.harness import Harness, make_request, reference, reference_outcome, tiny_model, tiny_tokenizer

VOCAB = tiny_model().config.vocab_size


@pytest.mark.parametrize("depth", [0, 1])
def test_masks_are_built_from_the_confirmed_tokens_right_before_their_sampler(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that allows one token, computed from the whole history, gives the text that the history dictates."""

    def successor(history: list[int]) -> int:
        return 3 + (sum(history) * 7 + len(history)) % 300

    def build(plan: SchedulerOutputs, sequences: list[Sequence], num_drafts: int) -> SamplerInputs:
        rows = [s.token_ids for s, p in zip(sequences, plan.sequences, strict=True) if p.is_sampling]
        allowed = torch.zeros(len(rows), 1, VOCAB, dtype=torch.bool)
        for row, history in enumerate(rows):
            allowed[row, 0, successor(history)] = True
        packed = np.packbits(allowed.numpy(), axis=-1, bitorder="little")
        return SamplerInputs(allowed=torch.from_numpy(packed))

    monkeypatch.setattr(loop_module, "build_sampler_inputs", build)
    harness = Harness(FuzzDevice(depth), depth=depth, num_blocks=14, budget=9, max_num_seqs=3)
    for index, length in enumerate((3, 11, 6, 14)):
        prompt = [5 + index + i for i in range(length)]
        harness.add(make_request(str(index), prompt, SamplingParams(max_tokens=15, temperature=1.0, seed=index)))
    for _ in range(12):
        harness.step()
    harness.scheduler._preempt(harness.scheduler.running[0])
    harness.run()
    assert harness.scheduler.counters.preemptions > 0
    for sequence in harness.sequences:
        expected = list(sequence.request.prompt_token_ids)
        for _ in range(15):
            expected.append(successor(expected))
        assert sequence.token_ids == expected


A, B, C, SPACE_A = 67, 68, 69, 267  # tokens of the tiny tokenizer; "e acute" is two tokens
PROMPT = (9, A, 40, B, 7, 300, 12)
# Drawing from a few allowed tokens makes every field matter within a few tokens.
FEW = {"temperature": 1.0, "seed": 4, "max_tokens": 16, "logprobs": 0, "ignore_eos": True, "allowed_token_ids": (A, B, C, SPACE_A)}
ONE_FIELD: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": (A, C)},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "negative frequency_penalty": {"frequency_penalty": -2.0},
    "repetition_penalty": {"repetition_penalty": 30.0},
    "logit_bias": {"logit_bias": {A: 1.5, C: -3.0}},
    "bad_words of one token": {"bad_words": ["a"]},
    "bad_words of several tokens": {"bad_words": ["ab", "cc", "bab", "bca"]},
    "stop": {"stop": ["bc", "a a"]},
    "stop of several characters": {"stop": "cab"},
    "forced_token_ids": {"forced_token_ids": (C, C, 5, 1, C, 77, A), "allowed_token_ids": None},
    "everything": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
        "logit_bias": {A: 0.5},
        "bad_words": ["ca", "bb"],
        "stop": ["cbcb"],
        "stop_token_ids": [SPACE_A],
        "min_tokens": 5,
        "top_p": 0.9,
    },
}
MIXED = [SamplingParams(**FEW | fields) for fields in ONE_FIELD.values()]


@pytest.mark.parametrize("field", ONE_FIELD)
def test_each_field_changes_something(field: str) -> None:
    assert reference_outcome(PROMPT, SamplingParams(**FEW)) != reference_outcome(PROMPT, SamplingParams(**FEW | ONE_FIELD[field]))


@pytest.mark.parametrize(("depth", "drafts"), [(0, 0), (1, 0), (1, 1), (0, 3), (1, 3)])
def test_history_counts_the_same_in_any_company_one_step_ahead_behind_drafts_and_after_preemption(depth: int, drafts: int) -> None:
    device = FuzzDevice(10 * depth + drafts)
    harness = Harness(device, depth=depth, num_speculative_tokens=drafts, num_blocks=30, budget=20, max_num_seqs=4)
    for index, params in enumerate(MIXED):
        harness.add(make_request(str(index), PROMPT[: 7 - index % 3], params))
    for count in range(1000):
        if not harness.step():
            break
        if count % 5 == 4 and harness.scheduler.running:
            harness.scheduler._preempt(harness.scheduler.running[count % len(harness.scheduler.running)])
    for sequence, params in zip(harness.sequences, MIXED, strict=True):
        assert harness.outcome(sequence) == reference_outcome(sequence.request.prompt_token_ids, params)
    counters = harness.scheduler.counters
    assert counters.preemptions > 0
    assert (counters.accepted > 0) == (drafts > 0)
    assert (counters.verified > counters.accepted) == (drafts > 0)


def naive_next(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> int:
    """The greedy token by the definitions of the fields, one token at a time."""
    scores = list(logits)
    for token in range(VOCAB):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            scores[token] = -math.inf
    for word in tokenize_bad_words(params, tiny_tokenizer()):
        if tuple(output[len(output) - len(word) + 1 :] if len(word) > 1 else ()) == word[:-1] and len(output) >= len(word) - 1:
            scores[word[-1]] = -math.inf
    for token, bias in params.bias_pairs:
        scores[token] += bias
    for token in range(VOCAB):
        count = output.count(token)
        if count or token in prompt:
            scores[token] *= 1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
        scores[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return max(range(VOCAB), key=lambda token: scores[token])


@pytest.mark.parametrize("seed", range(6))
def test_greedy_text_is_the_one_of_the_definitions(seed: int) -> None:
    rng = random.Random(seed)
    params = SamplingParams(
        temperature=0,
        max_tokens=14,
        ignore_eos=True,
        logprobs=0,
        allowed_token_ids=rng.sample(range(3, 320), 12),
        presence_penalty=rng.uniform(-2, 2),
        frequency_penalty=rng.uniform(0, 2),
        repetition_penalty=rng.choice([1.0, 1.4, 0.8]),
        logit_bias={rng.randrange(3, 320): rng.uniform(-2, 2) for _ in range(30)},
        bad_words=[tiny_tokenizer().decode([rng.randrange(3, 127)]) * rng.choice([1, 2]) for _ in range(3) if rng.random() < 0.9],
    )
    prompt = [rng.randrange(3, 320) for _ in range(9)]
    text = list(prompt)
    for _ in range(14):
        logits = tiny_model()(torch.tensor(text))[-1].tolist()
        text.append(naive_next(logits, prompt, text[len(prompt) :], params))
    token_ids, logprobs = reference(tuple(prompt), params)
    assert token_ids == text[len(prompt) :]
    # Log probabilities are those of the model, whatever the fields made of its logits.
    expected = torch.log_softmax(tiny_model()(torch.tensor(text[:-1])), dim=-1)[len(prompt) - 1 :]
    assert logprobs == pytest.approx([float(row[token]) for row, token in zip(expected, token_ids, strict=True)], abs=1e-5)


def test_a_step_whose_requests_use_nothing_stages_and_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def watched(*arguments: Any) -> SamplerInputs:
        built.append(build_sampler_inputs(*arguments))
        return built[-1]

    monkeypatch.setattr(loop_module, "build_sampler_inputs", watched)
    monkeypatch.setattr(Continuations, "lengths", property(lambda self: pytest.fail("computed")))
    harness = Harness(FuzzDevice(0), depth=1, num_speculative_tokens=2)
    harness.add(make_request("0", PROMPT, SamplingParams(max_tokens=6, temperature=0.7, top_p=0.9, logprobs=2, min_tokens=2)))
    harness.run()
    assert len(built) > 2
    for inputs in built:
        assert (inputs.allowed, inputs.constraints, inputs.forced, inputs.depend_on_text) == (None, (), None, False)
