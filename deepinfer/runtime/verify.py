"""The speculative verifier: which drafts stand, decided on the device.

`match`: the target draws its own token at every fed position, each with that position's noise; a draft is accepted iff it is that
very token. The text is therefore the target's alone, token for token, at any temperature and seed. Drafts are drawn with the same
noise, so that they agree often also above temperature 0.

Legend: R rows with logits, S sampling groups with up to Q1 = 1 + k rows each.
"""

import torch

from deepinfer.dims import Bool, Int, Tensor


def leading_matches(
    drawn: Int[Tensor, " R"],
    fed_next: Int[Tensor, " R"],
    is_draft_next: Bool[Tensor, " R"],
    group: Int[Tensor, " R"],
    index: Int[Tensor, " R"],
    shape: tuple[int, int],
) -> Int[Tensor, " S"]:
    """Drafts accepted in each group: those that equal the target's token, up to the first that does not.

    Args:
        drawn: the target's token after each row.
        fed_next: the token that the next row of the group fed.
        is_draft_next: whether there is such a row.
        group, index: which group a row belongs to, and its place in it.
        shape: (S, Q1).
    """
    matches = torch.zeros(shape, dtype=torch.int64, device=drawn.device)
    matches[group, index] = ((drawn == fed_next) & is_draft_next).to(torch.int64)
    return matches.cumprod(dim=1).sum(dim=1)
