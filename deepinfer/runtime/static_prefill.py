"""Short prefills over buffers that never move (`static_forward.py`): launched one by one they cost the host more than the device.

Which rows get logits differs from step to step, so they are picked outside the graph.
"""

from dataclasses import replace

import torch

from deepinfer.dims import Float, Tensor
from deepinfer.model.cache import ModelCache
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.device import Device
from deepinfer.runtime.row_layout import Layout, logit_rows
from deepinfer.runtime.staging import to_device
from deepinfer.runtime.static_forward import StaticForward
from deepinfer.runtime.step_state import DeviceOutputs, LogitRows, SequenceMetadata


class StaticPrefill:
    """The forward of one shape, for steps in which no row replays and nobody looks on. `relay`: see `StaticForward`."""

    def __init__(
        self, model: Transformer, cache: ModelCache, shape_like: SequenceMetadata, relay: DeviceOutputs, device: Device
    ) -> None:
        self._step = StaticForward(model, cache, shape_like, relay, device.torch_device)
        self._left: tuple[Layout, Float[Tensor, "T D"]] | None = None
        self._replay = device.capture(self._forward)

    @torch.inference_mode()
    def _forward(self) -> None:
        layout, hidden = self._step.run()
        self._left = layout, hidden.final

    @torch.inference_mode()
    def run(self, metadata: SequenceMetadata, before: DeviceOutputs | None, outputs: DeviceOutputs) -> LogitRows:
        """One step with inputs that are still on the host. Fills `outputs`; what it returns are copies."""
        self._step.fill(metadata, before)
        self._replay()
        assert self._left is not None
        mine = self._step.metadata
        layout, final = self._left
        outputs.next_start.copy_((layout.starts + mine.q_lens)[: outputs.next_start.shape[0]])
        (groups,) = to_device([metadata.sample_groups], mine.starts.device)
        return logit_rows(replace(mine, sample_groups=groups, num_logits=metadata.num_logits), layout, final)
