"""Short prefills from a graph: the outcome is that of a lone run without any, at every length around a bucket's edges."""

import asyncio
from collections import Counter

import pytest

from deepinfer.runtime.step_shapes import SHORT_PREFILLS, StepShapes
from deepinfer.sampling_params import SamplingParams
from tests.parallel.in_process import CapturingDevice
from tests.runtime.harness import Harness, make_request, reference_outcome
from tests.runtime.launches import CountingDevice
from tests.runtime.test_launches import BUCKETS, static_model

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=4, temperature=0.9, seed=3, logprobs=2, ignore_eos=True)
SEEN = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2, ignore_eos=True)


EDGE = SHORT_PREFILLS[0]


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(3 + (13 * i + 5 * length) % 300 for i in range(length))


def open_harness(device: CapturingDevice | CountingDevice, drafts: int = 0, budget: int = 1000) -> Harness:
    return Harness(
        device,
        depth=1,
        decode_buckets=BUCKETS,
        num_speculative_tokens=drafts,
        num_blocks=600,
        max_num_seqs=16,
        budget=budget,
        model=static_model(),
    )


def prefill_launches() -> Counter[str]:
    device = CountingDevice()
    harness = open_harness(device)
    # The first of its shape captures; later ones replay.
    for name in "ab":
        device.found.clear()
        harness.add(make_request(name, prompt_of(20), GREEDY))
        asyncio.run(harness.loop.step())
    return device.found


def test_the_forward_of_a_short_prefill_takes_few_launches() -> None:
    found = prefill_launches()
    assert found["replays"] == 1
    assert found["forward"] < 40, found


def test_a_prefill_that_is_not_replayed_takes_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepShapes, "of_prefill", lambda self, plan: None)
    assert prefill_launches()["forward"] > 400


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("length", [1, 2, EDGE // 2, EDGE // 2 + 1, EDGE - 1, EDGE, EDGE + 1])
def test_a_prompt_of_any_length_has_the_outcome_of_a_lone_run(length: int, drafts: int) -> None:
    device = CapturingDevice()
    harness = open_harness(device, drafts)
    sequences = [harness.add(make_request(str(i), prompt_of(length), params)) for i, params in enumerate((GREEDY, RANDOM))]
    harness.run()
    for sequence, params in zip(sequences, (GREEDY, RANDOM), strict=True):
        assert harness.outcome(sequence) == reference_outcome(prompt_of(length), params)


@pytest.mark.parametrize("drafts", [0, 3])
def test_prompts_that_come_beside_running_sequences_and_in_chunks_do_not_matter(drafts: int) -> None:
    """Chunks of a prompt, decode rows and drafts share steps; a request that is looked at takes the other way."""
    harness = open_harness(CapturingDevice(), drafts, budget=24)
    lengths, params = (30, 7, 90, 3, 41, 12), (GREEDY, RANDOM, GREEDY, SEEN, RANDOM, GREEDY)
    sequences = []
    for index, (length, how) in enumerate(zip(lengths, params, strict=True)):
        sequences.append(harness.add(make_request(str(index), prompt_of(length), how)))
        for _ in range(3):
            harness.step()
    harness.run()
    for sequence, length, how in zip(sequences, lengths, params, strict=True):
        assert harness.outcome(sequence) == reference_outcome(prompt_of(length), how)
