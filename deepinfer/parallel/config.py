"""How many ranks share the work, and when they prefill. Plain data, no torch.

There is no tensor and no pipeline parallelism: every rank computes attention for requests of its own (data parallel), and the
routed experts are split over all ranks (expert parallel).
"""

from dataclasses import dataclass
from enum import StrEnum

from deepinfer.errors import ConfigError


class Role(StrEnum):
    """What an engine does with a request."""

    NORMAL = "normal"  # everything
    PREFILL = "prefill"  # the prompt and the first token; then the request's state is exported
    DECODE = "decode"  # imported states only


class PrefillVote(StrEnum):
    """When a group of ranks runs a prefill step; see `deepinfer.parallel.voting`."""

    ALL = "all"
    ANY = "any"
    ALL_OR_ANY = "all_or_any"  # ALL fires early, ANY bounds the wait


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """A group of ranks.

    Attributes:
        ep_size: ranks that the routed experts are split over; each also owns requests.
        cp_size: ranks that split each long prompt between them, in an engine of role PREFILL.
        role: see `Role`.
        prefill_vote: see `PrefillVote`.
        prefill_interval_all, prefill_interval_any: least iterations between two prefill steps, for either vote.
        eplb_window: steps whose expert loads a placement is computed from.
        eplb_period: steps between two placements; 0 never moves an expert.
        num_redundant_experts: expert slots beyond one for each expert; they hold replicas of loaded experts.
        timeout_s: how long a rank waits for its peers before it gives them up. They compile at the same time, but not equally fast.
    """

    ep_size: int = 1
    cp_size: int = 1
    role: str = Role.NORMAL
    prefill_vote: str = PrefillVote.ALL_OR_ANY
    prefill_interval_all: int = 2
    prefill_interval_any: int = 16
    eplb_window: int = 1000
    eplb_period: int = 10_000
    num_redundant_experts: int = 0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        def require(name: str, condition: bool, rule: str) -> None:
            if not condition:
                raise ConfigError(f"ParallelConfig.{name} = {getattr(self, name)!r}: {rule}")

        def is_int(name: str, low: int) -> bool:
            value = getattr(self, name)
            return isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**31

        for name in ("ep_size", "cp_size", "prefill_interval_all", "prefill_interval_any", "eplb_window"):
            require(name, is_int(name, 1), "expected an integer of at least 1")
        for name in ("eplb_period", "num_redundant_experts"):
            require(name, is_int(name, 0), "expected an integer of at least 0")
        for name, kind in (("role", Role), ("prefill_vote", PrefillVote)):
            names = [str(member) for member in kind]
            require(name, getattr(self, name) in names, f"expected one of {', '.join(names)}")
        later = self.prefill_vote != PrefillVote.ALL_OR_ANY or self.prefill_interval_any >= self.prefill_interval_all
        require("prefill_interval_any", later, f"ANY bounds the wait of ALL, so it may not fire before {self.prefill_interval_all}")
        fits = self.eplb_period == 0 or self.eplb_window <= self.eplb_period
        require("eplb_window", fits, f"expected at most eplb_period, {self.eplb_period}")
        is_number = isinstance(self.timeout_s, int | float) and not isinstance(self.timeout_s, bool)
        require("timeout_s", is_number and 0 < self.timeout_s < float("inf"), "expected a finite number of seconds above 0")

    @property
    def num_ranks(self) -> int:
        """Processes that form the group."""
        return self.ep_size * self.cp_size

    @property
    def size_name(self) -> str:
        """The setting that makes a group of it, with its value."""
        return f"cp_size = {self.cp_size}" if self.cp_size > 1 else f"ep_size = {self.ep_size}"

    def slots_per_rank(self, n_experts: int) -> int:
        """Expert slots of a layer that each rank holds. Raises ConfigError if the slots cannot be split evenly."""
        slots = n_experts + self.num_redundant_experts
        if slots % self.ep_size:
            raise ConfigError(
                f"ParallelConfig.ep_size = {self.ep_size}: {n_experts} experts and {self.num_redundant_experts} redundant ones "
                f"make {slots} slots, which {self.ep_size} ranks cannot hold in equal numbers"
            )
        return slots // self.ep_size


# The public deployment: prefill on groups of 2 to 8, decode on 64 to 128, at its window and period.
TOPOLOGIES = {
    "prefill_ep2": ParallelConfig(ep_size=2, role=Role.PREFILL),
    "prefill_ep4": ParallelConfig(ep_size=4, role=Role.PREFILL),
    "prefill_ep8": ParallelConfig(ep_size=8, role=Role.PREFILL),
    "decode_ep64": ParallelConfig(ep_size=64, role=Role.DECODE, num_redundant_experts=64),
    "decode_ep128": ParallelConfig(ep_size=128, role=Role.DECODE, num_redundant_experts=128),
}


def topology(name: str) -> ParallelConfig:
    """A preset of `TOPOLOGIES`. Raises ConfigError that lists the names."""
    if name not in TOPOLOGIES:
        raise ConfigError(f"topology {name!r}: expected one of {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[name]
