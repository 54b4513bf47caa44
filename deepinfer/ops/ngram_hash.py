"""Rows of an Engram table for each token: hashed n-grams of compressed token ids.

Source: specification section 10 and `engram_hash` of the recorded units.
"""

import numpy as np
import torch

from deepinfer.dims import Int, Tensor

DEAD = -1  # compressed id of a token that breaks n-grams (image spans)
_SEED_STEP = 10007

# NumPy does not promise its generator streams across versions, so the published model's multipliers are written out.
_PUBLISHED_MULTIPLIERS = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
_PUBLISHED_KEY = (99092, 4)  # compressed vocabulary, n-gram order


def hash_multipliers(layer_id: int, compressed_vocab_size: int, max_ngram_size: int) -> list[int]:
    """One odd multiplier for each look-back 0 .. max_ngram_size - 1, small enough that products fit int64."""
    if (compressed_vocab_size, max_ngram_size) == _PUBLISHED_KEY and layer_id in _PUBLISHED_MULTIPLIERS:
        return list(_PUBLISHED_MULTIPLIERS[layer_id])
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    draws = np.random.default_rng(_SEED_STEP * layer_id).integers(0, bound, size=max_ngram_size, dtype=np.int64)
    return [int(draw) * 2 + 1 for draw in draws]


def hash_primes(layer_ids: tuple[int, ...], max_ngram_size: int, n_heads: int, vocab_size: int) -> list[list[int]]:
    """For each layer the moduli of its columns, n-gram order outermost; no prime is used twice in the model."""
    used: set[int] = set()
    layers = []
    for _ in layer_ids:
        primes = []
        for _ in range(2, max_ngram_size + 1):
            candidate = vocab_size - 1
            for _ in range(n_heads):
                candidate += 1
                while candidate in used or not is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                primes.append(candidate)
        layers.append(primes)
    return layers


def is_prime(n: int) -> bool:
    """Trial division; the published search stays near 16 million."""
    return n >= 2 and all(n % d for d in range(2, int(n**0.5) + 1))


def ngram_rows(
    window: Int[Tensor, "T Ng"],
    pad: int | Int[Tensor, ""],
    multipliers: Int[Tensor, " Ng"],
    primes: Int[Tensor, " X"],
    offsets: Int[Tensor, " X"],
) -> Int[Tensor, "T X"]:
    """Table rows for the compressed ids `window[:, k]` at look-back k; X = (Ng - 1) * heads columns.

    A look-back that is DEAD, and every farther one, counts as `pad`.
    """
    blocked = (window == DEAD).cumsum(dim=1) > 0
    ids = torch.where(blocked, pad, window)
    products = ids * multipliers
    heads = primes.shape[0] // (window.shape[1] - 1)
    mixed = products[:, 0]
    columns = []
    for order in range(1, window.shape[1]):
        mixed = mixed ^ products[:, order]
        columns.append(mixed[:, None] % primes[(order - 1) * heads : order * heads])
    return torch.cat(columns, dim=1) + offsets
