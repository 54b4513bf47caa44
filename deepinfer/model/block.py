"""One block: the streams in, attention, feed-forward, the streams out.

Source: specification section 4, "Block".
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from deepinfer.config import ModelConfig, MoEConfig
from deepinfer.dims import Bool, Float, Tensor
from deepinfer.model.attention import Attention
from deepinfer.model.hyper_connection import HyperConnection, Mixes, collapse, spread
from deepinfer.model.indexer import Shared
from deepinfer.model.moe import Chosen, MoE
from deepinfer.model.norm import RMSNorm
from deepinfer.model.numerics import Numerics


class Halves(NamedTuple):
    """The two halves of a block as functions of it: what is compiled. All layers have the same second half."""

    attend: Callable[..., Any]
    feed: Callable[..., Any]


class Halfway(NamedTuple):
    """What the second half knows before its routed experts have run."""

    x: Float[Tensor, "T D"]
    chosen: Chosen
    mixes: Mixes


def attend(
    block: "Block", streams: Float[Tensor, "T M D"], pre_mix: Float[Tensor, "T M"], *attention_inputs: Any
) -> tuple[Float[Tensor, "T M D"], Float[Tensor, "T M"], Shared]:
    """The attention half: new streams, the `pre` of the feed-forward half, and what the layers above share."""
    mixes = block.hc_attn(streams)
    y, shared = block.attn(read(block, streams, pre_mix, block.attn_norm), *attention_inputs)
    return write(block, y, streams, mixes), mixes.pre, shared


def feed(
    block: "Block",
    streams: Float[Tensor, "T M D"],
    pre_mix: Float[Tensor, "T M"],
    is_padding: Bool[Tensor, " T"] | None,
    is_even: bool,
) -> tuple[Float[Tensor, "T M D"], Float[Tensor, "T M"]]:
    """The feed-forward half: new streams, and the `pre` of the next block."""
    mixes = block.hc_ffn(streams)
    y = block.ffn(read(block, streams, pre_mix, block.ffn_norm), is_padding, is_even)
    return write(block, y, streams, mixes), mixes.pre


def choose(
    block: "Block", streams: Float[Tensor, "T M D"], pre_mix: Float[Tensor, "T M"], is_padding: Bool[Tensor, " T"] | None
) -> Halfway:
    """`feed` up to the exchange of (token, expert) pairs."""
    mixes = block.hc_ffn(streams)
    x = read(block, streams, pre_mix, block.ffn_norm)
    return Halfway(x, block.ffn.choose(x, is_padding), mixes)


def finish(
    block: "Block", streams: Float[Tensor, "T M D"], halfway: Halfway, outputs: Float[Tensor, "T K D"]
) -> Float[Tensor, "T M D"]:
    """`feed` behind the exchange."""
    return write(block, block.ffn.finish(halfway.x, halfway.chosen, outputs), streams, halfway.mixes)


def feed_in_two(choose: Callable[..., Halfway], finish: Callable[..., Tensor]) -> Callable[..., Any]:
    """`feed` of these two parts, compiled ones: between them stands an exchange that no compiler could look into."""

    def feed(
        block: "Block",
        streams: Float[Tensor, "T M D"],
        pre_mix: Float[Tensor, "T M"],
        is_padding: Bool[Tensor, " T"] | None,
        is_even: bool,
    ) -> tuple[Float[Tensor, "T M D"], Float[Tensor, "T M"]]:
        halfway = choose(block, streams, pre_mix, is_padding)
        x, (weights, ids, _), mixes = halfway
        outputs = block.ffn.exchange(block.ffn.experts, x, weights, ids, is_even=is_even)
        return finish(block, streams, halfway, outputs), mixes.pre

    return feed


def read(block: "Block", streams: Float[Tensor, "T M D"], pre: Float[Tensor, "T M"], norm: RMSNorm) -> Float[Tensor, "T D"]:
    """The collapsed and normalised input of a sub-layer."""
    fast = block.numerics.ops.collapse_norm
    return norm(collapse(streams, pre)) if fast is None else fast(streams, pre, norm)


def write(block: "Block", y: Float[Tensor, "T D"], streams: Float[Tensor, "T M D"], mixes: Mixes) -> Float[Tensor, "T M D"]:
    """The streams behind a sub-layer with output `y`. What a fast form of the coefficients began has ended behind this."""
    fast = block.numerics.ops.spread
    return spread(y, streams, mixes) if fast is None else fast(y, streams, mixes)


class Block(nn.Module):
    """Two sub-layers, each between its own hyper-connection coefficients; `attn` decides which kind of attention it is."""

    stages = Halves(attend, feed)

    def __init__(
        self, config: ModelConfig, attn: Attention, moe: MoEConfig, numerics: Numerics, expert_ids: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        self.numerics = numerics
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
        streams, pre_mix, shared = self.stages.attend(self, streams, pre_mix, *attention_inputs)
        streams, pre_mix = self.stages.feed(self, streams, pre_mix, is_padding, is_even)
        return streams, pre_mix, shared
