"""Memory goes back to its pool when the last step that may touch it has completed, and not before."""

import random

import pytest

from deepinfer.errors import DeepInferError
from deepinfer.runtime.ids import IdPool
from deepinfer.runtime.release import DeferredRelease


def open_release(num_blocks: int = 10, num_slots: int = 5) -> tuple[IdPool, IdPool, DeferredRelease]:
    blocks, slots = IdPool(num_blocks), IdPool(num_slots)
    return blocks, slots, DeferredRelease(blocks, slots)


def test_memory_waits_for_its_step() -> None:
    blocks, slots, release = open_release()
    taken, (slot,) = tuple(blocks.take(3)), slots.take(1)
    release.defer(4, taken, slot)
    for completed in (-1, 0, 3):
        release.drain(completed)
        assert (blocks.num_free, slots.num_free) == (6, 3)
        assert (sorted(release.held_blocks), release.held_slots) == (sorted(taken), [slot])
    release.drain(4)
    assert (blocks.num_free, slots.num_free) == (9, 4)
    assert (release.held_blocks, release.held_slots) == ([], [])


def test_a_younger_fence_in_front_does_not_hold_an_older_one_back() -> None:
    blocks, _, release = open_release()
    young, old = tuple(blocks.take(1)), tuple(blocks.take(2))
    release.defer(7, young, None)
    release.defer(5, old, None)
    release.drain(5)
    assert release.held_blocks == list(young)
    assert blocks.num_free == 8


def test_draining_twice_returns_once() -> None:
    blocks, slots, release = open_release()
    release.defer(1, tuple(blocks.take(2)), slots.take(1)[0])
    release.drain(1)
    release.drain(1)
    release.drain(99)
    assert (blocks.num_free, slots.num_free) == (9, 4)


def test_memory_that_is_deferred_twice_is_noticed() -> None:
    blocks, _, release = open_release()
    taken = tuple(blocks.take(2))
    release.defer(1, taken, None)
    release.defer(2, taken, None)
    release.drain(1)
    with pytest.raises(DeepInferError, match="twice"):
        release.drain(2)


def test_a_watcher_is_told_before_the_memory_can_be_taken_again() -> None:
    blocks, slots, release = open_release()
    taken, (slot,) = tuple(blocks.take(2)), slots.take(1)
    told: list[tuple[tuple[int, ...], int | None, int]] = []
    release.on_return = lambda ids, s: told.append((ids, s, blocks.num_free))
    release.defer(0, taken, slot)
    release.drain(0)
    assert told == [(taken, slot, 7)]


def test_random_fences_never_return_early_or_late() -> None:
    rng = random.Random(1)
    blocks, slots, release = open_release(60, 20)
    held: list[tuple[int, tuple[int, ...], int]] = []
    completed = 0
    for _ in range(1500):
        if rng.random() < 0.6 and blocks.num_free >= 5 and slots.num_free:
            entry = (completed + rng.randint(0, 2), tuple(blocks.take(rng.randint(0, 5))), slots.take(1)[0])
            release.defer(*entry)
            held.append(entry)
        else:
            completed += rng.randint(0, 1)
            release.drain(completed)
            held = [entry for entry in held if entry[0] > completed]
        assert sorted(release.held_blocks) == sorted(i for _, ids, _ in held for i in ids)
        assert sorted(release.held_slots) == sorted(slot for _, _, slot in held)
        blocks.check_integrity(release.held_blocks, "blocks")
        slots.check_integrity(release.held_slots, "slots")
