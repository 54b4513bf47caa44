"""What is rounded where, and which arithmetic computes it: one frozen value handed to every module.

`native` reproduces the published arithmetic; `float32` is the mathematics alone. Rounding points are part of the model, so
each precision is a definition and not an approximation of another one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from deepinfer.dims import Bool, Float, Tensor
from deepinfer.errors import ConfigError
from deepinfer.ops.attend import attend
from deepinfer.ops.elementwise import plain, without_tail
from deepinfer.ops.matmul import batched_matmul, block_matmul, matmul

ROW_TILE = 16  # rows of every product in batch-invariant arithmetic


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Rounding points of one reading of the model.

    Attributes:
        activation_dtype: dtype between operations.
        quantize_activations: round to FP8 in front of every FP8 or FP4 weight, and sum products in blocks of 32 channels.
        round_caches: round window rows to FP8, compressed entries and index queries and keys to FP4.
    """

    name: str
    activation_dtype: torch.dtype
    quantize_activations: bool
    round_caches: bool


PRECISIONS = {
    p.name: p
    for p in (
        Precision(name="native", activation_dtype=torch.bfloat16, quantize_activations=True, round_caches=True),
        Precision(name="float32", activation_dtype=torch.float32, quantize_activations=False, round_caches=False),
        Precision(name="float32_kv", activation_dtype=torch.float32, quantize_activations=False, round_caches=True),
        Precision(name="bfloat16", activation_dtype=torch.bfloat16, quantize_activations=False, round_caches=True),
    )
}


def precision_named(name: str) -> Precision:
    """Look a precision up. Raises `ConfigError` that lists the names."""
    if name not in PRECISIONS:
        raise ConfigError(f"precision {name!r}: expected one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


class MatmulFn(Protocol):
    """`y = x w^T`; shapes `[T, K]`, `[N, K]` to `[T, N]`."""

    def __call__(self, x: Float[Tensor, "T K"], w: Float[Tensor, "N K"]) -> Float[Tensor, "T N"]: ...


class BatchedMatmulFn(Protocol):
    """One product for each leading row."""

    def __call__(self, a: Float[Tensor, "T M K"], b: Float[Tensor, "T K N"]) -> Float[Tensor, "T M N"]: ...


class PointwiseFn(Protocol):
    """`fn(*inputs)` for an elementwise function of equally shaped inputs."""

    def __call__(self, fn: Callable[..., Tensor], *inputs: Any) -> Tensor: ...


class AttendFn(Protocol):
    """See `deepinfer.ops.attend.attend`."""

    def __call__(
        self,
        q: Float[Tensor, "T H Dh"],
        kv: Float[Tensor, "T S Dh"],
        visible: Bool[Tensor, "T S"],
        sink: Float[Tensor, " H"],
        scale: float,
    ) -> Float[Tensor, "T H Dh"]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """The operations whose result can depend on the shape they run in, or that have a fast twin."""

    matmul: MatmulFn
    block_matmul: MatmulFn
    batched_matmul: BatchedMatmulFn
    pointwise: PointwiseFn
    attend: AttendFn
    # Shapes may not depend on values: experts are gathered for each token instead of visited one by one.
    static_shapes: bool = False
    # Rows never share a product whose shape depends on their company.
    batch_invariant: bool = False


def reference_ops(*, batch_invariant: bool = False, static_shapes: bool = False) -> Ops:
    """The plain definitions, optionally in fixed row tiles so that a row's bits do not depend on its company."""
    tile = ROW_TILE if batch_invariant else 0
    return Ops(
        matmul=partial(matmul, row_tile=tile),
        block_matmul=partial(block_matmul, row_tile=tile),
        batched_matmul=partial(batched_matmul, row_tile=tile),
        pointwise=without_tail if batch_invariant else plain,
        attend=partial(attend, row_tile=tile),
        static_shapes=static_shapes,
        batch_invariant=batch_invariant,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """A precision, the operations that compute it, and one switch for comparisons with the published code.

    Attributes:
        published_index_keys: emulate the published code's single slot for index keys: at a decode position that leaves a
            ratio-2 group incomplete, its sources score against the last source's keys (specification U1). Off by default:
            each source uses its own keys, which is what prefill computes.
    """

    precision: Precision
    ops: Ops
    published_index_keys: bool = False
