"""A sequence that starts from what others left gives what it would have given alone, bit for bit, in `exact`."""

from collections.abc import Callable
from itertools import product

import pytest
import torch

from deepinfer.model.cache import ModelCache
from deepinfer.model.rows import Rows
from deepinfer.outputs import ReplayMode
from deepinfer.runtime import recovery_settings as settings
from deepinfer.runtime.device import InlineDevice
from deepinfer.runtime.fuzz_device import FuzzDevice
from deepinfer.runtime.release import DeferredRelease
from deepinfer.runtime.replay import ReplayPolicy
from deepinfer.runtime.sequence import Sequence, Status
from deepinfer.sampling_params import SamplingParams
from tests.golden import shared_model
from tests.runtime.harness import BLOCK_SIZE, Harness, make_request, reference, tiny_model

WINDOW = 12  # of the tiny model
NEW = 6
PARAMS = SamplingParams(max_tokens=NEW, temperature=0.8, seed=5, logprobs=0, ignore_eos=True)


def some_tokens(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(3 + (13 * i * i + 7 * i + 29 * salt) % 310 for i in range(length))


def open_harness(replay: ReplayMode = "exact", seed: int | None = None, **settings: object) -> Harness:
    device = InlineDevice() if seed is None else FuzzDevice(seed, eagerness=0.4)
    return Harness(device, **{"depth": 1, "num_blocks": 120, "replay": replay, "prefix_caching": True} | settings)  # type: ignore[arg-type]


def run(harness: Harness, prompt: tuple[int, ...], params: SamplingParams = PARAMS) -> Sequence:
    sequence = harness.add(make_request(str(len(harness.sequences)), prompt, params))
    harness.run()
    return sequence


def assert_as_alone(harness: Harness, sequence: Sequence) -> None:
    expected = reference(sequence.request.prompt_token_ids, sequence.request.params)
    assert (sequence.output_token_ids, harness.logprobs[sequence.seq_id]) == expected


def leave_prefix(harness: Harness, length: int) -> tuple[int, ...]:
    """Run a request whose memory ends after `length` tokens, and return those."""
    new = min(length, NEW)
    params = SamplingParams(max_tokens=new, temperature=0.8, seed=5, logprobs=0)
    donor = run(harness, some_tokens(length - new + 1), params)
    assert_as_alone(harness, donor)
    return tuple(donor.token_ids[:-1])


# Around the window, every place in a block and in a ratio-2 group.
LENGTHS = [1, 2, 3, 4, 5, WINDOW - 1, WINDOW, WINDOW + 1, *range(2 * WINDOW, 2 * WINDOW + BLOCK_SIZE + 1), 49]


@pytest.mark.parametrize(("length", "drafts"), [*((n, 0) for n in LENGTHS), *((n, 3) for n in LENGTHS[-6:])])
def test_a_hit_of_any_length_changes_no_bit(length: int, drafts: int) -> None:
    harness = open_harness(num_speculative_tokens=drafts)
    prefix = leave_prefix(harness, length)
    assert len(prefix) == length
    follower = run(harness, prefix + some_tokens(5, salt=1))
    assert follower.num_cached_tokens == length
    assert follower.num_replayed_tokens == 0
    assert_as_alone(harness, follower)


def test_nothing_stored_is_no_hit() -> None:
    harness = open_harness()
    first = run(harness, some_tokens(9))
    other = run(harness, some_tokens(9, salt=2))
    assert (first.num_cached_tokens, other.num_cached_tokens) == (0, 0)
    assert_as_alone(harness, other)


def test_the_same_prompt_again_enters_at_its_last_block_edge() -> None:
    harness = open_harness()
    for length in (BLOCK_SIZE + 1, 4 * BLOCK_SIZE, 30):
        first, again = run(harness, some_tokens(length, salt=length)), run(harness, some_tokens(length, salt=length))
        assert first.num_cached_tokens == 0
        assert again.num_cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert_as_alone(harness, again)


def test_the_second_to_branch_off_leaves_a_snapshot_for_the_third() -> None:
    harness, common = open_harness(), some_tokens(20)
    cached = []
    for salt in (1, 2, 3):
        sequence = run(harness, common + some_tokens(13, salt))
        assert_as_alone(harness, sequence)
        cached.append(sequence.num_cached_tokens)
    assert cached == [0, 0, 20]


def full_depth(drafts: int) -> int:
    """L (W - 1) of the tiny model; its draft block is a layer more."""
    return (tiny_model().config.n_layers + (drafts > 0)) * (WINDOW - 1)


@pytest.mark.parametrize(("budget", "drafts"), [(64, 0), (7, 3)])
def test_without_snapshots_exact_replays_the_depth_of_the_windows(budget: int, drafts: int) -> None:
    harness = open_harness(num_ring_snapshots=0, budget=budget, num_speculative_tokens=drafts)
    depth = full_depth(drafts)
    for hit in (depth - depth % BLOCK_SIZE, depth + BLOCK_SIZE - depth % BLOCK_SIZE, 84):
        common = some_tokens(hit, salt=hit)
        run(harness, common + some_tokens(2, salt=1))
        follower = run(harness, common + some_tokens(9, salt=2))
        assert follower.num_cached_tokens == (hit if hit > depth else 0)
        assert follower.num_replayed_tokens == (depth if hit > depth else 0)
        assert_as_alone(harness, follower)


def differs_from_alone(harness: Harness, sequence: Sequence) -> bool:
    expected = reference(sequence.request.prompt_token_ids, sequence.request.params)
    return (sequence.output_token_ids, harness.logprobs[sequence.seq_id]) != expected


def test_one_replayed_row_less_than_the_depth_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayPolicy, "depth", property(lambda self: self.num_layers * (self.window - 1) - 1))
    harness, common = open_harness(num_ring_snapshots=0), some_tokens(84)
    run(harness, common + some_tokens(2, salt=1))
    assert differs_from_alone(harness, run(harness, common + some_tokens(1, salt=2)))


