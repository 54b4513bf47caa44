"""From the rows that a forward leaves to tokens, and to drafts of the tokens after them: the second half of a step.

What is common in decode steps is replayed from a graph (`static_sampler.py`, `static_draft.py`). Steps whose requests forbid
tokens, look at their text or verify by rejection run here as written, and so do steps of any other shape: the tokens are the same.
"""

import torch
import torch.nn.functional as F

from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.cache import ModelCache
from deepinfer.model.compiled import LEAST_ROWS
from deepinfer.model.transformer import Transformer
from deepinfer.ops.noise import DRAFT, TARGET
from deepinfer.runtime.constraints import SamplerInputs, groups_behind_run, rows_behind_drafts
from deepinfer.runtime.device import Device
from deepinfer.runtime.sampler import (
    SamplerOutput,
    SamplingKind,
    SamplingMetadata,
    choose,
    constrain,
    log_distribution_of,
    report,
)
from deepinfer.runtime.staging import Packed
from deepinfer.runtime.static_decode import StaticDecode
from deepinfer.runtime.static_draft import StaticDraft
from deepinfer.runtime.static_sampler import StaticSampler
from deepinfer.runtime.step_shapes import StepShapes
from deepinfer.runtime.step_state import LogitRows, WorkerStepState
from deepinfer.runtime.verify import kept_run, reject

# In larger steps the device is busy for longer than the host, and a graph would keep the memory of all their logits.
MOST_STATIC_ROWS = 64
GREEDY = SamplingKind(False, False, None)


