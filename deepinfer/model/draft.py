"""DSpark: draft blocks that propose the next tokens from the backbone's features. Proposes only; verifying is the runtime's.

Per step and sequence: the target has processed the token at position p and produced token y for p + 1. The blocks see y and
noise tokens at p + 1 .. p + Q, the features of the last W positions (kept in their own rings), and each other.
Source: specification section 11.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import nn

from deepinfer.config import ModelConfig
from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.attention import Attention
from deepinfer.model.block import Block
from deepinfer.model.cache import LayerCache, ModelCache, store_latest
from deepinfer.model.hyper_connection import collapse, enter
from deepinfer.model.indexer import Shared
from deepinfer.model.linear import Float32Linear, Linear
from deepinfer.model.norm import RMSNorm
from deepinfer.model.numerics import Numerics
from deepinfer.model.rope import RopeTables
from deepinfer.model.rows import TRASH_SLOT, Rows

# (logits [B, V], position of the token to be drawn [B]) -> token ids [B]
SampleFn = Callable[[Float[Tensor, "B V"], Int[Tensor, " B"]], Int[Tensor, " B"]]


def greedy(logits: Float[Tensor, "B V"], positions: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """The first largest logit."""
    return logits.argmax(dim=-1)


class Proposal(NamedTuple):
    """Drafts for positions p + 2 .. p + Q + 1 of each sequence."""

    token_ids: Int[Tensor, "B Q"]
    logits: Float[Tensor, "B Q V"]  # Markov bias included: the distribution that the drafts were drawn from
    confidence: Float[Tensor, "B Q"]  # its sigmoid estimates acceptance, given that all earlier drafts were accepted


class DraftAttention(Attention):
    """Every draft query attends to the ring of features and to all draft rows of its sequence, later ones included."""

    def observe(self, features: Float[Tensor, "T D"], rows: Rows, rope: RopeTables, cache: LayerCache) -> None:
        """Write the ring rows of the positions that the target has processed. Mutates this block's ring."""
        store_latest(rows, self.window_rows(features, rope.table(0).query), cache.ring)

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "BQ D"],
        rope: RopeTables,
        positions: Int[Tensor, " B"],
        slots: Int[Tensor, " B"],
        cache: LayerCache,
    ) -> tuple[Float[Tensor, "BQ D"], Shared]:
        """`positions` are p, the newest in the ring; `rope` holds the rotations of the draft rows. Writes nothing."""
        rotation = rope.table(0).query
        _, q, kv = self.project(x, rotation)
        kv = kv.unflatten(0, (positions.shape[0], -1))
        window, block = self.config.window_size, kv.shape[1]
        # Ring order as published: place i holds the newest position that is i modulo the window.
        place = torch.arange(window, device=x.device)
        key_positions = positions[:, None] - (positions[:, None] - place) % window
        ring = cache.ring
        features = ring[slots[:, None], key_positions.clamp(min=0) % ring.shape[1]]
        listed = torch.cat((features, kv), dim=1).repeat_interleave(block, dim=0)
        seen = torch.cat((key_positions >= 0, torch.ones_like(kv[..., 0], dtype=torch.bool)), dim=1)
        out = self.numerics.ops.attend(q, listed, seen.repeat_interleave(block, dim=0), self.attn_sink, self.config.scale)
        return self.output(out, rotation), Shared()


class MarkovHead(nn.Module):
    """A low-rank bias on the logits from the token drafted before."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        self.embed = TokenEmbedding(config.vocab_size, config.draft.markov_rank)
        self.head = Float32Linear(config.draft.markov_rank, config.vocab_size, numerics)


class TokenEmbedding(nn.Module):
    """Rows of a bf16 table, looked up by token id."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, token_ids: Int[Tensor, "..."]) -> Float[Tensor, "... D"]:
        return self.weight[token_ids]


