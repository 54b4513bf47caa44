"""What is in a checkpoint: its layers, sizes by part, cache sizes, and what fits where.

Reads `config.json` and file headers, never tensor data; without tensor files the sizes are computed from the config.
Source: specification sections 1, 8.9 and 12.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer.checkpoint.load import check_engram_tables, check_tensors
from deepinfer.checkpoint.locate import locate_checkpoint
from deepinfer.checkpoint.safetensors_file import DTYPE_NAMES, INDEX_NAME, SINGLE_NAME, open_checkpoint
from deepinfer.checkpoint.tensor_map import is_ignored, stored_specs
from deepinfer.config import QUANT_BLOCK, ModelConfig
from deepinfer.config_json import load_config
from deepinfer.model.cache import CacheSizes, ModelCache
from deepinfer.model.numerics import precision_named

ENTRY_GROUP = 16  # channels of a compressed entry that share an e4m3 scale
# First match decides which part a tensor belongs to.
PARTS = (
    ("vision (not loaded)", r"(vision|aligner)\.|image_"),
    ("draft blocks", r"mtp\."),
    ("embedding", r"embed\."),
    ("Engram tables", r".*\.engram\.embed\."),
    ("Engram projections", r".*\.engram\."),
    ("compression and indexer", r".*\.attn\.(compressor|indexer)\."),
    ("attention", r".*\.attn\."),
    ("router", r".*\.ffn\.gate\."),
    ("experts", r".*\.ffn\.experts\."),
    ("shared experts", r".*\.ffn\.shared_experts\."),
    ("hyper-connections", r".*\.hc_"),
    ("norms", r".*norm\."),
    ("head", r"head\."),
)
NOT_BACKBONE = ("vision (not loaded)", "draft blocks", "Engram tables")
MEMORY_SIZES_GB = (24, 80, 141, 180)
# The rest is for activations and what the libraries take.
USABLE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One backbone or draft block. Sources are layer ids, None where nothing is compressed."""

    layer: int
    ratio: int
    role: str
    kv_source: int | None
    index_source: int | None
    has_engram: bool
    experts: int
    experts_per_token: int


@dataclass(frozen=True, slots=True)
class PartSize:
    """Parameters without scales (an FP4 byte counts as two), and all bytes as stored."""

    name: str
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """Memory of the compressed entries and index keys for a token, and of the window rings for a sequence."""

    form: str
    per_token: float
    per_sequence: int


