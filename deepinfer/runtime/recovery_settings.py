"""From an engine's settings and its model to the rules by which prefixes are recovered."""

import hashlib

from deepinfer.checkpoint.safetensors_file import as_bytes
from deepinfer.dims import Tensor
from deepinfer.engine_config import EngineConfig
from deepinfer.model.tail import first_decoder_layer
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.recovery import CacheNames
from deepinfer.runtime.replay import ReplayPolicy

# Models up to this size are digested whole, larger ones by a sample of each tensor.
WHOLE_DIGEST_BYTES = 2**30
SAMPLED_ELEMENTS = 4096
DIGEST_BYTES = 16


def num_ring_snapshots(config: EngineConfig) -> int:
    """Slots for the rings of stored prefixes."""
    if not (config.enable_prefix_caching and config.replay == "exact"):
        return 0
    return config.max_num_seqs if config.num_ring_snapshots is None else config.num_ring_snapshots


def num_host_blocks(config: EngineConfig) -> int:
    """Places in host memory for cache blocks."""
    return config.num_host_blocks if config.enable_prefix_caching else 0


def max_backtrack(limits: SchedulerLimits) -> int:
    """Rows that may be taken back: a step's drafts; where rings are kept, all rows of a decode step, which may be dropped whole."""
    return limits.num_speculative_tokens + (limits.num_ring_snapshots > 0)


def replay_policy(model: Transformer, config: EngineConfig) -> ReplayPolicy:
    """The rules of the chosen mode."""
    return ReplayPolicy(
        mode=config.replay,
        window=model.config.attention.window_size,
        num_layers=model.config.n_layers,
        num_decoder_layers=model.config.n_layers - first_decoder_layer(model.config),
        has_drafts=config.num_speculative_tokens > 0,
    )


def cache_names(model: Transformer, config: EngineConfig) -> CacheNames | None:
    """What cached entries are known by; None with caching off."""
    if not config.enable_prefix_caching:
        return None
    numerics = model.numerics
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    parts = (numerics.precision.name, numerics.ops.batch_invariant, numerics.published_index_keys, config.block_size)
    # What a bounded replay leaves is no use to an exact one.
    digest.update(repr((*parts, config.replay == "bounded")).encode())
    digest.update(model_digest(model))
    drafts = config.num_speculative_tokens
    has_engram = bool(model.config.engram.layer_ids)
    return CacheNames(
        root=digest.digest(),
        keeps_rings=num_ring_snapshots(config) > 0,
        max_backtrack=drafts + (num_ring_snapshots(config) > 0),
        context=model.config.engram.max_ngram_size - 1 if has_engram else 0,
        num_host_blocks=num_host_blocks(config),
    )


def model_digest(model: Transformer) -> bytes:
    """A digest of the configuration and of every parameter and buffer; of large models only a sample of each."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    total = sum(tensor.nbytes for tensor in tensors.values())
    digest = hashlib.blake2b(repr(model.config).encode(), digest_size=DIGEST_BYTES)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(as_bytes(_sample(tensor, whole=total <= WHOLE_DIGEST_BYTES)))
    return digest.digest()


def _sample(tensor: Tensor, whole: bool) -> Tensor:
    flat = tensor.detach().reshape(-1)
    step = 1 if whole else max(flat.shape[0] // SAMPLED_ELEMENTS, 1)
    return flat[::step].contiguous().cpu()
