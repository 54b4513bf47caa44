"""The whole text model: embedding, blocks, head, in the order they run. Read this first.

Source: specification section 3.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from deepinfer.config import ModelConfig
from deepinfer.dims import Float, Int, Tensor
from deepinfer.errors import ShapeError
from deepinfer.model.attention import Attention
from deepinfer.model.block import Block
from deepinfer.model.cache import CacheSizes, ModelCache, window_key_places
from deepinfer.model.draft import DSpark, Proposal, SampleFn, TokenEmbedding, greedy
from deepinfer.model.engram import Engram, TokenWindow
from deepinfer.model.hyper_connection import collapse, enter, mean_stream
from deepinfer.model.indexer import Shared
from deepinfer.model.linear import Float32Linear
from deepinfer.model.norm import RMSNorm
from deepinfer.model.numerics import Numerics
from deepinfer.model.rope import RotaryEmbedding
from deepinfer.model.rows import TRASH_SLOT, Rows, pack_rows
from deepinfer.model.tail import Tail, first_decoder_layer

WHOLE_SEQUENCE_BLOCK = 64


class Hidden(NamedTuple):
    """What one forward leaves behind for its rows, or for its tail."""

    rows: Rows  # the rows that it is about
    final: Float[Tensor, "T D"]  # collapsed streams before the final norm
    main_hidden: Float[Tensor, "T nD"] | None  # features for the draft blocks, if the model has any


class Layer(Block):
    """A backbone block, with the Engram memory that stands in front of it on some layers."""

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics, expert_ids: tuple[int, ...] | None) -> None:
        super().__init__(config, Attention(config, layer, numerics), config.moe, numerics, expert_ids)
        self.engram = Engram(config, layer, numerics) if layer in config.engram.layer_ids else None


class BetweenLayers(NamedTuple):
    """What runs in front of the layers, between them and behind them, as functions: what is compiled."""

    enter: Callable[..., Any]
    mean_stream: Callable[..., Any]
    collapse: Callable[..., Any]
    place: Callable[..., Any]


def place(shared: Shared, rows: Rows, window: int, ring_rows: int) -> Shared:
    """What layers share, with where the keys of `rows` lie."""
    return shared.with_places(window_key_places(rows, window, ring_rows), rows)


class Transformer(nn.Module):
    """DeepSeek-V4.1-Flash without its vision tower. Parameters are named as in the checkpoint and start uninitialised.

    `expert_ids`: the routed backbone experts that this process holds; all of them by default.
    """

    stages = BetweenLayers(enter, mean_stream, collapse, place)

    def __init__(self, config: ModelConfig, numerics: Numerics, expert_ids: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.config, self.numerics = config, numerics
        self.embed = TokenEmbedding(config.vocab_size, config.dim)
        self.rope = RotaryEmbedding(config)
        self.token_window = TokenWindow(config)
        self.layers = nn.ModuleList(Layer(config, i, numerics, expert_ids) for i in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = Float32Linear(config.dim, config.vocab_size, numerics)
        self.mtp = DSpark(config, numerics)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def new_cache(self, sizes: CacheSizes) -> ModelCache:
        """An empty cache that fits this model."""
        return ModelCache(self.config, self.numerics.precision, sizes, self.device)

    def forward_rows(self, rows: Rows, cache: ModelCache, tail: Tail | None = None) -> Hidden:
        """Run packed rows through the backbone. Mutates `cache`; logits are a separate step, for the rows that need them.

        With a `tail`, only its rows go on behind the last KV source.
        """
        config = self.config
        rope = self.rope(rows.positions)
        window = self.token_window(rows, cache) if config.engram.layer_ids else None
        embedded = self.embed(rows.token_ids).to(self.numerics.precision.activation_dtype)
        streams, pre_mix = self.stages.enter(embedded, config.hyper_connection.mult)
        is_padding = rows.row_slots == TRASH_SLOT if self.numerics.ops.skips_padding or rows.is_even else None
        shared = self.placed(Shared(), rows, cache)
        features: list[Tensor] = []
        # A model cut to its first layers keeps the ids, but has no draft blocks.
        targets = config.draft.target_layer_ids if config.draft.n_layers else ()
        for index, layer in enumerate(cast(list[Layer], list(self.layers))):
            if tail is not None and index == first_decoder_layer(config):
                kept = tail.row_ids
                rows, shared = tail.of_rows(rows), tail.of_shared(shared)
                rope, window = self.rope(rows.positions), None if window is None else window[kept]
                streams, pre_mix, features = streams[kept], pre_mix[kept], [feature[kept] for feature in features]
                is_padding = None if is_padding is None else is_padding[kept]
                if not kept.shape[0]:
                    break
                shared = self.placed(shared, rows, cache)
            if layer.engram is not None:
                streams = layer.engram(streams, window, self.token_window.pad)
            if index in targets:
                # The block's input, with its Engram, not its output.
                features.append(self.stages.mean_stream(streams))
            streams, pre_mix, shared = layer(
                streams, pre_mix, rows, rope, shared, cache.layers[index], is_padding=is_padding, is_even=rows.is_even
            )
        return Hidden(rows, self.stages.collapse(streams, pre_mix), torch.cat(features, dim=-1) if features else None)

    def placed(self, shared: Shared, rows: Rows, cache: ModelCache) -> Shared:
        """With the places of the keys of `rows`, if attention reads them in place."""
        if self.numerics.ops.attend_in_place is None:
            return shared
        return self.stages.place(shared, rows, self.config.attention.window_size, cache.ring_rows)

    def forward_without_rows(self) -> None:
        """The part of a forward that other processes wait for when this one has no rows: each layer's exchange of experts."""
        like = torch.zeros(0, self.config.dim, dtype=self.numerics.precision.activation_dtype, device=self.device)
        for layer in cast(list[Layer], list(self.layers)):
            layer.ffn.forward_without_rows(like)

    def logits(self, final: Float[Tensor, "T D"]) -> Float[Tensor, "T V"]:
        """Float32 logits of collapsed hidden rows."""
        return self.head(self.norm(final))

    def observe_draft(self, main_hidden: Float[Tensor, "T nD"], rows: Rows, cache: ModelCache) -> None:
        """Give the features of processed rows to the draft blocks. Mutates their rings."""
        self.mtp.observe(main_hidden, rows, self.rope(rows.positions), cache)

    def propose_draft(
        self,
        token_ids: Int[Tensor, " B"],
        positions: Int[Tensor, " B"],
        slots: Int[Tensor, " B"],
        cache: ModelCache,
        sample: SampleFn = greedy,
    ) -> Proposal:
        """Draft the tokens that follow `token_ids`, which stand at `positions + 1`. Reads the cache only."""
        block = self.config.draft.block_size
        steps = torch.arange(1, block + 1, device=positions.device)
        rope = self.rope((positions[:, None] + steps).flatten())
        embedded = self.embed(self.mtp.draft_inputs(token_ids)).to(self.numerics.precision.activation_dtype)
        return self.mtp.propose(embedded, token_ids, positions, slots, rope, self.head, cache, sample)

    def forward(self, token_ids: Int[Tensor, "*B T"]) -> Float[Tensor, "*B T V"]:
        """Float32 logits for every position of whole sequences, with a throw-away cache.

        Raises: ShapeError for another rank, an empty input, or ids outside the vocabulary.
        """
        rows, cache = self.whole_sequences(token_ids)
        return self.logits(self.forward_rows(rows, cache).final).unflatten(0, tuple(token_ids.shape))

    def whole_sequences(self, token_ids: Int[Tensor, "*B T"]) -> tuple[Rows, ModelCache]:
        """Rows and an empty cache for whole sequences of equal length."""
        if not isinstance(token_ids, torch.Tensor):
            raise ShapeError(f"token_ids: expected an int64 tensor [T] or [B, T], got {type(token_ids).__name__}")
        if token_ids.dim() not in (1, 2) or token_ids.numel() == 0 or token_ids.dtype not in (torch.int64, torch.int32):
            raise ShapeError(
                f"token_ids: expected int64 [T] or [B, T] and not empty, got {token_ids.dtype} {tuple(token_ids.shape)}"
            )
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= self.config.vocab_size:
            raise ShapeError(f"token_ids: values {low}..{high} leave the vocabulary [0, {self.config.vocab_size})")
        sequences = token_ids[None] if token_ids.dim() == 1 else token_ids
        count, length = sequences.shape
        blocks = -(-length // WHOLE_SEQUENCE_BLOCK)
        tables = [range(1 + i * blocks, 1 + (i + 1) * blocks) for i in range(count)]
        sizes = CacheSizes(num_slots=count + 1, num_blocks=count * blocks + 1, block_size=WHOLE_SEQUENCE_BLOCK)
        chunks = [(sequence.cpu(), 0) for sequence in sequences]
        rows = pack_rows(chunks, range(1, count + 1), tables, WHOLE_SEQUENCE_BLOCK, self.device)
        return rows, self.new_cache(sizes)
