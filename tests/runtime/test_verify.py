"""The verifier and what it leaves behind: every way a run of drafts can end."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

from deepinfer import ConfigError, EngineConfig, LLMEngine, Tokenizer
from deepinfer.model.numerics import reference_ops
from deepinfer.model.transformer import Transformer
from deepinfer.presets import random_model, tiny_config
from deepinfer.runtime.device import InlineDevice
from deepinfer.runtime.fuzz_device import FuzzDevice
from deepinfer.runtime.step_sampler import StepSampler
from deepinfer.runtime.step_state import WorkerStepState
from deepinfer.runtime.verify import count_leading
from deepinfer.sampling_params import SamplingParams
from tests.runtime.harness import GOLDEN, Harness, make_request, reference, tiny_model

BLOCK = 3  # drafts of the tiny model


def test_drafts_count_up_to_the_first_that_is_not_accepted() -> None:
    for first, second in itertools.product(itertools.product([0, 1], repeat=3), [(), (0,), (1,)]):
        accepted, group, index = [], [], []
        for g, run in enumerate((first, second)):
            # The row of the last draft has none behind it.
            accepted += [bool(is_good) for is_good in run] + [False]
            group += [g] * (len(run) + 1)
            index += range(len(run) + 1)
        expected = [len(list(itertools.takewhile(bool, run))) for run in (first, second)]
        found = count_leading(torch.tensor(accepted), torch.tensor(group), torch.tensor(index), (2, 4))
        assert found.tolist() == expected


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_planned_drafts_of_every_quality_leave_the_text_as_it_is(depth: int, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are right up to a place that varies, so that every accept length meets every parity and ring place."""
    prompts = [tuple(3 + (13 * i + length) % 300 for i in range(length)) for length in (3, 8, 13)]
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5, logprobs=0)
    texts = {prompt: prompt + tuple(reference(prompt, params)[0]) for prompt in prompts}
    harness = Harness(FuzzDevice(drafts), depth=depth, num_speculative_tokens=drafts, num_blocks=60, max_num_seqs=3)
    seen: set[tuple[int, int]] = set()
    count = itertools.count()

    def planned(self: StepSampler, state: WorkerStepState) -> None:
        found = state.box.logit_rows
        assert found is not None
        rows = []
        for position, slot in zip(state.outputs.next_start[found.groups].tolist(), found.slots.tolist(), strict=True):
            owner = next((s for s in harness.sequences if s.slot == slot), None)
            text = texts[owner.request.prompt_token_ids] if owner else ()
            good = next(count) % (drafts + 1)
            seen.add((good, position % 12))
            right = [text[i] if i < len(text) else 0 for i in range(position + 1, position + 1 + drafts)]
            rows.append([t if i < good else (t + 1) % 300 for i, t in enumerate(right)])
        state.outputs.drafts[found.groups] = torch.tensor(rows)

    monkeypatch.setattr(StepSampler, "propose", planned)
    for index, prompt in enumerate(prompts):
        harness.add(make_request(str(index), prompt, params))
    harness.run()
    for sequence, prompt in zip(harness.sequences, prompts, strict=True):
        assert (sequence.output_token_ids, harness.logprobs[sequence.seq_id]) == reference(prompt, params)
    assert {good for good, _ in seen} == set(range(drafts + 1))
    assert harness.scheduler.counters.accepted > 0


@cache
def model_with_five_drafts() -> Transformer:
    """Nine small layers of every kind, and proposals of five."""
    return random_model(tiny_config(), precision="float32", device="cpu", ops=reference_ops(batch_invariant=True))


def texts_of(harness: Harness, prompts: list[tuple[int, ...]], params: SamplingParams) -> list[tuple[list[int], list[float]]]:
    for index, prompt in enumerate(prompts):
        harness.add(make_request(str(index), prompt, params))
    harness.run()
    return [(sequence.output_token_ids, harness.logprobs[sequence.seq_id]) for sequence in harness.sequences]


@pytest.mark.parametrize("depth", [0, 1])
def test_every_accept_length_meets_every_place_in_block_window_and_group(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposals of five, right up to a place that is chosen so that all combinations happen."""
    model, k = model_with_five_drafts(), 5
    period = model.config.attention.window_size  # a multiple of the block of 4 and of the ratio 2
    assert period % 4 == 0
    prompts = [tuple(3 + (13 * i + length) % 240 for i in range(length)) for length in range(2, 2 + period)]
    params = SamplingParams(max_tokens=56, temperature=1.0, seed=5, logprobs=0, ignore_eos=True)
    sizes = {"num_blocks": 400, "max_num_seqs": len(prompts), "budget": 200, "model": model}
    expected = texts_of(Harness(InlineDevice(), depth=0, **sizes), prompts, params)
    wanted = {prompt: prompt + tuple(tokens) for prompt, (tokens, _) in zip(prompts, expected, strict=True)}
    harness = Harness(FuzzDevice(depth), depth=depth, num_speculative_tokens=k, **sizes)
    seen: Counter[tuple[int, int]] = Counter()

    def planned(self: StepSampler, state: WorkerStepState) -> None:
        found = state.box.logit_rows
        assert found is not None
        rows = []
        for position, slot in zip(state.outputs.next_start[found.groups].tolist(), found.slots.tolist(), strict=True):
            text = next((wanted[s.request.prompt_token_ids] for s in harness.sequences if s.slot == slot), ())
            # The accept length that this place in the window has met least.
            good = min(range(k + 1), key=lambda length: seen[(length, position % period)])
            if position + k + 1 < len(text):
                seen[(good, position % period)] += 1
            right = [text[i] if i < len(text) else 0 for i in range(position + 1, position + 1 + k)]
            rows.append([t if i < good else (t + 1) % 240 for i, t in enumerate(right)])
        state.outputs.drafts[found.groups] = torch.tensor(rows)

    monkeypatch.setattr(StepSampler, "propose", planned)
    assert texts_of(harness, prompts, params) == expected
    missing = {(good, place) for good in range(k + 1) for place in range(period)} - set(seen)
    assert not missing


def test_drafts_with_the_noise_of_the_target_are_accepted_more_often_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1)

    def accepted() -> int:
        harness = Harness(InlineDevice(), depth=0, num_speculative_tokens=BLOCK, num_blocks=80, max_num_seqs=4)
        for i in range(4):
            harness.add(make_request(str(i), [5 + i, 40, 7], params))
        harness.run()
        return harness.scheduler.counters.accepted

    shared = accepted()
    original = StepSampler.propose

    def independent(self: StepSampler, state: WorkerStepState) -> None:
        assert state.box.sampling is not None
        state.box.sampling = replace(state.box.sampling, seeds=state.box.sampling.seeds + 1000)
        original(self, state)

    monkeypatch.setattr(StepSampler, "propose", independent)
    assert shared > accepted()


def test_more_drafts_than_the_block_size_are_refused() -> None:
    tokenizer = Tokenizer.from_folder(GOLDEN / "bf16_full")
    with pytest.raises(ConfigError, match="num_speculative_tokens = 4: the model drafts at most 3"):
        LLMEngine(tiny_model(), tokenizer, EngineConfig(num_speculative_tokens=BLOCK + 1))
