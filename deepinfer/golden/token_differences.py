"""Differences of predictions and tokens, position by position, both builds having read the same tokens."""

from dataclasses import dataclass
from typing import Literal

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.golden.build_output import Predictions
from deepinfer.ops.noise import gumbel
from deepinfer.ops.sample import MIN_TEMPERATURE, filter_logits
from deepinfer.sampling_params import SamplingParams

# Tokens whose log probabilities are compared: as many as vLLM reports at most. Far down, they are noise.
COMPARED_TOKENS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionDifference:
    """Predictions at one position.

    Attributes:
        position: of the row; it predicts the token at the next one.
        kl: Kullback-Leibler divergence of their distribution from ours, in nats; where they report some tokens only, of the
            distributions with all others lumped together, which is a lower bound.
        max_logprob_difference: among our 20 most probable tokens, or those that both have.
    """

    position: int
    kl: float
    max_logprob_difference: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDivergence:
    """A token that they generated and we would not have.

    Attributes:
        index: place among the generated tokens, from 0.
        position: absolute position of the token.
        gap: by how much we prefer our token over theirs, in log probability (with noise and temperature, if it was drawn).
        top2_gap: by how much we prefer it over our own second choice.
        kind: a tie is a gap that rounding can account for.
    """

    index: int
    position: int
    ours: int
    theirs: int
    gap: float
    top2_gap: float
    kind: Literal["tie", "error"]


def compare_predictions(ours: Float[Tensor, "R V"], theirs: Predictions) -> list[PositionDifference]:
    """Compare the rows that both have; row r of ours stands at position r."""
    count = min(len(theirs), ours.shape[0] - theirs.first)
    if count <= 0:
        return []
    logp = torch.log_softmax(ours[theirs.first : theirs.first + count].double(), dim=-1)
    if theirs.logits is not None:
        other = torch.log_softmax(theirs.logits[:count].double(), dim=-1)
        kl = torch.where(logp.exp() > 0, logp.exp() * (logp - other), 0.0).sum(dim=-1)
        ids = logp.topk(min(COMPARED_TOKENS, logp.shape[1]), dim=-1).indices
        difference = (logp.gather(1, ids) - other.gather(1, ids)).abs()
    else:
        kl, difference = _compare_reported(logp, theirs, count)
    largest = difference.nan_to_num(nan=float("inf")).amax(dim=-1)
    kl = kl.nan_to_num(nan=float("inf")).clamp(min=0)
    return [
        PositionDifference(position=theirs.first + r, kl=float(kl[r]), max_logprob_difference=float(largest[r]))
        for r in range(count)
    ]


def _compare_reported(
    logp: Float[Tensor, "R V"], theirs: Predictions, count: int
) -> tuple[Float[Tensor, " R"], Float[Tensor, "R n"]]:
    assert theirs.token_ids is not None
    assert theirs.logprobs is not None
    ids, other = theirs.token_ids[:count], theirs.logprobs[:count].double()
    is_real = ids >= 0
    mine = logp.gather(1, ids.clamp(min=0))
    difference = torch.where(is_real, (mine - other).abs(), 0.0)
    p, q = (torch.where(is_real, side.exp(), 0.0) for side in (mine, other))
    terms = torch.where(p > 0, p * (mine - other), 0.0).sum(dim=-1)
    rest_p, rest_q = ((1 - side.sum(dim=-1)).clamp(min=1e-12) for side in (p, q))
    return terms + rest_p * (rest_p / rest_q).log(), difference


def decision_values(
    logits: Float[Tensor, "R V"], params: SamplingParams | None, seed: int, positions: Int[Tensor, " R"]
) -> Float[Tensor, "R V"]:
    """What the generated token is the largest of: log probabilities, or those over the temperature with filters and noise."""
    if params is None or params.temperature == 0:
        return torch.log_softmax(logits, dim=-1)
    scaled = logits / max(params.temperature, MIN_TEMPERATURE)
    count = logits.shape[0]
    if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
        scaled = filter_logits(
            scaled,
            torch.full((count,), max(params.top_k, 0)),
            torch.full((count,), float(params.top_p)),
            torch.full((count,), float(params.min_p)),
        )
    return torch.log_softmax(scaled, dim=-1) + gumbel(torch.full((count,), seed), positions, logits.shape[1])


def compare_tokens(
    ours: Float[Tensor, "R V"],
    num_prompt_tokens: int,
    token_ids: list[int],
    params: SamplingParams | None,
    seed: int,
    token_gap: float,
) -> list[TokenDivergence]:
    """Tokens that we would have chosen otherwise, each after their tokens before it."""
    if not token_ids:
        return []
    first = num_prompt_tokens - 1
    positions = torch.arange(num_prompt_tokens, num_prompt_tokens + len(token_ids))
    values = decision_values(ours[first : first + len(token_ids)], params, seed, positions)
    best = values.argmax(dim=-1).tolist()
    top2 = values.topk(min(2, values.shape[1]), dim=-1).values
    divergences = []
    for index, (mine, theirs) in enumerate(zip(best, token_ids, strict=True)):
        if mine == theirs:
            continue
        gap = float(values[index, mine] - values[index, theirs])
        divergences.append(
            TokenDivergence(
                index=index,
                position=num_prompt_tokens + index,
                ours=mine,
                theirs=theirs,
                gap=gap,
                top2_gap=float(top2[index, 0] - top2[index, -1]),
                kind="tie" if gap <= token_gap else "error",
            )
        )
    return divergences
