"""Penalties for tokens that a text already holds.

Counts are integers, so that their sums depend on no order; a token without a penalty keeps its logit to the bit.
Source: OpenAI's API for presence and frequency; Keskar et al. 2019 (CTRL), section 4.1, for repetition.
"""

import torch

from deepinfer.dims import Bool, Float, Int, Tensor


def add_counts(counts: Int[Tensor, "n V"], rows: Int[Tensor, " m"], token_ids: Int[Tensor, " m"]) -> Int[Tensor, "n V"]:
    """Count each of m tokens in its row; a negative id counts nothing. Mutates `counts` and returns it."""
    return counts.index_put_((rows, token_ids.clamp(min=0)), (token_ids >= 0).to(counts.dtype), accumulate=True)


def penalize(
    logits: Float[Tensor, "n V"],
    output_counts: Int[Tensor, "n V"],
    is_seen: Bool[Tensor, "n V"],
    repetition: Float[Tensor, " n"],
    frequency: Float[Tensor, " n"],
    presence: Float[Tensor, " n"],
) -> Float[Tensor, "n V"]:
    """Logits less what repeated tokens cost: first the factor, then the two differences.

    Args:
        output_counts: how often the output holds each token.
        is_seen: whether prompt or output hold it.
        repetition: divides positive and multiplies negative logits of seen tokens; 1 does nothing.
        frequency: subtracted once for each time in the output.
        presence: subtracted if the output holds the token at all.
    """
    factor = repetition[:, None]
    logits = torch.where(is_seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - frequency[:, None] * output_counts
    return logits - presence[:, None] * (output_counts > 0)
