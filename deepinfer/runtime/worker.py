"""Runs steps on the device: forward, then sampler, then the copy of the result to the host.

Every launch goes through `Device`; the worker never waits for one. The forward of step N + 1 reads what the sampler of step N
wrote, on the device, so it can be submitted before the host has seen step N's tokens.
"""

import bisect
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F

from deepinfer.dims import Tensor
from deepinfer.model.cache import CacheSizes
from deepinfer.model.compiled import LEAST_ROWS, is_compiled
from deepinfer.model.transformer import Transformer
from deepinfer.ops.noise import DRAFT, TARGET
from deepinfer.runtime.constraints import UNCONSTRAINED, SamplerInputs, groups_behind_run, rows_behind_drafts
from deepinfer.runtime.device import COMPUTE, COPY, Device
from deepinfer.runtime.grammar_masks import has_grammar
from deepinfer.runtime.host_memory import HostMemory
from deepinfer.runtime.observations import StepObservations, recorded_experts, stage_observations, with_observations
from deepinfer.runtime.plan import CacheCopy, SchedulerOutputs, StepKind, StepResult
from deepinfer.runtime.replay_state import num_skipped
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
from deepinfer.runtime.staging import host_copy
from deepinfer.runtime.static_decode import StaticDecode
from deepinfer.runtime.static_draft import StaticDraft
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

LEAST_TABLE_WIDTH = 8  # blocks; short sequences share a shape
PREFILL_WARM_UP_ROWS = 256


