"""Where a step's rows stand, decided on the device: the host knows bounds, the device true lengths.

`split_drafts` gives a step's draft rows to the drafts most likely to survive. `build_rows` is Remap and length correction: it
completes a step's inputs from the results of the step before, which the host may not have seen. Shapes depend on the plan alone.

Legend: T rows, R rows with logits, B row groups (one sequence each), S groups that sample, k drafts of a proposal.
"""

from typing import NamedTuple

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.rows import Rows
from deepinfer.ops.select import topk_stable
from deepinfer.runtime.step_state import DeviceOutputs, LogitRows, SequenceMetadata


class Layout(NamedTuple):
    """A step's rows and what follows from the true lengths."""

    rows: Rows
    starts: Int[Tensor, " B"]  # position of each group's first row
    n_drafts: Int[Tensor, " B"]  # rows at its end that feed drafts
    ends: Int[Tensor, " B"]  # row behind its last one
    survival: Float[Tensor, "B k"]  # of the drafts that it was offered


def split_drafts(survival: Float[Tensor, "B k"], max_drafts: Int[Tensor, " B"], budget: Int[Tensor, " 1"]) -> Int[Tensor, " B"]:
    """How many drafts of each group get a row, `budget` in all (or all there are): those with the highest survival.

    `survival` never rises along k, and ties go to the lower group and draft, so a group's share is a prefix of its drafts.
    """
    groups, k = survival.shape
    is_offered = torch.arange(k, device=survival.device) < max_drafts[:, None]
    scores = torch.where(is_offered, survival.nan_to_num(0.0), -1.0).flatten()[None]
    values, places = topk_stable(scores, groups * k)
    is_taken = (values[0] >= 0) & (torch.arange(groups * k, device=survival.device) < budget)
    return torch.zeros_like(max_drafts).index_add(0, places[0] // k, is_taken.to(torch.int64))


def build_rows(meta: SequenceMetadata, previous: DeviceOutputs | None) -> Layout:
    """The rows of a step.

    A group with `remap >= 0` feeds the token that the step before drew for the same sequence, then drafts of that step, from the
    position which it left behind. Rows behind the last group's are padding: they belong to that group, a sequence of trash.
    """
    device, starts, n_drafts = meta.starts.device, meta.starts, meta.max_drafts
    survival = torch.zeros((starts.shape[0], 0), device=device)
    if previous is not None:
        is_remapped, source = meta.remap >= 0, meta.remap.clamp(min=0)
        starts = torch.where(is_remapped, previous.next_start[source], starts)
        survival = previous.survival[source]
        if meta.splits_drafts and survival.shape[1]:
            n_drafts = split_drafts(survival, meta.max_drafts, meta.draft_budget)
    q_lens = meta.q_lens + n_drafts
    ends = q_lens.cumsum(0)
    row = torch.arange(meta.num_rows, device=device)
    is_padding = row >= ends[-1]
    seq_ids = torch.searchsorted(ends, row, right=True).clamp(max=starts.shape[0] - 1)
    offsets = (row - (ends - q_lens)[seq_ids]).masked_fill(is_padding, 0)
    remaining = (ends[seq_ids] - 1 - row).masked_fill(is_padding, 0)
    place = (meta.token_starts[seq_ids] + offsets).clamp(max=meta.token_ids.shape[0] - 1)
    token_ids = meta.token_ids[place]
    if previous is not None:
        feed = torch.cat((previous.sampled[:, None], previous.drafts), dim=1)[source]
        fed = feed[seq_ids, offsets.clamp(max=feed.shape[1] - 1)]
        token_ids = torch.where(is_remapped[seq_ids], fed, token_ids)
    rows = Rows(
        token_ids=token_ids.masked_fill(is_padding, 0),
        positions=starts[seq_ids] + offsets,
        seq_ids=seq_ids,
        offsets=offsets,
        remaining=remaining,
        slots=meta.slots,
        block_tables=meta.block_tables,
        block_size=meta.block_size,
        # Steps with and without replays are one to a compiler.
        window_starts=torch.zeros_like(meta.slots),
        write_floors=torch.zeros_like(meta.slots),
        is_even=meta.is_even,
    )
    return Layout(rows, starts, n_drafts, ends, survival)


def logit_rows(meta: SequenceMetadata, layout: Layout, final: Float[Tensor, "T D"]) -> LogitRows:
    """The rows that get logits: of each group that samples the last certain row and those that feed drafts."""
    groups = meta.sample_groups
    n_drafts = layout.n_drafts[groups]
    count = 1 + n_drafts
    ends = count.cumsum(0)
    count_up = torch.arange(meta.num_logits, device=final.device)
    # A step that samples nothing has no rows here, and then no group to index either.
    group = torch.searchsorted(ends, count_up, right=True)
    place = count_up - (ends - count)[group]
    row = (layout.ends[groups] - count)[group] + place
    following = (row + 1).clamp(max=final.shape[0] - 1)
    return LogitRows(
        final=final[row],
        positions=layout.rows.positions[row],
        fed_next=layout.rows.token_ids[following],
        group=group,
        place=place,
        groups=groups,
        slots=meta.slots[groups],
        remap=meta.remap[groups],
        n_drafts=n_drafts,
        survival=layout.survival[groups],
    )
