"""Engram: a memory of hashed n-grams, looked up by row and gated into the residual streams in front of some layers.

Source: specification section 10.
"""

import torch
from torch import nn

from deepinfer.config import ModelConfig
from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.cache import ModelCache, look_back, store_latest
from deepinfer.model.linear import Linear
from deepinfer.model.numerics import Numerics
from deepinfer.model.rows import Rows
from deepinfer.ops.formats import BLOCK, dequantize_rows_fp8
from deepinfer.ops.ngram_hash import hash_multipliers, hash_primes, ngram_rows

MIN_GATE_INPUT = 1e-6


class EngramTable(nn.Module):
    """Rows of FP8 values with one scale for each 32 channels, decoded on look-up.

    The two tensors may live on another device than the model, or be mapped from a file: only the rows that a step looks up are
    read and copied.
    """

    def __init__(self, rows: int, head_dim: int) -> None:
        super().__init__()
        weight = torch.empty(rows, head_dim, dtype=torch.float8_e4m3fn)
        scale = torch.empty(rows, head_dim // BLOCK, dtype=torch.float8_e8m0fnu)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.register_buffer("scale_bytes", None, persistent=False)
        self.scale_bytes: Tensor | None

    def keep_scale_bytes(self) -> None:
        """Read the scales as bytes from now on: the compiler's code generators do not know float8_e8m0fnu."""
        self.scale_bytes = self.scale.view(torch.uint8)

    def forward(self, row_ids: Int[Tensor, "T X"]) -> Float[Tensor, "T X De"]:
        ids = row_ids.to(self.weight.device)
        # Bytes are gathered, because not every device can gather float8.
        weight = self.weight.view(torch.uint8)[ids].to(row_ids.device).view(torch.float8_e4m3fn)
        scale_bytes = self.scale.view(torch.uint8) if self.scale_bytes is None else self.scale_bytes
        scale = scale_bytes[ids].to(row_ids.device)
        return dequantize_rows_fp8(weight, scale)


class NgramHash(nn.Module):
    """The table rows of one Engram layer for windows of compressed token ids."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        e = config.engram
        index = e.layer_ids.index(layer)
        primes = hash_primes(e.layer_ids, e.max_ngram_size, e.n_heads, e.vocab_size)[index]
        multipliers = hash_multipliers(layer, e.compressed_vocab_size, e.max_ngram_size)
        offsets = [sum(primes[:i]) for i in range(len(primes))]
        self.multipliers: Tensor
        self.primes: Tensor
        self.offsets: Tensor
        for name, values in (("multipliers", multipliers), ("primes", primes), ("offsets", offsets)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.int64, device="cpu"), persistent=False)
        self.num_embeddings = sum(primes)

    def forward(self, window: Int[Tensor, "T Ng"], pad: Int[Tensor, ""]) -> Int[Tensor, "T X"]:
        return ngram_rows(window, pad, self.multipliers, self.primes, self.offsets)


class TokenWindow(nn.Module):
    """Compressed ids of each token and of the tokens before it; what every Engram layer hashes.

    The token map (raw id to compressed id) comes from the tokenizer, not from the checkpoint: see `deepinfer.token_map`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.size, self.pad_token_id = config.engram.max_ngram_size, config.engram.pad_token_id
        self.token_map: Tensor
        self.register_buffer("token_map", torch.zeros(config.vocab_size, dtype=torch.int64, device="cpu"), persistent=False)

    @property
    def pad(self) -> Int[Tensor, ""]:
        """Compressed id that stands for what is missing before a sequence."""
        return self.token_map[self.pad_token_id]

    def forward(self, rows: Rows, cache: ModelCache) -> Int[Tensor, "T Ng"]:
        """Ids at look-back 0, 1, ..; `pad` before the sequence. Mutates the cache's n-gram history."""
        own = self.token_map[rows.token_ids]
        positions = rows.positions[:, None] - torch.arange(self.size, device=own.device)
        ids = look_back(rows, own, cache.history, positions)
        store_latest(rows, own, cache.history)
        return torch.where(positions >= 0, ids, self.pad)

    def recall(
        self, token_ids: Int[Tensor, " n"], slots: Int[Tensor, " n"], positions: Int[Tensor, " n"], cache: ModelCache
    ) -> None:
        """Put tokens that no row of this step or a later one feeds into the history. Mutates it."""
        cache.history.index_put_((slots, positions % cache.history_rows), self.token_map[token_ids])


class Engram(nn.Module):
    """Adds what the table remembers of the last tokens to every stream, each through its own gate."""

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics) -> None:
        super().__init__()
        e, self.norm_eps, self.numerics = config.engram, config.norm_eps, numerics
        self.mult, self.dim = config.hyper_connection.mult, config.dim
        self.hash = NgramHash(config, layer)
        self.embed = EngramTable(e.num_embeddings[e.layer_ids.index(layer)], e.head_dim)
        fmt = "fp8" if config.quantized else "bf16"
        self.wkv = Linear(e.n_columns * e.head_dim, (self.mult + 1) * self.dim, fmt, numerics)
        self.q_weight = nn.Parameter(torch.empty(self.mult, self.dim, dtype=torch.bfloat16), requires_grad=False)
        self.k_weight = nn.Parameter(torch.empty(self.mult, self.dim, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, streams: Float[Tensor, "T M D"], window: Int[Tensor, "T Ng"], pad: Int[Tensor, ""]) -> Float[Tensor, "T M D"]:
        rows = self.embed(self.hash(window, pad))
        projected = self.wkv(rows.to(streams.dtype).flatten(1))
        key = projected[:, : self.mult * self.dim].unflatten(1, (self.mult, self.dim)).float()
        value = projected[:, self.mult * self.dim :].float()
        h = streams.float()
        gain = self.q_weight.float() * self.k_weight.float()
        dot = (h * gain * key).sum(dim=-1) * self._inverse_rms(h) * self._inverse_rms(key) * self.dim**-0.5
        signed_root = torch.copysign(dot.abs().clamp(min=MIN_GATE_INPUT).sqrt(), dot)
        gate = self.numerics.ops.pointwise(torch.sigmoid, signed_root)
        return (h + gate[:, :, None] * value[:, None, :]).to(streams.dtype)

    def _inverse_rms(self, x: Float[Tensor, "T M D"]) -> Float[Tensor, "T M"]:
        return torch.rsqrt(x.square().mean(dim=-1) + self.norm_eps)
