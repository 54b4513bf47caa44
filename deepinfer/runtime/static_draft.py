"""Proposals over buffers that never move, so that a captured graph can be replayed: the counterpart of `static_decode.py`.

One graph for each number of sequences and each kind of sampling (greedy, random, filtered).
"""

from dataclasses import replace

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.cache import ModelCache
from deepinfer.model.compiled import LEAST_ROWS
from deepinfer.model.rows import TRASH_SLOT
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.device import Device
from deepinfer.runtime.sampler import SamplingMetadata, choose


class StaticDraft:
    """Drafts for up to `bucket` sequences, `kept` of each proposal; sampled with the noise that the target will use."""

    def __init__(
        self, model: Transformer, cache: ModelCache, bucket: int, sampling_like: SamplingMetadata, kept: int, device: Device
    ) -> None:
        self.model, self.cache, self.kept = model, cache, kept
        place, count = device.torch_device, max(bucket, LEAST_ROWS)
        # Places of the token drawn last, of the newest position and of the ring slot; trash until the first run.
        self._inputs = torch.full((3, count), TRASH_SLOT, device=place)
        sampling = SamplingMetadata.greedy(count).to(place)
        self._sampling = replace(sampling, any_random=sampling_like.any_random, any_filter=sampling_like.any_filter)
        self._drafts = torch.zeros((count, kept), dtype=torch.int64, device=place)
        self._survival = torch.zeros((count, kept), device=place)
        self._replay = device.capture(self._propose)

    @torch.inference_mode()
    def _propose(self) -> None:
        def draft(logits: Tensor, positions: Tensor) -> Tensor:
            return choose(logits, self._sampling, positions)

        last, newest, slots = self._inputs.unbind(0)
        proposal = self.model.propose_draft(last, newest, slots, self.cache, draft)
        self._drafts.copy_(proposal.token_ids[:, : self.kept])
        self._survival.copy_(proposal.confidence[:, : self.kept].float().sigmoid().cumprod(dim=1))

    def run(
        self, last: Int[Tensor, " S"], newest: Int[Tensor, " S"], slots: Int[Tensor, " S"], sampling: SamplingMetadata
    ) -> tuple[Int[Tensor, "S k"], Float[Tensor, "S k"]]:
        """Drafts after `last` and their survival; views that the next run overwrites."""
        count = last.shape[0]
        self._inputs[:, :count].copy_(torch.stack((last, newest, slots)))
        self._inputs[:, count:].fill_(TRASH_SLOT)
        for mine, theirs in zip(self._sampling.tensors(), sampling.tensors(), strict=True):
            mine[:count].copy_(theirs)
        self._replay()
        return self._drafts[:count], self._survival[:count]
