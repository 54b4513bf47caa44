"""Pools of ids: each id is free or handed out, never both, and 0 is nobody's."""

import random

import pytest

from deepinfer.errors import DeepInferError
from deepinfer.runtime.ids import IdPool


def test_a_new_pool_hands_out_every_id_but_the_trash_one() -> None:
    pool = IdPool(5)
    assert (pool.num_usable, pool.num_free) == (4, 4)
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


@pytest.mark.parametrize("size", [1, 2])
def test_the_smallest_pools_work(size: int) -> None:
    pool = IdPool(size)
    assert pool.take(0) == []
    assert pool.num_free == pool.num_usable == size - 1
    pool.check_integrity([], "ids")


def test_ids_come_in_an_order_that_is_the_same_every_time() -> None:
    def trace() -> list[list[int]]:
        pool = IdPool(9)
        first = pool.take(3)
        second = pool.take(2)
        pool.give_back(first)
        return [first, second, pool.take(5)]

    assert trace() == trace()


def test_an_id_cannot_be_returned_twice() -> None:
    pool = IdPool(4)
    taken = pool.take(2)
    pool.give_back(taken[:1])
    with pytest.raises(DeepInferError, match=f"id {taken[0]} .*twice"):
        pool.give_back(taken[:1])
    with pytest.raises(DeepInferError, match="twice"):
        pool.give_back([taken[1], taken[1]])


@pytest.mark.parametrize("stranger", [0, -1, 4, 99])
def test_an_id_that_never_came_from_the_pool_cannot_be_returned(stranger: int) -> None:
    pool = IdPool(4)
    pool.take(3)
    with pytest.raises(DeepInferError, match="never came from it"):
        pool.give_back([stranger])


def test_integrity_names_what_is_wrong() -> None:
    pool = IdPool(6)
    a, b = pool.take(2)
    pool.check_integrity([a, b], "blocks")
    with pytest.raises(DeepInferError, match="blocks: an id has two owners"):
        pool.check_integrity([a, b, a], "blocks")
    with pytest.raises(DeepInferError, match="blocks: an owned id is also free"):
        pool.check_integrity([a, next(i for i in range(1, 6) if i not in (a, b))], "blocks")
    with pytest.raises(DeepInferError, match=r"blocks: 3 free \+ 1 owned != 5"):
        pool.check_integrity([a], "blocks")


def test_random_takes_and_returns_keep_every_id_in_one_place() -> None:
    rng = random.Random(0)
    pool, owned = IdPool(40), []
    for _ in range(2000):
        if rng.random() < 0.5:
            owned += pool.take(rng.randint(0, min(7, pool.num_free)))
        else:
            rng.shuffle(owned)
            count = rng.randint(0, min(7, len(owned)))
            pool.give_back(owned[:count])
            del owned[:count]
        pool.check_integrity(owned, "ids")
    pool.give_back(owned)
    assert pool.num_free == pool.num_usable
