"""The grammars' part of `SamplerInputs`: which tokens the rows of a step may draw, from committed tokens and the drafts fed.

Masks are addressed by sequence and place in it, never by counting what other sequences have drafted. Masks travel packed, one bit a
token, and are spread out on the device.
"""

import numpy as np
import torch

from deepinfer.dims import Bool, Int, Tensor
from deepinfer.runtime.plan import SchedulerOutputs
from deepinfer.runtime.sequence import Sequence
from deepinfer.structured.grammar import mask_bytes


def has_grammar(plan: SchedulerOutputs) -> bool:
    """Whether a token drawn in this step is bound by a grammar."""
    return any(seq.is_sampling and seq.request.grammar is not None for seq in plan.sequences)


def looks_at_drafts(plan: SchedulerOutputs) -> bool:
    """Whether the masks of this step need the drafts of the step before on the host."""
    return any(seq.n_drafts > 0 and seq.request.grammar is not None for seq in plan.sequences)


def build_masks(
    plan: SchedulerOutputs, sequences: list[Sequence], drafts: list[list[int]], vocab_size: int
) -> Int[Tensor, "S Q W"] | None:
    """Masks of a planned step whose predecessors have all been applied; None if it has no grammar.

    For each sequence that samples one in front of its drafts and one behind each, whether or not the device gives them rows.

    Args:
        sequences: those of the plan's row groups. Rows of one that has ended or was preempted since are dropped: any mask will do.
        drafts: what each row group of the step before proposed; may be empty unless `looks_at_drafts`.
    """
    if not has_grammar(plan):
        return None
    sampling = [(seq, sequence) for seq, sequence in zip(plan.sequences, sequences, strict=True) if seq.is_sampling]
    most = max(1 + seq.n_drafts for seq, _ in sampling)
    masks = np.full((len(sampling), most, mask_bytes(vocab_size)), 0xFF, dtype=np.uint8)
    for own, (seq, sequence) in zip(masks, sampling, strict=True):
        if sequence.grammar is not None and sequence.epoch == seq.epoch:
            fed = drafts[seq.remap][: seq.n_drafts] if seq.n_drafts else []
            sequence.grammar.write_masks(own[: 1 + seq.n_drafts], fed)
    return torch.from_numpy(masks)


def unpack(masks: Int[Tensor, "R W"], vocab_size: int) -> Bool[Tensor, "R V"]:
    """Packed masks (uint8) as booleans."""
    places = torch.arange(8, dtype=torch.uint8, device=masks.device)
    return (masks[:, :, None] >> places & 1).to(torch.bool).flatten(1)[:, :vocab_size]