class StepSampler:
    """Fills the outputs and the box of a step. Owns the graphs that do; `rejects`: drafts are verified by rejection."""

    def __init__(
        self, model: Transformer, cache: ModelCache, device: Device, shapes: StepShapes, num_drafts: int, rejects: bool
    ) -> None:
        self.model, self.cache, self.device, self.shapes = model, cache, device, shapes
        self.num_drafts, self.rejects = num_drafts, rejects
        self._static: dict[tuple[StaticDecode, SamplingKind], StaticSampler] = {}
        self._static_drafts: dict[tuple[int, SamplingKind], StaticDraft] = {}

    def warm_up(self, decode: StaticDecode) -> None:
        """Compile and capture what greedy requests need behind a forward over these buffers."""
        if decode.num_rows <= MOST_STATIC_ROWS:
            self._static_sampler(decode, GREEDY)

    def warm_up_drafts(self, bucket: int) -> None:
        """Compile and capture greedy drafts for up to `bucket` sequences."""
        self._static_draft(bucket, GREEDY)

    @torch.inference_mode()
    def sample(self, state: WorkerStepState, inputs: SamplerInputs, decode: StaticDecode | None) -> None:
        """Draw a token for each row with logits, and decide which drafts stand. `decode`: what replayed the step's forward."""
        is_plain = inputs.leaves_logits and state.sampling.stops is None and not self.rejects
        if decode is not None and is_plain and decode.num_rows <= MOST_STATIC_ROWS:
            drawn = self._static_sampler(decode, state.sampling.kind).run(state.sampling, state.outputs)
            state.box.drawn, state.box.draft_inputs = drawn, drawn.record.draft_inputs
        else:
            self._sample(state, inputs)

    def _static_sampler(self, decode: StaticDecode, kind: SamplingKind) -> StaticSampler:
        if kind.num_top:
            # More of the most probable tokens than wanted, so that few numbers of them are captured.
            kind = kind._replace(num_top=min(1 << (kind.num_top - 1).bit_length(), self.model.config.vocab_size))
        if (decode, kind) not in self._static:
            self._static[decode, kind] = StaticSampler(self.model, decode, kind, self.num_drafts, self.device)
        return self._static[decode, kind]

    def _sample(self, state: WorkerStepState, inputs: SamplerInputs) -> None:
        place, outputs, box = self.device.torch_device, state.outputs, state.box
        sampling = box.sampling = state.sampling.to(place)
        limits = box.inputs = inputs.to(place)
        found = box.logit_rows
        assert found is not None
        width = 1 + self.num_drafts
        of_rows, positions = sampling.rows(found.group), found.positions + 1
        texts = rows_behind_drafts(found, (found.groups.shape[0], width)) if limits.depend_on_text else None
        logits = self._logits(found.final)
        masked = limits.mask(logits, found.group, found.place)
        constrained = constrain(masked, of_rows, positions, limits, texts)
        drawn = choose(constrained, of_rows, positions)
        if self.rejects and state.plan.draft_rows:
            is_accepted, drawn = self._reject(state, found, constrained, drawn, of_rows)
        else:
            is_accepted = drawn == found.fed_next
        run = kept_run(found, drawn, is_accepted, width)
        outputs.sampled[found.groups] = run.last
        outputs.next_start[found.groups] += run.accepted
        box.texts = groups_behind_run(run.token_ids, run.accepted) if limits.depend_on_text else None
        counted = SamplerOutput(
            token_ids=drawn,
            emitted=run.accepted + 1,
            n_drafts=found.n_drafts,
            survival=found.survival,
            peaks=constrained.amax(dim=1),
        )
        box.drawn = Packed.of(report(logits, counted, sampling.num_top))
        if state.observed is not None:
            state.observed.score(self._logits)

    def _logits(self, final: Tensor) -> Tensor:
        """Logits of hidden rows; one row, and none, go through the arithmetic of several."""
        count = final.shape[0]
        if self.shapes.pads_every_step and count < LEAST_ROWS:
            return self.model.logits(F.pad(final, (0, 0, 0, LEAST_ROWS - count)))[:count]
        return self.model.logits(final)

    def _reject(
        self, state: WorkerStepState, found: LogitRows, logits: Tensor, drawn: Tensor, of_rows: SamplingMetadata
    ) -> tuple[Tensor, Tensor]:
        """Accept or replace the draft behind each row; rows without one keep what was drawn."""
        assert state.before is not None
        source = found.remap[found.group].clamp(min=0)
        draft = state.before.draft_logprobs[source, found.place.clamp(max=self.num_drafts - 1)]
        target = log_distribution_of(logits, of_rows)
        is_accepted, token_ids = reject(target, draft, found.fed_next, drawn, of_rows.seeds, found.positions + 1)
        return is_accepted, torch.where(found.draft_follows, token_ids, drawn)

    @torch.inference_mode()
    def propose(self, state: WorkerStepState) -> None:
        """Draft the tokens after the last one of each group.

        For `match` with the noise that the target will use at their positions, for `rejection` with noise of their own.
        """
        outputs, box, found = state.outputs, state.box, state.box.logit_rows
        assert found is not None
        groups, inputs = found.groups, box.draft_inputs
        if inputs is None:
            inputs = torch.stack((outputs.sampled[groups], outputs.next_start[groups] - 1, found.slots))
        bucket = self.shapes.bucket(groups.shape[0])
        if bucket is not None and not self.rejects and state.sampling.stops is None and box.texts is None:
            drafts, survival = self._static_draft(bucket, state.sampling.kind).run(inputs, state.sampling)
        else:
            drafts, survival = self._propose(state, groups, inputs)
        outputs.drafts[groups] = drafts[: groups.shape[0]]
        outputs.survival[groups] = survival[: groups.shape[0]]

    def _static_draft(self, bucket: int, kind: SamplingKind) -> StaticDraft:
        key = (bucket, kind._replace(num_top=None))
        if key not in self._static_drafts:
            self._static_drafts[key] = StaticDraft(self.model, self.cache, *key, self.num_drafts, self.device)
        return self._static_drafts[key]

    def _propose(
        self, state: WorkerStepState, groups: Int[Tensor, " S"], inputs: Int[Tensor, "3 S"]
    ) -> tuple[Int[Tensor, "S k"], Float[Tensor, "S k"]]:
        sampling, limits, texts = state.box.sampling, state.box.inputs, state.box.texts
        assert sampling is not None
        assert limits is not None
        role, logprobs = DRAFT if self.rejects else TARGET, []

        def draft(logits: Tensor, positions: Tensor) -> Tensor:
            nonlocal texts
            constrained = constrain(logits, sampling, positions, limits, texts)
            drawn = choose(constrained, sampling, positions, role)
            texts = None if texts is None else texts.with_drawn(drawn)
            if self.rejects:
                logprobs.append(log_distribution_of(constrained, sampling))
            return drawn

        last, newest, slots = inputs.unbind(0)
        proposal, kept = self.model.propose_draft(last, newest, slots, self.cache, draft), self.num_drafts
        if self.rejects:
            state.outputs.draft_logprobs[groups] = torch.stack(logprobs[:kept], dim=1)
        return proposal.token_ids[:, :kept], proposal.confidence[:, :kept].float().sigmoid().cumprod(dim=1)
