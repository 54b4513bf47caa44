"""The attention of `deepinfer.model.attention`, for whole sequences at once and with gradients.

The window is read in chunks: 64 queries see the 128 rows of their own chunk and the one before. Selected entries are gathered
once for each query, which all heads share. One softmax with the sink runs over both, as in `deepinfer.ops.attend`.

B sequences, T tokens (a multiple of the window W), H heads, N gathered or C dense entries.
"""

from typing import Any

import torch
import torch.nn.functional as F

from deepinfer.dims import Bool, Float, Int, Tensor

NEG_INF = float("-inf")


class GatherEntries(torch.autograd.Function):
    """`entries[ids]`, whose gradient is summed in float32 by atomic additions: a sorted sum is slow, a bf16 one inexact."""

    @staticmethod
    def forward(ctx: Any, entries: Float[Tensor, "R Dh"], ids: Int[Tensor, " P"]) -> Float[Tensor, "P Dh"]:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.dtype = entries.shape[0], entries.dtype
        return entries.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, "P Dh"]) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        total = torch.zeros(ctx.rows, grad.shape[1], dtype=torch.float32, device=grad.device)
        return total.index_add_(0, ids, grad.float()).to(ctx.dtype), None


def gather_entries(entries: Float[Tensor, "B C Dh"], selected: Int[Tensor, "B T N"]) -> Float[Tensor, "B T N Dh"]:
    """The selected entries of each query; a negative id gives entry 0, which must be masked."""
    b, c, _ = entries.shape
    first = torch.arange(b, device=entries.device)[:, None, None] * c
    rows = GatherEntries.apply(entries.flatten(0, 1), (selected.clamp(min=0) + first).flatten())
    return rows.unflatten(0, tuple(selected.shape))


def window_pairs(kv: Float[Tensor, "B T Dh"], window: int) -> Float[Tensor, "Bn W2 Dh"]:
    """For each chunk of `window` rows: the chunk before it (zeros before the first), then itself."""
    chunks = kv.unflatten(1, (-1, window))
    before = F.pad(chunks, (0, 0, 0, 0, 1, 0))[:, :-1]
    return torch.cat((before, chunks), dim=2).flatten(0, 1)


def window_mask(b: int, t: int, window: int, device: torch.device) -> Bool[Tensor, "Bn W W2"]:
    """Which of the two chunks' rows each query of a chunk sees."""
    query = torch.arange(window, device=device)[:, None]
    key = torch.arange(2 * window, device=device)[None]
    inside = (key > query) & (key <= query + window)
    chunk = torch.arange(t // window, device=device)[:, None, None]
    return (inside & ((chunk > 0) | (key >= window))).repeat(b, 1, 1)


def joint_softmax(
    scores: Float[Tensor, "B T H S"], visible: Bool[Tensor, "B T S"], sink: Float[Tensor, " H"]
) -> Float[Tensor, "B T H S"]:
    """Float32 probabilities of visible places, the sink in the denominator."""
    scores = scores.float().masked_fill(~visible[:, :, None], NEG_INF)
    maximum = torch.maximum(scores.amax(dim=-1, keepdim=True), sink[:, None]).detach()
    weights = torch.exp(scores - maximum)
    return weights / (weights.sum(dim=-1, keepdim=True) + torch.exp(sink[:, None] - maximum))


def attend_window(
    q: Float[Tensor, "B T H Dh"], kv: Float[Tensor, "B T Dh"], sink: Float[Tensor, " H"], scale: float, window: int
) -> Float[Tensor, "B T H Dh"]:
    """Attention of a window-only layer."""
    b, t, h, _ = q.shape
    pairs, visible = window_pairs(kv, window), window_mask(b, t, window, q.device)
    chunked = q.reshape(-1, window, h, q.shape[-1])
    scores = torch.bmm(chunked.flatten(1, 2), pairs.transpose(1, 2)).unflatten(1, (window, h)) * scale
    probabilities = joint_softmax(scores, visible, sink).to(q.dtype)
    return torch.bmm(probabilities.flatten(1, 2), pairs).view(q.shape)


def attend_with_entries(
    q: Float[Tensor, "B T H Dh"],
    kv: Float[Tensor, "B T Dh"],
    entries: Float[Tensor, "B T N Dh"] | Float[Tensor, "B C Dh"],
    seen: Bool[Tensor, "B T S"],
    sink: Float[Tensor, " H"],
    scale: float,
    window: int,
) -> Float[Tensor, "B T H Dh"]:
    """Attention over the window and entries: gathered ones of each query, or (three dimensions) all of the sequence."""
    b, t, h, dim = q.shape
    pairs = window_pairs(kv, window)
    chunked = q.reshape(-1, window, h, dim).flatten(1, 2)
    near = torch.bmm(chunked, pairs.transpose(1, 2)).view(b, t, h, -1)
    rows = q.flatten(0, 1) if entries.dim() == 4 else q.flatten(1, 2)
    keys = entries.flatten(0, 1) if entries.dim() == 4 else entries
    far = torch.bmm(rows, keys.transpose(1, 2)).view(b, t, h, -1)
    visible = torch.cat((window_mask(b, t, window, q.device).view(b, t, -1), seen), dim=-1)
    probabilities = joint_softmax(torch.cat((near, far), dim=-1) * scale, visible, sink).to(q.dtype)
    near, far = probabilities[..., : 2 * window], probabilities[..., 2 * window :]
    out = torch.bmm(near.reshape(chunked.shape[0], chunked.shape[1], -1), pairs).view(q.shape)
    return out + torch.bmm(far.reshape(rows.shape[0], rows.shape[1], -1), keys).view(q.shape)
