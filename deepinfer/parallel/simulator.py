"""Many ranks in one process: the real scheduler, votes and step loop of each rank over collectives and workers that are fakes.

No model runs: a worker draws the tokens that its request is known to end with, so anything lost, doubled or out of order shows.
A collective completes when all ranks have called it with the same name, and a call that does not match is an error, where a real
group would hang.
"""

import asyncio
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from deepinfer.errors import AgreementError
from deepinfer.parallel.agreement import StepAgreement
from deepinfer.parallel.config import ParallelConfig
from deepinfer.parallel.group_loop import GroupLoop
from deepinfer.parallel.voting import Motion
from deepinfer.runtime.constraints import SamplerInputs
from deepinfer.runtime.device import COPY, Event, InlineDevice
from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.plan import GroupShape, SchedulerOutputs, SequenceResult, StepKind, StepResult
from deepinfer.runtime.request import Request
from deepinfer.runtime.scheduler import Scheduler, SequenceEvent
from deepinfer.runtime.sequence import Sequence
from deepinfer.runtime.worker import Worker
from deepinfer.sampling_params import SamplingParams

EOS, FIRST_TOKEN = 1, 100
TIMEOUT_S = 60.0


class Arrival(NamedTuple):
    """One request of a traffic trace.

    Attributes:
        rank: its owner.
        iteration: when it is queued.
        ends_at: tokens after which the model ends it by itself; None leaves it to `max_tokens`.
    """

    rank: int
    iteration: int
    prompt_tokens: int
    max_tokens: int
    ends_at: int | None = None

    @property
    def expected(self) -> list[int]:
        """The tokens it must get."""
        tokens = [FIRST_TOKEN + i for i in range(self.max_tokens)]
        return tokens if self.ends_at is None or self.ends_at > self.max_tokens else [*tokens[: self.ends_at - 1], EOS]


