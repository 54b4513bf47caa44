import pytest
import torch
from torch import Tensor

from deepinfer.ops.ngram_hash import DEAD, hash_multipliers, hash_primes, is_prime, ngram_rows
from tests.golden import published_numbers, recorded_unit

LAYERS = (1, 14)
ORDER, HEADS, BUCKETS, COMPRESSED = 4, 8, 16_000_000, 99092


def windows(compressed: Tensor, pad: int) -> Tensor:
    """`[T, ORDER]` ids at look-back 0, 1, .. of one sequence; `pad` before it."""
    padded = torch.cat((torch.full((ORDER - 1,), pad), compressed))
    return padded.unfold(0, ORDER, 1).flip(1)


@pytest.fixture(scope="module")
def primes() -> list[list[int]]:
    return hash_primes(LAYERS, ORDER, HEADS, BUCKETS)


def offsets_of(primes: list[int]) -> list[int]:
    return [sum(primes[:i]) for i in range(len(primes))]


@pytest.mark.golden
def test_constants_of_the_published_layout_are_the_recorded_ones(primes: list[list[int]]) -> None:
    unit = recorded_unit("engram_hash")
    assert unit["layer_ids"].tolist() == list(LAYERS)
    for i, layer in enumerate(LAYERS):
        assert primes[i] == unit["primes"][i].flatten().tolist()
        assert offsets_of(primes[i]) == unit["offsets"][i].tolist()
        assert hash_multipliers(layer, COMPRESSED, ORDER) == unit["multipliers"][i].tolist()


@pytest.mark.golden
def test_constants_are_the_published_ones(primes: list[list[int]]) -> None:
    for i, layer in enumerate(LAYERS):
        published = published_numbers()["engram_constants"][str(layer)]
        assert primes[i] == [prime for order in published["primes_by_ngram_2_3_4"] for prime in order]
        assert offsets_of(primes[i]) == published["offsets"]
        assert hash_multipliers(layer, COMPRESSED, ORDER) == published["multipliers"]
        assert sum(primes[i]) == published["rows"]


def test_written_out_multipliers_are_what_the_generator_gives() -> None:
    """NumPy may change its streams. With one compressed id less the constants do not apply, and the draws hardly move."""
    for layer in LAYERS:
        drawn, published = (hash_multipliers(layer, size, ORDER) for size in (COMPRESSED - 1, COMPRESSED))
        assert all(abs(a - b) < 2e-5 * b for a, b in zip(drawn, published, strict=True))
        assert all(multiplier % 2 == 1 for multiplier in drawn)


@pytest.mark.golden
@pytest.mark.parametrize("masked", [False, True])
def test_rows_are_the_recorded_ones(primes: list[list[int]], masked: bool) -> None:
    unit = recorded_unit("engram_hash")
    pad = int(unit["pad_compressed_id"])
    expected = unit["rows_masked" if masked else "rows"]
    for sequence, ids in enumerate(unit["compressed_ids"]):
        if masked:
            ids = ids.masked_fill(unit["token_mask"][sequence] == 0, DEAD)
        for i in range(len(LAYERS)):
            constants = (unit["multipliers"][i], torch.tensor(primes[i]), unit["offsets"][i])
            assert torch.equal(ngram_rows(windows(ids, pad), pad, *constants), expected[sequence, :, i])


@pytest.mark.golden
def test_rows_of_the_published_example_are_met(primes: list[list[int]]) -> None:
    example = published_numbers()["engram_hash_example"]
    ids, pad = torch.tensor(example["compressed_ids"]), example["pad_compressed_id"]
    for i, layer in enumerate(LAYERS):
        constants = (hash_multipliers(layer, COMPRESSED, ORDER), primes[i], offsets_of(primes[i]))
        rows = ngram_rows(windows(ids, pad), pad, *(torch.tensor(values) for values in constants))
        assert rows.tolist() == example["hash_ids"][str(layer)]


def test_rows_of_a_layer_never_leave_its_table(primes: list[list[int]]) -> None:
    ids = torch.randint(0, COMPRESSED, (500,))
    constants = [torch.tensor(values) for values in (hash_multipliers(14, COMPRESSED, ORDER), primes[1], offsets_of(primes[1]))]
    rows = ngram_rows(windows(ids, 2), 2, *constants)
    ends = constants[2] + constants[1]
    assert ((rows >= constants[2]) & (rows < ends)).all()


def test_primes_are_primes_and_are_used_once(primes: list[list[int]]) -> None:
    flat = [prime for layer in primes for prime in layer]
    assert len(set(flat)) == len(flat)
    assert [n for n in range(30) if is_prime(n)] == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
    assert not any(p % d == 0 for p in flat for d in range(2, 4001) if p != d)
