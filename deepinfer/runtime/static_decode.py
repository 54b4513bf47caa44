"""Decode steps over buffers that never move, so that a captured graph can be replayed with new contents.

One graph for each shape. True lengths, tokens and tables are values inside the buffers; shapes are those of the bucket. On a device
without graphs the same function simply runs.
"""

import torch

from deepinfer.dims import Int, Tensor
from deepinfer.model.cache import ModelCache
from deepinfer.model.compiled import compile_function, is_compiled
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.device import Device
from deepinfer.runtime.row_layout import build_rows
from deepinfer.runtime.staging import pack, staged, unpack
from deepinfer.runtime.step_state import DeviceOutputs, LogitRows, SequenceMetadata


class StaticDecode:
    """The decode forward of one shape. `relay` receives what the step before left; it is as long as the largest bucket.

    Every row of a decode step gets logits, and padding comes last: the rows with logits are the first of all rows.
    """

    def __init__(
        self, model: Transformer, cache: ModelCache, shape_like: SequenceMetadata, relay: DeviceOutputs, device: Device
    ) -> None:
        self.model, self.cache, self.relay = model, cache, relay
        self._build_rows = compile_function(build_rows) if is_compiled(model) else build_rows
        place = device.torch_device
        # A shape starts as padding only: its warm-up touches nothing but trash.
        like = shape_like.as_padding().forward_inputs()
        self._inputs = pack(like).to(place)
        self._metadata = shape_like.with_forward_inputs(unpack(self._inputs, like))
        self.num_groups = shape_like.starts.shape[0]
        # Read after other graphs have run, and those overwrite each other's memory.
        self._groups = torch.arange(self.num_groups, device=place)
        self.num_rows = shape_like.num_rows
        self._left: tuple[Tensor, LogitRows] | None = None
        self.replay = device.capture(self._forward)

    @torch.inference_mode()
    def _forward(self) -> None:
        layout = self._build_rows(self._metadata, self.relay)
        rows = layout.rows
        hidden = self.model.forward_rows(rows, self.cache)
        if hidden.main_hidden is not None and self.relay.drafts.shape[1]:
            self.model.observe_draft(hidden.main_hidden, rows, self.cache)
        everything = LogitRows(
            final=hidden.final,
            positions=rows.positions,
            fed_next=rows.token_ids.roll(-1),
            group=rows.seq_ids,
            place=rows.offsets,
            groups=self._groups,
            slots=self._metadata.slots,
            remap=self._metadata.remap,
            n_drafts=layout.n_drafts,
            survival=layout.survival,
        )
        # Outputs of a captured graph stay at their places: a replay fills them anew, and one of another graph may spoil them.
        self._left = (layout.starts + self._metadata.q_lens, everything)

    @property
    def left(self) -> tuple[Int[Tensor, " B"], LogitRows]:
        """What the last run left for its sampler: the position behind each group's certain rows, and all rows, padding included."""
        assert self._left is not None
        return self._left

    @torch.inference_mode()
    def run(self, metadata: SequenceMetadata, before: DeviceOutputs | None, outputs: DeviceOutputs) -> LogitRows:
        """One step with inputs that are still on the host. Fills `outputs`; the next graph overwrites most of what it returns.

        The step's own sampler is the only reader, launched on the same stream before anything else is replayed. Drafts need the
        groups and their slots besides, which stay.
        """
        place = self._inputs.device
        self._inputs.copy_(staged(pack(metadata.forward_inputs()), place), non_blocking=True)
        if before is not None:
            self.relay.copy_from(before)
        self.replay()
        next_start, everything = self.left
        outputs.next_start.copy_(next_start[: outputs.next_start.shape[0]])
        rows, groups = metadata.num_logits, metadata.sample_groups.shape[0]
        return LogitRows(*(t[:rows] for t in everything[:5]), *(t[:groups] for t in everything[5:]))
