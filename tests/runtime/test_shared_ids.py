"""Ids with several owners, and idle ones that keep their contents until somebody needs the room."""

import random
from collections import Counter

import pytest

from deepinfer.errors import DeepInferError
from deepinfer.runtime.shared_ids import SharedIdPool


def test_an_id_stays_owned_until_its_last_owner_has_gone() -> None:
    pool = SharedIdPool(4)
    (i,) = pool.take(1)
    pool.share([i])
    pool.give_back([i])
    pool.check_integrity([i], "ids")
    assert pool.num_free == 2
    pool.give_back([i])
    pool.check_integrity([], "ids")
    assert pool.num_free == 3


def test_kept_ids_are_given_away_oldest_first_and_only_when_nothing_is_free() -> None:
    pool, evicted = SharedIdPool(5), list[int]()
    pool.on_evict = evicted.append
    a, b, c = pool.take(3)
    for i in (a, b, c):
        pool.keep(i)
    pool.give_back([b, a, c])
    assert (pool.num_free, pool.num_idle) == (4, 3)
    pool.take(1)
    assert evicted == []
    pool.take(2)
    assert evicted == [b, a]
    assert pool.evictions == 2


def test_an_idle_id_that_is_shared_again_is_the_youngest() -> None:
    pool = SharedIdPool(3)
    a, b = pool.take(2)
    pool.keep(a)
    pool.keep(b)
    pool.give_back([a, b])
    pool.share([a])
    assert pool.take(1) == [b]
    pool.give_back([a])
    assert pool.take(1) == [a]


def test_forgetting_frees_idle_ids_at_once_and_owned_ones_later() -> None:
    pool, freed = SharedIdPool(3), list[int]()
    pool.on_free = freed.append
    a, b = pool.take(2)
    pool.keep(a)
    pool.keep(b)
    pool.give_back([a])
    pool.forget(a)
    pool.forget(b)
    assert freed == [a]
    pool.give_back([b])
    assert freed == [a, b]


def test_misuse_is_noticed() -> None:
    pool = SharedIdPool(3)
    (i,) = pool.take(1)
    with pytest.raises(DeepInferError, match="owners"):
        pool.check_integrity([i, i], "ids")
    pool.give_back([i])
    with pytest.raises(DeepInferError, match="more often"):
        pool.give_back([i])
    with pytest.raises(DeepInferError, match="nothing to share"):
        pool.share([i])


def test_random_use_keeps_the_books() -> None:
    rng, pool, owners = random.Random(3), SharedIdPool(12), Counter[int]()
    for _ in range(3000):
        owned = list(owners.elements())
        action = rng.randrange(5)
        if action == 0 and pool.num_free:
            owners.update(pool.take(rng.randint(1, pool.num_free)))
        elif action == 1 and owned:
            i = rng.choice(owned)
            pool.share([i])
            owners[i] += 1
        elif action == 2 and owned:
            i = rng.choice(owned)
            pool.give_back([i])
            owners[i] -= 1
        elif action == 3 and owned:
            pool.keep(rng.choice(owned))
        elif action == 4:
            pool.forget(rng.randrange(1, 12))
        pool.check_integrity(owners.elements(), "ids")
