"""What all forwards over buffers that never move have in common: inputs at fixed places, and rows built from them.

One graph for each shape. True lengths, tokens and tables are values inside the buffers; shapes are those of the bucket. On a device
without graphs the same functions simply run.
"""

import torch

from deepinfer.model.cache import ModelCache
from deepinfer.model.compiled import compile_function, is_compiled
from deepinfer.model.transformer import Hidden, Transformer
from deepinfer.runtime.row_layout import Layout, build_rows
from deepinfer.runtime.staging import pack, staged, unpack
from deepinfer.runtime.step_state import DeviceOutputs, SequenceMetadata


class StaticForward:
    """Inputs of one shape, and the forward over them. `relay` receives what the step before left; it is as long as any step needs.

    Attributes:
        metadata: as staged last, on the device.
    """

    def __init__(
        self, model: Transformer, cache: ModelCache, shape_like: SequenceMetadata, relay: DeviceOutputs, place: torch.device
    ) -> None:
        self.model, self.cache, self.relay = model, cache, relay
        self._build_rows = compile_function(build_rows) if is_compiled(model) else build_rows
        # A shape starts as padding only: its warm-up touches nothing but trash.
        like = shape_like.as_padding().forward_inputs()
        self._inputs = pack(like).to(place)
        self.metadata = shape_like.with_forward_inputs(unpack(self._inputs, like))

    @torch.inference_mode()
    def run(self) -> tuple[Layout, Hidden]:
        """The forward itself, which a graph can hold. Mutates the cache."""
        layout = self._build_rows(self.metadata, self.relay)
        hidden = self.model.forward_rows(layout.rows, self.cache)
        if hidden.main_hidden is not None and self.relay.drafts.shape[1]:
            self.model.observe_draft(hidden.main_hidden, layout.rows, self.cache)
        return layout, hidden

    @torch.inference_mode()
    def fill(self, metadata: SequenceMetadata, before: DeviceOutputs | None) -> None:
        """Take over a step's inputs, which are still on the host, and what the step before left. Mutates the buffers."""
        self._inputs.copy_(staged(pack(metadata.forward_inputs()), self._inputs.device), non_blocking=True)
        if before is not None:
            self.relay.copy_from(before)
