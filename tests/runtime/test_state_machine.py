"""Anything that can happen to requests, at random: every finished one equals its lone reference run, bit for bit."""

import random
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer.runtime.draft_budget import DraftBudget
from deepinfer.runtime.fuzz_device import FuzzDevice
from deepinfer.runtime.sequence import Sequence, Status
from deepinfer.sampling_params import SamplingParams
from tests.runtime.harness import BLOCK_SIZE, Harness, make_request, reference_outcome

# What happened over all examples; the last test asks that it was not nothing.
SEEN = {
    "finished": 0,
    "accepted": 0,
    "rejected": 0,
    "not_verified": 0,
    "preemptions": 0,
    "stale_results": 0,
    "chunked_prefills": 0,
    "forks": 0,
    "late_looks": 0,
    "slot_reuse": 0,
    "aborted": 0,
    "cached_tokens": 0,
}
# A few prompts and parameters, so that reference runs are shared.
PROMPTS = [tuple(3 + (7 * i + 5 * length) % 310 for i in range(length)) for length in (1, 2, 7, 11, 12, 13, 24, 31)]
PARAMS = [
    SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, logprobs=0)
    for tokens, temperature, seed in ((1, 0.0, 0), (5, 0.0, 0), (14, 0.0, 0), (9, 1.0, 3), (14, 0.7, 8))
]
# What depends on the tokens before: drawn from a few tokens, so that every field matters within a few steps.
FEW = {"allowed_token_ids": (67, 68, 69, 267), "temperature": 1.0, "logprobs": 0}
PARAMS += [
    SamplingParams(max_tokens=14, seed=3, presence_penalty=1.5, frequency_penalty=0.6, repetition_penalty=1.4, **FEW),
    SamplingParams(max_tokens=14, seed=5, bad_words=["ab", "cc", "bca"], stop="ca", min_tokens=4, **FEW),
    SamplingParams(max_tokens=12, seed=6, stop=["a a", "bcb"], include_stop_str_in_output=True, logit_bias={69: 1.0}, **FEW),
    SamplingParams(max_tokens=11, seed=7, forced_token_ids=(5, 1, 5, 90, 5, 67), logprobs=0, prompt_logprobs=1),
    SamplingParams(max_tokens=14, seed=9, structured_outputs={"regex": "(ab|[abc]d?){6,9}"}, logprobs=0),
]
LONGEST = max(len(p) for p in PROMPTS) + 14


class AnyBudget(DraftBudget):
    """A budget that changes from step to step without any reason."""

    def __init__(self, seed: int, num_drafts: int) -> None:
        super().__init__(num_drafts)
        self.random = random.Random(seed)

    def drafts_each(self, survivals: list[tuple[float, ...]]) -> int:
        return self.random.randint(0, self.num_drafts)


