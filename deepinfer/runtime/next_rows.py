"""Which rows a sequence can feed next, and what they hold: decided from confirmed tokens and from bounds of what is in flight.

The newest planned step is remembered, because a row may feed the token that it draws and the drafts that it proposes, which only
the device knows. Nothing here changes a sequence. No torch.
"""

from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.plan import NOT_IN_LAST_STEP, SchedulerOutputs, SequencePlan
from deepinfer.runtime.sequence import Sequence


class NextRows:
    """Rows of the step behind the newest planned one."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        # seq_id -> (row group, epoch) in the newest planned step, for sequences that draw a token there
        self._last_row_of: dict[int, tuple[int, int]] = {}
        self._last_proposed = False  # whether that step drafts tokens

    def planned(self, step: SchedulerOutputs) -> None:
        """Make a step the newest one."""
        self._last_proposed = step.proposes
        self._last_row_of = {plan.seq_id: (row, plan.epoch) for row, plan in enumerate(step.sequences) if plan.is_sampling}

    def wanted(self, sequence: Sequence, position: int) -> int:
        """Rows the sequence could use from `position` on, before any budget."""
        known = len(sequence.token_ids)
        if self.continues_last_step(sequence, position):
            return 1 + self._drafts_wanted(sequence)
        if position < known:
            return known - position
        # All known tokens are planned. Each sampling step in flight yields one more; feed it from the device, unless the
        # sequence will have reached its limit by then.
        in_flight = sequence.num_sampling_inflight
        can_grow = in_flight > 0 and sequence.num_output_tokens + in_flight < sequence.request.max_new_tokens
        return 1 if can_grow else 0

    def is_chunk(self, sequence: Sequence, start: int) -> bool:
        """Whether the next rows of a running sequence are known tokens, more than the last one alone."""
        return not self.continues_last_step(sequence, start) and len(sequence.token_ids) - start > 1

    def continues_last_step(self, sequence: Sequence, position: int) -> bool:
        """Whether the next row feeds the token that the newest planned step draws, and drafts of that step may follow it."""
        row = self._last_row_of.get(sequence.seq_id)
        if not self._last_proposed or row is None or row[1] != sequence.epoch:
            return False
        return self._drafts_wanted(sequence) >= 0 and len(sequence.token_ids) - position <= 1

    def _drafts_wanted(self, sequence: Sequence) -> int:
        """Drafts that could still be of use; negative if the sequence needs no further step. Each step in flight yields a token."""
        left = sequence.request.max_new_tokens - sequence.num_output_tokens - sequence.num_sampling_inflight
        return min(self.limits.num_speculative_tokens, left - 1)

    def plan(self, sequence: Sequence, start: int, count: int, context: tuple[int, ...]) -> SequencePlan:
        """`count` rows from position `start` on; the sequence has its slot and blocks. `context`: tokens before a replay's rows."""
        known = len(sequence.token_ids)
        continues = self.continues_last_step(sequence, start)
        is_on_device = continues or start >= known
        assert sequence.slot is not None
        is_replay = sequence.replay is not None and start < sequence.replay.end
        return SequencePlan(
            request=sequence.request,
            seq_id=sequence.seq_id,
            epoch=sequence.epoch,
            slot=sequence.slot,
            blocks=sequence.blocks,
            start=start,
            token_ids=() if is_on_device else tuple(sequence.token_ids[start : start + count]),
            q_cap=count,
            n_drafts=count - 1 if continues else 0,
            remap=self._last_row_of[sequence.seq_id][0] if is_on_device else NOT_IN_LAST_STEP,
            is_sampling=start + count >= known,
            scored=_scored(sequence, start, count),
            seed=sequence.seed,
            num_output_tokens=sequence.num_output_tokens + sequence.num_sampling_inflight,
            replay=sequence.replay if is_replay else None,
            context=context,
        )


def _scored(sequence: Sequence, start: int, count: int) -> range:
    """Positions among the next rows whose prompt tokens behind them shall get a log probability and have none yet."""
    if sequence.request.params.prompt_logprobs is None or sequence.index > 0:
        return range(0)
    first = max(start, len(sequence.prompt_scores))
    return range(first, max(first, min(start + count, sequence.num_prompt_tokens - 1)))
