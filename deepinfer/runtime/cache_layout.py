"""How many cache blocks fit: arithmetic on sizes, no tensors."""

from deepinfer.config import ModelConfig
from deepinfer.errors import CapacityError

MEMORY_SHARE = 0.5  # of the free memory at most; the rest is for activations


def bytes_per_block(config: ModelConfig, block_size: int, element_bytes: int) -> int:
    """Bytes that one block takes in all pools together (compressed entries and index keys of every KV source)."""
    width = config.attention.head_dim + config.indexer.head_dim
    return sum(block_size // config.compress_ratios[layer] * width * element_bytes for layer in config.kv_source_layers)


def choose_num_blocks(
    config: ModelConfig, *, block_size: int, element_bytes: int, max_num_seqs: int, max_model_len: int, free_bytes: int
) -> int:
    """Blocks for the pool, the trash block included: enough for every sequence at full length, or what fits.

    Raises: CapacityError if not even one sequence of `block_size` tokens fits.
    """
    wanted = max_num_seqs * -(-max_model_len // block_size)
    each = bytes_per_block(config, block_size, element_bytes)
    if each == 0:
        return wanted + 1
    fitting = int(free_bytes * MEMORY_SHARE) // each
    if fitting < 2:
        raise CapacityError(f"{free_bytes / 2**20:.0f} MiB are free, one cache block takes {each / 2**20:.2f} MiB")
    return min(wanted + 1, fitting)
