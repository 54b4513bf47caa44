"""Noise is a pure function of seed, position, token id and role, and it is spread as noise should be."""

import math

import pytest
import torch
from torch import Tensor

from deepinfer.ops import noise
from deepinfer.ops.noise import ACCEPT, DRAFT, RESAMPLE, TARGET, gumbel, mix64, uniform

ROLES = (TARGET, DRAFT, ACCEPT, RESAMPLE)
MASK = 2**64 - 1


def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def finaliser(x: int) -> int:
    """The last three lines of splitmix64 on Python integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def draws(seeds: Tensor, positions: Tensor, num_tokens: int, role: int = TARGET) -> Tensor:
    return uniform(seeds, positions, torch.arange(num_tokens), role)


def draw(seed: int, position: int, token_id: int, role: int) -> float:
    return float(uniform(torch.tensor([seed]), torch.tensor([position]), torch.tensor([token_id]), role))


def chi_square(numbers: Tensor, bins: int) -> float:
    counts = torch.histc(numbers.flatten(), bins=bins, min=0, max=1)
    expected = numbers.numel() / bins
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("x", [0, 1, 2, 12345, 2**31, 2**62 + 3, 2**63 - 1, 2**63, 2**64 - 1])
def test_hash_is_the_finaliser_of_splitmix64(x: int) -> None:
    assert int(mix64(torch.tensor(signed(x)))) == signed(finaliser(x))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ((0, 0, 0, TARGET), 0.3380524541955055),
        ((1, 2, 3, TARGET), 0.05977302874244944),
        ((123456789, 40, 319, DRAFT), 0.1291849833326471),
        ((2**63 - 1, 1_000_000, 129279, RESAMPLE), 0.18403998435079033),
    ],
)
def test_noise_of_a_seed_never_changes(key: tuple[int, int, int, int], expected: float) -> None:
    assert draw(*key) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("bits", [0, -1])
def test_uniform_numbers_leave_out_both_ends_even_for_extreme_hashes(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "mix64", lambda x: torch.full_like(x, bits))
    assert 0.0 < draw(0, 0, 0, TARGET) < 1.0
    assert math.isfinite(float(gumbel(torch.tensor([0]), torch.tensor([0]), 1)))


def test_uniform_numbers_are_spread_evenly_over_seeds_positions_and_tokens() -> None:
    # 99 degrees of freedom: above 162 once in 10,000 times.
    many = torch.arange(20_000)
    zeros = torch.zeros_like(many)
    for numbers in (draws(many, zeros, 1), draws(zeros, many, 1), draws(torch.tensor([7]), torch.tensor([9]), 20_000)):
        assert chi_square(numbers, 100) < 162
    for role in ROLES:
        assert chi_square(draws(many[:200], many[:200] * 3, 100, role), 100) < 162


def test_neighbours_are_uncorrelated() -> None:
    n = 20_000
    many = torch.arange(n)
    base = draws(many, many, 4, TARGET)
    for other in (draws(many + 1, many, 4), draws(many, many + 1, 4), draws(many, many, 4, DRAFT), base.roll(1, dims=1)):
        correlation = torch.corrcoef(torch.stack([base.flatten(), other.flatten()]))[0, 1]
        assert abs(float(correlation)) < 4 / math.sqrt(n)


def test_no_two_keys_share_their_noise() -> None:
    seeds, positions = torch.cartesian_prod(torch.arange(40), torch.arange(40)).T
    numbers = torch.stack([draws(seeds, positions, 20, role) for role in ROLES])
    assert numbers.unique().numel() == numbers.numel()


def test_noise_of_a_row_does_not_depend_on_its_batch() -> None:
    seeds, positions = torch.tensor([3, 2**62, -5, 0]), torch.tensor([0, 17, 1 << 20, 5])
    together = gumbel(seeds, positions, 320)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(gumbel(seeds[order], positions[order], 320), together[order], rtol=0, atol=0)
    for row in range(4):
        alone = gumbel(seeds[row : row + 1], positions[row : row + 1], 320)
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=0)


def test_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary() -> None:
    seeds, positions = torch.tensor([3]), torch.tensor([8])
    torch.testing.assert_close(gumbel(seeds, positions, 7), gumbel(seeds, positions, 320)[:, :7], rtol=0, atol=0)


def test_gumbel_noise_has_the_moments_of_its_distribution() -> None:
    numbers = gumbel(torch.arange(1000), torch.arange(1000), 200).double()
    assert numbers.mean() == pytest.approx(0.57722, abs=0.01)
    assert numbers.var() == pytest.approx(math.pi**2 / 6, abs=0.03)
