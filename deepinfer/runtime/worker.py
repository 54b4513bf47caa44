"""Runs steps on the device: forward, then sampler, then the copy of the result to the host.

Every launch goes through `Device`; the worker never waits for one. The forward of step N + 1 reads what the sampler of step N
wrote, on the device, so it can be submitted before the host has seen step N's tokens.
"""

import bisect

import torch

from deepinfer.dims import Tensor
from deepinfer.model.cache import CacheSizes
from deepinfer.model.transformer import Transformer
from deepinfer.ops.noise import DRAFT, TARGET
from deepinfer.runtime.constraints import UNCONSTRAINED, SamplerInputs, groups_behind_run, rows_behind_drafts
from deepinfer.runtime.device import COMPUTE, COPY, Device
from deepinfer.runtime.plan import SchedulerOutputs, StepKind, StepResult
from deepinfer.runtime.row_layout import build_rows, logit_rows
from deepinfer.runtime.sampler import (
    SamplerOutput,
    SamplingMetadata,
    choose,
    constrain,
    log_distribution_of,
    report,
    stage_sampling,
    to_result,
)
from deepinfer.runtime.static_decode import StaticDecode
from deepinfer.runtime.step_state import (
    POISON,
    DeviceOutputs,
    LogitRows,
    PaddedShape,
    SequenceMetadata,
    StepBox,
    WorkerStepState,
    stage_metadata,
    table_width,
)
from deepinfer.runtime.verify import count_leading, reject


def cache_places(plan: SchedulerOutputs) -> list[tuple[str, int]]:
    """Names of the cache blocks and ring slots that a step may touch, for devices that check accesses."""
    return [("block", i) for seq in plan.sequences for i in seq.blocks] + [("slot", seq.slot) for seq in plan.sequences]


