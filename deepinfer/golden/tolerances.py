"""How far two builds may be apart that compute the same model: one row for each precision, with the reason.

Measured on `mini` and `tiny_config()` with sums in float64 as the other build, module by module (see `anchor`): the largest
deviations were 7e-7 of a tensor and 1.5e-6 of a row in `float32`, 6e-5 and 4e-4 in `float32_kv`, 4e-3 and 8e-3 in `bfloat16`,
1.5e-2 and 4.5e-2 in `native`. A bound is at least twice that.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace

from deepinfer.errors import ConfigError

# Tensors that have just been rounded to FP4: one step of one element is a large part of a row.
ROUNDED_TO_FP4 = ("entries", "index_keys")
FP4_TENSOR, FP4_ROW = 0.03, 0.35
COEFFICIENTS = ("pre", "post", "comb")
# Proposals of draft blocks that did not go on from the other build's streams: several blocks have carried roundings.
FREE_PROPOSAL_TENSOR, FREE_PROPOSAL_ROW = 0.2, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerances:
    """Bounds on the deviation of one build from another. Raises: ConfigError unless all are finite and at least 0.

    Attributes:
        tensor: root mean square of the difference, relative to that of the tensor.
        row: the same for the worst row.
        choice_gap: scores between which a choice of experts or entries may differ, relative to the row's scores.
        logprob: difference of log probabilities of tokens that matter; also what a tie of tokens may be decided by.
        token_gap: two tokens whose log probabilities are this close may change places: a tie, not an error.
        last_bit: relative size of a last bit, used to find out how far the model itself carries one.
    """

    tensor: float
    row: float
    choice_gap: float
    logprob: float
    token_gap: float
    last_bit: float

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"tolerance {f.name} = {value!r}: expected a finite number, at least 0")


BY_PRECISION = {
    # Sums of float32 products in another order.
    "float32": Tolerances(tensor=5e-6, row=2e-5, choice_gap=2e-5, logprob=1e-3, token_gap=1e-3, last_bit=2.0**-22),
    # As above, but a value at a rounding boundary may be cached as its neighbour.
    "float32_kv": Tolerances(tensor=1e-3, row=2e-2, choice_gap=2e-2, logprob=2e-2, token_gap=2e-2, last_bit=2.0**-22),
    # Every operation ends in a rounding to 8 bits.
    "bfloat16": Tolerances(tensor=1e-2, row=4e-2, choice_gap=4e-2, logprob=0.1, token_gap=0.25, last_bit=2.0**-8),
    # As above, and a value at a rounding boundary in front of a matrix moves by a sixteenth.
    "native": Tolerances(tensor=3e-2, row=0.12, choice_gap=6e-2, logprob=0.1, token_gap=0.25, last_bit=2.0**-8),
}


def choose_tolerances(precision: str, asked: Tolerances | Mapping[str, float] | None) -> tuple[Tolerances, frozenset[str]]:
    """The precision's tolerances with those that were asked for in their place, and the names of these.

    Of a whole `Tolerances`, what equals the precision's own was not asked for.
    Raises: ConfigError for a name that there is not, or a value that bounds nothing.
    """
    default = BY_PRECISION[precision]
    if asked is None:
        return default, frozenset()
    own = asdict(default)
    if isinstance(asked, Tolerances):
        return asked, frozenset(name for name, value in asdict(asked).items() if value != own[name])
    unknown = sorted(set(asked) - set(own))
    if unknown:
        raise ConfigError(f"tolerance {unknown[0]!r}: expected one of {', '.join(own)}")
    return replace(default, **asked), frozenset(asked)


def bounds(
    name: str, precision: str, tolerances: Tolerances, given: Collection[str] = (), asked: Collection[str] = ()
) -> tuple[float, float]:
    """Bounds for the tensor and for its worst row.

    `given`: names of the tensors that our modules went on from. Coefficients and routing are float32 in every precision, so that
    between equal inputs nothing but the order of sums is left. `asked`: names of the tolerances that somebody asked for; a bound
    on tensors holds for every tensor then.
    """
    if "tensor" in asked or "row" in asked:
        return tolerances.tensor, tolerances.row
    inputs = float32_inputs(name)
    if inputs and all(part in given for part in inputs):
        exact = BY_PRECISION["float32"]
        return min(exact.tensor, tolerances.tensor), min(exact.row, tolerances.row)
    if precision != "float32" and name.rpartition(".")[2] in ROUNDED_TO_FP4:
        return max(FP4_TENSOR, tolerances.tensor), max(FP4_ROW, tolerances.row)
    if precision != "float32" and name in ("mtp.logits", "mtp.confidence") and "mtp.0" not in given:
        return max(FREE_PROPOSAL_TENSOR, tolerances.tensor), max(FREE_PROPOSAL_ROW, tolerances.row)
    return tolerances.tensor, tolerances.row


def float32_inputs(name: str) -> tuple[str, ...]:
    """What a tensor that is computed in float32 throughout comes from; empty for any other tensor."""
    block, _, rest = name.partition(".ffn.gate.")
    if rest:
        return (f"{block}.ffn_norm",)
    block, _, rest = name.partition(".hc_ffn.")
    if rest in COEFFICIENTS:
        return (f"{block}.attn", *(f"{block}.hc_attn.{part}" for part in COEFFICIENTS))
    return ()
