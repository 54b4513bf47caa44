"""Decode steps over buffers that never move (`static_forward.py`), so that a captured graph can be replayed with new contents."""

import torch

from deepinfer.dims import Int, Tensor
from deepinfer.model.cache import ModelCache
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.device import Device
from deepinfer.runtime.static_forward import StaticForward
from deepinfer.runtime.step_state import DeviceOutputs, LogitRows, SequenceMetadata


class StaticDecode:
    """The decode forward of one shape. `relay`: see `StaticForward`.

    Every row of a decode step gets logits, and padding comes last: the rows with logits are the first of all rows.
    """

    def __init__(
        self, model: Transformer, cache: ModelCache, shape_like: SequenceMetadata, relay: DeviceOutputs, device: Device
    ) -> None:
        place = device.torch_device
        self._step = StaticForward(model, cache, shape_like, relay, place)
        self.num_groups = shape_like.starts.shape[0]
        # Read after other graphs have run, and those overwrite each other's memory.
        self._groups = torch.arange(self.num_groups, device=place)
        self.num_rows = shape_like.num_rows
        self._left: tuple[Tensor, LogitRows] | None = None
        self.replay = device.capture(self._forward)

    @torch.inference_mode()
    def _forward(self) -> None:
        layout, hidden = self._step.run()
        rows = layout.rows
        everything = LogitRows(
            final=hidden.final,
            positions=rows.positions,
            fed_next=rows.token_ids.roll(-1),
            group=rows.seq_ids,
            place=rows.offsets,
            groups=self._groups,
            slots=self._step.metadata.slots,
            remap=self._step.metadata.remap,
            n_drafts=layout.n_drafts,
            survival=layout.survival,
        )
        # Outputs of a captured graph stay at their places: a replay fills them anew, and one of another graph may spoil them.
        self._left = (layout.starts + self._step.metadata.q_lens, everything)

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
        self._step.fill(metadata, before)
        self.replay()
        next_start, everything = self.left
        outputs.next_start.copy_(next_start[: outputs.next_start.shape[0]])
        rows, groups = metadata.num_logits, metadata.sample_groups.shape[0]
        return LogitRows(*(t[:rows] for t in everything[:5]), *(t[:groups] for t in everything[5:]))
