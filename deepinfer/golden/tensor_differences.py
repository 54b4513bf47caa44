"""Differences of named tensors: numbers by relative size, choices as sets with the gap that decided them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from deepinfer.dims import Bool, Float, Int, Shaped, Tensor
from deepinfer.errors import RecordingError
from deepinfer.golden.observe import EMPTY_PLACE, module_of
from deepinfer.golden.reading import fill_up
from deepinfer.golden.tolerances import Tolerances, bounds

CHOICES = ("ids", "selected", "candidates")
# Rows count as at least this part of the tensor's root mean square: a row of almost nothing has no relative size.
SMALLEST_ROW = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """One tensor of one prompt.

    Attributes:
        order: place in execution order.
        module: the checkpoint's module that computes it.
        relative: root mean square of the difference over that of our tensor; for choices, rows that differ beyond a tie.
        worst_row: the same for the row that differs most.
        where: worst element: row (position, or number of the proposal) and place in it.
        jaccard: mean over rows of shared choices over all choices; None for numbers.
        gap: for choices, the largest relative gap between scores that were decided otherwise.
    """

    order: int
    name: str
    module: str
    shape: tuple[int, ...]
    relative: float
    worst_row: float
    allowed: tuple[float, float]
    where: tuple[int, ...]
    ours: float
    theirs: float
    jaccard: float | None = None
    gap: float | None = None

    @property
    def is_within(self) -> bool:
        """NaN never is."""
        return self.relative <= self.allowed[0] and self.worst_row <= self.allowed[1]

    @property
    def severity(self) -> float:
        """How many times the tolerance: 1 is just within."""
        return max(_ratio(self.relative, self.allowed[0]), _ratio(self.worst_row, self.allowed[1]))


def _ratio(value: float, allowed: float) -> float:
    if value == 0:
        return 0.0
    return value / allowed if allowed else float("inf")


def compare_tensors(
    ours: Mapping[str, Shaped[Tensor, "R ..."]],
    theirs: Mapping[str, Shaped[Tensor, "R ..."]],
    precision: str,
    tolerances: Tolerances,
    where: str,
    *,
    is_anchored: bool = False,
    asked: Collection[str] = (),
) -> list[TensorDifference]:
    """Compare every tensor of theirs that we have, in our execution order.

    Args:
        ours: also the scores that choices were made by, where they are to be judged.
        is_anchored: our modules went on from their tensors (see `anchor`).
        asked: names of the tolerances that somebody asked for: used as they are.
    Raises: RecordingError for a shape that does not fit.
    """
    found = []
    given = theirs.keys() if is_anchored else ()
    for order, (name, mine) in enumerate(ours.items()):
        other = theirs.get(name)
        if other is None:
            continue
        field = name.rpartition(".")[2]
        if field in EMPTY_PLACE and ".indexer." in name:
            width = max(mine.shape[-1], other.shape[-1])
            mine, other = (fill_up(t, width, EMPTY_PLACE[field]) for t in (mine, other))
        if mine.shape != other.shape:
            raise RecordingError(f"{where}: {name} has shape {tuple(other.shape)}, expected {tuple(mine.shape)}")
        if field in CHOICES:
            found.append(_compare_choices(order, name, mine, other, ours.get(_scores_of(name)), tolerances))
        elif name == "mtp.token_ids":
            found.append(_compare_drafts(order, name, mine, other, ours.get("mtp.logits"), tolerances))
        elif not mine.is_floating_point():
            found.append(_compare_exactly(order, name, mine, other))
        else:
            mine, other = _comparable(name, mine, other, ours, theirs)
            found.append(_compare_numbers(order, name, mine, other, bounds(name, precision, tolerances, given, asked)))
    return found


def _scores_of(name: str) -> str:
    return f"{name.rpartition('.')[0]}.scores"


def _comparable(
    name: str,
    mine: Float[Tensor, "R ..."],
    other: Float[Tensor, "R ..."],
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
) -> tuple[Float[Tensor, "r ..."], Float[Tensor, "r ..."]]:
    """The rows that mean the same on both sides: weights of the same experts, drafts behind the same drafts."""
    stem, _, field = name.rpartition(".")
    ids = f"{stem}.ids"
    if field == "weights" and ids in ours and ids in theirs:
        (a, order_a), (b, order_b) = (side[ids].long().sort(dim=-1) for side in (ours, theirs))
        same = (a == b).all(dim=-1)
        return mine.gather(-1, order_a)[same], other.gather(-1, order_b)[same]
    if name.startswith("mtp.") and "mtp.token_ids" in ours and "mtp.token_ids" in theirs:
        drafts = ours["mtp.token_ids"].long() == theirs["mtp.token_ids"].long()
        if name in ("mtp.logits", "mtp.confidence") or ".markov_head." in name or ".confidence_head." in name:
            # A draft depends on the drafts before it.
            before = torch.cat((torch.ones_like(drafts[:, :1]), drafts[:, :-1].cumprod(dim=1).bool()), dim=1)
            return mine[before], other[before]
    return mine, other


def _compare_numbers(
    order: int, name: str, mine: Float[Tensor, "R ..."], other: Float[Tensor, "R ..."], allowed: tuple[float, float]
) -> TensorDifference:
    a, b = mine.double(), other.double()
    # Equal infinities mark what may not be chosen; any other infinity or NaN is an infinite difference.
    is_equal = (a == b) | (~a.isfinite() & ~b.isfinite() & (a.isnan() == b.isnan()) & (a.sign() == b.sign()))
    difference = torch.where(is_equal, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    if difference.numel() == 0:
        return TensorDifference(
            order=order, name=name, module=module_of(name), shape=tuple(mine.shape), relative=0.0, worst_row=0.0, allowed=allowed,
            where=(), ours=0.0, theirs=0.0,
        )  # fmt: skip
    finite = torch.where(a.isfinite(), a, 0.0)
    size = float(finite.square().mean().sqrt()) or 1.0
    per_row = difference.reshape(difference.shape[0], -1).square().mean(dim=1).sqrt()
    row_size = finite.reshape(finite.shape[0], -1).square().mean(dim=1).sqrt().clamp(min=SMALLEST_ROW * size)
    place = torch.unravel_index(difference.argmax(), difference.shape)
    return TensorDifference(
        order=order,
        name=name,
        module=module_of(name),
        shape=tuple(mine.shape),
        relative=float(difference.square().mean().sqrt()) / size,
        worst_row=float((per_row / row_size).max()),
        allowed=allowed,
        where=tuple(int(i) for i in place),
        ours=float(a[place]),
        theirs=float(b[place]),
    )


def _compare_exactly(order: int, name: str, mine: Int[Tensor, "R ..."], other: Int[Tensor, "R ..."]) -> TensorDifference:
    differs = mine.long() != other.long()
    place = torch.unravel_index(differs.to(torch.int8).argmax(), differs.shape)
    rows = differs.reshape(differs.shape[0], -1).any(dim=1).double()
    return TensorDifference(
        order=order,
        name=name,
        module=module_of(name),
        shape=tuple(mine.shape),
        relative=float(rows.mean()),
        worst_row=float(rows.max()),
        allowed=(0.0, 0.0),
        where=tuple(int(i) for i in place),
        ours=float(mine[place]),
        theirs=float(other[place]),
    )


def membership(name: str, chosen: Int[Tensor, "R ... K"], width: int) -> Bool[Tensor, "R ... width"]:
    """Choices as a mask over what could be chosen."""
    if name.endswith(".candidates"):
        return chosen.bool()
    outside = (chosen < 0) | (chosen >= width)
    mask = torch.zeros(*chosen.shape[:-1], width + 1, dtype=torch.bool)
    return mask.scatter(-1, chosen.long().masked_fill(outside, width), True)[..., :width]


def _compare_choices(
    order: int,
    name: str,
    mine: Int[Tensor, "R ... K"],
    other: Int[Tensor, "R ... K"],
    scores: Float[Tensor, "R ... C"] | None,
    tolerances: Tolerances,
) -> TensorDifference:
    """Sets of experts or entries. A row may differ by what our scores can hardly tell apart."""
    width = int(max(mine.max(), other.max())) + 1 if scores is None else scores.shape[-1]
    a, b = (membership(name, t, width) for t in (mine, other))
    union = (a | b).sum(dim=-1)
    jaccard = torch.where(union > 0, (a & b).sum(dim=-1) / union.clamp(min=1), 1.0)
    differs = (a != b).any(dim=-1)
    gap = torch.where(differs, float("inf"), 0.0) if scores is None else choice_gap(scores.double(), a, b)
    beyond = gap > tolerances.choice_gap
    row = int(gap.reshape(gap.shape[0], -1).amax(dim=1).argmax())
    return TensorDifference(
        order=order,
        name=name,
        module=module_of(name),
        shape=tuple(mine.shape),
        relative=float(beyond.double().mean()),
        worst_row=float(beyond.any()),
        allowed=(0.0, 0.0),
        where=(row,) if bool(differs.any()) else (),
        ours=float((a & ~b)[row].reshape(-1).to(torch.int8).argmax() % width),
        theirs=float((b & ~a)[row].reshape(-1).to(torch.int8).argmax() % width),
        jaccard=float(jaccard.double().mean()),
        gap=float(gap.max()),
    )


def choice_gap(
    scores: Float[Tensor, "R ... C"], mine: Bool[Tensor, "R ... C"], other: Bool[Tensor, "R ... C"]
) -> Float[Tensor, "R ..."]:
    """How much better the best thing that only we chose is than the worst that only they chose, relative to the row.

    Infinite where one side chose more, or something that cannot be chosen.
    """
    size = torch.where(scores.isfinite(), scores, 0.0).square().sum(dim=-1)
    size = (size / scores.isfinite().sum(dim=-1).clamp(min=1)).sqrt().clamp(min=1e-30)
    only_mine, only_other = mine & ~other, other & ~mine
    best = torch.where(only_mine, scores, float("-inf")).amax(dim=-1)
    worst = torch.where(only_other, scores, float("inf")).amin(dim=-1)
    gap = ((best - worst) / size).nan_to_num(nan=float("inf")).clamp(min=0)
    gap = torch.where(only_mine.sum(dim=-1) == only_other.sum(dim=-1), gap, float("inf"))
    return torch.where((only_mine | only_other).any(dim=-1), gap, 0.0)


def _compare_drafts(
    order: int,
    name: str,
    mine: Int[Tensor, "B Q"],
    other: Int[Tensor, "B Q"],
    logits: Float[Tensor, "B Q V"] | None,
    tolerances: Tolerances,
) -> TensorDifference:
    """Proposals, each up to the first draft that differs: the ones behind it follow from it."""
    differs = mine.long() != other.long()
    first = differs & (differs.cumsum(dim=1) == 1)
    gap = torch.zeros_like(differs, dtype=torch.float64)
    if logits is not None:
        logprobs = torch.log_softmax(logits.double(), dim=-1)
        valid = other.long().clamp(0, logits.shape[-1] - 1)
        gap = logprobs.amax(dim=-1) - logprobs.gather(-1, valid[..., None]).squeeze(-1)
    else:
        gap = gap + float("inf")
    gap = torch.where(first, gap, 0.0)
    beyond = gap > tolerances.token_gap
    place = torch.unravel_index(gap.argmax(), gap.shape)
    return TensorDifference(
        order=order,
        name=name,
        module=module_of(name),
        shape=tuple(mine.shape),
        relative=float(beyond.any(dim=1).double().mean()),
        worst_row=float(beyond.any()),
        allowed=(0.0, 0.0),
        where=tuple(int(i) for i in place),
        ours=float(mine[place]),
        theirs=float(other[place]),
        jaccard=float((~differs).double().mean()),
        gap=float(gap.max()),
    )