@pytest.mark.parametrize(("case", "budget"), [("bf16_full", 5), ("bf16_full", 64), ("select_full", 200)])
def test_exact_truncation_changes_no_bit(case: str, budget: int) -> None:
    """No caching at all: only the last rows of the prompt run behind the last KV source, wherever the chunks are cut."""
    model = shared_model(case, "float32", True)
    for length in (10, 41, 83):
        harness = open_harness(prefix_caching=False, budget=budget, model=model)
        sequence = run(harness, some_tokens(length))
        plain = open_harness("full", prefix_caching=False, budget=64, model=model)
        expected = run(plain, some_tokens(length))
        assert sequence.output_token_ids == expected.output_token_ids
        assert harness.logprobs[0] == plain.logprobs[0]
        depth = harness.scheduler.recovery.policy.decoder_depth
        assert harness.scheduler.recovery.counters.truncated_rows == max(length - 1 - depth, 0)


def test_one_tail_row_less_than_the_decoder_depth_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayPolicy, "decoder_depth", property(lambda self: self.num_decoder_layers * (self.window - 1) - 1))
    harness = open_harness(prefix_caching=False)
    assert differs_from_alone(harness, run(harness, some_tokens(83)))


@pytest.mark.parametrize(("depth", "drafts"), [(0, 0), (1, 0), (1, 2), (1, 3)])
def test_preemption_keeps_what_was_computed(depth: int, drafts: int) -> None:
    """Preempted after every step in turn, with a step in flight in the overlapped loop."""
    params = SamplingParams(max_tokens=14, temperature=0.8, seed=5, logprobs=0, ignore_eos=True)
    for after in (3, 4, 5, 6):
        harness = open_harness(depth=depth, num_speculative_tokens=drafts, seed=after)
        sequence = harness.add(make_request("0", some_tokens(29), params))
        for _ in range(after):
            harness.step()
        if sequence.status is not Status.RUNNING:
            continue
        confirmed, scheduled = sequence.confirmed, harness.scheduler.counters.scheduled_tokens
        harness.scheduler._preempt(sequence)
        harness.run()
        assert_as_alone(harness, sequence)
        counters = harness.scheduler.recovery.counters
        assert counters.cached_tokens == confirmed
        again = harness.scheduler.counters.scheduled_tokens - scheduled
        assert again <= len(sequence.token_ids) - confirmed + harness.scheduler.counters.drafted + depth * (1 + drafts)


