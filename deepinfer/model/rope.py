"""Rotations of a step: one table for window-only layers, one with YaRN for compressed layers.

Source: specification section 7.
"""

from typing import NamedTuple

from torch import nn

from deepinfer.config import ModelConfig
from deepinfer.dims import Float, Int, Tensor
from deepinfer.ops.rotate import rope_frequencies, rotation, yarn_frequencies


class Rope(NamedTuple):
    """Rotations for the rows of one step in layers of one ratio."""

    query: Float[Tensor, "T half 2"]  # at each row's own position: queries, window rows, index queries
    entry: Float[Tensor, "T half 2"]  # at the first token of each row's group: entries and index keys


class RopeTables(NamedTuple):
    """Rotations of one step for every ratio the model has."""

    by_ratio: dict[int, Rope]

    def table(self, ratio: int) -> Rope:
        return self.by_ratio[ratio]


class RotaryEmbedding(nn.Module):
    """Frequencies of both tables; computes the rotations once for each step."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        r, dim = config.rope, config.attention.rope_head_dim
        self.ratios = sorted(set(config.compress_ratios))
        self.window_freqs: Tensor
        self.compress_freqs: Tensor
        self.register_buffer("window_freqs", rope_frequencies(dim, r.theta), persistent=False)
        compress = rope_frequencies(dim, r.compress_theta)
        if r.original_seq_len:
            compress = yarn_frequencies(dim, r.compress_theta, r.factor, r.beta_fast, r.beta_slow, r.original_seq_len)
        self.register_buffer("compress_freqs", compress, persistent=False)

    def forward(self, positions: Int[Tensor, " T"]) -> RopeTables:
        tables = {}
        for ratio in self.ratios:
            freqs = self.compress_freqs if ratio else self.window_freqs
            query = rotation(positions, freqs)
            entry = rotation(positions // ratio * ratio, freqs) if ratio > 1 else query
            tables[ratio] = Rope(query, entry)
        return RopeTables(tables)
