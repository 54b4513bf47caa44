"""The step loop of a rank in a group: the same two loops as alone, with the next step agreed on instead of planned."""

import asyncio
from collections.abc import Awaitable, Callable

from deepinfer.parallel.agreement import StepAgreement
from deepinfer.parallel.voting import Motion
from deepinfer.runtime.loop import OnEvents, StepLoop
from deepinfer.runtime.plan import SchedulerOutputs
from deepinfer.runtime.scheduler import SequenceEvent
from deepinfer.runtime.step_state import WorkerStepState
from deepinfer.runtime.worker import Worker


async def _nothing() -> None:
    pass


class GroupLoop(StepLoop):
    """Every rank of the group runs one of these in a round: from `open_round` until nobody has work any more.

    Attributes:
        pending: what this rank will still queue in the present round; it keeps the round open.
        digest: see `StepAgreement.next_step`.
        after_step: awaited after each step that ran, at the same step on every rank.
        on_agreed: told of every iteration: its number, the motion, the row groups. Equal on all ranks.
    """

    def __init__(self, agreement: StepAgreement, worker: Worker, depth: int, on_events: OnEvents, timeout_s: float) -> None:
        super().__init__(agreement.scheduler, worker, depth, on_events)
        self.agreement, self.timeout_s = agreement, timeout_s
        self.is_open, self.pending, self.digest = False, 0, 0
        self.after_step: Callable[[], Awaitable[None]] = _nothing
        self.on_agreed: Callable[[int, Motion, int], None] | None = None
        self._agreed: SchedulerOutputs | None = None

    @property
    def has_work(self) -> bool:
        return self.is_open

    def open_round(self) -> None:
        """Take part in the steps of the group from now on; every rank has to."""
        self.is_open = True

    async def step(self) -> bool:
        """Advance with the group; False if the round is over. Not to be cancelled."""
        iteration = self.agreement.iteration
        has_work = self.scheduler.has_work or self.pending > 0
        motion, num_groups, self._agreed = await self.agreement.next_step(self.digest, has_work)
        if self.on_agreed is not None:
            self.on_agreed(iteration, motion, num_groups)
        if motion is Motion.STOP:
            # What was queued here while the others voted makes a new round.
            self.is_open = self.scheduler.has_work or self.pending > 0
            return False
        ran = self._agreed is not None
        await super().step()
        if ran:
            await self.after_step()
        return True

    def _schedule(self) -> SchedulerOutputs | None:
        plan, self._agreed = self._agreed, None
        return plan

    async def _commit(self, state: WorkerStepState) -> list[SequenceEvent]:
        """As alone, but a device that waits for a lost peer is not waited for. Raises TimeoutError."""
        async with asyncio.timeout(self.timeout_s):
            return await super()._commit(state)
