"""The plain loop and the overlapped loop, side by side, made of the same four calls.

Plain (depth 0): plan, run, wait, apply.
Overlapped (depth 1): while the device runs step N, the host plans and submits the forward of step N + 1; only then does it wait
for N's tokens, applies them, and submits the sampler of N + 1, whose masks are exact because N has been applied. Callbacks
(text, statistics, users) come last, beside the forward of N + 1.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from deepinfer.runtime.constraints import SamplerInputs, build_sampler_inputs
from deepinfer.runtime.device import wait_for
from deepinfer.runtime.grammar_masks import build_masks, looks_at_drafts
from deepinfer.runtime.plan import SchedulerOutputs
from deepinfer.runtime.scheduler import Scheduler, SequenceEvent
from deepinfer.runtime.step_state import WorkerStepState
from deepinfer.runtime.worker import Worker

OnEvents = Callable[[list[SequenceEvent]], None]
SpanFn = Callable[[str], AbstractContextManager[None]]


def _no_span(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class StepLoop:
    """One pipeline of steps.

    `previous` is the step whose result has not been applied yet, if there is one; `newest` is the step submitted last, whose device
    outputs the next one may read. `on_events` is called once for each applied step. `span` brackets the host's phases (see
    `deepinfer.runtime.trace`), `clock` gives seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        depth: int,
        on_events: OnEvents,
        span: SpanFn = _no_span,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler, self.worker, self.depth, self.on_events, self.span = scheduler, worker, depth, on_events, span
        self.clock, self._committed_at = clock, clock()
        self.previous: WorkerStepState | None = None
        self.newest: WorkerStepState | None = None

    @property
    def has_work(self) -> bool:
        """Whether another step has something to do."""
        return self.scheduler.has_work

    async def step(self) -> bool:
        """Advance by one step; False if there was nothing to do. Not to be cancelled: a step's result would be lost."""
        return await (self._overlapped_step() if self.depth else self._plain_step())

    async def _plain_step(self) -> bool:
        plan = self._schedule()
        if plan is None:
            return False
        before = self.newest
        state = self._submit(plan)
        self._submit_sampler(state, await self._sampler_inputs(plan, before))
        self._tell(await self._commit(state))
        return True

    async def _overlapped_step(self) -> bool:
        plan = self._schedule()
        if plan is None and self.previous is None:
            return False
        before = self.newest
        state = None if plan is None else self._submit(plan)
        previous, self.previous = self.previous, state
        events = await self.pre_sampler_sync(previous)
        try:
            if state is not None:
                self._submit_sampler(state, await self._sampler_inputs(state.plan, before))
        finally:
            # The device has everything it needs; what is left runs beside it. A step that fails does not take back the last.
            if previous is not None:
                self._tell(events)
        return True

    async def pre_sampler_sync(self, previous: WorkerStepState | None) -> list[SequenceEvent]:
        """Commit the step before, so that what the next sampler may draw is decided by confirmed tokens alone.

        Memory whose last step this was returns to its pools here (`DeferredRelease`).
        """
        return [] if previous is None else await self._commit(previous)

    def _schedule(self) -> SchedulerOutputs | None:
        with self.span("schedule"):
            return self.scheduler.schedule()

    def _submit(self, plan: SchedulerOutputs) -> WorkerStepState:
        with self.span("submit"):
            self.newest = self.worker.submit_forward(plan, self.newest)
            return self.newest

    def _submit_sampler(self, state: WorkerStepState, inputs: SamplerInputs) -> None:
        with self.span("submit sampler"):
            self.worker.submit_sampler(state, inputs)

    async def _sampler_inputs(self, plan: SchedulerOutputs, before: WorkerStepState | None) -> SamplerInputs:
        """What the next sampler may draw, from confirmed tokens; nothing but `plan` may be in flight.

        `before` is the step planned before it, whose drafts it feeds.
        """
        drafts: list[list[int]] = []
        if looks_at_drafts(plan):
            assert before is not None
            assert before.box.drafts_copied is not None
            with self.span("wait"):
                await wait_for(self.worker.device, before.box.drafts_copied)
            drafts = self.worker.drafts(before)
        with self.span("constrain"):
            sequences = self.scheduler.planned(plan)
            inputs = build_sampler_inputs(plan, sequences, self.worker.num_drafts)
            masks = build_masks(plan, sequences, drafts, self.worker.model.config.vocab_size)
            return inputs if masks is None else replace(inputs, allowed=masks)

    async def _commit(self, state: WorkerStepState) -> list[SequenceEvent]:
        """Wait for a step's tokens and apply them."""
        assert state.box.copied is not None
        with self.span("wait"):
            await wait_for(self.worker.device, state.box.copied)
        # In steady decode the time since the step before was committed is what a step takes.
        elapsed, self._committed_at = self.clock() - self._committed_at, self.clock()
        with self.span("apply"):
            return self.scheduler.apply(self.worker.result(state), elapsed)

    def _tell(self, events: list[SequenceEvent]) -> None:
        with self.span("callbacks"):
            self.on_events(events)

    async def flush(self) -> None:
        """Apply every step in flight without planning another. Idempotent."""
        if self.previous is not None:
            state, self.previous = self.previous, None
            self._tell(await self._commit(state))