class ConfidenceHead(nn.Module):
    """Predicts from a draft row and the previous token's Markov embedding whether the draft will be accepted."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        self.proj = Float32Linear(config.dim + config.draft.markov_rank, 1, numerics)


class DraftBlock(Block):
    """One DSpark block; the first also projects the features, the last also holds the heads (the checkpoint's layout)."""

    attn: DraftAttention

    def __init__(self, config: ModelConfig, index: int, numerics: Numerics) -> None:
        layer = config.n_layers + index
        super().__init__(config, DraftAttention(config, layer, numerics), config.draft_moe, numerics)
        if index == 0:
            features = len(config.draft.target_layer_ids) * config.dim
            self.main_proj = Linear(features, config.dim, "fp8" if config.quantized else "bf16", numerics)
            self.main_norm = RMSNorm(config.dim, config.norm_eps)
        if index == config.draft.n_layers - 1:
            self.norm = RMSNorm(config.dim, config.norm_eps)
            self.markov_head = MarkovHead(config, numerics)
            self.confidence_head = ConfidenceHead(config, numerics)


class DSpark(nn.ModuleList):
    """The draft blocks in order. Embedding, LM head and rotary tables are the backbone's and come in as arguments."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__(DraftBlock(config, index, numerics) for index in range(config.draft.n_layers))
        self.config = config

    @property
    def blocks(self) -> list[DraftBlock]:
        """The blocks with their type, which `nn.ModuleList` does not know."""
        return cast(list[DraftBlock], list(self))

    def observe(self, main_hidden: Float[Tensor, "T nD"], rows: Rows, rope: RopeTables, cache: ModelCache) -> None:
        """Take in the features of rows that the backbone has processed. Mutates the draft rings.

        Rows that are rejected later may be observed too: the rings hold enough rows that setting the length back undoes them.
        """
        first = self.blocks[0]
        features = first.main_norm(first.main_proj(main_hidden))
        for block, memory in zip(self.blocks, cache.layers[self.config.n_layers :], strict=True):
            block.attn.observe(features, rows, rope, memory)

    def propose(
        self,
        embedded: Float[Tensor, "BQ D"],
        token_ids: Int[Tensor, " B"],
        positions: Int[Tensor, " B"],
        slots: Int[Tensor, " B"],
        rope: RopeTables,
        head: Float32Linear,
        cache: ModelCache,
        sample: SampleFn = greedy,
    ) -> Proposal:
        """Draft Q tokens for each sequence.

        Args:
            embedded: embeddings of `draft_inputs`, packed.
            token_ids: y, the token just produced for position p + 1.
            positions: p; its features and those of the window before it must have been observed.
            rope: rotations at p + 1 .. p + Q, packed.
        """
        last = self.blocks[-1]
        streams, pre_mix = enter(embedded, self.config.hyper_connection.mult)
        is_padding = None
        if last.attn.numerics.ops.skips_padding:
            is_padding = (slots == TRASH_SLOT).repeat_interleave(self.config.draft.block_size)
        for block, memory in zip(self.blocks, cache.layers[self.config.n_layers :], strict=True):
            streams, pre_mix, _ = block(streams, pre_mix, rope, positions, slots, memory, is_padding=is_padding)
        x = collapse(streams, pre_mix)
        plain = head(last.norm(x)).unflatten(0, (token_ids.shape[0], -1))
        x = x.unflatten(0, (token_ids.shape[0], -1))

        drafted, corrected, confidence, previous = [], [], [], token_ids
        for i in range(self.config.draft.block_size):
            markov = last.markov_head.embed(previous)
            logits = plain[:, i] + last.markov_head.head(markov)
            confidence.append(last.confidence_head.proj(torch.cat((x[:, i], markov.to(x.dtype)), dim=-1)))
            previous = sample(logits, positions + 2 + i)
            drafted.append(previous)
            corrected.append(logits)
        return Proposal(torch.stack(drafted, 1), torch.stack(corrected, 1), torch.cat(confidence, 1))

    def draft_inputs(self, token_ids: Int[Tensor, " B"]) -> Int[Tensor, " BQ"]:
        """y and Q - 1 noise tokens for each sequence, packed."""
        d = self.config.draft
        inputs = token_ids.new_full((token_ids.shape[0], d.block_size), d.noise_token_id)
        inputs[:, 0] = token_ids
        return inputs.flatten()
