"""What a comparison found: plain records, a verdict, and the verdict's text. JSON is `Report.to_dict`."""

from dataclasses import asdict, dataclass, field
from typing import Any

from deepinfer.golden.tensor_differences import TensorDifference
from deepinfer.golden.token_differences import PositionDifference, TokenDivergence

SHOWN_TENSORS, SHOWN_TOKENS = 8, 5
COUNTING = "prompts, positions and rows from 0, generated tokens from 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptReport:
    """One prompt.

    Attributes:
        index: in the golden recording.
        where: what was compared with it.
        num_tokens: generated ones that were compared.
        num_recorded_tokens: generated ones of the recording.
        ended_after: tokens of an output that is shorter than the recorded one without a stop token; None: it is not.
        went_on_after: tokens behind which the output should have ended, by the recording or its parameters; None: it did.
        logprob_tolerance: what the largest difference of log probabilities may be.
        token_gap: up to which gap another token is a tie.
        widened_from: those of the two that the last-bit measurement has widened, by name, with what they were.
        last_bit_difference: how far the model itself moves them when last bits of its streams change; None: not needed.
        mean_kl_tolerance: what the mean over positions may be, from the same measurement.
        divergences: tokens that we would not have chosen, each after the same tokens before it.
        tensors: in execution order.
    """

    index: int
    where: str
    num_prompt_tokens: int
    num_tokens: int
    num_recorded_tokens: int = 0
    ended_after: int | None = None
    went_on_after: int | None = None
    positions: list[PositionDifference] = field(default_factory=list)
    logprob_tolerance: float = 0.0
    token_gap: float = 0.0
    widened_from: dict[str, float] = field(default_factory=dict)
    last_bit_difference: float | None = None
    mean_kl_tolerance: float | None = None
    divergences: list[TokenDivergence] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)

    @property
    def max_kl(self) -> float:
        return max((p.kl for p in self.positions), default=0.0)

    @property
    def mean_kl(self) -> float:
        return sum(p.kl for p in self.positions) / max(len(self.positions), 1)

    @property
    def max_logprob_difference(self) -> float:
        return max((p.max_logprob_difference for p in self.positions), default=0.0)

    @property
    def first_divergence(self) -> TokenDivergence | None:
        return self.divergences[0] if self.divergences else None

    @property
    def first_outside(self) -> TensorDifference | None:
        """The first tensor in execution order that leaves its tolerance."""
        return next((t for t in self.tensors if not t.is_within), None)

    @property
    def widening(self) -> str | None:
        """Which default tolerances were widened, and why."""
        if not self.widened_from:
            return None
        now = {"logprob": self.logprob_tolerance, "token_gap": self.token_gap}
        changes = (f"{name} {before:.3g} widened to {now[name]:.3g}" for name, before in self.widened_from.items())
        return f"default tolerances: {', '.join(changes)}, because the model's own last bits move its log probabilities"

    @property
    def problems(self) -> list[str]:
        """Everything that makes this prompt differ."""
        found = []
        if self.ended_after is not None:
            found.append(f"ended after {self.ended_after} of {self.num_recorded_tokens} tokens")
        if self.went_on_after is not None:
            found.append(f"went on after {self.went_on_after} tokens, where it should have ended, to {self.num_tokens}")
        if self.first_outside is not None:
            found.append(_count(sum(not t.is_within for t in self.tensors), "tensor") + " outside tolerance")
        errors = sum(d.kind == "error" for d in self.divergences)
        if errors:
            found.append(_count(errors, "token") + " that no tie explains")
        if not self.max_logprob_difference <= self.logprob_tolerance:
            found.append(f"log probabilities differ by {self.max_logprob_difference:.3g}, allowed {self.logprob_tolerance:.3g}")
        if self.mean_kl_tolerance is not None and not self.mean_kl <= self.mean_kl_tolerance:
            found.append(f"the mean KL divergence is {self.mean_kl:.3g}, allowed {self.mean_kl_tolerance:.3g}")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A comparison of a golden recording with another build.

    Attributes:
        basis: what stood for our side: the model, or the recording alone.
        notes: what a reader should know before trusting the verdict.
        num_prompts: of the recording; those without a report are missing on one side.
        allow_missing: whether the verdict is about the prompts that both have.
    """

    golden: str
    other: str
    precision: str
    basis: str
    notes: list[str]
    prompts: list[PromptReport]
    num_prompts: int
    allow_missing: bool = False

    @property
    def is_equal(self) -> bool:
        """Equal within tolerance."""
        return not any(prompt.problems for prompt in self.prompts) and (self.missing is None or self.allow_missing)

    @property
    def missing(self) -> str | None:
        """How many prompts were compared, if that is not all of them."""
        if len(self.prompts) == self.num_prompts:
            return None
        return f"{len(self.prompts)} of {self.num_prompts} prompts compared: the others are missing on one side"

    @property
    def verdict(self) -> str:
        """In words, with prompts that are missing."""
        result = "equal within tolerance" if self.is_equal else "differs"
        return result if self.missing is None else f"{result}; {self.missing}{' (allowed)' if self.allow_missing else ''}"

    @property
    def exit_code(self) -> int:
        """0 equal within tolerance, 1 differs. (2, unusable input, is an error and gives no report.)"""
        return 0 if self.is_equal else 1

    @property
    def first_outside(self) -> TensorDifference | None:
        """Over all prompts, the tensor outside its tolerance that is computed first."""
        found = [prompt.first_outside for prompt in self.prompts]
        return min((t for t in found if t is not None), key=lambda t: t.order, default=None)

    @property
    def jaccard(self) -> dict[str, float]:
        """For each choice of experts or entries the share of it that both builds chose, averaged over the prompts."""
        shares: dict[str, list[float]] = {}
        for prompt in self.prompts:
            for tensor in prompt.tensors:
                if tensor.jaccard is not None:
                    shares.setdefault(tensor.name, []).append(tensor.jaccard)
        return {name: sum(values) / len(values) for name, values in shares.items()}

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values; infinite and undefined numbers as text, which JSON has no numbers for."""
        first = self.first_outside
        summary = {
            "verdict": "equal within tolerance" if self.is_equal else "differs",
            "exit_code": self.exit_code,
            "missing": self.missing,
            "first_outside": None if first is None else first.name,
            "module": None if first is None else first.module,
            "jaccard": self.jaccard,
        }
        result: dict[str, Any] = _json_values(summary | asdict(self))
        for entry, prompt in zip(result["prompts"], self.prompts, strict=True):
            entry["problems"] = prompt.problems
        return result

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _json_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _json_values(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_values(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def describe_tensor(t: TensorDifference) -> str:
    """One line: how far, how far it may be, where it is worst."""
    module = t.module or "the model itself"
    where = f"row {t.where[0]}{list(t.where[1:]) or ''}" if t.where else "nowhere"
    if t.gap is not None:
        shared = f", {t.jaccard:.1%} of the choices shared" if t.jaccard is not None else ""
        return f"{t.name} ({module}): another choice with a score gap of {t.gap:.3g}{shared}, at {where}"
    if t.allowed == (0.0, 0.0):
        return f"{t.name} ({module}): {t.relative:.1%} of the rows differ, at {where}: {t.theirs:g} instead of {t.ours:g}"
    return (
        f"{t.name} ({module}): relative difference {t.relative:.3g} (allowed {t.allowed[0]:g}), worst row {t.worst_row:.3g} "
        f"(allowed {t.allowed[1]:g}), worst element at {where}: {t.theirs:.6g} instead of {t.ours:.6g}"
    )


def _lines(report: Report) -> list[str]:
    lines = [
        f"golden  {report.golden}",
        f"other   {report.other}",
        f"basis   {report.basis}, precision {report.precision}",
        f"counts  {COUNTING}",
        *(f"note    {note}" for note in report.notes),
        "",
    ]
    for prompt in report.prompts:
        lines += _prompt_lines(prompt)
    shares = report.jaccard
    if shares:
        worst = sorted(shares.items(), key=lambda item: item[1])[:SHOWN_TOKENS]
        lines += [f"choices shared by both ({len(shares)} kinds), the fewest: {', '.join(f'{n} {s:.1%}' for n, s in worst)}"]
    first = report.first_outside
    if first is not None:
        lines += ["", f"FIRST OUTSIDE ITS TOLERANCE, in execution order: {describe_tensor(first)}"]
    lines += ["", f"VERDICT: {report.verdict}"]
    return lines


def _prompt_lines(prompt: PromptReport) -> list[str]:
    state = "differs: " + "; ".join(prompt.problems) if prompt.problems else "equal within tolerance"
    lines = [f"prompt {prompt.index} ({prompt.num_prompt_tokens} + {prompt.num_tokens} tokens): {state}"]
    if prompt.positions:
        worst = max(prompt.positions, key=lambda p: p.max_logprob_difference)
        line = (
            f"  predictions at {len(prompt.positions)} positions: KL at most {prompt.max_kl:.3g}, log probabilities differ by "
            f"at most {worst.max_logprob_difference:.3g} (position {worst.position}, allowed {prompt.logprob_tolerance:.3g}"
        )
        if prompt.last_bit_difference is not None:
            line += f"; the model's own last bits move them by {prompt.last_bit_difference:.3g}"
        lines.append(line + ")")
    if prompt.widening is not None:
        lines.append(f"  {prompt.widening}")
    lines += [f"  {line}" for line in describe_divergences(prompt)]
    outside = [t for t in prompt.tensors if not t.is_within]
    if prompt.tensors:
        lines.append(f"  tensors: {len(prompt.tensors)} compared, {len(outside)} outside their tolerance")
        lines += [f"    {describe_tensor(t)}" for t in outside[:SHOWN_TENSORS]]
        if len(outside) > SHOWN_TENSORS:
            lines.append(f"    ... and {len(outside) - SHOWN_TENSORS} more")
    return lines


def describe_divergences(prompt: PromptReport) -> list[str]:
    """The first token chosen otherwise, and what those behind it are worth."""
    first = prompt.first_divergence
    if first is None:
        return []
    lines = [
        f"tokens: the first chosen otherwise is token {first.index + 1} of {prompt.num_tokens}, at position {first.position}: "
        f"{first.theirs} instead of {first.ours}, gap {first.gap:.3g} (a tie up to {prompt.token_gap:.3g}), "
        f"top-2 gap {first.top2_gap:.3g}: {'a tie' if first.kind == 'tie' else 'an error'}"
    ]
    behind = prompt.divergences[1:]
    if behind:
        ties = sum(d.kind == "tie" for d in behind)
        lines.append(
            f"        {len(behind)} more behind it, judged on the other build's own tokens ({_count(ties, 'tie')}, "
            f"{_count(len(behind) - ties, 'error')}): may follow from it"
        )
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
