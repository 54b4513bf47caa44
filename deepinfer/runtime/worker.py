"""Runs steps on the device: forward, then sampler, then the copy of the result to the host.

Every launch goes through `Device`; the worker never waits for one. The forward of step N + 1 reads what the sampler of step N
wrote, on the device, so it can be submitted before the host has seen step N's tokens.
"""

import bisect

import torch

from deepinfer.dims import Tensor
from deepinfer.model.cache import CacheSizes
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.constraints import UNCONSTRAINED, Continuations, SamplerInputs, groups_behind_run, rows_behind_drafts
from deepinfer.runtime.device import COMPUTE, COPY, Device
from deepinfer.runtime.observations import recorded_experts, stage_observations, with_observations
from deepinfer.runtime.plan import SchedulerOutputs, StepKind, StepResult
from deepinfer.runtime.sampler import SamplerOutput, SamplingMetadata, choose, report, restrict, stage_sampling, to_result
from deepinfer.runtime.staging import pack, to_device
from deepinfer.runtime.static_decode import StaticDecode
from deepinfer.runtime.step_state import (
    POISON,
    SAMPLER_INPUTS,
    DeviceOutputs,
    SequenceMetadata,
    WorkerStepState,
    build_rows,
    stage_metadata,
    table_width,
)
from deepinfer.runtime.verify import leading_matches


def cache_places(plan: SchedulerOutputs) -> list[tuple[str, int]]:
    """Names of the cache blocks and ring slots that a step may touch, for devices that check accesses."""
    return [("block", i) for seq in plan.sequences for i in seq.blocks] + [("slot", seq.slot) for seq in plan.sequences]


