"""The plain loop and the overlapped loop, side by side, made of the same four calls.

Plain (depth 0): plan, run, wait, apply.
Overlapped (depth 1): while the device runs step N, the host plans and submits the forward of step N + 1; only then does it wait
for N's tokens, applies them, and submits the sampler of N + 1, whose masks are exact because N has been applied.
"""

from collections.abc import Callable

from deepinfer.runtime.device import wait_for
from deepinfer.runtime.scheduler import Scheduler, SequenceEvent
from deepinfer.runtime.step_state import WorkerStepState
from deepinfer.runtime.worker import Worker

OnEvents = Callable[[list[SequenceEvent]], None]


class StepLoop:
    """One pipeline of steps. `previous` is the step whose result has not been applied yet, if there is one."""

    def __init__(self, scheduler: Scheduler, worker: Worker, depth: int, on_events: OnEvents) -> None:
        self.scheduler, self.worker, self.depth, self.on_events = scheduler, worker, depth, on_events
        self.previous: WorkerStepState | None = None

    async def step(self) -> bool:
        """Advance by one step; False if there was nothing to do. Cancellation between steps loses nothing."""
        return await (self._overlapped_step() if self.depth else self._plain_step())

    async def _plain_step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        state = self.worker.submit_forward(plan, None)
        self.worker.submit_sampler(state)
        await self._commit(state)
        return True

    async def _overlapped_step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None and self.previous is None:
            return False
        state = None if plan is None else self.worker.submit_forward(plan, self.previous)
        previous, self.previous = self.previous, state
        if previous is not None:
            await self._commit(previous)  # pre_sampler_sync
        if state is not None:
            self.worker.submit_sampler(state)
        return True

    async def _commit(self, state: WorkerStepState) -> None:
        """Wait for a step's tokens and apply them."""
        assert state.box.copied is not None
        await wait_for(self.worker.device, state.box.copied)
        self.on_events(self.scheduler.apply(self.worker.result(state)))

    async def flush(self) -> None:
        """Apply every step in flight without planning another. Idempotent."""
        if self.previous is not None:
            state, self.previous = self.previous, None
            await self._commit(state)
