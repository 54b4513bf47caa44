"""A drafter that knows what will be drawn: drafts of an untrained model would nearly all be rejected."""

from collections.abc import Callable

import torch

from deepinfer.dims import Tensor
from deepinfer.runtime.sampler import SamplingMetadata
from deepinfer.runtime.step_state import DeviceOutputs, SequenceMetadata
from deepinfer.runtime.worker import Worker

WRONG = 70
ERRS_EVERY = 4  # positions, so that accepted runs end anywhere


def tokens_ahead(known: dict[int, list[int]]) -> Callable[..., Tensor]:
    """A stand-in for `Worker._propose`. `known`: prompt and output of each request, by its seed."""

    def propose(
        self: Worker, meta: SequenceMetadata, sampling: SamplingMetadata, outputs: DeviceOutputs, last: Tensor, *_: object
    ) -> Tensor:
        seeds = sampling.seeds[meta.first_logit].tolist()
        drafts = torch.full((len(seeds), self.num_drafts), WRONG)
        for row, (seed, newest) in enumerate(zip(seeds, outputs.next_start[meta.sample_groups].tolist(), strict=True)):
            for place in range(self.num_drafts):
                position = newest + 1 + place
                if position < len(known[seed]) and (position + seed) % ERRS_EVERY:
                    drafts[row, place] = known[seed][position]
        return drafts

    return propose
