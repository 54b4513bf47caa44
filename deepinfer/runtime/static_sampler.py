"""Drawing over buffers that never move, so that a captured graph can be replayed: the counterpart of `static_decode.py`.

One graph for each shape of a decode step and each kind of sampling. It holds the operations of `step_sampler.py`, so that the
tokens are the same to the bit; what it spares is the host's part of up to a hundred small launches.

Legend: T rows of the shape, S its groups, padding included; k drafts.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from deepinfer.dims import Int, Tensor
from deepinfer.model.compiled import compile_function, is_compiled
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.device import Device
from deepinfer.runtime.sampler import SamplerOutput, SamplingKind, SamplingMetadata, choose, report
from deepinfer.runtime.staging import Packed, pack, staged, unpack
from deepinfer.runtime.static_decode import StaticDecode
from deepinfer.runtime.step_state import DeviceOutputs, LogitRows
from deepinfer.runtime.verify import kept_run


class StaticSampling:
    """Sampling parameters of up to `count` sequences at places that never move; whoever has none is greedy."""

    def __init__(self, count: int, kind: SamplingKind, device: torch.device) -> None:
        self._count = count
        greedy = SamplingMetadata.greedy(count)
        self._packed = pack(greedy.drawing_inputs()).to(device)
        views = unpack(self._packed, greedy.drawing_inputs())
        kinds = {"any_random": kind.any_random, "any_filter": kind.any_filter, "num_top": kind.num_top}
        self.metadata = replace(greedy.to(device).with_drawing_inputs(views), **kinds)  # type: ignore[arg-type]

    def fill(self, staged_on_host: SamplingMetadata) -> None:
        """Take over the parameters of some sequences. Greedy ones have none that anybody reads."""
        if self.metadata.any_random:
            padded = [F.pad(tensor, (0, self._count - tensor.shape[0])) for tensor in staged_on_host.drawing_inputs()]
            self._packed.copy_(staged(pack(padded), self._packed.device), non_blocking=True)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StaticOutput(SamplerOutput):
    """What a run leaves, padding included: for the host, and on the device for the next step and its drafts.

    Attributes:
        kept: the last token of each group, and the position of its next row.
        draft_inputs: last token, its row's position and ring slot of each group.
    """

    kept: Int[Tensor, "S 2"]
    draft_inputs: Int[Tensor, "3 S"]


def keep_matching(rows: LogitRows, drawn: Int[Tensor, " T"], next_start: Int[Tensor, " S"], width: int) -> dict[str, Tensor]:
    """Accept the drafts that were drawn, too: those fields of `StaticOutput` that follow from it.

    `next_start` are the positions behind the certain rows, `width` is 1 + k.
    """
    run = kept_run(rows, drawn, drawn == rows.fed_next, width)
    behind = next_start + run.accepted
    return {
        "emitted": run.accepted + 1,
        "kept": torch.stack((run.last, behind), dim=1),
        # Padding has drawn nothing, and looks up token 0 at position 0 of the trash.
        "draft_inputs": torch.stack((run.last.clamp(min=0), (behind - 1).clamp(min=0), rows.slots)),
    }


class StaticSampler:
    """Draws for the rows that `decode` has left; nothing but a request's own parameters may change its logits."""

    @torch.inference_mode()
    def __init__(self, model: Transformer, decode: StaticDecode, kind: SamplingKind, num_drafts: int, device: Device) -> None:
        self.model, self.num_drafts, self._decode = model, num_drafts, decode
        self._sampling = StaticSampling(decode.num_groups, kind, device.torch_device)
        self._keep_matching = compile_function(keep_matching) if is_compiled(model) else keep_matching
        # Memory of its own: what graphs allocate is overwritten by others, and the host may read this later.
        self._left = Packed.of(self._draw())
        self._replay = device.capture(self._fill)

    def _draw(self) -> StaticOutput:
        next_start, rows = self._decode.left
        sampling = self._sampling.metadata
        logits = self.model.logits(rows.final)
        of_rows = sampling.rows(rows.group) if sampling.any_random else sampling
        drawn = choose(logits, of_rows, rows.positions + 1)
        output = StaticOutput(
            token_ids=drawn,
            n_drafts=rows.n_drafts,
            survival=rows.survival,
            peaks=logits.amax(dim=1),
            **self._keep_matching(rows, drawn, next_start, 1 + self.num_drafts),
        )
        return report(logits, output, sampling.num_top)

    @torch.inference_mode()
    def _fill(self) -> None:
        self._left.fill(self._draw())

    @torch.inference_mode()
    def run(self, staged_on_host: SamplingMetadata, outputs: DeviceOutputs) -> Packed[StaticOutput]:
        """What was drawn, behind a run of `decode`. Fills `outputs`; the next run overwrites the result.

        That next run comes after the host has read the tokens of this one.
        """
        self._sampling.fill(staged_on_host)
        self._replay()
        outputs.tokens[:, :2].copy_(self._left.record.kept[: outputs.tokens.shape[0]])
        return self._left
