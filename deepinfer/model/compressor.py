"""Compression: `ratio` consecutive tokens become one entry that later queries can attend to.

Source: specification section 8.5. There is no position embedding and no overlap of groups (V4 had both).
"""

import torch
from torch import nn

from deepinfer.config import ModelConfig
from deepinfer.dims import Float, Tensor
from deepinfer.model.cache import LayerCache
from deepinfer.model.linear import Float32Linear, Linear
from deepinfer.model.norm import RMSNorm
from deepinfer.model.numerics import Numerics
from deepinfer.model.rows import TRASH_SLOT, Rows


class Compressor(nn.Module):
    """Latents of one KV source layer, before rotation and rounding."""

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics) -> None:
        super().__init__()
        self.ratio = config.compress_ratios[layer]
        dim, head_dim = config.dim, config.attention.head_dim
        if self.ratio == 2:
            self.wkv: Float32Linear | Linear = Float32Linear(dim, head_dim, numerics)
            self.wgate = Float32Linear(dim, head_dim, numerics)
        else:
            self.wkv = Linear(dim, head_dim, "bf16", numerics)
        self.norm = RMSNorm(head_dim, config.norm_eps)

    def forward(self, x: Float[Tensor, "T D"], rows: Rows, cache: LayerCache) -> Float[Tensor, "T Dh"]:
        """The latent of the group that ends at each row; meaningless for rows that end none.

        Ratio 1: a projection and a norm. Ratio 2: the group's two projections, weighted for each channel by a softmax over
        their gates, in float32. The even token may have come in an earlier step: it waits in the cache's pending group.
        """
        if self.ratio == 1:
            return self.norm(self.wkv(x))
        own = torch.stack((self.wkv(x), self.wgate(x)), dim=1)
        even = self._even_partner(own, rows, cache)
        kv = torch.stack((even[:, 0], own[:, 0]), dim=1)
        weights = torch.softmax(torch.stack((even[:, 1], own[:, 1]), dim=1), dim=1)
        pooled = (kv * weights).sum(dim=1)
        return self.norm(pooled.to(x.dtype))

    def _even_partner(self, own: Float[Tensor, "T 2 Dh"], rows: Rows, cache: LayerCache) -> Float[Tensor, "T 2 Dh"]:
        """`(kv, gate)` of the token before each row. Mutates the pending groups: even rows leave theirs for a later step."""
        pending = cache.pending
        assert pending is not None
        before = rows.positions - 1
        previous_row = own.roll(1, dims=0)
        group = before.clamp(min=0) // 2 % pending.shape[1]
        waiting = pending[rows.row_slots, group]
        even = torch.where((rows.offsets > 0)[:, None, None], previous_row, waiting)
        is_live = rows.keep_new((rows.positions % 2 == 0) & (rows.remaining < 2 * pending.shape[1]))
        slot = torch.where(is_live, rows.row_slots, TRASH_SLOT)
        pending.index_put_((slot, rows.positions // 2 % pending.shape[1]), own)
        return even