def padded_shape(groups: int, drafts_each: int, table_width: int, *, is_even: bool = False) -> PaddedShape:
    """The fixed shape of a decode step: table widths grow in powers of four, so that long sequences need few shapes."""
    width = LEAST_TABLE_WIDTH
    while width < table_width:
        width *= 4
    return PaddedShape(groups, max(groups * (1 + drafts_each), LEAST_ROWS), width, is_even)


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
        num_host_blocks: int = 0,
    ) -> None:
        assert sizes.max_backtrack >= num_speculative_tokens
        self.model, self.sizes, self.device, self.decode_buckets = model, sizes, device, decode_buckets
        self.pads_every_step = is_compiled(model)
        self.num_drafts, self.rejects = num_speculative_tokens, verification == "rejection"
        self.cache = model.new_cache(sizes)
        self.host_memory = HostMemory(self.cache, num_host_blocks)
        self._static: dict[tuple[object, ...], StaticDecode] = {}
        self._static_drafts: dict[tuple[object, ...], StaticDraft] = {}
        # Graphs read the results of the step before at one place; a prefill step may have more groups than any bucket.
        longest = max(decode_buckets, default=0) + sizes.num_slots
        self._relay = DeviceOutputs.empty(longest, num_speculative_tokens, 0, device.torch_device)

    def submit_forward(self, plan: SchedulerOutputs, previous: WorkerStepState | None) -> WorkerStepState:
        """Launch the forward of a step. `previous` is the step before it, whose results need not be on the host yet."""
        device, padded = self.device.torch_device, self._padded_shape(plan)
        observed = stage_observations(plan, self.model.config.vocab_size)
        metadata = stage_metadata(plan, self.sizes.block_size, padded)
        is_static = plan.kind is StepKind.DECODE and observed is None and self._bucket(len(plan.sequences)) is not None
        vocab_size = self.model.config.vocab_size if self.rejects else 0
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
            # To capture is to take part in collectives, so all ranks do, also one that then looks at its rows one by one.
            static = self._static_decode(metadata) if is_static or metadata.is_even else None
            if static is not None and observed is None:
                box.logit_rows = static.run(metadata, before, outputs)
            else:
                box.logit_rows = self._run_rows(metadata, before, outputs, observed)
            self._copy_cache(plan.copies_after)

        places = cache_places(plan) if self.device.checks_accesses else []
        reads = [metadata, *([before] if before else [])]
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

    def _static_draft(self, bucket: int, sampling: SamplingMetadata) -> StaticDraft:
        """The buffers of a proposal for up to `bucket` groups."""
        key = (bucket, sampling.any_random, sampling.any_filter)
        if key not in self._static_drafts:
            self._static_drafts[key] = StaticDraft(self.model, self.cache, bucket, sampling, self.num_drafts, self.device)
        return self._static_drafts[key]

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[str], AbstractContextManager[None]], in_group: bool = False) -> None:
        """Compile, and capture what steady decode of short sequences needs. `progress` brackets each part with what it is.

        Collective `in_group`, whose ranks all run steps of the same shapes.
        """
        idle, block_size = SchedulerOutputs(step_seq=-1, kind=StepKind.IDLE, sequences=()), self.sizes.block_size
        with progress("prefill"):
            for width in self._kinds_of_tables():
                shape = PaddedShape(1, PREFILL_WARM_UP_ROWS, width)
                self._run_eagerly(stage_metadata(idle, block_size, shape).to(self.device.torch_device))
        for groups in self.decode_buckets:
            for each in (self.num_drafts,) if in_group else sorted({0, self.num_drafts}):
                with progress(f"decode, {groups} sequences, {each} drafts"):
                    shape = padded_shape(groups, each, 1, is_even=in_group)
                    self._static_decode(stage_metadata(idle, block_size, shape))
        if not self.num_drafts:
            return
        for bucket in self.decode_buckets:
            with progress(f"drafts, {bucket} sequences"):
                self._static_draft(bucket, SamplingMetadata.greedy(1))

    def _kinds_of_tables(self) -> list[int]:
        """Widths of block tables that have code of their own: the index chooses among more entries, or blocks, than it keeps."""
        config, ix = self.model.config, self.model.config.indexer
        kept = [ix.topk] + [ix.candidate_topk_blocks * ix.candidate_block_size] * (ix.candidate_source_layer >= 0)
        tokens = [0, *(config.compress_ratios[layer] * count for layer in config.kv_source_layers for count in kept)]
        longest = padded_shape(1, 0, self.sizes.num_blocks - 1).table_width
        widths = {padded_shape(1, 0, count // self.sizes.block_size + 1).table_width for count in tokens}
        return sorted(width for width in widths if width <= longest)

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
            self._sample(state, inputs)

        @torch.inference_mode()
        def copy() -> None:
            assert box.drawn is not None
            box.host = box.drawn.to_host()
            box.seen = None if state.observed is None else state.observed.to_host()

        def draft() -> None:
            self._propose(state)

        reads = [state.sampling, inputs, *([state.before] if state.before else [])]
        drawn, host = ("drawn", state.plan.step_seq), ("host", state.plan.step_seq)
        seen = watched(state.observed)
        self.device.launch(COMPUTE, sampler, reads=reads, writes=[state.outputs, box, drawn, *seen])
        self.device.wait(COPY, self.device.record(COMPUTE))
        self.device.launch(COPY, copy, reads=[drawn, *seen], writes=[host])
        box.copied = self.device.record(COPY)
        if state.plan.proposes:
            # Behind the copy's event: nobody waits for drafts on the host.
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
        logits = self._logits(found.final)
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
        counted = SamplerOutput(
            token_ids=drawn,
            emitted=accepted + 1,
            n_drafts=found.n_drafts,
            survival=found.survival,
            peaks=constrained.amax(dim=1),
        )
        box.drawn = report(logits, counted, sampling.num_top)
        if state.observed is not None:
            state.observed.score(self._logits)

    def _logits(self, final: Tensor) -> Tensor:
        """Logits of hidden rows; one row, and none, go through the arithmetic of several."""
        count = final.shape[0]
        if self.pads_every_step and count < LEAST_ROWS:
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
        is_constrained = self.rejects or limits.depend_on_text or sampling.stops is not None
        if (bucket := self._bucket(groups.shape[0])) is not None and not is_constrained:
            drafts, survival = self._static_draft(bucket, sampling).run(last, newest, found.slots, sampling)
            outputs.drafts[groups] = drafts
            outputs.survival[groups] = survival
            return
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

    def _padded_shape(self, plan: SchedulerOutputs) -> PaddedShape | None:
        """The shape that a step is padded to: its bucket's, if there is one, or away from sizes of 1."""
        count, width = len(plan.sequences), table_width(plan, self.sizes.block_size)
        agreed = plan.group_shape
        groups = self._bucket(count if agreed is None else agreed.num_groups)
        if groups is not None and agreed is not None:
            return padded_shape(groups, self.num_drafts, agreed.num_blocks, is_even=True)
        if groups is not None and plan.kind is StepKind.DECODE:
            return padded_shape(groups, -(-plan.draft_rows // count), width)
        if not self.pads_every_step or not count:
            return None
        # Behind the last KV source as well.
        skipped = sum(num_skipped(seq) for seq in plan.sequences)
        return padded_shape(count, 0, width)._replace(rows=max(plan.num_rows, skipped + LEAST_ROWS))

    def _bucket(self, count: int) -> int | None:
        """The smallest bucket for a number of groups."""
        place = bisect.bisect_left(self.decode_buckets, count)
        return self.decode_buckets[place] if place < len(self.decode_buckets) else None
