"""Completions of one request that wait until the first of them, their leader, has computed the prompt but for its last token.

There they fork: each shares the prompt's full blocks, copies the rest of what the model remembers of it, feeds the last token
itself and draws with its own seed. No torch.
"""

from deepinfer.runtime.sequence import Sequence


class SharedPrompts:
    """Who waits for whom. A follower is neither running nor in the scheduler's queue."""

    def __init__(self) -> None:
        self._followers: dict[int, list[Sequence]] = {}

    def add(self, leader: Sequence, followers: list[Sequence]) -> None:
        """Let `followers` wait for `leader`, which has not started; their prompt has at least two tokens."""
        if followers:
            self._followers[leader.seq_id] = followers

    def num_waiting(self, leaders: list[Sequence]) -> int:
        """Followers of these sequences."""
        return sum(len(self._followers.get(leader.seq_id, ())) for leader in leaders) if self._followers else 0

    def cut(self, leader: Sequence, start: int, count: int) -> int:
        """Rows of the leader's next chunk: up to where its followers fork, if that lies within."""
        fork = leader.num_prompt_tokens - 1
        return fork - start if leader.seq_id in self._followers and start < fork < start + count else count

    def due(self, leader: Sequence, start: int) -> list[Sequence]:
        """The followers that fork before the leader's row at `start`; they wait no more."""
        return self.part(leader) if start == leader.num_prompt_tokens - 1 else []

    def part(self, leader: Sequence) -> list[Sequence]:
        """The followers of a leader, which wait no more."""
        return self._followers.pop(leader.seq_id, [])

    def forget(self, follower: Sequence) -> bool:
        """Remove a sequence from those that wait. False if it is none of them."""
        for followers in self._followers.values():
            if follower in followers:
                followers.remove(follower)
                return True
        return False
