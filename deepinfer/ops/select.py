"""Choosing the largest scores with a stated tie rule, and the candidate blocks of the two-level index.

Tie rule everywhere: the higher score first, and among equal scores the **lower index**. `torch.topk` leaves ties open, and
index scores in bfloat16 tie often, so a stable sort does the choosing.
Source: specification sections 8.6 and 8.7, `candidates` of the recorded units.
"""

import torch
import torch.nn.functional as F

from deepinfer.dims import Bool, Float, Int, Tensor

NEG_INF = float("-inf")


def topk_stable(scores: Float[Tensor, "T C"], k: int) -> tuple[Float[Tensor, "T k"], Int[Tensor, "T k"]]:
    """The k largest scores of each row and their indices, best first; ties go to the lower index."""
    values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]


def select_entries(scores: Float[Tensor, "T C"], k: int) -> Int[Tensor, "T N"]:
    """Indices of the k best entries in ascending order, -1 (nothing) behind them. N = min(k, C).

    A score of -inf marks an entry that may not be chosen.
    """
    count = scores.shape[1]
    values, ids = topk_stable(scores, min(k, count))
    ids = torch.where(values > NEG_INF, ids, count).sort(dim=-1).values
    return torch.where(ids < count, ids, -1)


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
    values, ids = topk_stable(blocks, min(topk_blocks, blocks.shape[1]))
    kept = torch.zeros_like(blocks, dtype=torch.bool).scatter(1, ids, values > NEG_INF)
    return kept.repeat_interleave(block_size, dim=1)[:, :count]
