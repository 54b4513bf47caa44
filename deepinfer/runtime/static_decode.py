"""Decode steps over buffers that never move, so that a captured graph can be replayed with new contents.

One graph for each (row groups, block-table width). True lengths, tokens and tables are values inside the buffers; shapes are those
of the bucket. On a device without graphs the same function simply runs.
"""

import torch

from deepinfer.dims import Tensor
from deepinfer.model.cache import ModelCache
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.device import Device
from deepinfer.runtime.staging import pack, unpack
from deepinfer.runtime.step_state import POISON, DeviceOutputs, SequenceMetadata, build_rows


class StaticDecode:
    """The decode forward of one bucket. `relay` receives what the step before left; it is as long as the largest bucket."""

    def __init__(
        self, model: Transformer, cache: ModelCache, shape_like: SequenceMetadata, relay: DeviceOutputs, device: Device
    ) -> None:
        self.model, self.cache, self.relay = model, cache, relay
        place, groups = device.torch_device, shape_like.starts.shape[0]
        # A bucket starts as padding only: its warm-up touches nothing but trash.
        like = shape_like.as_padding().forward_inputs()
        self._inputs = pack(like, place).to(place)
        self._metadata = shape_like.with_forward_inputs(unpack(self._inputs, like))
        self.next_start = torch.full((groups,), POISON, device=place)
        self.final = torch.empty(groups, model.config.dim, dtype=model.numerics.precision.activation_dtype, device=place)
        self._replay = device.capture(self._forward)

    @torch.inference_mode()
    def _forward(self) -> None:
        rows, starts = build_rows(self._metadata, self.relay)
        self.next_start.copy_(starts + self._metadata.q_lens)
        self.final.copy_(self.model.forward_rows(rows, self.cache).final)

    @torch.inference_mode()
    def run(self, staged: Tensor, before: DeviceOutputs | None, outputs: DeviceOutputs, sample_rows: Tensor) -> None:
        """One step: `staged` are the packed forward inputs on the host. Fills `outputs`."""
        self._inputs.copy_(staged, non_blocking=True)
        if before is not None:
            count = before.sampled.shape[0]
            self.relay.sampled[:count].copy_(before.sampled)
            self.relay.next_start[:count].copy_(before.next_start)
        self._replay()
        outputs.next_start.copy_(self.next_start)
        outputs.final.copy_(self.final[sample_rows])
        outputs.positions.copy_(self.next_start[sample_rows] - 1)
