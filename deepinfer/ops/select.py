"""Choosing the largest scores with a stated tie rule, and the candidate blocks of the two-level index.

Tie rule everywhere: the higher score first, and among equal scores the **lower index**. `torch.topk` leaves ties open, and
index scores in bfloat16 tie often, so a stable sort does the choosing.
Source: specification sections 8.6 and 8.7, `candidates` of the recorded units.
"""

import torch
import torch.nn.functional as F

from deepinfer.dims import Bool, Float, Int, Tensor

NEG_INF, NAN = float("-inf"), float("nan")
INDEX_LIMIT = 2**31 - 1


def topk_stable(scores: Float[Tensor, "T C"], k: int) -> tuple[Float[Tensor, "T k"], Int[Tensor, "T k"]]:
    """The k largest scores of each row and their indices, best first; ties go to the lower index."""
    if scores.device.type != "cpu" and k < scores.shape[1]:
        return topk_by_keys(scores, k)
    values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]


def topk_by_keys(scores: Float[Tensor, "T C"], k: int) -> tuple[Float[Tensor, "T k"], Int[Tensor, "T k"]]:
    """`topk_stable` without sorting everything: score and index make one integer key, so that no two keys are equal."""
    # Integers order as the floats do once the magnitude bits of negative ones are flipped; -0 and 0 are one score, and NaN of
    # either sign is the largest.
    plain = torch.where(scores == 0, 0.0, scores).float()
    bits = torch.where(plain.isnan(), NAN, plain).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & INDEX_LIMIT)).to(torch.int64)
    keys = (ordered << 32) + (INDEX_LIMIT - torch.arange(scores.shape[1], device=scores.device))
    ids = INDEX_LIMIT - (torch.topk(keys, k, dim=-1).values & INDEX_LIMIT)
    return scores.gather(1, ids), ids


def select_entries(scores: Float[Tensor, "T C"], k: int) -> Int[Tensor, "T N"]:
    """Indices of the k best entries in ascending order, -1 (nothing) behind them. N = min(k, C).

    A score of -inf marks an entry that may not be chosen.
    """
    count = scores.shape[1]
    if k >= count:
        return _compact(scores > NEG_INF)
    values, ids = topk_stable(scores, k)
    ids = torch.where(values > NEG_INF, ids, count).sort(dim=-1).values
    return torch.where(ids < count, ids, -1)


def _compact(is_taken: Bool[Tensor, "T C"]) -> Int[Tensor, "T C"]:
    """Indices of the taken entries in ascending order, -1 behind them."""
    count = is_taken.shape[1]
    index = torch.arange(count, device=is_taken.device).expand(is_taken.shape)
    # What is not taken goes to a place behind the last, which is cut off.
    place = torch.where(is_taken, is_taken.cumsum(dim=1) - 1, count)
    return index.new_full((is_taken.shape[0], count + 1), -1).scatter(1, place, index)[:, :count]


def candidate_mask(
    scores: Float[Tensor, "T C"], visible: Int[Tensor, " T"], block_size: int, topk_blocks: int
) -> Bool[Tensor, "T C"]:
    """Entries of the `topk_blocks` best blocks of each row; a block's score is its largest entry's.

    `visible` counts the entries a row sees. The block with the newest of them is always kept. Kept blocks are marked whole:
    the newest may include entries that the row does not see, so visibility is applied separately.
    """
    count = scores.shape[1]
    blocks = F.pad(scores, (0, -count % block_size), value=NEG_INF).unflatten(1, (-1, block_size)).amax(dim=-1)
    newest = (visible - 1).div(block_size, rounding_mode="floor")
    index = torch.arange(blocks.shape[1], device=scores.device)
    blocks = torch.where(index[None] == newest[:, None], float("inf"), blocks)
    kept = blocks > NEG_INF
    if topk_blocks < blocks.shape[1]:
        values, ids = topk_stable(blocks, topk_blocks)
        kept = torch.zeros_like(kept).scatter(1, ids, values > NEG_INF)
    return kept.repeat_interleave(block_size, dim=1)[:, :count]
