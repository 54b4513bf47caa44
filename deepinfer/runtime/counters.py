"""What a scheduler has done so far, in numbers. No torch."""

from dataclasses import dataclass, field

from deepinfer.runtime.plan import SequenceResult


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start, for statistics and for tests that ask whether a mechanism was exercised."""

    scheduled_tokens: int = 0
    preemptions: int = 0
    stale_results: int = 0
    chunked_prefills: int = 0
    forks: int = 0  # completions that took over the rows of a prompt
    verify_steps: int = 0  # results that kept a run: one token and the drafts accepted before it
    drafted: int = 0  # drafts proposed, whether or not they got a row
    verified_at: list[int] = field(default_factory=list)  # by place in the proposal
    accepted_at: list[int] = field(default_factory=list)

    @property
    def verified(self) -> int:
        """Drafts that got a row."""
        return sum(self.verified_at)

    @property
    def accepted(self) -> int:
        """Drafts that stood."""
        return sum(self.accepted_at)

    def count_run(self, offered: int, result: SequenceResult) -> None:
        """Take in what one sequence got from a step that verified drafts of it."""
        missing = offered - len(self.verified_at)
        self.verified_at += [0] * missing
        self.accepted_at += [0] * missing
        self.verify_steps += 1
        self.drafted += offered
        for place in range(result.n_drafts):
            self.verified_at[place] += 1
            self.accepted_at[place] += place < result.num_accepted
