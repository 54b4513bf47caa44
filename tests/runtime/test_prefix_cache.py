"""The index of stored prefixes: what is found, what is forgotten with its memory."""

import pytest

from deepinfer.runtime.prefix_cache import Ending, PrefixCache
from deepinfer.runtime.shared_ids import SharedIdPool

SIZE = 4


class Books:
    """An index over two small pools."""

    def __init__(self, root: bytes = b"root") -> None:
        self.blocks, self.slots = SharedIdPool(9), SharedIdPool(4)
        self.cache = PrefixCache(root, SIZE, self.blocks, self.slots)

    def store(self, tokens: list[int], *, slot: bool = False, part: bool = False) -> list[int]:
        """Store the full blocks of `tokens`, and with `slot` or `part` their end; nobody owns them afterwards."""
        digests: list[bytes] = []
        self.cache.extend_digests(digests, tokens)
        blocks = self.blocks.take(len(digests) + part)
        self.cache.add_blocks(digests, blocks[: len(digests)])
        if slot or part:
            end = tuple(tokens[len(digests) * SIZE :])
            digest = digests[-1] if digests else self.cache.root
            ids = self.slots.take(1) if slot else [None]
            self.cache.add_ending(Ending(digest, len(digests), end, blocks[-1] if part else None, ids[0]))
            self.slots.give_back(i for i in ids if i is not None)
        self.blocks.give_back(reversed(blocks))
        self.cache.check_integrity()
        return blocks

    def match(self, tokens: list[int]) -> tuple[int, int]:
        """Full blocks found, and tokens up to the best ending."""
        digests: list[bytes] = []
        self.cache.extend_digests(digests, tokens)
        match = self.cache.match(digests, tokens)
        ending = match.ending
        return len(match.blocks), 0 if ending is None else ending.num_blocks * SIZE + len(ending.tokens)


def test_a_prefix_is_found_as_far_as_its_tokens_agree() -> None:
    books = Books()
    books.store(list(range(12)))
    assert books.match(list(range(20))) == (3, 0)
    assert books.match([*range(11), 99, 0, 0]) == (2, 0)
    assert books.match([99, *range(1, 12), 0]) == (0, 0)
    # The same tokens behind others are not the same prefix.
    assert books.match([*range(4, 12), 0]) == (0, 0)


def test_at_least_one_token_is_left_to_run() -> None:
    books = Books()
    books.store(list(range(10)), slot=True, part=True)
    assert books.match(list(range(8))) == (1, 0)
    assert books.match(list(range(10))) == (2, 0)
    assert books.match(list(range(11))) == (2, 10)


def test_the_longest_ending_counts() -> None:
    books = Books()
    books.store([1, 2, 3], slot=True, part=True)
    books.store([1, 2, 3, 4, 5, 6], slot=True, part=True)
    assert books.match([1, 2, 3, 4, 5, 6, 7]) == (1, 6)
    assert books.match([1, 2, 3, 4, 5, 9, 7]) == (1, 3)


def test_another_root_knows_other_blocks() -> None:
    digests: list[list[bytes]] = [[], []]
    for found, root in zip(digests, (b"a", b"b"), strict=True):
        Books(root).cache.extend_digests(found, range(8))
    assert digests[0][0] != digests[1][0]


def test_memory_that_is_given_away_is_forgotten_from_the_end_on() -> None:
    books = Books()
    books.store(list(range(16)))
    books.blocks.take(8 - 4 + 1)
    assert books.match(list(range(20))) == (3, 0)
    books.cache.check_integrity()


@pytest.mark.parametrize("lost", ["block", "slot"])
def test_an_ending_goes_with_either_of_its_memories(lost: str) -> None:
    books = Books()
    books.store(list(range(6)), slot=True, part=True)
    assert books.match(list(range(9))) == (1, 6)
    books.slots.take(3) if lost == "slot" else books.blocks.take(7)
    assert books.match(list(range(9)))[1] == 0
    books.cache.check_integrity()
    # What its other memory held is worth nothing without it.
    assert books.slots.num_idle == 0
    assert books.blocks.num_idle == 1


def test_what_is_stored_already_stays() -> None:
    books = Books()
    first = books.store(list(range(8)))
    again = books.store(list(range(8)))
    assert not set(first) & set(again)
    assert list(books.cache.stored_blocks.values()) == first
    assert books.blocks.num_idle == 2
