"""Which kind of step a group of ranks runs next: pure functions of what every rank has said. No torch.

Ranks meet in collectives inside the model, so all must run the same kinds of steps in the same order, also a rank without rows.
In each iteration every rank casts a `Ballot`; `decide` turns all of them into a `Motion`. A prefill is confirmed in a second
round, for which each rank has tried to reserve the memory (`confirm`). Nothing but gathered values and counters that follow from
them may enter a decision: two ranks that decide by something of their own hang, perhaps an hour later.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from deepinfer.errors import AgreementError
from deepinfer.parallel.config import ParallelConfig, PrefillVote


class Ballot(NamedTuple):
    """What one rank says before an iteration.

    Attributes:
        iteration: how many have begun; equal on all ranks, or they have lost each other.
        digest: of everything else that must be equal, such as the expert placement.
        wants_prefill: a prompt waits, whole or in part.
        num_decodable: running sequences that could decode.
        num_blocks: cache blocks of the longest of them.
        has_work: anything waits, runs, or is in flight.
    """

    iteration: int
    digest: int
    wants_prefill: int
    num_decodable: int
    num_blocks: int
    has_work: int


class Motion(Enum):
    """What the first vote leads to."""

    STOP = "stop"  # nobody has work: all leave together
    DRAIN = "drain"  # nobody has rows: all apply what is in flight, and no step runs
    DECODE = "decode"
    PREFILL_ALL = "prefill_all"  # every rank with work wants it: all that want it must confirm
    PREFILL_ANY = "prefill_any"  # somebody has waited long enough: one confirmation is enough


class Decision(NamedTuple):
    """The outcome of the first vote.

    Attributes:
        num_groups: most sequences that any rank could decode: the bucket of a step whose shape all ranks must share.
    """

    motion: Motion
    num_groups: int


def check_ballots(ballots: Sequence[Ballot]) -> None:
    """Raise AgreementError unless all ranks are at the same iteration and agree on the digest."""
    for field in ("iteration", "digest"):
        values = [getattr(ballot, field) for ballot in ballots]
        if len(set(values)) > 1:
            raise AgreementError(f"ranks disagree on the {field}: {dict(enumerate(values))}")


def decide(ballots: Sequence[Ballot], since_prefill: int, config: ParallelConfig) -> Decision:
    """The next motion.

    Ranks without work do not count in an ALL vote: they have nothing that a prefill could delay, and waiting for them would be
    waiting for a request that may never come.

    Args:
        since_prefill: iterations since the last prefill step.
    """
    num_groups = max(ballot.num_decodable for ballot in ballots)
    relevant = [ballot for ballot in ballots if ballot.has_work]
    if not relevant:
        return Decision(Motion.STOP, num_groups)
    wants = [bool(ballot.wants_prefill) for ballot in relevant]
    vote = config.prefill_vote
    if all(wants) and vote != PrefillVote.ANY and since_prefill >= config.prefill_interval_all:
        return Decision(Motion.PREFILL_ALL, num_groups)
    if any(wants) and vote != PrefillVote.ALL and since_prefill >= config.prefill_interval_any:
        return Decision(Motion.PREFILL_ANY, num_groups)
    # With nothing to decode anywhere, waiting for an interval would be idling.
    if any(wants) and num_groups == 0:
        return Decision(Motion.PREFILL_ANY, num_groups)
    return Decision(Motion.DECODE if num_groups else Motion.DRAIN, num_groups)


def confirm(motion: Motion, wanted: Sequence[bool], reserved: Sequence[bool], num_groups: int) -> Motion:
    """The second vote: the prefill motion if it stands, else what replaces it.

    Args:
        wanted: which ranks have something to prefill.
        reserved: which of them have memory for it. After a rejection they give it back.
    """
    if motion is Motion.PREFILL_ALL:
        stands = all(has for wants, has in zip(wanted, reserved, strict=True) if wants)
    else:
        stands = any(reserved)
    if stands:
        return motion
    return Motion.DECODE if num_groups else Motion.DRAIN