class Worker:
    """Owns the model, its cache and the device; single writer of all of them.

    `decode_buckets`: row counts that decode steps are padded to, ascending; empty pads nothing.
    """

    def __init__(
        self,
        model: Transformer,
        sizes: CacheSizes,
        device: Device,
        decode_buckets: tuple[int, ...] = (),
        num_speculative_tokens: int = 0,
    ) -> None:
        assert sizes.max_backtrack >= num_speculative_tokens
        self.model, self.sizes, self.device, self.decode_buckets = model, sizes, device, decode_buckets
        self.num_drafts = num_speculative_tokens
        self.cache = model.new_cache(sizes)
        self._static: dict[tuple[int, int], StaticDecode] = {}
        # Graphs read the results of the step before at one place; a prefill step may have more groups than any bucket.
        longest = max(decode_buckets, default=0) + sizes.num_slots
        self._relay = DeviceOutputs(
            sampled=torch.full((longest,), POISON, device=device.torch_device),
            next_start=torch.full((longest,), POISON, device=device.torch_device),
            drafts=torch.full((longest, num_speculative_tokens), POISON, device=device.torch_device),
            final=torch.empty(0, device=device.torch_device),
            positions=torch.empty(0, dtype=torch.int64, device=device.torch_device),
            fed_next=torch.empty(0, dtype=torch.int64, device=device.torch_device),
        )

    def submit_forward(self, plan: SchedulerOutputs, previous: WorkerStepState | None) -> WorkerStepState:
        """Launch the forward of a step. `previous` is the step before it, whose results need not be on the host yet."""
        device, model = self.device.torch_device, self.model
        num_groups, width = self._padded_shape(plan)
        metadata = stage_metadata(plan, self.sizes.block_size, num_groups, width)
        outputs = self._empty_outputs(num_groups, metadata.sample_rows.shape[0])
        before = None if previous is None else previous.outputs
        observed = stage_observations(plan, model.config.vocab_size)
        is_static = self.num_drafts == 0 and plan.kind is StepKind.DECODE and num_groups in self.decode_buckets and observed is None

        @torch.inference_mode()
        def forward() -> None:
            if is_static:
                self._run_static(metadata, before, outputs)
                return
            on_device = metadata.to(device)
            rows, starts = build_rows(on_device, before)
            outputs.next_start.copy_(starts + on_device.q_lens - on_device.n_drafts)
            with recorded_experts(model, observed is not None and observed.wants_experts) as experts:
                hidden = model.forward_rows(rows, self.cache)
            if observed is not None:
                observed.take(hidden, experts)
            outputs.final.copy_(hidden.final[on_device.sample_rows])
            outputs.positions.copy_(rows.positions[on_device.sample_rows])
            outputs.fed_next.copy_(rows.token_ids.roll(-1)[on_device.sample_rows])
            if self.num_drafts:
                assert hidden.main_hidden is not None
                model.observe_draft(hidden.main_hidden, rows, self.cache)

        places = cache_places(plan) if self.device.checks_accesses else []
        reads = [metadata, *([before] if before else [])]
        seen = [] if observed is None else [observed]
        self.device.launch(COMPUTE, forward, reads=reads, writes=[outputs, self.cache, *seen, *places])
        return WorkerStepState(
            plan=plan,
            metadata=metadata,
            sampling=stage_sampling(plan, model.config.vocab_size),
            outputs=outputs,
            forward_done=self.device.record(COMPUTE),
            observed=observed,
        )

    def _run_static(self, metadata: SequenceMetadata, before: DeviceOutputs | None, outputs: DeviceOutputs) -> None:
        """A decode step in its bucket's buffers; the bucket is made, and captured, when it is first needed."""
        key = (metadata.starts.shape[0], metadata.block_tables.shape[1])
        if key not in self._static:
            self._static[key] = StaticDecode(self.model, self.cache, metadata, self._relay, self.device)
        (sample_rows,) = to_device([metadata.sample_rows], self.device.torch_device)
        self._static[key].run(pack(metadata.forward_inputs(), self.device.torch_device), before, outputs, sample_rows)

    def submit_sampler(self, state: WorkerStepState, inputs: SamplerInputs = UNCONSTRAINED) -> None:
        """Launch the sampler of a step and the copy of what it draws. Fills the step's box.

        `inputs` are built once the step before has been applied, so that they are exact.
        """
        device, box = self.device.torch_device, state.box

        @torch.inference_mode()
        def sampler() -> None:
            meta = state.metadata.to(device, (*SAMPLER_INPUTS, "slots"))
            sampling, outputs = state.sampling.to(device), state.outputs
            logits = self.model.logits(outputs.final)
            groups, place = meta.sample_groups, (meta.sample_of, meta.sample_index)
            shape = (groups.shape[0], 1 + self.num_drafts)
            fed = (outputs.fed_next, meta.draft_follows > 0, *place, shape)
            limits = inputs.to(device)
            texts = rows_behind_drafts(*fed) if limits.depend_on_text else None
            free = restrict(limits.mask(logits), sampling, outputs.positions + 1, limits, texts)
            drawn = limits.force(choose(free, sampling, outputs.positions + 1), texts)
            accepted = leading_matches(drawn, *fed)
            grid = torch.full(shape, POISON, device=device)
            grid[place] = drawn
            last = grid.gather(1, accepted[:, None]).squeeze(1)
            outputs.sampled[groups] = last
            outputs.next_start[groups] += accepted
            drawn_here = SamplerOutput(token_ids=drawn, emitted=accepted + 1, peaks=free.amax(dim=-1))
            box.drawn = report(logits, drawn_here, sampling.num_top)
            if state.observed is not None:
                state.observed.score(self.model.logits)
            if self.num_drafts and groups.shape[0]:
                texts = groups_behind_run(grid, accepted) if limits.depend_on_text else None
                outputs.drafts[groups] = self._propose(meta, sampling, outputs, last, limits, texts)

        @torch.inference_mode()
        def copy() -> None:
            assert box.drawn is not None
            box.host = box.drawn.to_host()
            box.seen = None if state.observed is None else state.observed.to_host()

        seen = [] if state.observed is None else [state.observed]
        self.device.launch(COMPUTE, sampler, reads=[state.sampling, inputs], writes=[state.outputs, box, *seen])
        self.device.wait(COPY, self.device.record(COMPUTE))
        self.device.launch(COPY, copy, reads=seen, writes=[box])
        box.copied = self.device.record(COPY)

    def _propose(
        self,
        meta: SequenceMetadata,
        sampling: SamplingMetadata,
        outputs: DeviceOutputs,
        last: Tensor,
        inputs: SamplerInputs,
        texts: Continuations | None,
    ) -> Tensor:
        """Draft the tokens after `last` with the noise and the constraints that the target will use at their positions."""
        groups = meta.sample_groups
        of_group = sampling.rows(meta.first_logit)

        def draft(logits: Tensor, positions: Tensor) -> Tensor:
            nonlocal texts
            drawn = inputs.force(choose(restrict(logits, of_group, positions, inputs, texts), of_group, positions), texts)
            texts = None if texts is None else texts.with_drawn(drawn)
            return drawn

        newest = outputs.next_start[groups] - 1
        proposal = self.model.propose_draft(last, newest, meta.slots[groups], self.cache, draft)
        return proposal.token_ids[:, : self.num_drafts]

    def _empty_outputs(self, num_groups: int, num_logits: int) -> DeviceOutputs:
        """Where a step's launches will leave what the next one reads."""
        device, model = self.device.torch_device, self.model

        def poison(*shape: int) -> Tensor:
            return torch.full(shape, POISON, device=device)

        dtype = model.numerics.precision.activation_dtype
        return DeviceOutputs(
            sampled=poison(num_groups),
            next_start=poison(num_groups),
            drafts=poison(num_groups, self.num_drafts),
            final=torch.empty((num_logits, model.config.dim), dtype=dtype, device=device),
            positions=poison(num_logits),
            fed_next=poison(num_logits),
        )

    def result(self, state: WorkerStepState) -> StepResult:
        """The host's view of a step whose copy event has passed."""
        box = state.box
        assert box.copied is not None
        assert box.copied.query(), "read before its event"
        if box.result is None:
            assert box.host is not None
            box.result = to_result(state.plan, box.host)
            if box.seen is not None:
                box.result = with_observations(box.result, state.plan, box.seen)
            box.drawn = box.host = box.seen = None
        return box.result

    def _padded_shape(self, plan: SchedulerOutputs) -> tuple[int, int]:
        """Row groups and block-table width that a plan is padded to: those of its bucket, or its own."""
        count = len(plan.sequences)
        place = bisect.bisect_left(self.decode_buckets, count)
        if plan.kind is not StepKind.DECODE or place == len(self.decode_buckets):
            return count, 1
        width = table_width(plan, self.sizes.block_size)
        return self.decode_buckets[place], 1 << (width - 1).bit_length()
