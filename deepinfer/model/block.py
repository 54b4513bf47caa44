"""One block: the streams in, attention, feed-forward, the streams out.

Source: specification section 4, "Block".
"""

from typing import Any

from torch import nn

from deepinfer.config import ModelConfig, MoEConfig
from deepinfer.dims import Bool, Float, Tensor
from deepinfer.model.attention import Attention
from deepinfer.model.hyper_connection import HyperConnection, collapse, spread
from deepinfer.model.indexer import Shared
from deepinfer.model.moe import MoE
from deepinfer.model.norm import RMSNorm
from deepinfer.model.numerics import Numerics


class Block(nn.Module):
    """Two sub-layers, each between its own hyper-connection coefficients; `attn` decides which kind of attention it is."""

    def __init__(
        self, config: ModelConfig, attn: Attention, moe: MoEConfig, numerics: Numerics, expert_ids: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        self.hc_attn = HyperConnection(config, numerics)
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = attn
        self.hc_ffn = HyperConnection(config, numerics)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = MoE(config, moe, numerics, expert_ids)

    def forward(
        self,
        streams: Float[Tensor, "T M D"],
        pre_mix: Float[Tensor, "T M"],
        *attention_inputs: Any,
        is_padding: Bool[Tensor, " T"] | None = None,
        is_even: bool = False,
    ) -> tuple[Float[Tensor, "T M D"], Float[Tensor, "T M"], Shared]:
        """New streams, the `pre` that the next block collapses them with, and what the layers above share.

        `pre_mix` comes from the block below; `attention_inputs` go to `attn` as they are, `is_padding` and `is_even` to `ffn`.
        """
        mixes = self.hc_attn(streams)
        y, shared = self.attn(self.attn_norm(collapse(streams, pre_mix)), *attention_inputs)
        streams = spread(y, streams, mixes)
        ffn_mixes = self.hc_ffn(streams)
        y = self.ffn(self.ffn_norm(collapse(streams, mixes.pre)), is_padding, is_even)
        return spread(y, streams, ffn_mixes), ffn_mixes.pre, shared
