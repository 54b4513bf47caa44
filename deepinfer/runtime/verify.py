"""The speculative verifier: which drafts stand, and the token that follows them, decided on the device.

`match`: the target draws its own token at every fed position, each with that position's noise; a draft is accepted iff it is that
very token. The text is therefore the target's alone, token for token, at any temperature and seed. Drafts are drawn with the same
noise, so that they agree often also above temperature 0.

`rejection`: standard speculative sampling. A draft x drawn from q is accepted with probability min(1, p(x) / q(x)), else a token
is drawn from the positive part of p - q. Tokens have the target's distribution, but are not those of a run without drafts.
Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", algorithm 1.

Legend: R rows with logits, S sampling groups with up to Q1 = 1 + k rows each.
"""

from typing import NamedTuple

import torch

from deepinfer.dims import Bool, Float, Int, Tensor
from deepinfer.ops.noise import ACCEPT, RESAMPLE, gumbel, uniform
from deepinfer.runtime.step_state import POISON, LogitRows

VERIFICATIONS = ("match", "rejection")


def count_leading(
    is_accepted: Bool[Tensor, " R"], group: Int[Tensor, " R"], index: Int[Tensor, " R"], shape: tuple[int, int]
) -> Int[Tensor, " S"]:
    """Drafts accepted in each group: those up to the first that is not.

    Args:
        is_accepted: whether the draft that the next row feeds is accepted; False where there is none.
        group, index: which group a row belongs to, and its place in it.
        shape: (S, Q1).
    """
    accepted = torch.zeros(shape, dtype=torch.int64, device=group.device)
    accepted[group, index] = is_accepted.to(torch.int64)
    return accepted.cumprod(dim=1).sum(dim=1)


class Run(NamedTuple):
    """What the sampling groups of a step keep: `accepted` drafts and one token behind them, which is `last`.

    `token_ids` are those drawn at each place, `POISON` where a group has no row.
    """

    token_ids: Int[Tensor, "S Q1"]
    accepted: Int[Tensor, " S"]
    last: Int[Tensor, " S"]


def kept_run(rows: LogitRows, drawn: Int[Tensor, " R"], is_accepted: Bool[Tensor, " R"], width: int) -> Run:
    """The run of each group. `drawn` and `is_accepted` tell of each row its token and whether the draft behind it stands.

    `width` is Q1. Padding rows may share a place of a group that nobody looks at.
    """
    shape = (rows.groups.shape[0], width)
    accepted = count_leading(is_accepted & rows.draft_follows, rows.group, rows.place, shape)
    token_ids = drawn.new_full(shape, POISON)
    token_ids[rows.group, rows.place] = drawn
    return Run(token_ids, accepted, token_ids.gather(1, accepted[:, None]).squeeze(1))


def reject(
    target: Float[Tensor, "R V"],
    draft: Float[Tensor, "R V"],
    drafted: Int[Tensor, " R"],
    drawn: Int[Tensor, " R"],
    seeds: Int[Tensor, " R"],
    positions: Int[Tensor, " R"],
) -> tuple[Bool[Tensor, " R"], Int[Tensor, " R"]]:
    """Whether each row's draft is accepted, and the token that stands there either way.

    Args:
        target, draft: log probabilities p and q after temperature and filters, -inf for tokens that cannot be drawn.
        drafted: the draft, drawn from q.
        drawn: the target's own draw, kept where p - q has no positive part left by rounding.
        seeds, positions: keys of the noise, each decision with its own role.
    """
    p, q = target.exp(), draft.exp()
    at = drafted[:, None]
    chance = uniform(seeds, positions, at, ACCEPT).squeeze(1)
    is_accepted = chance * q.gather(1, at).squeeze(1) < p.gather(1, at).squeeze(1)
    residual = (p - q).clamp(min=0)
    redrawn = (residual.log() + gumbel(seeds, positions, p.shape[1], RESAMPLE)).argmax(dim=1)
    redrawn = torch.where(residual.sum(dim=1) > 0, redrawn, drawn)
    return is_accepted, torch.where(is_accepted, drafted, redrawn)