def test_bounded_hits_are_no_shorter_than_the_window_and_replay_one_window() -> None:
    harness = open_harness("bounded")
    for length in (WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 2 * WINDOW, 2 * WINDOW + 1, 49, 50):
        prefix = some_tokens(length, salt=length)
        run(harness, prefix + some_tokens(1, salt=1), SamplingParams(max_tokens=1, logprobs=0, seed=0))
        follower = run(harness, prefix + some_tokens(1, salt=1) + some_tokens(6, salt=2))
        # An odd end is entered one row earlier.
        stored = (length + 1) // 2 * 2
        expected = stored if stored > WINDOW else 0
        assert follower.num_cached_tokens == expected
        assert follower.num_replayed_tokens == (WINDOW if expected else 0)


def test_bounded_is_an_approximation_that_stays_close() -> None:
    harness, common = open_harness("bounded"), some_tokens(84)
    run(harness, common + some_tokens(2, salt=1))
    follower = run(harness, common + some_tokens(3, salt=2))
    expected = reference(follower.request.prompt_token_ids, PARAMS)
    observed = harness.logprobs[follower.seq_id]
    assert follower.num_cached_tokens == 84
    assert observed != expected[1]
    # Random weights look back more than trained ones.
    assert abs(observed[0] - expected[1][0]) < 1


def test_full_takes_nothing_from_the_cache() -> None:
    harness = open_harness("full")
    for _ in range(2):
        sequence = run(harness, some_tokens(40))
        assert sequence.num_cached_tokens == 0
        assert_as_alone(harness, sequence)
    assert harness.scheduler.counters.scheduled_tokens == 2 * (40 + NEW - 1)


def contents(harness: Harness, blocks: list[int]) -> list[torch.Tensor]:
    return [memory[blocks].clone() for memory in harness.worker.cache.block_tensors()]


@pytest.mark.parametrize(("replay", "snapshots"), [("exact", 8), ("exact", 0), ("bounded", 0)])
def test_shared_entries_stay_as_they_are(replay: ReplayMode, snapshots: int) -> None:
    """Replayed rows read them; two sequences run on them at once."""
    harness, common = open_harness(replay, num_ring_snapshots=snapshots), some_tokens(84)
    run(harness, common + some_tokens(2, salt=1))
    assert harness.scheduler.recovery.cache is not None
    blocks = list(harness.scheduler.recovery.cache.stored_blocks.values())
    before = contents(harness, blocks)
    assert len(blocks) >= 21
    assert all(torch.isfinite(memory).all() for memory in before)
    followers = [harness.add(make_request(str(salt), common + some_tokens(7, salt), PARAMS)) for salt in (3, 4)]
    harness.step()
    assert all(follower.num_cached_tokens >= 84 for follower in followers)
    assert followers[0].blocks[:21] == followers[1].blocks[:21] == tuple(blocks[:21])
    harness.run()
    assert all(torch.equal(a, b) for a, b in zip(before, contents(harness, blocks), strict=True))


def test_without_a_write_floor_a_replay_spoils_shared_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rows, "keep_new", lambda self, is_new: is_new)
    with pytest.raises(AssertionError):
        test_shared_entries_stay_as_they_are("bounded", 0)


def busy(seed: int, drafts: int) -> tuple[Harness, list[str]]:
    """Many requests on few prefixes, a tight pool, a late device, forced preemptions; and what went wrong."""
    harness = open_harness(seed=seed, num_blocks=40, budget=13, max_num_seqs=3, num_ring_snapshots=2, num_speculative_tokens=drafts)
    for index, (prefix, length) in enumerate(product((20, 33, 47), (1, 4, 9))):
        harness.add(make_request(str(index), some_tokens(prefix) + some_tokens(length, salt=index), PARAMS))
    try:
        for count in range(400):
            if not harness.step():
                break
            if count % 9 == 8 and harness.scheduler.running:
                harness.scheduler._preempt(harness.scheduler.running[-1])
    except Exception as error:
        return harness, [f"{type(error).__name__}: {error}"]
    return harness, [f"request {s.seq_id} differs" for s in harness.sequences if differs_from_alone(harness, s)]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("seed", range(2))
