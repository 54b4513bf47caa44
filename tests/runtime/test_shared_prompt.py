"""Completions of one request: the prompt is computed once, and each text is the one that the completion gives alone."""

from dataclasses import replace

import pytest
import torch

from deepinfer.model.cache import ModelCache
from deepinfer.runtime.device import InlineDevice
from deepinfer.runtime.fuzz_device import FuzzDevice
from deepinfer.sampling_params import SamplingParams
from tests.runtime.harness import BLOCK_SIZE, Harness, Outcome, make_request, reference_outcome

PROMPT = tuple(3 + (11 * i) % 310 for i in range(21))
PARAMS = SamplingParams(n=4, max_tokens=7, temperature=1.0, seed=5, logprobs=0, frequency_penalty=0.5)


def alone(prompt: tuple[int, ...]) -> list[Outcome]:
    return [reference_outcome(prompt, replace(PARAMS, n=1, seed=5 + i)) for i in range(4)]


def add_group(harness: Harness, prompt: tuple[int, ...] = PROMPT) -> None:
    """Queue all completions of a request as the engine does."""
    request = make_request(str(len(harness.sequences)), prompt, PARAMS)
    sequences = [harness.open(request, index) for index in range(PARAMS.n)]
    harness.scheduler.add(sequences[0], sequences[1:])


def texts(harness: Harness) -> list[Outcome]:
    return [harness.outcome(sequence) for sequence in harness.sequences]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("length", [2, 3, 20, 21])
def test_the_prompt_is_computed_once(depth: int, length: int) -> None:
    harness = Harness(FuzzDevice(depth), depth=depth, num_blocks=60)
    add_group(harness, PROMPT[:length])
    harness.run()
    assert texts(harness) == alone(PROMPT[:length])
    assert harness.scheduler.counters.forks == 3
    # One step ahead, a text that ends at a stop costs a row more.
    rows = length - 1 + sum(len(text.token_ids) for text in texts(harness))
    assert rows <= harness.scheduler.counters.scheduled_tokens <= rows + 4 * depth


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("settings", [{"budget": 5}, {"max_num_seqs": 2}, {"num_blocks": 20}, {"max_num_seqs": 3, "budget": 3}])
def test_completions_without_room_wait_and_start_again(settings: dict[str, int], drafts: int) -> None:
    harness = Harness(FuzzDevice(1), depth=1, num_speculative_tokens=drafts, **{"num_blocks": 60} | settings)
    add_group(harness)
    add_group(harness)
    for count in range(40):
        harness.step()
        if count % 8 == 6 and harness.scheduler.running:
            harness.scheduler._preempt(harness.scheduler.running[0])
    harness.run()
    assert harness.scheduler.counters.preemptions > 0
    assert texts(harness) == alone(PROMPT) * 2
    assert harness.scheduler.counters.forks > 0


@pytest.mark.parametrize("steps", range(6))
def test_the_others_go_on_without_a_leader_that_is_aborted_or_preempted(steps: int) -> None:
    harness = Harness(FuzzDevice(steps), depth=1, budget=8, num_blocks=60)
    add_group(harness)
    for _ in range(steps):
        harness.step()
    if harness.scheduler.running:
        harness.scheduler._preempt(harness.scheduler.running[0])
    harness.scheduler.abort(harness.sequences[2])
    harness.scheduler.abort(harness.sequences[0])
    harness.run()
    expected = alone(PROMPT)
    assert [texts(harness)[i] for i in (1, 3)] == [expected[i] for i in (1, 3)]
    assert harness.scheduler.blocks.num_free == harness.scheduler.blocks.num_usable


def shared_entries(harness: Harness, blocks: tuple[int, ...]) -> list[torch.Tensor]:
    return [memory[list(blocks)].clone() for memory in harness.worker.cache.block_tensors()]


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("length", [4, 5, 20, 21])
def test_full_blocks_of_the_prompt_are_shared_and_stay_as_they_are(length: int, caches: bool) -> None:
    harness = Harness(FuzzDevice(length), depth=1, num_blocks=60, prefix_caching=caches, replay="exact" if caches else "full")
    add_group(harness, PROMPT[:length])
    while harness.scheduler.counters.forks < 3:
        harness.step()
    full, pool = (length - 1) // BLOCK_SIZE, harness.scheduler.blocks
    leader, *followers = harness.scheduler.running
    shared = leader.blocks[:full]
    assert all(follower.blocks[:full] == shared for follower in followers)
    own = [block for sequence in (leader, *followers) for block in sequence.blocks[full:]]
    assert len(set(own)) == len(own)
    assert pool.num_free == pool.num_usable - len(shared) - len(own)
    harness.flush()
    before = shared_entries(harness, shared)
    assert all(torch.isfinite(memory).all() for memory in before)
    seen = 0
    while harness.scheduler.running:
        assert all(torch.equal(a, b) for a, b in zip(before, shared_entries(harness, shared), strict=True))
        harness.step()
        seen += 1
    assert seen > 1
    harness.run()
    assert texts(harness) == alone(PROMPT[:length])


def test_shared_blocks_come_back_with_the_last_fork() -> None:
    harness, full = Harness(FuzzDevice(3), depth=1, num_blocks=60), 5
    add_group(harness)
    while harness.scheduler.counters.forks < 3:
        harness.step()
    pool, shared = harness.scheduler.blocks, harness.sequences[0].blocks[:full]
    free = []
    for sequence in harness.sequences:
        assert set(sequence.blocks[:full]) == set(shared)
        harness.scheduler.abort(sequence)
        harness.check_integrity()
        harness.flush()  # behind the steps in flight
        free.append(pool.num_free)
    own = pool.num_usable - full - free[2]
    assert free == [pool.num_usable - full - own * left for left in (3, 2, 1)] + [pool.num_usable]


def copy_nothing(self: ModelCache, source: int, target: int) -> None:
    pass


@pytest.mark.parametrize("name", ["copy_slot", "copy_block"])
def test_a_fork_needs_windows_and_entries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = PROMPT[:20]  # the fork divides a block
    expected = alone(prompt)
    monkeypatch.setattr(ModelCache, name, copy_nothing)
    harness = Harness(InlineDevice(), depth=0, num_blocks=60)
    add_group(harness, prompt)
    harness.run()
    assert texts(harness) != expected