class Worker:
    """Owns the model, its cache and the device; single writer of all of them.

    `decode_buckets`: row group counts that decode steps are padded to, ascending; empty pads nothing. `verification` is a name in
    `VERIFICATIONS`.
    """

    def __init__(
        self,
        model: Transformer,
        sizes: CacheSizes,
        device: Device,
        decode_buckets: tuple[int, ...] = (),
        num_speculative_tokens: int = 0,
        verification: str = "match",
    ) -> None:
        assert sizes.max_backtrack >= num_speculative_tokens
        self.model, self.sizes, self.device, self.decode_buckets = model, sizes, device, decode_buckets
        self.num_drafts, self.rejects = num_speculative_tokens, verification == "rejection"
        self.cache = model.new_cache(sizes)
        self._static: dict[tuple[object, ...], StaticDecode] = {}
        # Graphs read the results of the step before at one place; a prefill step may have more groups than any bucket.
        longest = max(decode_buckets, default=0) + sizes.num_slots
        self._relay = DeviceOutputs.empty(longest, num_speculative_tokens, 0, device.torch_device)

    def submit_forward(self, plan: SchedulerOutputs, previous: WorkerStepState | None) -> WorkerStepState:
        """Launch the forward of a step. `previous` is the step before it, whose results need not be on the host yet."""
        device, model = self.device.torch_device, self.model
        padded = self._padded_shape(plan)
        metadata = stage_metadata(plan, self.sizes.block_size, padded)
        vocab_size = model.config.vocab_size if self.rejects else 0
        outputs = DeviceOutputs.empty(len(plan.sequences), self.num_drafts, vocab_size, device)
        # A step without rows leaves nothing to read; whoever sat it out has been applied by now.
        before = None if previous is None or not previous.plan.sequences else previous.outputs
        box = StepBox()

        @torch.inference_mode()
        def forward() -> None:
            if not plan.sequences:
                model.forward_without_rows()
                return
            if padded is not None:
                box.logit_rows = self._static_decode(metadata).run(metadata, before, outputs)
                return
            on_device = metadata.to(device)
            layout = build_rows(on_device, before)
            outputs.next_start.copy_(layout.starts + on_device.q_lens)
            hidden = model.forward_rows(layout.rows, self.cache)
            box.logit_rows = logit_rows(on_device, layout, hidden.final)
            if self.num_drafts:
                assert hidden.main_hidden is not None
                model.observe_draft(hidden.main_hidden, layout.rows, self.cache)

        places = cache_places(plan) if self.device.checks_accesses else []
        reads = [metadata, *([before] if before else [])]
        self.device.launch(COMPUTE, forward, reads=reads, writes=[outputs, box, self.cache, *places])
        return WorkerStepState(
            plan=plan,
            metadata=metadata,
            sampling=stage_sampling(plan, model.config.vocab_size),
            before=before,
            outputs=outputs,
            forward_done=self.device.record(COMPUTE),
            box=box,
        )

    def _static_decode(self, metadata: SequenceMetadata) -> StaticDecode:
        """The buffers of a decode step's shape; made, and captured, when it is first needed."""
        key = (metadata.block_tables.shape, metadata.num_rows, metadata.splits_drafts)
        if key not in self._static:
            self._static[key] = StaticDecode(self.model, self.cache, metadata, self._relay, self.device)
        return self._static[key]

    def submit_sampler(self, state: WorkerStepState, inputs: SamplerInputs = UNCONSTRAINED) -> None:
        """Launch the sampler of a step, the copy of what it draws, and the drafts for the next step. Fills the step's box.

        `inputs` are built once the step before has been applied, so that they are exact.
        """
        box = state.box
        if not state.plan.sequences:
            box.result, box.copied = StepResult(step_seq=state.plan.step_seq), self.device.record(COMPUTE)
            return

        @torch.inference_mode()
        def copy() -> None:
            assert box.drawn is not None
            box.host = box.drawn.to_host()

        reads = [state.sampling, inputs, *([state.before] if state.before else [])]
        drawn, host = ("drawn", state.plan.step_seq), ("host", state.plan.step_seq)
        self.device.launch(COMPUTE, lambda: self._sample(state, inputs), reads=reads, writes=[state.outputs, box, drawn])
        self.device.wait(COPY, self.device.record(COMPUTE))
        self.device.launch(COPY, copy, reads=[drawn], writes=[host])
        box.copied = self.device.record(COPY)
        if state.plan.proposes:
            # Behind the copy's event: nobody waits for drafts on the host.
            self.device.launch(COMPUTE, lambda: self._propose(state), reads=[box, self.cache], writes=[state.outputs])

    @torch.inference_mode()
    def _sample(self, state: WorkerStepState, inputs: SamplerInputs) -> None:
        """Draw a token for each row with logits, and decide which drafts stand."""
        place, outputs, box = self.device.torch_device, state.outputs, state.box
        sampling = box.sampling = state.sampling.to(place)
        limits = box.inputs = inputs.to(place)
        found = box.logit_rows
        assert found is not None
        shape = (found.groups.shape[0], 1 + self.num_drafts)
        of_rows, positions = sampling.rows(found.group), found.positions + 1
        texts = rows_behind_drafts(found, shape) if limits.depend_on_text else None
        logits = self.model.logits(found.final)
        masked = limits.mask(logits, found.group, found.place)
        constrained = constrain(masked, of_rows, positions, limits, texts)
        drawn = choose(constrained, of_rows, positions)
        if self.rejects and state.plan.draft_rows:
            is_accepted, drawn = self._reject(state, found, constrained, drawn, of_rows)
        else:
            is_accepted = drawn == found.fed_next
        accepted = count_leading(is_accepted & found.draft_follows, found.group, found.place, shape)
        run = drawn.new_full(shape, POISON)
        run[found.group, found.place] = drawn
        outputs.sampled[found.groups] = run.gather(1, accepted[:, None]).squeeze(1)
        outputs.next_start[found.groups] += accepted
        box.texts = groups_behind_run(run, accepted) if limits.depend_on_text else None
        counted = SamplerOutput(token_ids=drawn, emitted=accepted + 1, n_drafts=found.n_drafts, survival=found.survival)
        box.drawn = report(logits, counted, sampling.num_top)

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
    def _propose(self, state: WorkerStepState) -> None:
        """Draft the tokens after the last one of each group.

        For `match` with the noise that the target will use at their positions, for `rejection` with noise of their own.
        """
        outputs, box, kept = state.outputs, state.box, self.num_drafts
        found, sampling, limits, texts = box.logit_rows, box.sampling, box.inputs, box.texts
        assert found is not None
        assert sampling is not None
        assert limits is not None
        groups, role = found.groups, DRAFT if self.rejects else TARGET
        logprobs: list[Tensor] = []

        def draft(logits: Tensor, positions: Tensor) -> Tensor:
            nonlocal texts
            constrained = constrain(logits, sampling, positions, limits, texts)
            drawn = choose(constrained, sampling, positions, role)
            texts = None if texts is None else texts.with_drawn(drawn)
            if self.rejects:
                logprobs.append(log_distribution_of(constrained, sampling))
            return drawn

        last, newest = outputs.sampled[groups], outputs.next_start[groups] - 1
        proposal = self.model.propose_draft(last, newest, found.slots, self.cache, draft)
        outputs.drafts[groups] = proposal.token_ids[:, :kept]
        outputs.survival[groups] = proposal.confidence[:, :kept].float().sigmoid().cumprod(dim=1)
        if self.rejects:
            outputs.draft_logprobs[groups] = torch.stack(logprobs[:kept], dim=1)

    def result(self, state: WorkerStepState) -> StepResult:
        """The host's view of a step whose copy event has passed."""
        box = state.box
        assert box.copied is not None
        assert box.copied.query(), "read before its event"
        if box.result is None:
            assert box.host is not None
            box.result = to_result(state.plan, box.host)
            box.drawn = box.host = None
        return box.result

    def _padded_shape(self, plan: SchedulerOutputs) -> PaddedShape | None:
        """The shape that a decode step is padded to, if there is a bucket for it."""
        count = len(plan.sequences)
        place = bisect.bisect_left(self.decode_buckets, count)
        if plan.kind is not StepKind.DECODE or place == len(self.decode_buckets):
            return None
        groups = self.decode_buckets[place]
        drafts_each = -(-plan.draft_rows // count)
        width = table_width(plan, self.sizes.block_size)
        return PaddedShape(groups, groups * (1 + drafts_each), 1 << (width - 1).bit_length())