def test_under_pressure_on_a_late_device_nothing_changes(seed: int, drafts: int) -> None:
    harness, wrong = busy(seed, drafts)
    assert wrong == []
    recovery = harness.scheduler.recovery
    assert recovery.counters.cached_tokens > 0
    assert recovery.blocks.evictions > 0  # type: ignore[attr-defined]
    assert recovery.slots.evictions > 0  # type: ignore[attr-defined]
    assert harness.device.late_looks > 0  # type: ignore[attr-defined]
    assert harness.scheduler.counters.preemptions > 0
    assert recovery.blocks.num_free == recovery.blocks.num_usable


@pytest.mark.parametrize("replay", ["exact", "bounded"])
def test_blocks_come_back_from_host_memory(replay: ReplayMode) -> None:
    """The device holds one sequence; what the next one pushes out is there again when it is asked for."""
    harness = open_harness(replay, num_blocks=27, max_num_seqs=1, num_ring_snapshots=0, num_host_blocks=40)
    prompt, follower = some_tokens(90), some_tokens(90) + some_tokens(4, salt=2)
    plain = run(open_harness(replay), prompt)
    run(harness, prompt)
    run(harness, some_tokens(90, salt=1))
    host = harness.scheduler.recovery.cache.host  # type: ignore[union-attr]
    assert host.offloads >= 20
    assert host.restores == 0
    sequence = run(harness, follower)
    assert host.restores >= 20
    assert sequence.num_cached_tokens == 88
    if replay == "exact":
        assert_as_alone(harness, sequence)
    else:
        # An approximation, but the same one as without host memory.
        roomy = open_harness(replay)
        run(roomy, prompt)
        assert run(roomy, follower).output_token_ids == sequence.output_token_ids
    assert plain.output_token_ids == harness.sequences[0].output_token_ids


@pytest.mark.parametrize(("num_host_blocks", "drafts"), [(40, 0), (40, 3), (9, 0)])
def test_under_pressure_host_memory_changes_nothing(num_host_blocks: int, drafts: int) -> None:
    """Three prefixes take turns, and the device has room for two."""
    harness = open_harness(
        seed=drafts,
        num_blocks=25,
        budget=17,
        max_num_seqs=2,
        num_ring_snapshots=9,
        num_speculative_tokens=drafts,
        num_host_blocks=num_host_blocks,
    )
    for index in range(9):
        harness.add(make_request(str(index), some_tokens(33, salt=index % 3) + some_tokens(1 + index, salt=index), PARAMS))
    for count in range(200):
        if not harness.step():
            break
        if count % 11 == 10 and harness.scheduler.running:
            harness.scheduler._preempt(harness.scheduler.running[-1])
    for sequence in harness.sequences:
        assert_as_alone(harness, sequence)
    host = harness.scheduler.recovery.cache.host  # type: ignore[union-attr]
    assert host.offloads > 0
    assert host.restores > 0 or num_host_blocks < 40


def without_owners_until_a_copy_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step only copies from or to goes back at once."""
    defer = DeferredRelease.defer

    def at_once(self: DeferredRelease, fence: int, blocks: tuple[int, ...], slot: int | None) -> None:
        if len(blocks) <= 1 and fence >= 0:
            self._blocks.give_back(blocks)
            self._slots.give_back([] if slot is None else [slot])
        else:
            defer(self, fence, blocks, slot)

    monkeypatch.setattr(DeferredRelease, "defer", at_once)


def without_deferred_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def defer(self: DeferredRelease, fence: int, blocks: tuple[int, ...], slot: int | None) -> None:
        self._blocks.give_back(blocks)
        self._slots.give_back([] if slot is None else [slot])

    monkeypatch.setattr(DeferredRelease, "defer", defer)


def without_room_for_a_dropped_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "max_backtrack", lambda limits: limits.num_speculative_tokens)


def without_a_copy_of_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelCache, "copy_block", lambda self, source, target: None)


def without_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelCache, "copy_slot", lambda self, source, target: None)


MUTATIONS = [
    without_owners_until_a_copy_is_done,
    without_deferred_release,
    without_room_for_a_dropped_step,
    without_a_copy_of_the_last_block,
    without_rings,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_taking_a_mechanism_out_is_noticed(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    busy(0, 0)  # the references, before the mutation
    mutation(monkeypatch)
    assert any(busy(seed, drafts)[1] for seed in range(6) for drafts in (0, 3)), "nothing failed without it"
