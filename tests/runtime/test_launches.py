"""The host's part of a decode step: how few launches it takes, and that replaying them changes no token."""

import asyncio
import itertools
from collections import Counter
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest

from deepinfer.checkpoint.load import load_model
from deepinfer.model.numerics import reference_ops
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.device import Device, InlineDevice
from deepinfer.runtime.draft_budget import DraftBudget
from deepinfer.runtime.step_sampler import StepSampler
from deepinfer.sampling_params import SamplingParams
from tests.parallel.in_process import CapturingDevice, LateCapturingDevice
from tests.runtime.harness import GOLDEN, Harness, Outcome, make_request, reference_outcome
from tests.runtime.launches import CountingDevice

STEPS = 4
BUCKETS = (1, 2, 4, 8, 16)
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
FILTERED = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True)
KINDS = {
    "greedy": GREEDY,
    "random": SamplingParams(max_tokens=20, temperature=0.9, seed=7, ignore_eos=True),
    "filtered": SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=1, ignore_eos=True),
    "scored": SamplingParams(max_tokens=20, temperature=0.7, seed=2, logprobs=3, ignore_eos=True),
    "scored alone": SamplingParams(max_tokens=20, temperature=0, logprobs=0),
    "all scored": SamplingParams(max_tokens=20, temperature=0, logprobs=-1),
    "not yet": SamplingParams(max_tokens=20, temperature=0.8, seed=3, min_tokens=9),
    "penalised": SamplingParams(max_tokens=20, temperature=0.8, seed=4, frequency_penalty=0.8),
    "seen": SamplingParams(max_tokens=9, temperature=0.8, seed=5, return_hidden_states=True),
}
PROMPTS = [tuple(3 + (13 * i + length) % 300 for i in range(length)) for length in (3, 8, 13, 5, 2, 6, 9)]


@cache
def static_model() -> Transformer:
    """The tiny model without a look at the host in its layers."""
    ops = reference_ops(batch_invariant=True, static_shapes=True)
    return load_model(GOLDEN / "bf16_full", "float32", "cpu", ops=ops)


def open_harness(device: Device, drafts: int, buckets: tuple[int, ...] = BUCKETS, **options: Any) -> Harness:
    sizes = {"num_blocks": 300, "max_num_seqs": 16, "model": static_model()}
    return Harness(device, depth=1, decode_buckets=buckets, num_speculative_tokens=drafts, **sizes, **options)


def launches(params: SamplingParams, drafts: int, batch: int = 1) -> Counter[str]:
    """Operations that a step of steady decode launches, by the launch that they belong to."""
    device = CountingDevice()
    harness = open_harness(device, drafts)
    for index in range(batch):
        harness.add(make_request(str(index), PROMPTS[index], params))
    for _ in range(STEPS):
        asyncio.run(harness.loop.step())
    device.found.clear()
    for _ in range(STEPS):
        asyncio.run(harness.loop.step())
    return Counter({name: count // STEPS for name, count in device.found.items()})


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("params", "drafts", "most"),
    [(GREEDY, 0, 8), (GREEDY, 3, 13), (FILTERED, 0, 15), (FILTERED, 3, 27)],
    ids=["greedy", "greedy with drafts", "filtered", "filtered with drafts"],
)
def test_a_decode_step_takes_few_launches(params: SamplingParams, drafts: int, most: int, batch: int) -> None:
    found = launches(params, drafts, batch)
    assert found["replays"] == 2 + (drafts > 0)
    assert sum(found.values()) <= most, found


def test_a_sampler_that_is_not_replayed_takes_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepSampler, "sample", lambda self, state, inputs, decode: self._sample(state, inputs))
    assert launches(GREEDY, 0)["sampler"] > 30


def outcomes(device: Device, drafts: int, buckets: tuple[int, ...], kinds: list[str]) -> tuple[list[Outcome], int]:
    """What requests of these kinds give, and how many drafts were accepted on the way."""
    harness = open_harness(device, drafts, buckets)
    for index, kind in enumerate(kinds):
        harness.add(make_request(str(index), PROMPTS[index % len(PROMPTS)], KINDS[kind]))
    harness.run()
    return [harness.outcome(sequence) for sequence in harness.sequences], harness.scheduler.counters.accepted


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "seen"])
def test_replayed_steps_give_the_outcome_of_a_lone_run(kind: str, drafts: int) -> None:
    """Replays repeat recorded operations alone, late, over memory that graphs share and later steps overwrite."""
    device = LateCapturingDevice(seed=drafts)
    found, accepted = outcomes(device, drafts, BUCKETS, [kind] * 3)
    assert found == [reference_outcome(prompt, KINDS[kind]) for prompt in PROMPTS[:3]]
    assert accepted == outcomes(InlineDevice(), drafts, (), [kind] * 3)[1]
    assert device.num_replays > 10
    assert device.late_looks > 10


@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_of_mixed_kinds_give_the_outcome_without_graphs(drafts: int) -> None:
    kinds = [*KINDS, "greedy", "random", "filtered"]
    assert outcomes(CapturingDevice(), drafts, BUCKETS, kinds) == outcomes(InlineDevice(), drafts, (), kinds)


@pytest.mark.parametrize(("drafts", "chooses"), [(0, False), (3, False), (2, True), (3, True)])
def test_a_warm_up_captures_what_greedy_steps_need(drafts: int, chooses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured one behind the other there, and a capture leaves nonsense."""
    device, budget = CapturingDevice(), DraftBudget(drafts) if chooses else None
    monkeypatch.setattr("deepinfer.runtime.draft_budget.TRIAL_AFTER", 1)
    monkeypatch.setattr("deepinfer.runtime.draft_budget.TRIAL_STEPS", 1)
    times = itertools.count()
    harness = open_harness(device, drafts, draft_budget=budget, clock=lambda: float(next(times)))
    harness.worker.warm_up(lambda what: nullcontext())
    # Prefills of several sequences are captured when they are first needed.
    captured = len(device.graphs) - len(harness.worker._static_prefills)
    # Requests that end one after the other, in the middle of a group of drafts; longer ones would need a wider table.
    kinds = [SamplingParams(max_tokens=17 - 3 * index, temperature=0, ignore_eos=True) for index in range(3)]
    for index, params in enumerate(kinds):
        harness.add(make_request(str(index), PROMPTS[index], params))
    harness.run()
    expected = [reference_outcome(prompt, params) for prompt, params in zip(PROMPTS, kinds, strict=False)]
    assert [harness.outcome(sequence) for sequence in harness.sequences] == expected
    assert len(device.graphs) - len(harness.worker._static_prefills) == captured
    if budget is not None:
        assert len(next(iter(budget._times.values())).seconds) > 1, "nothing was tried"
