"""Attention of each query row over its own list of key-value rows, with a sink in the denominator.

Source: specification section 8.4 and `sparse_attn` of the recorded units.
"""

import torch
import torch.nn.functional as F

from deepinfer.dims import Bool, Float, Tensor
from deepinfer.ops.matmul import batched_matmul

BLOCK = 64  # list entries between two updates of the running maximum; part of the published rounding
LOWEST_MAX = -1e30


def attend(
    q: Float[Tensor, "T H Dh"],
    kv: Float[Tensor, "T S Dh"],
    visible: Bool[Tensor, "T S"],
    sink: Float[Tensor, " H"],
    scale: float,
    row_tile: int = 0,
) -> Float[Tensor, "T H Dh"]:
    """Softmax over the visible places of each row's list; key and value are the same vector.

    Dtype: scores, softmax and sums in float32; the probabilities are rounded to `q.dtype` for the value product while the
        denominator sums the unrounded ones; result in `q.dtype`.
    Order: online softmax over blocks of 64 places from the start of the list.
    A row without a visible place gives zeros. Invisible places may hold anything, NaN included.
    """
    pad = -kv.shape[1] % BLOCK
    kv = torch.where(visible[:, :, None], kv, torch.zeros((), dtype=kv.dtype, device=kv.device))
    kv, visible = F.pad(kv, (0, 0, 0, pad)), F.pad(visible, (0, pad))
    queries = q.float()
    t, h, _ = q.shape
    maximum = queries.new_full((t, h, 1), LOWEST_MAX)
    denominator = queries.new_zeros((t, h, 1))
    total = torch.zeros_like(queries)
    for start in range(0, kv.shape[1], BLOCK):
        block = kv[:, start : start + BLOCK].float()
        scores = batched_matmul(queries, block.transpose(1, 2), row_tile) * scale
        scores = scores.masked_fill(~visible[:, None, start : start + BLOCK], float("-inf"))
        higher = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        decay, maximum = torch.exp(maximum - higher), higher
        probabilities = torch.exp(scores - maximum)
        denominator = denominator * decay + probabilities.sum(dim=-1, keepdim=True)
        total = total * decay + batched_matmul(probabilities.to(q.dtype).float(), block, row_tile)
    denominator = denominator + torch.exp(sink[None, :, None] - maximum)
    return (total / denominator).to(q.dtype)
