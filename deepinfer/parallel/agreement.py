"""One rank's part in agreeing on the next step: two small collectives around its own scheduler.

The second one is a transaction: the rank reserves memory for its prompts, and gives it back if the group decides otherwise.
How the integers travel is the caller's business (`Gather`): the engine and the simulator run this same code.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from deepinfer.parallel.config import ParallelConfig
from deepinfer.parallel.voting import Ballot, Motion, check_ballots, confirm, decide
from deepinfer.runtime.plan import GroupShape, SchedulerOutputs, StepKind
from deepinfer.runtime.scheduler import PlannedStep, Scheduler

# The same number of integers from every rank, in rank order. `what` names the collective for whoever waits in vain.
Gather = Callable[[str, tuple[int, ...]], Awaitable[list[tuple[int, ...]]]]

PREFILL_MOTIONS = (Motion.PREFILL_ALL, Motion.PREFILL_ANY)


class AgreedStep(NamedTuple):
    """What all ranks do next.

    Attributes:
        motion: equal on all ranks.
        num_groups: the largest number of sequences that any rank could decode; equal on all ranks.
        plan: this rank's rows; None if the motion runs no step.
    """

    motion: Motion
    num_groups: int
    plan: SchedulerOutputs | None


class StepAgreement:
    """The counters that follow from agreed steps alone, and the two votes of an iteration."""

    def __init__(self, scheduler: Scheduler, gather: Gather, config: ParallelConfig) -> None:
        self.scheduler, self.gather, self.config = scheduler, gather, config
        self.iteration = 0
        self.since_prefill = max(config.prefill_interval_all, config.prefill_interval_any)  # the first prompt need not wait
        self.withdrawals = 0

    async def next_step(self, digest: int, has_work: bool) -> AgreedStep:
        """Agree with the other ranks. Not to be cancelled: they would wait in vain.

        Args:
            digest: of whatever must be equal on all ranks.
            has_work: whether this rank wants any more steps.

        Raises: AgreementError; what `gather` raises if a rank does not come.
        """
        wants_prefill, decodable = self.scheduler.demand()
        ballot = Ballot(self.iteration, digest, int(wants_prefill), *decodable, int(has_work))
        ballots = [Ballot(*row) for row in await self.gather("vote", ballot)]
        check_ballots(ballots)
        motion, num_groups = decide(ballots, self.since_prefill, self.config)
        self.iteration += 1
        if motion is Motion.STOP:
            return AgreedStep(motion, num_groups, None)
        planned = PlannedStep([], [])
        if motion in PREFILL_MOTIONS:
            planned = self.scheduler.plan()
            reserved = await self.gather("confirm", (int(planned.has_prefill),))
            wanted = [bool(ballot.wants_prefill) for ballot in ballots]
            motion = confirm(motion, wanted, [bool(has) for (has,) in reserved], num_groups)
            if motion not in PREFILL_MOTIONS:
                self.scheduler.withdraw_prefill(planned)
                self.withdrawals += 1
        elif motion is Motion.DECODE:
            planned = self.scheduler.plan(allow_prefill=False)
        is_prefill = motion in PREFILL_MOTIONS
        self.since_prefill = 0 if is_prefill else self.since_prefill + 1
        if motion is Motion.DRAIN:
            return AgreedStep(motion, num_groups, None)
        if is_prefill:
            return AgreedStep(motion, num_groups, self.scheduler.commit(planned, StepKind.PREFILL))
        shape = GroupShape(num_groups, max(ballot.num_blocks for ballot in ballots))
        return AgreedStep(motion, num_groups, self.scheduler.commit(planned, StepKind.DECODE, shape))
