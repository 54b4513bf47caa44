"""How many drafts a step should verify: confidence-scheduled verification. No torch, no clock.

A draft row costs time and pays with the probability that it stands. Times are measured in the running engine, probabilities come
from the confidence head by way of the host: two steps old, which is good enough for a budget. Which drafts get the budget's rows is
decided on the device, from the newest confidences (`deepinfer.runtime.row_layout.split_drafts`). Neither changes any text in
`match` verification.

Source: specification section 11, confidence head.
"""

import statistics
from collections import deque
from dataclasses import dataclass, field

from deepinfer.runtime.plan import SchedulerOutputs, StepKind

TRIAL_AFTER = 8  # steps of about one batch size before others are tried: batches that shrink at their end pass quickly
TRIAL_STEPS = 3  # measured steps that make a time known
KEPT_TIMES = 5  # of which the median counts: a first step of a new shape may take seconds
REVIEW_STEPS = 8  # decisions between two comparisons of budgets
REFRESH_STEPS = 256  # decisions after which a budget that was not used is measured again
TRIAL_PATIENCE = 12  # decisions after which a trial ends, measured or not
MIN_GAIN = 1.02  # a better budget must promise this much
PRIOR_SURVIVAL = 0.7  # of each further draft, of a sequence that nothing is known of
CALIBRATION_DECAY = 0.98


@dataclass(slots=True)
class _Times:
    """What steps of about one batch size took, for each number of drafts a sequence."""

    seconds: dict[int, deque[float]] = field(default_factory=dict)
    measured_at: dict[int, int] = field(default_factory=dict)
    each: int = 0
    reviewed_at: int = -REVIEW_STEPS


def draft_counts(most: int) -> tuple[int, ...]:
    """The numbers of drafts for each sequence among which a budget chooses, ascending: few, because each is a shape to capture."""
    return tuple(sorted({0, (most + 1) // 2, most}))


class DraftBudget:
    """Chooses the drafts for each sequence, on average over a step, that promise the most tokens a second.

    Writes nothing but its own measurements. Every batch size up to the next power of two is measured for itself; one that is new
    begins with what the last one used.
    """

    def __init__(self, num_drafts: int) -> None:
        self.counts, self.num_drafts = draft_counts(num_drafts), num_drafts
        self._times: dict[int, _Times] = {}
        self._decisions = 0
        self._last_batch, self._last_each, self._steady_since = -1, num_drafts, 0
        self._trial: tuple[int, int, int] | None = None  # batch class, drafts, decision at which it began
        self._last_shape: tuple[int, int, bool] | None = None
        # Accepted drafts over what their confidences promised, decaying.
        self._accepted = self._promised = 1.0

    # ---- measuring ----------------------------------------------------------------------------------------------------

    def observe(self, plan: SchedulerOutputs, seconds: float, accepted: int, promised: float) -> None:
        """Take in a step: what it took, drafts accepted, and the sum of the survival of those that were verified.

        Only the second of two equal decode steps counts: the first pays for the change, and for drafts that it did not propose.
        """
        self._accepted = CALIBRATION_DECAY * self._accepted + accepted
        self._promised = CALIBRATION_DECAY * self._promised + promised
        count = len(plan.sequences)
        # The number whose shape the step had.
        each = next(each for each in self.counts if each * count >= plan.draft_rows)
        shape = (_batch_class(count), each, plan.proposes)
        is_steady = plan.kind is StepKind.DECODE and plan.proposes == (each > 0) and shape == self._last_shape
        self._last_shape = shape
        if not is_steady:
            return
        times = self._times.setdefault(shape[0], _Times())
        times.seconds.setdefault(each, deque(maxlen=KEPT_TIMES)).append(seconds)
        if len(times.seconds[each]) >= TRIAL_STEPS:
            times.measured_at[each] = self._decisions
            if self._trial is not None and self._trial[:2] == (shape[0], each):
                self._trial = None

    # ---- deciding -----------------------------------------------------------------------------------------------------

    def drafts_each(self, survivals: list[tuple[float, ...]]) -> int:
        """Draft rows for each sequence of the next step, given what is known of each sequence's drafts."""
        self._decisions += 1
        batch = _batch_class(len(survivals))
        if batch != self._last_batch:
            self._last_batch, self._steady_since = batch, self._decisions
        times = self._times.setdefault(batch, _Times(each=self._last_each))
        if self._trial is not None and (self._trial[0] != batch or self._decisions - self._trial[2] > TRIAL_PATIENCE):
            times.measured_at.setdefault(self._trial[1], self._decisions)
            self._trial = None
        is_steady = self._decisions - self._steady_since >= TRIAL_AFTER
        if is_steady and self._trial is None and (stale := self._stale_count(times)) is not None:
            self._trial = (batch, stale, self._decisions)
            times.seconds.pop(stale, None)
        if self._trial is not None:
            return self._trial[1]
        if self._decisions - times.reviewed_at >= REVIEW_STEPS:
            times.reviewed_at, times.each = self._decisions, self._best(times, survivals)
        self._last_each = times.each
        return times.each

    def _stale_count(self, times: _Times) -> int | None:
        """A number to measure: one never measured, or not for long."""
        for each in reversed(self.counts):
            if self._decisions - times.measured_at.get(each, -REFRESH_STEPS) >= REFRESH_STEPS:
                return each
        return None

    def _best(self, times: _Times, survivals: list[tuple[float, ...]]) -> int:
        """Among the numbers that have been measured."""
        seconds = {each: statistics.median(found) for each, found in times.seconds.items() if found}
        rates = {each: self._tokens(survivals, each) / seconds[each] for each in seconds}
        if times.each not in rates:
            return times.each
        best = max(rates, key=lambda each: (rates[each], -each))
        return best if rates[best] > MIN_GAIN * rates[times.each] else times.each

    def _tokens(self, survivals: list[tuple[float, ...]], each: int) -> float:
        """Tokens that a step with `each` drafts for each sequence promises, the most likely ones first."""
        prior = tuple(PRIOR_SURVIVAL**i for i in range(1, self.num_drafts + 1))
        chances = sorted((chance for survival in survivals for chance in survival or prior), reverse=True)
        return len(survivals) + self._accepted / self._promised * sum(chances[: each * len(survivals)])


def _batch_class(count: int) -> int:
    return max(count - 1, 0).bit_length()
