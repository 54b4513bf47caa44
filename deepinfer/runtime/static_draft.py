"""Proposals over buffers that never move, so that a captured graph can be replayed: the counterpart of `static_decode.py`.

One graph for each number of sequences and each kind of sampling (greedy, random, filtered).
"""

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.cache import ModelCache
from deepinfer.model.compiled import LEAST_ROWS
from deepinfer.model.rows import TRASH_SLOT
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.device import Device
from deepinfer.runtime.sampler import SamplingKind, SamplingMetadata, choose
from deepinfer.runtime.static_sampler import StaticSampling


class StaticDraft:
    """Drafts for up to `bucket` sequences, `kept` of each proposal; sampled with the noise that the target will use."""

    def __init__(self, model: Transformer, cache: ModelCache, bucket: int, kind: SamplingKind, kept: int, device: Device) -> None:
        self.model, self.cache, self.kept = model, cache, kept
        place, count = device.torch_device, max(bucket, LEAST_ROWS)
        # Places of the token drawn last, of the newest position and of the ring slot; trash until the first run.
        self._inputs = torch.full((3, count), TRASH_SLOT, device=place)
        self._sampling = StaticSampling(count, kind, place)
        self._drafts = torch.zeros((count, kept), dtype=torch.int64, device=place)
        self._survival = torch.zeros((count, kept), device=place)
        self._replay = device.capture(self._propose)

    @torch.inference_mode()
    def _propose(self) -> None:
        def draft(logits: Tensor, positions: Tensor) -> Tensor:
            return choose(logits, self._sampling.metadata, positions)

        last, newest, slots = self._inputs.unbind(0)
        proposal = self.model.propose_draft(last, newest, slots, self.cache, draft)
        self._drafts.copy_(proposal.token_ids[:, : self.kept])
        self._survival.copy_(proposal.confidence[:, : self.kept].float().sigmoid().cumprod(dim=1))

    def run(self, inputs: Int[Tensor, "3 n"], staged_on_host: SamplingMetadata) -> tuple[Int[Tensor, "B k"], Float[Tensor, "B k"]]:
        """Drafts and their survival; the next run overwrites them.

        Args:
            inputs: last token, its row's position and ring slot of each sequence; what is behind the bucket is trash.
            staged_on_host: how they sample.
        """
        count = min(inputs.shape[1], self._inputs.shape[1])
        self._inputs[:, :count].copy_(inputs[:, :count])
        if count < self._inputs.shape[1]:
            self._inputs[:, count:].fill_(TRASH_SLOT)
        self._sampling.fill(staged_on_host)
        self._replay()
        return self._drafts, self._survival
