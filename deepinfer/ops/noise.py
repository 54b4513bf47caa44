"""Random numbers without a generator: noise is a hash of seed, position, token id and role.

Nothing carries state, so a token's noise is the same after preemption, in any batch and with speculation on or off.
"""

import torch

from deepinfer.dims import Float, Int, Tensor

TARGET, DRAFT, ACCEPT, RESAMPLE = 0, 1, 2, 3  # roles: which decision the noise is for

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64, splitmix64's increment
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Int[Tensor, "..."], bits: int) -> Int[Tensor, "..."]:
    """Logical shift of int64, which torch shifts arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The finaliser of splitmix64: every input bit reaches every output bit. Multiplication wraps."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(
    seeds: Int[Tensor, " B"], positions: Int[Tensor, " B"], token_ids: Int[Tensor, "... V"], role: int
) -> Float[Tensor, "B V"]:
    """Uniform numbers strictly between 0 and 1 with 52 random bits, float64.

    `positions` are absolute positions of the token that the noise decides.
    """
    key = mix64(mix64(seeds + _GOLDEN) ^ (positions * 4 + role))
    bits = mix64(key[:, None] + (token_ids + 1) * _GOLDEN)
    return (_shift_right(bits, 12).to(torch.float64) + 0.5) * 2.0**-52


def gumbel(seeds: Int[Tensor, " B"], positions: Int[Tensor, " B"], vocab_size: int, role: int = TARGET) -> Float[Tensor, "B V"]:
    """Gumbel noise for every token, float32: `argmax(logits + noise)` is a draw from `softmax(logits)`."""
    token_ids = torch.arange(vocab_size, device=seeds.device)
    return (-torch.log(-torch.log(uniform(seeds, positions, token_ids, role)))).float()
