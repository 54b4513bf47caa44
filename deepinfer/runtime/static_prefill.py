"""Short prefills over buffers that never move: the forward of a step of few rows, whose launches would take the host longer than
its work takes the device.

As in `static_decode.py`, true lengths are values and shapes those of a bucket. Which rows get logits differs from step to step, so
that they are picked outside.
"""

from dataclasses import replace

import torch

from deepinfer.dims import Float, Tensor
from deepinfer.model.cache import ModelCache
from deepinfer.model.compiled import compile_function, is_compiled
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.device import Device
from deepinfer.runtime.row_layout import Layout, build_rows, logit_rows
from deepinfer.runtime.staging import pack, staged, to_device, unpack
from deepinfer.runtime.step_state import DeviceOutputs, LogitRows, SequenceMetadata


class StaticPrefill:
    """The forward of one shape, for steps in which no row replays and nobody looks on. `relay`: see `StaticDecode`."""

    def __init__(
        self, model: Transformer, cache: ModelCache, shape_like: SequenceMetadata, relay: DeviceOutputs, device: Device
    ) -> None:
        self.model, self.cache, self.relay = model, cache, relay
        self._build_rows = compile_function(build_rows) if is_compiled(model) else build_rows
        like = shape_like.as_padding().forward_inputs()
        self._inputs = pack(like).to(device.torch_device)
        self._metadata = shape_like.with_forward_inputs(unpack(self._inputs, like))
        self._left: tuple[Layout, Float[Tensor, "T D"]] | None = None
        self._replay = device.capture(self._forward)

    @torch.inference_mode()
    def _forward(self) -> None:
        layout = self._build_rows(self._metadata, self.relay)
        hidden = self.model.forward_rows(layout.rows, self.cache)
        if hidden.main_hidden is not None and self.relay.drafts.shape[1]:
            self.model.observe_draft(hidden.main_hidden, layout.rows, self.cache)
        self._left = layout, hidden.final

    @torch.inference_mode()
    def run(self, metadata: SequenceMetadata, before: DeviceOutputs | None, outputs: DeviceOutputs) -> LogitRows:
        """One step with inputs that are still on the host. Fills `outputs`; what it returns are copies."""
        place = self._inputs.device
        self._inputs.copy_(staged(pack(metadata.forward_inputs()), place), non_blocking=True)
        if before is not None:
            self.relay.copy_from(before)
        self._replay()
        assert self._left is not None
        layout, final = self._left
        outputs.next_start.copy_((layout.starts + self._metadata.q_lens)[: outputs.next_start.shape[0]])
        (groups,) = to_device([metadata.sample_groups], place)
        return logit_rows(replace(self._metadata, sample_groups=groups, num_logits=metadata.num_logits), layout, final)
