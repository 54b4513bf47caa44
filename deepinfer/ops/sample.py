"""Drawing tokens from logits: temperature, filters, position-keyed noise, log probabilities.

Every row is treated alone, so batch mates do not matter. Order as in vLLM: temperature, min-p, top-k, top-p.
"""

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.ops.noise import TARGET, gumbel
from deepinfer.ops.select import NEG_INF, topk_stable

MIN_TEMPERATURE = 1e-5
STAGE_SIZES = (512, 256, 128)


def filter_logits(
    logits: Float[Tensor, "B V"], top_k: Int[Tensor, " B"], top_p: Float[Tensor, " B"], min_p: Float[Tensor, " B"]
) -> Float[Tensor, "B V"]:
    """Set filtered tokens to -inf. Equal probabilities rank by lower id; the most probable token always stays.

    `top_k` 0 keeps all. `logits` are already divided by the temperature.
    """
    probabilities = torch.softmax(logits, dim=-1)
    highest = probabilities.amax(dim=-1, keepdim=True)
    logits = logits.masked_fill(probabilities < min_p[:, None] * highest, NEG_INF)
    values, ids = topk_stable(logits, logits.shape[1])
    rank = torch.arange(logits.shape[1], device=logits.device)
    values = values.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), NEG_INF)
    sorted_probabilities = torch.softmax(values, dim=-1)
    mass_before = sorted_probabilities.cumsum(dim=-1) - sorted_probabilities
    values = values.masked_fill((mass_before >= top_p[:, None]) & (rank > 0), NEG_INF)
    return torch.empty_like(values).scatter(1, ids, values)


def warp(
    logits: Float[Tensor, "B V"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
    min_p: Float[Tensor, " B"],
    *,
    any_filter: bool = True,
) -> Float[Tensor, "B V"]:
    """Logits divided by the temperature and filtered: their softmax is what a row with a temperature above 0 draws from."""
    scaled = logits / temperature.clamp(min=MIN_TEMPERATURE)[:, None]
    if not any_filter:
        return scaled
    is_filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    return torch.where(is_filtered[:, None], filter_logits(scaled, top_k, top_p, min_p), scaled)


def sample(
    logits: Float[Tensor, "B V"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
    min_p: Float[Tensor, " B"],
    seeds: Int[Tensor, " B"],
    positions: Int[Tensor, " B"],
    *,
    any_random: bool = True,
    any_filter: bool = True,
    role: int = TARGET,
) -> Int[Tensor, " B"]:
    """One token for each row; rows with temperature 0 take the first largest logit.

    `any_random` and `any_filter` are host knowledge that spares the work when no row needs it; they do not change a row's token.
    """
    best = first_largest(logits)
    if not any_random:
        return best
    warped = warp(logits, temperature, top_k, top_p, min_p, any_filter=any_filter)
    drawn = first_largest(warped + gumbel(seeds, positions, logits.shape[1], role))
    return torch.where(temperature > 0, drawn, best)


def first_largest(x: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
    """`argmax` over the vocabulary, the lower id among equals; in two stages, so that one row keeps a device busy."""
    size = next((size for size in STAGE_SIZES if x.shape[1] % size == 0 and x.shape[1] > size), None)
    return x.argmax(dim=-1) if x.device.type == "cpu" or size is None else largest_in_stages(x, size)


def largest_in_stages(x: Float[Tensor, "B V"], size: int) -> Int[Tensor, " B"]:
    """The first largest of runs of `size` numbers, then of the runs."""
    values, ids = x.unflatten(1, (-1, size)).max(dim=-1)
    stage = values.argmax(dim=-1, keepdim=True)
    return (stage * size + ids.gather(1, stage)).squeeze(1)


def log_distribution(
    logits: Float[Tensor, "B V"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
    min_p: Float[Tensor, " B"],
    *,
    any_filter: bool = True,
) -> Float[Tensor, "B V"]:
    """Log probabilities that `sample` draws each row with; a row with temperature 0 has one token."""
    warped = torch.log_softmax(warp(logits, temperature, top_k, top_p, min_p, any_filter=any_filter), dim=-1)
    certain = torch.full_like(warped, NEG_INF).scatter(1, logits.argmax(dim=-1, keepdim=True), 0.0)
    return torch.where(temperature[:, None] > 0, warped, certain)


def token_logprobs(
    logits: Float[Tensor, "B V"], token_ids: Int[Tensor, " B"], top: int
) -> tuple[Float[Tensor, " B"], Int[Tensor, " B"], Float[Tensor, "B top"], Int[Tensor, "B top"]]:
    """Log probability and rank (from 1) of the chosen tokens, and the `top` most probable tokens with theirs."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    ahead = (logprobs > chosen) | ((logprobs == chosen) & (ids < token_ids[:, None]))
    values, top_ids = topk_stable(logprobs, top)
    return chosen.squeeze(1), ahead.sum(dim=1) + 1, values, top_ids