class FakeGroup:
    """Collectives among coroutines: the n-th call of every rank must be the same collective."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._calls: dict[int, tuple[str, int, dict[int, tuple[int, ...]], asyncio.Event]] = {}
        self._counts = [0] * num_ranks

    async def gather(self, rank: int, what: str, row: tuple[int, ...]) -> list[tuple[int, ...]]:
        """All ranks' rows. Raises AgreementError if this rank's call is not the one that others have made."""
        number = self._counts[rank]
        self._counts[rank] += 1
        name, width, rows, done = self._calls.setdefault(number, (what, len(row), {}, asyncio.Event()))
        if (what, len(row)) != (name, width):
            raise AgreementError(f"collective {number}: rank {rank} calls {what} of {len(row)}, others {name} of {width}")
        rows[rank] = row
        if len(rows) == self.num_ranks:
            del self._calls[number]
            done.set()
        await done.wait()
        return [rows[r] for r in range(self.num_ranks)]


@dataclass(slots=True)
class _Box:
    copied: Event


@dataclass(slots=True)
class _State:
    plan: SchedulerOutputs
    box: _Box


class FakeWorker:
    """Draws the tokens that each request is known to get, and records the kinds and shapes of the steps it ran."""

    def __init__(self, ends_at: dict[str, int | None], block_size: int) -> None:
        self.block_size = block_size
        self.device, self.ends_at, self.num_drafts = InlineDevice(), ends_at, 0
        self.model = SimpleNamespace(config=SimpleNamespace(vocab_size=0))  # for masks, of which there are none
        self.kinds: list[StepKind] = []
        self.shapes: list[GroupShape | None] = []

    def submit_forward(self, plan: SchedulerOutputs, previous: _State | None) -> _State:
        """Note the step. Raises AgreementError for a decode step that does not fit the shape that was agreed on."""
        if plan.kind is StepKind.DECODE:
            longest = max(-(-(seq.start + seq.q_cap) // self.block_size) for seq in plan.sequences)
            own, agreed = GroupShape(len(plan.sequences), longest), plan.group_shape
            if agreed is None or any(need > room for need, room in zip(own, agreed, strict=True)):
                raise AgreementError(f"step {plan.step_seq} needs {own}, agreed on is {agreed}")
            if any(seq.is_chunk for seq in plan.sequences):
                raise AgreementError(f"step {plan.step_seq} is a decode step and feeds a prompt")
        self.kinds.append(plan.kind)
        self.shapes.append(plan.group_shape)
        return _State(plan, _Box(self.device.record(COPY)))

    def submit_sampler(self, state: _State, inputs: SamplerInputs) -> None:
        """Nothing to launch."""

    def result(self, state: _State) -> StepResult:
        """One token for each row group that samples."""
        results = []
        for seq in state.plan.sequences:
            count, ends_at = seq.num_output_tokens, self.ends_at[seq.request.request_id]
            token = EOS if ends_at is not None and count + 1 >= ends_at else FIRST_TOKEN + count
            results.append(SequenceResult((token,) if seq.is_sampling else ()))
        return StepResult(step_seq=state.plan.step_seq, sequences=tuple(results))


@dataclass(slots=True)
class RankTrace:
    """What one rank did.

    Attributes:
        agreed: (iteration, motion, row groups) of every iteration: must be the same on all ranks.
        kinds: steps as this rank ran them.
        shapes: of its decode steps, None for others: must be the same on all ranks.
        outputs: request ids with their tokens, in the order they finished.
        queued_at, admitted_at: iterations.
        withdrawals, preemptions: how often each happened.
    """

    agreed: list[tuple[int, Motion, int]] = field(default_factory=list)
    kinds: list[StepKind] = field(default_factory=list)
    shapes: list[GroupShape | None] = field(default_factory=list)
    outputs: list[tuple[str, list[int]]] = field(default_factory=list)
    queued_at: dict[str, int] = field(default_factory=dict)
    admitted_at: dict[str, int] = field(default_factory=dict)
    withdrawals: int = 0
    preemptions: int = 0


class _Rank:
    def __init__(
        self, rank: int, group: FakeGroup, limits: SchedulerLimits, config: ParallelConfig, depth: int, arrivals: list[Arrival]
    ) -> None:
        self.trace = RankTrace()
        self._arrivals = deque(sorted(arrivals, key=lambda a: a.iteration))
        self._names = {id(a): f"{rank}.{i}" for i, a in enumerate(arrivals)}
        self.scheduler = Scheduler(limits)
        self.worker = FakeWorker({self._names[id(a)]: a.ends_at for a in arrivals}, limits.block_size)

        async def gather(what: str, row: tuple[int, ...]) -> list[tuple[int, ...]]:
            return await group.gather(rank, what, row)

        self.agreement = StepAgreement(self.scheduler, gather, config)
        self.loop = GroupLoop(self.agreement, cast(Worker, cast(Any, self.worker)), depth, self._on_events, TIMEOUT_S)
        self.loop.on_agreed = lambda iteration, motion, groups: self.trace.agreed.append((iteration, motion, groups))

    def _on_events(self, events: list[SequenceEvent]) -> None:
        for event in events:
            if event.sequence.finish_reason is not None:
                self.trace.outputs.append((event.sequence.request.request_id, event.sequence.output_token_ids))

    async def run(self, max_iterations: int) -> RankTrace:
        self.loop.open_round()
        self.loop.pending = len(self._arrivals)
        while self.loop.is_open:
            iteration = self.agreement.iteration
            if iteration >= max_iterations:
                raise AgreementError(f"no end after {iteration} iterations: {self.scheduler.demand()}")
            while self._arrivals and self._arrivals[0].iteration <= iteration:
                self._queue(self._arrivals.popleft(), iteration)
            self.loop.pending = len(self._arrivals)
            await self.loop.step()
            for sequence in self.scheduler.running:
                self.trace.admitted_at.setdefault(sequence.request.request_id, iteration)
            self.scheduler.check_integrity()
        self.trace.kinds, self.trace.shapes = self.worker.kinds, self.worker.shapes
        self.trace.withdrawals = self.agreement.withdrawals
        self.trace.preemptions = self.scheduler.counters.preemptions
        return self.trace

    def _queue(self, arrival: Arrival, iteration: int) -> None:
        name = self._names[id(arrival)]
        self.trace.queued_at[name] = iteration
        self.scheduler.add(sequence_of(arrival, name, len(self.trace.queued_at)))


def sequence_of(arrival: Arrival, name: str, seq_id: int) -> Sequence:
    """The arrival as a scheduler takes it."""
    request = Request(
        request_id=name,
        prompt=None,
        prompt_token_ids=(FIRST_TOKEN,) * arrival.prompt_tokens,
        params=SamplingParams(max_tokens=arrival.max_tokens),
        max_new_tokens=arrival.max_tokens,
        seed=0,
        eos_token_id=EOS,
        stop_token_ids=frozenset({EOS}),
        arrival_s=0.0,
    )
    return Sequence(request, 0, seq_id, list(request.prompt_token_ids))


def simulate(
    arrivals: SequenceOf[Arrival],
    config: ParallelConfig,
    limits: SchedulerLimits,
    *,
    async_scheduling: int = 1,
    max_iterations: int = 100_000,
) -> list[RankTrace]:
    """Run a traffic trace to its end on `config.ep_size` ranks; one trace for each.

    Raises: AgreementError if two ranks call different collectives, or if there is no end.
    """

    async def run() -> list[RankTrace]:
        group = FakeGroup(config.ep_size)
        ranks = [
            _Rank(rank, group, limits, config, async_scheduling, [a for a in arrivals if a.rank == rank])
            for rank in range(config.ep_size)
        ]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(rank.run(max_iterations)) for rank in ranks]
        return [task.result() for task in running]

    try:
        return asyncio.run(run())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
