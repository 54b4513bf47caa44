"""What a step must read and multiply at the least, by formula from the model's sizes. No tensor data, no device.

Weights count as they are stored and are read once a step, of the experts only those that some row chose; cache rows count as
they are held (bfloat16). Activations are left out: they fit the device's caches.

Legend: `rows` of a step, of `sequences` sequences, each with `context` tokens before it.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from deepinfer.checkpoint.tensor_map import TensorSpec, stored_specs
from deepinfer.config import ModelConfig

HELD_BYTES = 2  # of a cached value
EXPERTS, FP8, BF16, HYPER, LOOK_UPS = "experts", "fp8 linears", "bf16 linears", "hyper-connections", "look-ups"
ATTEND, INDEX = "attend", "index scores"
PARTS = (EXPERTS, FP8, BF16, HYPER, ATTEND, INDEX, LOOK_UPS)

# First match decides; what no pattern finds is too small to count.
KINDS = (
    (LOOK_UPS, r"(.*\.)?embed\.(weight|scale)$"),
    (EXPERTS, r".*\.ffn\.experts\."),
    (HYPER, r".*\.hc_(attn|ffn)_fn$"),
)


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to read, and floating-point operations, two for each multiplication."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops)


def total(parts: dict[str, Work]) -> Work:
    """All parts together."""
    return sum(parts.values(), Work())


def expected_active(experts: int, chosen: int, rows: int) -> float:
    """Experts that at least one of `rows` rows visits, on average, if each row chooses evenly."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def decode_work(
    config: ModelConfig, *, sequences: int, context: int, drafts: int = 0, active_experts: float | None = None
) -> dict[str, Work]:
    """One decode step by parts, sampler excluded, with the proposal of the next drafts if there are any.

    `active_experts` is the mean over the backbone's layers; None expects even routing.
    """
    rows = sequences * (1 + drafts)
    parts = backbone_work(config, rows=rows, logit_rows=rows, active_experts=active_experts)
    for name, work in cache_work(config, sequences=sequences, rows_each=1 + drafts, context=context).items():
        parts[name] += work
    if drafts:
        for name, work in draft_work(config, sequences=sequences, rows=rows).items():
            parts[name] += work
    return parts


def prefill_work(config: ModelConfig, *, tokens: int, chunk: int) -> dict[str, Work]:
    """One prompt of `tokens` tokens in chunks, logits of its last row only."""
    parts = dict.fromkeys(PARTS, Work())
    for start in range(0, tokens, chunk):
        for name, work in chunk_work(config, start=start, end=min(start + chunk, tokens), tokens=tokens).items():
            parts[name] += work
    return parts


def chunk_work(config: ModelConfig, *, start: int, end: int, tokens: int) -> dict[str, Work]:
    """The rows from position `start` to `end` of a prompt of `tokens` tokens, as one step."""
    rows = end - start
    parts = backbone_work(config, rows=rows, logit_rows=int(end == tokens))
    # Rows of a chunk share what they read; how much they multiply grows with the position.
    for name, work in cache_work(config, sequences=1, rows_each=rows, context=start + rows // 2).items():
        parts[name] += work
    return parts


def backbone_work(config: ModelConfig, *, rows: int, logit_rows: int, active_experts: float | None = None) -> dict[str, Work]:
    """Weights of the backbone and its head."""
    parts, moe = dict.fromkeys(PARTS, Work()), config.moe
    active = active_experts
    if active is None:
        active = expected_active(moe.n_routed_experts, moe.n_activated_experts, rows)
    share = active / moe.n_routed_experts, moe.n_activated_experts / moe.n_routed_experts
    for spec, kind in _matrices(config):
        if spec.name.startswith("mtp."):
            continue
        fed = logit_rows if spec.name.startswith("head.") else rows
        parts[kind] += _look_up(spec, config, rows) if kind == LOOK_UPS else _product(spec, kind, fed, share)
    return parts


def draft_work(config: ModelConfig, *, sequences: int, rows: int) -> dict[str, Work]:
    """The draft blocks: features of the step's rows, then one proposal for each sequence.

    The Markov head is read once for each draft, because a draft waits for the one before it; the LM head once more.
    """
    parts, moe, d = dict.fromkeys(PARTS, Work()), config.draft_moe, config.draft
    queries = sequences * d.block_size
    active = expected_active(moe.n_routed_experts, moe.n_activated_experts, queries)
    share = active / moe.n_routed_experts, moe.n_activated_experts / moe.n_routed_experts
    for spec, kind in _matrices(config):
        is_head = spec.name.startswith("head.")
        if kind == LOOK_UPS or not (is_head or spec.name.startswith("mtp.")):
            continue
        fed = rows if ".main_proj." in spec.name else queries
        work = _product(spec, kind, fed, share)
        if ".markov_head." in spec.name or ".confidence_head." in spec.name:
            work = Work(work.bytes * d.block_size, work.flops)
        parts[kind] += work
    a = config.attention
    listed = a.window_size + d.block_size
    flops = 4.0 * d.n_layers * queries * listed * a.n_heads * a.head_dim
    parts[ATTEND] += Work(d.n_layers * sequences * a.window_size * a.head_dim * HELD_BYTES, flops)
    return parts


def cache_work(config: ModelConfig, *, sequences: int, rows_each: int, context: int) -> dict[str, Work]:
    """Cache rows that a step reads, and the products over them."""
    a, ix, rows = config.attention, config.indexer, sequences * rows_each
    window = min(a.window_size, context + 1)
    attend, index = Work(), Work()
    for layer in range(config.n_layers):
        ratio = config.compress_ratios[layer]
        visible = context // ratio if ratio else 0
        selected = min(ix.topk, visible)
        listed = window + selected
        attend += Work(sequences * listed * a.head_dim * HELD_BYTES, 4.0 * rows * listed * a.n_heads * a.head_dim)
        if layer in config.index_source_layers:
            if 0 <= ix.candidate_source_layer < layer:
                visible = min(visible, ix.candidate_topk_blocks * ix.candidate_block_size)
            index += Work(sequences * visible * ix.head_dim * HELD_BYTES, 2.0 * rows * visible * ix.n_heads * ix.head_dim)
    return {ATTEND: attend, INDEX: index}


@cache
def _stored(config: ModelConfig) -> tuple[TensorSpec, ...]:
    return tuple(stored_specs(config))


def _matrices(config: ModelConfig) -> Iterator[tuple[TensorSpec, str]]:
    """Every stored matrix and its scales, with the part that it belongs to."""
    for spec in _stored(config):
        found = next((kind for kind, pattern in KINDS if re.match(pattern, spec.name)), None)
        if found is None and len(spec.shape) == 2:
            found = BF16 if spec.dtype == torch.bfloat16 else FP8
        if found is not None:
            yield spec, found


def _product(spec: TensorSpec, kind: str, rows: int, expert_share: tuple[float, float]) -> Work:
    """A matrix times `rows` rows; of an expert, the share of rows that read it and that visit it. Scales multiply nothing."""
    read, visited = expert_share if kind == EXPERTS else (1.0, 1.0)
    if not rows:
        return Work()
    values = math.prod(spec.shape) * (2 if spec.dtype == torch.int8 else 1)
    return Work(spec.nbytes * read, 0.0 if spec.name.endswith(".scale") else 2.0 * values * rows * visited)


def _look_up(spec: TensorSpec, config: ModelConfig, rows: int) -> Work:
    """Table rows that `rows` tokens need."""
    each = config.engram.n_columns if ".engram." in spec.name else 1
    return Work(spec.nbytes / spec.shape[0] * each * rows)
