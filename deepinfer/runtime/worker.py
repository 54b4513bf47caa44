"""Runs steps on the device: forward, then sampler, then the copy of the result to the host.

Every launch goes through `Device`; the worker never waits for one. The forward of step N + 1 reads what the sampler of step N
wrote, on the device, so it can be submitted before the host has seen step N's tokens.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deepinfer.model.cache import CacheSizes
from deepinfer.model.compiled import LEAST_ROWS, exchanging, is_compiled
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.constraints import UNCONSTRAINED, SamplerInputs
from deepinfer.runtime.device import ALONE, COMPUTE, COPY, Device
from deepinfer.runtime.grammar_masks import has_grammar
from deepinfer.runtime.host_memory import HostMemory
from deepinfer.runtime.observations import StepObservations, recorded_experts, stage_observations, with_observations
from deepinfer.runtime.plan import CacheCopy, SchedulerOutputs, StepKind, StepResult
from deepinfer.runtime.row_layout import build_rows, logit_rows
from deepinfer.runtime.sampler import stage_sampling, to_result
from deepinfer.runtime.staging import host_copy
from deepinfer.runtime.static_decode import StaticDecode
from deepinfer.runtime.static_prefill import StaticPrefill
from deepinfer.runtime.step_sampler import StepSampler
from deepinfer.runtime.step_shapes import SHORT_PREFILLS, StepShapes
from deepinfer.runtime.step_state import (
    DeviceOutputs,
    LogitRows,
    PaddedShape,
    SequenceMetadata,
    StepBox,
    WorkerStepState,
    stage_metadata,
)

PREFILL_WARM_UP_ROWS = 256


def cache_places(plan: SchedulerOutputs) -> list[tuple[str, int]]:
    """Names of the cache blocks and ring slots that a step may touch, for devices that check accesses."""
    copied = [place for copy in (*plan.copies_before, *plan.copies_after) for place in copy.places]
    own = [("block", i) for seq in plan.sequences for i in seq.blocks] + [("slot", seq.slot) for seq in plan.sequences]
    return list(dict.fromkeys([*own, *copied]))


def watched(observed: StepObservations | None) -> list[StepObservations]:
    """What a launch touches of it."""
    return [] if observed is None else [observed]


class Worker:
    """Owns the model, its cache and the device; single writer of all of them.

    Args:
        decode_buckets: row group counts that decode steps are padded to, ascending; empty pads nothing.
        verification: a name in `VERIFICATIONS`.
        chooses_drafts: whether steps come from a scheduler with a `DraftBudget`.
    """

    def __init__(
        self,
        model: Transformer,
        sizes: CacheSizes,
        device: Device,
        decode_buckets: tuple[int, ...] = (),
        num_speculative_tokens: int = 0,
        verification: str = "match",
        num_host_blocks: int = 0,
        chooses_drafts: bool = False,
    ) -> None:
        assert sizes.max_backtrack >= num_speculative_tokens
        self.model, self.sizes, self.device, self.num_drafts = model, sizes, device, num_speculative_tokens
        # Engines of one process take turns at code that may be compiled; a group's ranks wait for each other inside it.
        self.alone: AbstractContextManager[Any] = ALONE if is_compiled(model) and not exchanging(model) else nullcontext()
        self.shapes = StepShapes(
            decode_buckets,
            num_speculative_tokens,
            sizes.block_size,
            chooses_drafts=chooses_drafts,
            # An exchange between processes looks at numbers of rows, which no graph can.
            fixes_prefills=bool(decode_buckets) and not exchanging(model),
            pads_every_step=is_compiled(model),
        )
        self.cache = model.new_cache(sizes)
        rejects = verification == "rejection"
        self.sampler = StepSampler(model, self.cache, device, self.shapes, num_speculative_tokens, rejects)
        self.host_memory = HostMemory(self.cache, num_host_blocks)
        self._static: dict[tuple[object, ...], StaticDecode] = {}
        self._static_prefills: dict[tuple[object, ...], StaticPrefill] = {}
        # Graphs read the results of the step before at one place; a prefill step may have more groups than any bucket.
        longest = max(decode_buckets, default=0) + sizes.num_slots
        self._relay = DeviceOutputs.empty(longest, num_speculative_tokens, 0, device.torch_device)

    def submit_forward(self, plan: SchedulerOutputs, previous: WorkerStepState | None) -> WorkerStepState:
        """Launch the forward of a step. `previous` is the step before it, whose results need not be on the host yet."""
        device, observed = self.device.torch_device, stage_observations(plan, self.model.config.vocab_size)
        short_prefill = self.shapes.of_prefill(plan) if observed is None else None
        padded = self.shapes.of(plan) if short_prefill is None else short_prefill
        metadata = stage_metadata(plan, self.sizes.block_size, padded)
        vocab_size = self.model.config.vocab_size if self.sampler.rejects else 0
        outputs = DeviceOutputs.empty(len(plan.sequences), self.num_drafts, vocab_size, device)
        # A step without rows leaves nothing to read; whoever sat it out has been applied by now.
        before = None if previous is None or not previous.plan.sequences else previous.outputs
        box = StepBox()

        @torch.inference_mode()
        def forward() -> None:
            if not plan.sequences and not metadata.is_even:
                self.model.forward_without_rows()
                return
            self._copy_cache(plan.copies_before)
            if metadata.is_even:
                # To capture is to take part in collectives, so all ranks do, also one that then looks at its rows one by one.
                self._static_decode(metadata)
            if self._is_static(plan, observed):
                box.logit_rows = self._static_decode(metadata).run(metadata, before, outputs)
            elif short_prefill is not None:
                box.logit_rows = self._static_prefill(metadata).run(metadata, before, outputs)
            else:
                box.logit_rows = self._run_rows(metadata, before, outputs, observed)
            self._copy_cache(plan.copies_after)

        places = cache_places(plan) if self.device.checks_accesses else []
        reads = [metadata, *([before] if before else [])]
        with self.alone:
            self.device.launch(COMPUTE, forward, reads=reads, writes=[outputs, box, self.cache, *watched(observed), *places])
        return WorkerStepState(
            plan=plan,
            metadata=metadata,
            sampling=stage_sampling(plan, self.model.config.vocab_size),
            before=before,
            outputs=outputs,
            forward_done=self.device.record(COMPUTE),
            box=box,
            observed=observed,
        )

    def _is_static(self, plan: SchedulerOutputs, observed: StepObservations | None) -> bool:
        """Whether a step's forward runs over buffers that never move."""
        groups = len(plan.sequences) if plan.group_shape is None else plan.group_shape.num_groups
        is_decode = plan.kind is StepKind.DECODE or plan.group_shape is not None
        return is_decode and observed is None and self.shapes.bucket(groups) is not None

    def _copy_cache(self, copies: tuple[CacheCopy, ...]) -> None:
        memory, host = self.cache, self.host_memory
        make = {"slot": memory.copy_slot, "block": memory.copy_block, "offload": host.offload, "restore": host.restore}
        for kind, source, target in copies:
            make[kind](source, target)

    def _run_rows(
        self,
        metadata: SequenceMetadata,
        before: DeviceOutputs | None,
        outputs: DeviceOutputs,
        observed: StepObservations | None,
    ) -> LogitRows:
        """The forward of a step of any shape. Fills `outputs` and `observed`."""
        model, tail = self.model, None
        on_device = metadata.to(self.device.torch_device)
        layout = build_rows(on_device, before)
        outputs.next_start.copy_((layout.starts + on_device.q_lens)[: outputs.next_start.shape[0]])
        if metadata.replay is not None:
            replay = metadata.replay.to(self.device.torch_device)
            replay.recall_context(model, self.cache)
            layout = layout._replace(rows=replay.marked(layout.rows))
            tail = replay.tail(layout.rows)
        with recorded_experts(model, observed is not None and observed.wants_experts) as experts:
            hidden = model.forward_rows(layout.rows, self.cache, tail)
        if tail is not None:
            # Whoever is observed has all rows in the tail.
            kept, count = tail.row_ids, hidden.rows.positions.shape[0]
            experts = [ids if ids.shape[0] == count else ids[kept] for ids in experts]
            layout = layout._replace(rows=hidden.rows, ends=layout.ends - tail.skipped.cumsum(0))
        if observed is not None:
            observed.take(hidden, experts, layout.ends - on_device.q_lens - layout.n_drafts)
        if self.num_drafts and hidden.rows.positions.shape[0]:
            assert hidden.main_hidden is not None
            model.observe_draft(hidden.main_hidden, hidden.rows, self.cache)
        return logit_rows(on_device, layout, hidden.final)

    def _static_decode(self, metadata: SequenceMetadata) -> StaticDecode:
        """The buffers of a decode step's shape; made, and captured, when it is first needed."""
        key = (metadata.block_tables.shape, metadata.num_rows, metadata.splits_drafts)
        if key not in self._static:
            self._static[key] = StaticDecode(self.model, self.cache, metadata, self._relay, self.device)
        return self._static[key]

    def _static_prefill(self, metadata: SequenceMetadata) -> StaticPrefill:
        """The same for a short prefill."""
        key = (metadata.block_tables.shape, metadata.num_rows, metadata.splits_drafts)
        if key not in self._static_prefills:
            self._static_prefills[key] = StaticPrefill(self.model, self.cache, metadata, self._relay, self.device)
        return self._static_prefills[key]

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[str], AbstractContextManager[None]], in_group: bool = False) -> None:
        """Compile, and capture what steady decode of short sequences needs. `progress` brackets each part with what it is.

        Collective `in_group`, whose ranks all run steps of the same shapes.
        """
        idle, block_size = SchedulerOutputs(step_seq=-1, kind=StepKind.IDLE, sequences=()), self.sizes.block_size
        with progress("prefill"):
            for width in self.shapes.table_widths(self.model.config, self.sizes.num_blocks):
                shape = PaddedShape(1, PREFILL_WARM_UP_ROWS, width)
                self._run_eagerly(stage_metadata(idle, block_size, shape).to(self.device.torch_device))
        if self.shapes.fixes_prefills:
            for rows in SHORT_PREFILLS:
                with progress(f"prefill, up to {rows} rows"):
                    shape = self.shapes.fixed(self.shapes.buckets[0], 0, 1)._replace(rows=rows)
                    self._static_prefill(stage_metadata(idle, block_size, shape))
        for groups in self.shapes.buckets:
            for each in (self.num_drafts,) if in_group else self.shapes.draft_counts:
                with progress(f"decode, {groups} sequences, {each} drafts"):
                    shape = self.shapes.fixed(groups, each, 1, is_even=in_group)
                    decode = self._static_decode(stage_metadata(idle, block_size, shape))
                    # A capture computes nothing, and the sampler's own begins with real runs over these rows.
                    decode.replay()
                    self.sampler.warm_up(decode)
        if not self.num_drafts:
            return
        for bucket in self.shapes.buckets:
            with progress(f"drafts, {bucket} sequences"):
                self.sampler.warm_up_drafts(bucket)

    def _run_eagerly(self, metadata: SequenceMetadata) -> None:
        """A step of nothing but padding, for what it compiles."""
        layout = build_rows(metadata, None)
        hidden = self.model.forward_rows(layout.rows, self.cache)
        self.model.logits(hidden.final[:LEAST_ROWS])
        if self.num_drafts:
            assert hidden.main_hidden is not None
            self.model.observe_draft(hidden.main_hidden, layout.rows, self.cache)

    def submit_sampler(self, state: WorkerStepState, inputs: SamplerInputs = UNCONSTRAINED) -> None:
        """Launch the sampler of a step, the copy of what it draws, and the drafts for the next step. Fills the step's box.

        `inputs` are built once the step before has been applied, so that they are exact.
        """
        box = state.box
        if not state.plan.sequences:
            box.result, box.copied = StepResult(step_seq=state.plan.step_seq), self.device.record(COMPUTE)
            return

        # Traces name launches after these functions.
        def sampler() -> None:
            is_static = self._is_static(state.plan, state.observed)
            self.sampler.sample(state, inputs, self._static_decode(state.metadata) if is_static else None)

        @torch.inference_mode()
        def copy() -> None:
            assert box.drawn is not None
            box.host = box.drawn.to_host()
            box.seen = None if state.observed is None else state.observed.to_host()

        def draft() -> None:
            self.sampler.propose(state)

        reads = [state.sampling, inputs, *([state.before] if state.before else [])]
        # Where a graph draws, each step draws to the same place: the host has read the last one's tokens by now.
        drawn, host = "drawn", ("host", state.plan.step_seq)
        seen = watched(state.observed)
        with self.alone:
            self.device.launch(COMPUTE, sampler, reads=reads, writes=[state.outputs, box, drawn, *seen])
        self.device.wait(COPY, self.device.record(COMPUTE))
        self.device.launch(COPY, copy, reads=[drawn, *seen], writes=[host])
        box.copied = self.device.record(COPY)
        if state.plan.proposes:
            # Behind the copy's event: nobody waits for drafts on the host.
            with self.alone:
                self.device.launch(COMPUTE, draft, reads=[box, self.cache], writes=[state.outputs])
            if has_grammar(state.plan):
                self._submit_drafts_copy(state)

    def _submit_drafts_copy(self, state: WorkerStepState) -> None:
        """Launch the copy of the step's drafts to the host, for the masks of the rows behind them in the next step."""
        box, drafts = state.box, ("drafts", state.plan.step_seq)

        @torch.inference_mode()
        def copy() -> None:
            box.drafts = host_copy(state.outputs.drafts)

        self.device.wait(COPY, self.device.record(COMPUTE))
        self.device.launch(COPY, copy, reads=[state.outputs], writes=[drafts])
        box.drafts_copied = self.device.record(COPY)

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

    def drafts(self, state: WorkerStepState) -> list[list[int]]:
        """What each row group of a step proposed; its `drafts_copied` has passed."""
        box = state.box
        assert box.drafts_copied is not None
        assert box.drafts_copied.query(), "read before its event"
        assert box.drafts is not None
        ids: list[list[int]] = box.drafts.tolist()
        return ids
