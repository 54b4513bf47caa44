"""The bytes of cache blocks that the device gave away; `host_tier.py` has their names."""

import torch

from deepinfer.model.cache import ModelCache


class HostMemory:
    """The bytes: pinned, so that copies run on the device's stream in the order of everything else there."""

    def __init__(self, memory: ModelCache, num_blocks: int) -> None:
        self._blocks = memory.block_tensors()
        pinned = memory.history.device.type != "cpu" and num_blocks > 0
        self._places = [torch.empty((num_blocks, *t.shape[1:]), dtype=t.dtype, pin_memory=pinned) for t in self._blocks]

    def offload(self, block: int, place: int) -> None:
        """Copy a block from the device."""
        for source, target in zip(self._blocks, self._places, strict=True):
            target[place].copy_(source[block], non_blocking=True)

    def restore(self, place: int, block: int) -> None:
        """Copy a block to the device. Mutates the cache."""
        for source, target in zip(self._places, self._blocks, strict=True):
            target[block].copy_(source[place], non_blocking=True)
