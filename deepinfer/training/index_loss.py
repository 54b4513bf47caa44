"""What teaches the indexers: their scores shall rank entries as the attention itself would weigh them.

Choosing the best entries has no gradient. So, for a few sampled queries of each sequence, attention is computed over *all*
visible entries without gradient, summed over heads and normalised; the loss is the Kullback-Leibler divergence of the softmax
of the index scores from it. Inputs of the indexer are detached: this loss moves nothing but indexers, and nothing else moves
them.
"""

import torch

from deepinfer.dims import Bool, Float, Int, Tensor

NEG_INF = float("-inf")
MIN_MASS = 1e-9


def attention_mass(
    q: Float[Tensor, "B R H Dh"],
    kv: Float[Tensor, "B T Dh"],
    entries: Float[Tensor, "B C Dh"],
    positions: Int[Tensor, " R"],
    visible: Bool[Tensor, "R C"],
    sink: Float[Tensor, " H"],
    scale: float,
    window: int,
) -> Float[Tensor, "B R C"]:
    """Share of each entry in what the queries at `positions` give to entries, all heads together; rows sum to 1 (or 0)."""
    keys = positions[:, None] - torch.arange(window, device=q.device)
    near = torch.einsum("brhd,brwd->brhw", q, kv[:, keys.clamp(min=0)]).float() * scale
    near = near.masked_fill((keys < 0)[None, :, None], NEG_INF)
    far = torch.einsum("brhd,bcd->brhc", q, entries).float() * scale
    far = far.masked_fill(~visible[None, :, None], NEG_INF)
    sinks = sink.view(1, 1, -1, 1).expand(*near.shape[:3], 1)
    total = torch.logsumexp(torch.cat((near, far, sinks), dim=-1), dim=-1, keepdim=True)
    mass = torch.exp(far - total).sum(dim=2)
    return mass / mass.sum(dim=-1, keepdim=True).clamp(min=MIN_MASS)


def index_divergence(
    scores: Float[Tensor, "B R C"], mass: Float[Tensor, "B R C"], visible: Bool[Tensor, "R C"]
) -> Float[Tensor, ""]:
    """Mean divergence over the rows that see an entry."""
    log_scores = torch.log_softmax(scores.float().masked_fill(~visible, -1e30), dim=-1)
    terms = mass * (mass.clamp(min=MIN_MASS).log() - log_scores)
    has_entry = visible.any(dim=-1)
    return (terms.sum(dim=-1) * has_entry).sum() / (has_entry.sum() * scores.shape[0]).clamp(min=1)