class Runtime(RuleBasedStateMachine):
    """Add, step, preempt, abort and flush in any order."""

    @initialize(
        seed=st.integers(0, 10_000),
        depth=st.sampled_from([0, 1, 1]),
        spare=st.integers(0, 12),
        budget=st.sampled_from([3, 8, 17, 64]),
        max_num_seqs=st.integers(1, 5),
        buckets=st.sampled_from([(), (1, 2, 4, 8)]),
        drafts=st.sampled_from([0, 3, 1, 2, 3]),
        is_adaptive=st.sampled_from([True, False]),
        eagerness=st.sampled_from([0.2, 0.5, 0.9]),
        caches=st.booleans(),
    )
    def open(
        self,
        seed: int,
        depth: int,
        spare: int,
        budget: int,
        max_num_seqs: int,
        buckets: tuple[int, ...],
        drafts: int,
        is_adaptive: bool,
        eagerness: float,
        caches: bool,
    ) -> None:
        self.device = FuzzDevice(seed, eagerness)
        self.drafts = drafts
        tightest = -(-(LONGEST + 2 * drafts) // BLOCK_SIZE) + 1
        self.harness = Harness(
            self.device,
            depth=depth,
            num_blocks=tightest + spare,
            budget=max(budget, max_num_seqs),
            max_num_seqs=max_num_seqs,
            decode_buckets=buckets,
            num_speculative_tokens=drafts,
            prefix_caching=caches,
            replay="exact" if caches else "full",
            num_ring_snapshots=3,
            draft_budget=AnyBudget(seed, drafts) if is_adaptive and drafts else None,
        )
        self.aborted: set[int] = set()

    def _running(self) -> list[Sequence]:
        return self.harness.scheduler.running

    @rule(prompt=st.sampled_from(PROMPTS), params=st.sampled_from(PARAMS))
    def add(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        self.harness.add(make_request(str(len(self.harness.sequences)), prompt, params))

    @rule(prompt=st.sampled_from(PROMPTS[1:]), params=st.sampled_from(PARAMS))
    def add_completions(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        request = make_request(str(len(self.harness.sequences)), prompt, params)
        first, second = (self.harness.open(request, index) for index in range(2))
        self.harness.scheduler.add(first, [second])

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self._running())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.harness.scheduler._preempt(data.draw(st.sampled_from(self._running())))

    @precondition(lambda self: self.harness.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.harness.sequences))
        if sequence.status is not Status.FINISHED:
            self.aborted.add(sequence.seq_id)
        self.harness.scheduler.abort(sequence)

    @rule()
    def flush(self) -> None:
        self.harness.flush()
        assert all(not s.tickets for s in self.harness.sequences)

    @invariant()
    def books_balance(self) -> None:
        harness = self.harness
        harness.scheduler.check_integrity()
        depth = harness.loop.depth
        for sequence in harness.sequences:
            assert sequence.confirmed >= 0
            assert sequence.status is Status.FINISHED or sequence.confirmed <= len(sequence.token_ids)
            assert len(sequence.tickets) <= depth
            if (
                sequence.num_output_tokens
                and sequence.status is Status.RUNNING
                and sequence.confirmed >= sequence.num_prompt_tokens
            ):
                assert sequence.total_inflight_tokens <= max(depth * (1 + self.drafts), sequence.num_output_tokens)

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        harness.run()
        for sequence in harness.sequences:
            assert sequence.status is Status.FINISHED
            params = sequence.request.params
            expected = reference_outcome(
                sequence.request.prompt_token_ids, replace(params, seed=(params.seed or 0) + sequence.index)
            )
            if sequence.index > 0:
                expected = expected._replace(prompt_scores=[])
            count = sequence.num_output_tokens
            if sequence.seq_id not in self.aborted:
                assert harness.outcome(sequence) == expected
                SEEN["finished"] += 1
            assert sequence.output_token_ids == expected.token_ids[:count]
            assert harness.logprobs[sequence.seq_id] == expected.logprobs[:count]
        assert harness.scheduler.blocks.num_free == harness.scheduler.blocks.num_usable
        assert harness.scheduler.slots.num_free == harness.scheduler.slots.num_usable
        counters = harness.scheduler.counters
        SEEN["preemptions"] += counters.preemptions
        SEEN["stale_results"] += counters.stale_results
        SEEN["chunked_prefills"] += counters.chunked_prefills
        SEEN["forks"] += counters.forks
        SEEN["late_looks"] += self.device.late_looks
        SEEN["slot_reuse"] += len(harness.sequences) > harness.scheduler.slots.num_usable
        SEEN["aborted"] += len(self.aborted)
        SEEN["cached_tokens"] += harness.scheduler.recovery.counters.cached_tokens
        SEEN["accepted"] += counters.accepted
        SEEN["rejected"] += counters.verified - counters.accepted
        SEEN["not_verified"] += counters.drafted - counters.verified


TestRuntime = Runtime.TestCase
TestRuntime.pytestmark = [pytest.mark.timeout(1200)]
TestRuntime.settings = settings(
    max_examples=50, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def test_the_state_machine_exercised_every_mechanism() -> None:
    if not SEEN["finished"]:
        TestRuntime("runTest").runTest()
    assert all(SEEN.values()), SEEN
