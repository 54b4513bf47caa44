"""One table of tolerances: what is compared, in which precision, how far it may be off, and why.

Subjects are what `SUBJECTS` calls the recorded tensors. A key with a case in front holds for that case only. A bound of 0 is
bitwise. Where `largest` is None only the root mean square counts.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """Bounds on the absolute difference, and the reason for them."""

    largest: float | None
    rms: float | None
    reason: str


# The last part of a recorded name -> what kind of thing it is.
SUBJECTS = {
    "engram_hash": "choice",
    "router_idx": "choice",
    "index_topk": "choice",
    "candidates": "choice",
    "next_ids": "choice",
    "ids": "choice",
    "embed": "embedding",
    "engram_out": "stream",
    "out": "stream",
    "final_hidden": "stream",
    "main_hidden": "stream",
    "attn_out": "sublayer",
    "ffn_out": "sublayer",
    "final_norm": "sublayer",
    "compress_kv": "cached row",
    "index_k": "cached row",
    "window_kv": "cached row",
    "pre_mix_in": "coefficient",
    "router_w": "coefficient",
    "index_scores": "index score",
    "logits": "logits",
    "confidence": "confidence",
}

BITWISE = Tolerance(0.0, 0.0, "the same operations in the same order")
FLOAT32_SUMS = "sums of float32 products in another order; {} observed on numbers up to {}"
LAST_BIT = (
    "float32 values on the way to a bfloat16 result, which is bit-equal; the vector and scalar forms of a function differ by an ulp"
)

TABLE = {
    ("choice", "float32"): Tolerance(0.0, 0.0, "every recorded margin exceeds what float32 can move"),
    ("embedding", "float32"): BITWISE,
    ("stream", "float32"): Tolerance(2e-4, None, FLOAT32_SUMS.format("5e-5", 46)),
    ("sublayer", "float32"): Tolerance(1e-4, None, FLOAT32_SUMS.format("1e-5", 8)),
    ("cached row", "float32"): Tolerance(5e-5, None, FLOAT32_SUMS.format("7e-6", 5)),
    ("coefficient", "float32"): Tolerance(5e-6, None, FLOAT32_SUMS.format("1e-6", 2)),
    ("index score", "float32"): Tolerance(5e-5, None, FLOAT32_SUMS.format("5e-6", 5)),
    ("logits", "float32"): Tolerance(1e-4, None, FLOAT32_SUMS.format("2e-5", 10)),
    ("confidence", "float32"): Tolerance(2e-4, None, FLOAT32_SUMS.format("5e-5", 20)),
    # Rounded caches: as in float32 unless a value lies within float error of a rounding boundary.
    ("choice", "float32_kv"): Tolerance(0.0, 0.0, "every recorded margin exceeds what float32 can move"),
    ("stream", "float32_kv"): Tolerance(2e-4, None, FLOAT32_SUMS.format("2e-5", 44)),
    ("cached row", "float32_kv"): Tolerance(0.0, 0.0, "rounding hides the order of sums"),
    ("logits", "float32_kv"): Tolerance(1e-4, None, FLOAT32_SUMS.format("7e-6", 9)),
    ("confidence", "float32_kv"): Tolerance(2e-4, None, FLOAT32_SUMS.format("2e-5", 18)),
    ("swa_tiny/logits", "float32_kv"): Tolerance(3e-3, 1e-4, "a window row on a rounding boundary flips in steps 9 to 16"),
    ("select_full/confidence", "float32_kv"): Tolerance(
        0.05, 5e-3, "a draft ring row on a rounding boundary, in sight until step 11"
    ),
    # The published rounding points. With sums in the recording's order and ties broken as recorded everything is bit-equal.
    ("choice", "native"): BITWISE,
    ("embedding", "native"): BITWISE,
    ("stream", "native"): BITWISE,
    ("sublayer", "native"): BITWISE,
    ("cached row", "native"): BITWISE,
    ("index score", "native"): BITWISE,
    ("logits", "native"): BITWISE,
    ("coefficient", "native"): Tolerance(2.5e-7, None, LAST_BIT),
    ("confidence", "native"): Tolerance(1e-5, None, FLOAT32_SUMS.format("2e-6", 27)),
    ("bf16_full/confidence", "native"): Tolerance(0.05, 5e-3, "in one draft of 192 a last bit tips a bfloat16 rounding"),
    # One last-bit difference in a float32 sum moves `native` logits by whole units, and flips roundings of caches. What stays is
    # the distance to another arithmetic: `native` and `float32` are 0.33 (swa_tiny), 0.65, 1.07 and 0.48 (bf16_full) rms apart.
    ("logits", "native, other sums"): Tolerance(None, 0.3, "last bits of sums decide roundings, which the model amplifies"),
    ("swa_tiny/logits", "native, other sums"): Tolerance(None, 0.05, "as above; three layers without selections amplify little"),
    # Outputs of a layer given its recorded input, relative to the largest value of their row, in rows with the recorded choices.
    ("most rows of a layer", "native, other sums"): Tolerance(2.0**-6, None, "two steps of bfloat16"),
    ("any row of a layer", "native, other sums"): Tolerance(
        2.0**-3,
        None,
        "a last bit may tip a rounding to FP8 between two products; noise of that size moved rows of recordings by 0.12",
    ),
    ("logits", "float32_kv, other sums"): Tolerance(None, 0.15, "a last bit may flip a rounding of a cached row"),
    # The same rows in other company: chunks, steps, batches.
    ("continuation", "float32"): Tolerance(3e-5, None, "libraries sum a product of other shape in another order"),
    ("continuation", "batch invariant"): Tolerance(0.0, 0.0, "a row's arithmetic does not depend on its company"),
    ("compiled logits", "float32"): Tolerance(3e-5, None, "compiled code fuses and reorders float32 operations"),
    # Functions by themselves, against the recorded units and the published examples. What is not here is bitwise in its test.
    ("sinkhorn", "float32"): BITWISE,
    ("sinkhorn with torch.softmax", "float32"): Tolerance(1.2e-7, None, "the example was made with `torch.softmax`: one ulp"),
    ("hyper-connection", "float32"): Tolerance(5e-6, None, FLOAT32_SUMS.format("1e-6", 10)),
    ("rms norm", "float32"): Tolerance(1e-6, None, FLOAT32_SUMS.format("2e-7", 4)),
    ("router", "float32"): Tolerance(2e-6, None, FLOAT32_SUMS.format("2e-7", 1.5)),
    ("expert", "float32"): Tolerance(2e-5, None, FLOAT32_SUMS.format("1e-6", 10)),
    ("attention", "float32"): Tolerance(2e-6, None, FLOAT32_SUMS.format("4e-7", 3)),
    ("sinkhorn", "other sums"): Tolerance(5e-7, None, "another exponential function"),
    ("rotation", "other sums"): Tolerance(2e-6, None, "another sine, cosine or power function"),
    ("attention", "other sums"): Tolerance(0.02, 2e-3, "a last bit may tip a rounding to bfloat16"),
    ("linear", "other sums"): Tolerance(None, 0.02, "a last bit may tip a rounding to bfloat16"),
    # Compared in the units of `tests.kernels.units`.
    ("kernel", "other sums"): Tolerance(2.0**-4, 1e-3, "a last bit of a float32 sum may tip a rounding to bfloat16, by one step"),
    ("expert kernel", "other sums"): Tolerance(
        2.0**-2, 4e-3, "as above; a tipped rounding of gate, up or the intermediate moves sums behind it"
    ),
    ("norm kernel", "other sums"): Tolerance(2.0**-4, 2e-4, "the mean is summed in another order: one step of bfloat16, rarely"),
    ("compressor", "float32"): Tolerance(1e-5, None, FLOAT32_SUMS.format("1e-6", 4)),
}


def tolerance(subject: str, precision: str, case: str | None = None) -> Tolerance:
    """The most specific entry of the table."""
    specific = TABLE.get((f"{case}/{subject}", precision))
    return TABLE[subject, precision] if specific is None else specific


class Difference(NamedTuple):
    """How one tensor differs from what it should be."""

    name: str
    largest: float
    rms: float
    where: tuple[int, ...]  # first place of the largest difference
    observed: float
    expected: float
    allowed: Tolerance

    @property
    def is_allowed(self) -> bool:
        """A NaN difference never is."""
        limits = ((self.largest, self.allowed.largest), (self.rms, self.allowed.rms))
        return not math.isnan(self.largest) and all(limit is None or value <= limit for value, limit in limits)

    def __str__(self) -> str:
        return (
            f"{self.name}: largest {self.largest:.3g} (allowed {self.allowed.largest}), rms {self.rms:.3g} "
            f"(allowed {self.allowed.rms}), at {list(self.where)}: {self.observed!r} instead of {self.expected!r}"
        )


def difference(name: str, observed: Tensor, expected: Tensor, allowed: Tolerance) -> Difference:
    """Compare two tensors of one shape; equal infinities do not differ."""
    assert observed.shape == expected.shape, f"{name}: shape {tuple(observed.shape)} instead of {tuple(expected.shape)}"
    a, b = observed.double(), expected.double()
    distance = torch.where(a == b, 0.0, (a - b).abs())
    if distance.numel() == 0:
        return Difference(name, 0.0, 0.0, (), 0.0, 0.0, allowed)
    flat = int(distance.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), distance.shape))
    largest, rms = float(distance.flatten()[flat]), float(distance.square().mean().sqrt())
    return Difference(name, largest, rms, where, float(a[where]), float(b[where]), allowed)


def check_close(observed: Tensor, expected: Tensor, subject: str, precision: str, name: str | None = None) -> None:
    """Fail with the first largest difference if it exceeds what the table allows."""
    found = difference(name or subject, observed, expected, tolerance(subject, precision))
    assert found.is_allowed, f"{found}\n{found.allowed.reason}"


def recorded_differences(
    case: str, precision: str, observed: dict[str, Tensor], expected: dict[str, Tensor]
) -> Iterator[Difference]:
    """Compare every tensor of a recording that was observed, each by its own tolerance."""
    for name, value in expected.items():
        if name in observed:
            allowed = tolerance(SUBJECTS[name.rpartition(".")[2]], precision, case)
            yield difference(name, observed[name], value, allowed)