@dataclass(frozen=True, slots=True)
class Fit:
    """What a device of some size can hold.

    Attributes:
        expert_parallel_ranks: fewest devices (a power of two) that hold the model with the Engram tables on the host and the
            backbone's experts divided among them; None if no number does.
        cache_tokens: tokens whose cache fits beside the weights of the first placement that fits, on each device.
    """

    memory_gb: int
    holds_all: bool
    holds_all_but_tables: bool
    expert_parallel_ranks: int | None
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that `inspect_checkpoint` found."""

    path: str
    has_tensors: bool
    layers: tuple[LayerRow, ...]
    parts: tuple[PartSize, ...]
    backbone_parameters: int
    engram_table_parameters: int
    draft_parameters: int
    cache: tuple[CacheBytes, ...]
    max_seq_len: int
    usable_share: float
    fits: tuple[Fit, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect_checkpoint(path: Path | str) -> Report:
    """Describe a checkpoint folder or a preset, or the model that a folder with only a `config.json` stands for.

    Raises: ConfigError or CheckpointError if the folder is no checkpoint or its files do not match its config.
    """
    folder = locate_checkpoint(path)
    config = load_config(folder)
    check_engram_tables(config)
    specs = list(stored_specs(config))
    tensors = [(spec.name, DTYPE_NAMES[spec.dtype], spec.shape, spec.nbytes) for spec in specs]
    has_tensors = any((folder / name).is_file() for name in (INDEX_NAME, SINGLE_NAME))
    if has_tensors:
        stored = open_checkpoint(folder)
        check_tensors(folder, [spec for spec in specs if not is_ignored(spec.name)], stored, complete=True)
        tensors = [(name, t.dtype, t.shape, t.nbytes) for name, t in stored.items()]
    parts = part_sizes(tensors)
    by_name = {part.name: part for part in parts}
    packed, held = cache_bytes(config)
    return Report(
        path=str(path),
        has_tensors=has_tensors,
        layers=layer_table(config),
        parts=parts,
        backbone_parameters=sum(part.parameters for part in parts if part.name not in NOT_BACKBONE),
        engram_table_parameters=by_name["Engram tables"].parameters,
        draft_parameters=by_name["draft blocks"].parameters,
        cache=(packed, held),
        max_seq_len=config.max_seq_len,
        usable_share=USABLE_SHARE,
        fits=tuple(fit(config, by_name, held, memory) for memory in MEMORY_SIZES_GB),
    )


def layer_table(config: ModelConfig) -> tuple[LayerRow, ...]:
    """What each block does, backbone first."""
    rows = []
    for layer, ratio in enumerate(config.compress_ratios):
        is_draft = layer >= config.n_layers
        if is_draft:
            role = "draft"
        elif not ratio:
            role = "window only"
        elif layer in config.kv_source_layers:
            role = "full, candidate source" if layer == config.indexer.candidate_source_layer else "full"
        else:
            role = "reindex" if layer in config.index_source_layers else "reuse"
        moe = config.draft_moe if is_draft else config.moe
        rows.append(
            LayerRow(
                layer=layer,
                ratio=ratio,
                role=role,
                kv_source=config.kv_source(layer) if ratio else None,
                index_source=config.index_source(layer) if ratio else None,
                has_engram=layer in config.engram.layer_ids,
                experts=moe.n_routed_experts,
                experts_per_token=moe.n_activated_experts,
            )
        )
    return tuple(rows)


def part_sizes(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> tuple[PartSize, ...]:
    """Parameters and bytes by part, from (name, dtype, shape, bytes) of each tensor; every part of `PARTS` is there."""
    parameters = dict.fromkeys((name for name, _ in PARTS), 0)
    sizes = dict.fromkeys(parameters, 0)
    compiled = [(name, re.compile(pattern)) for name, pattern in PARTS]
    for name, dtype, shape, nbytes in tensors:
        part = next(part for part, pattern in compiled if pattern.match(name))
        sizes[part] += nbytes
        if dtype != "F8_E8M0":
            parameters[part] += math.prod(shape) * (2 if dtype == "I8" else 1)
    return tuple(PartSize(name, parameters[name], sizes[name]) for name in parameters)


def cache_bytes(config: ModelConfig) -> tuple[CacheBytes, CacheBytes]:
    """Cache sizes in the published packed formats, and as this package holds them (bf16 values that were rounded to those)."""
    head, key = config.attention.head_dim, config.indexer.head_dim
    entry = head / 2 + head / ENTRY_GROUP + key / 2 + key / QUANT_BLOCK
    per_token = sum(entry / config.compress_ratios[layer] for layer in config.kv_source_layers)
    ring = (head + head // QUANT_BLOCK) * config.attention.window_size
    packed = CacheBytes("packed (FP8 rows, FP4 entries)", per_token, ring * len(config.compress_ratios))

    sizes = CacheSizes(num_slots=1, num_blocks=1, max_backtrack=config.draft.block_size if config.draft.n_layers else 0)
    cache = ModelCache(config, precision_named("native"), sizes, "meta")
    pools = sum(pool.entries.nbytes + pool.index_keys.nbytes for pool in cache.pools.values())
    per_sequence = sum(tensor.nbytes for tensor in cache.tensors()) - pools
    return packed, CacheBytes("as held (bfloat16)", pools / sizes.block_size, per_sequence)


def fit(config: ModelConfig, parts: dict[str, PartSize], cache: CacheBytes, memory_gb: int) -> Fit:
    """What a device with `memory_gb` (10^9 bytes) can hold of the model."""
    usable = int(memory_gb * 1e9 * USABLE_SHARE)
    total = sum(part.bytes for name, part in parts.items() if name != "vision (not loaded)")
    without_tables = total - parts["Engram tables"].bytes
    experts, count = parts["experts"].bytes, config.moe.n_routed_experts
    powers = [2**i for i in range(count.bit_length()) if 2**i <= count]
    shares = {ranks: without_tables - experts + experts * math.ceil(count / ranks) // count for ranks in powers}
    ranks = next((ranks for ranks, share in shares.items() if share <= usable), None)
    weights = total if total <= usable else shares[ranks] if ranks else usable
    tokens = (usable - weights - cache.per_sequence) / cache.per_token if cache.per_token else 0
    return Fit(memory_gb, total <= usable, without_tables <= usable, ranks, max(0, int(tokens)))
