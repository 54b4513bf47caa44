"""What the ranks of a group pack for the kernels: a layer's experts on all of them, or on none.

Whether experts can be packed depends on their values, and each rank holds others. A layer that some ranks packed and others did not
would have results that depend on the number of ranks, and experts that move would meet slots of another layout.
"""

from deepinfer.model.packed_weights import Obstacles
from deepinfer.parallel.ranks import Ranks


def agree_on_packing(ranks: Ranks, obstacles: Obstacles) -> Obstacles:
    """Obstacles of any rank, as those of all, with the rank that has them. Collective.

    Args:
        obstacles: of the experts that are held here; all ranks name the same stacks in the same order.

    Raises: PeerLost if a rank does not come.
    """
    gathered = ranks.gather_waiting("what can be packed", [int(reason is not None) for reason in obstacles.values()])
    agreed: Obstacles = {}
    for (name, reason), flags in zip(obstacles.items(), zip(*gathered, strict=True), strict=True):
        holders = [str(rank) for rank, flag in enumerate(flags) if flag]
        whose = f"of what rank {' and '.join(holders)} holds" + (f" ({reason})" if reason else "")
        agreed[name] = whose if holders else None
    return agreed
