"""What is rounded where, and which arithmetic computes it: one frozen value handed to every module.

`native` reproduces the published arithmetic; `float32` is the mathematics alone. Rounding points are part of the model, so
each precision is a definition and not an approximation of another one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from deepinfer.dims import Bool, Float, Int, Tensor
from deepinfer.errors import ConfigError, MissingExtra
from deepinfer.model import inductor_forms, plain_forms
from deepinfer.ops.attend import attend
from deepinfer.ops.elementwise import plain, without_tail
from deepinfer.ops.matmul import batched_matmul, block_matmul, matmul
from deepinfer.ops.select import candidate_mask, select_entries

Rounding = Callable[[Tensor], Tensor]  # of vectors to a format with scales, same shape and dtype

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

    def cached(self, rounding: Rounding) -> Rounding | None:
        """The rounding of something that is kept or compared with what is kept, if there is one."""
        return rounding if self.round_caches else None


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


class AttendInPlaceFn(Protocol):
    """`attend` over a list that is not gathered.

    `places` are rows of `own` or of `ring` for the window's places, as `is_own` says, and rows of `pool` behind them.
    """

    def __call__(
        self,
        q: Float[Tensor, "T H Dh"],
        own: Float[Tensor, "T Dh"],
        ring: Float[Tensor, "R Dh"],
        pool: Float[Tensor, "P Dh"],
        places: Int[Tensor, "T S"],
        is_own: Bool[Tensor, "T W"],
        visible: Bool[Tensor, "T S"],
        sink: Float[Tensor, " H"],
        scale: float,
    ) -> Float[Tensor, "T H Dh"]: ...


class LinearFn(Protocol):
    """See `deepinfer.model.plain_forms.linear`."""

    def __call__(self, x: Float[Tensor, "T K"], matrix: Any, numerics: "Numerics") -> Float[Tensor, "T N"]: ...


class LinearsFn(Protocol):
    """See `deepinfer.model.plain_forms.linears`."""

    def __call__(
        self, x: Float[Tensor, "T K"], matrices: tuple[Any, ...], numerics: "Numerics"
    ) -> tuple[Float[Tensor, "T N"], ...]: ...


class NormLinearFn(Protocol):
    """See `deepinfer.model.plain_forms.norm_linear`."""

    def __call__(self, x: Float[Tensor, "T K"], norm: Any, matrix: Any) -> tuple[Float[Tensor, "T K"], Float[Tensor, "T N"]]: ...


class GroupedLinearFn(Protocol):
    """See `deepinfer.model.plain_forms.grouped_linear`."""

    def __call__(self, x: Float[Tensor, "T G K"], matrix: Any, numerics: "Numerics") -> Float[Tensor, "T G R"]: ...


class ExpertsFn(Protocol):
    """See `deepinfer.model.plain_forms.experts`."""

    def __call__(
        self, x: Float[Tensor, "T D"], weights: Float[Tensor, "T K"], ids: Int[Tensor, "T K"], stack: Any
    ) -> Float[Tensor, "T K D"]: ...


class CombineFn(Protocol):
    """See `deepinfer.model.plain_forms.combine_with_shared`."""

    def __call__(
        self, outputs: Float[Tensor, "T K D"], ids: Int[Tensor, "T K"], shared: Float[Tensor, "T D"], x: Float[Tensor, "T D"]
    ) -> Float[Tensor, "T D"]: ...


class NormRotateRoundFn(Protocol):
    """See `deepinfer.model.plain_forms.norm_rotate_round`."""

    def __call__(
        self,
        x: Float[Tensor, "T ... D"],
        rotation: Float[Tensor, "T half 2"],
        norm: Any = None,
        rounding: Rounding | None = None,
    ) -> Float[Tensor, "T ... D"]: ...


class SharedExpertFn(Protocol):
    """`SharedExpert.forward` in a fast form."""

    def __call__(self, x: Float[Tensor, "T D"], expert: Any) -> Float[Tensor, "T D"]: ...


class CollapseNormFn(Protocol):
    """A norm of `hyper_connection.collapse` in a fast form."""

    def __call__(self, streams: Float[Tensor, "T M D"], pre: Float[Tensor, "T M"], norm: Any) -> Float[Tensor, "T D"]: ...


class SpreadFn(Protocol):
    """`hyper_connection.spread` in a fast form."""

    def __call__(self, y: Float[Tensor, "T D"], streams: Float[Tensor, "T M D"], mixes: Any) -> Float[Tensor, "T M D"]: ...


class Float32LinearFn(Protocol):
    """`Float32Linear.forward` in a fast form."""

    def __call__(self, x: Float[Tensor, "T K"], matrix: Any, numerics: "Numerics") -> Float[Tensor, "T N"]: ...


class HyperMixFn(Protocol):
    """`HyperConnection.forward` in a fast form: `pre`, `post` and `comb`."""

    def __call__(
        self, streams: Float[Tensor, "T M D"], hyper: Any
    ) -> tuple[Float[Tensor, "T M"], Float[Tensor, "T M"], Float[Tensor, "T M M"]]: ...


class IndexScoresFn(Protocol):
    """Index scores of `Indexer.forward` in a fast form, -inf from each row's `n_visible` on."""

    def __call__(
        self, q: Float[Tensor, "T Hi Di"], weights: Float[Tensor, "T Hi"], pool: Any, rows: Any, n_visible: Int[Tensor, " T"]
    ) -> Float[Tensor, "T C"]: ...


class RouteFn(Protocol):
    """The choice of `Router.forward` in a fast form: weights and ids."""

    def __call__(self, logits: Float[Tensor, "T E"], router: Any) -> tuple[Float[Tensor, "T K"], Int[Tensor, "T K"]]: ...


class SelectEntriesFn(Protocol):
    """See `deepinfer.ops.select.select_entries`; may be `k` wide even where there are fewer scores."""

    def __call__(self, scores: Float[Tensor, "T C"], k: int) -> Int[Tensor, "T N"]: ...


class CandidateMaskFn(Protocol):
    """See `deepinfer.ops.select.candidate_mask`."""

    def __call__(
        self, scores: Float[Tensor, "T C"], visible: Int[Tensor, " T"], block_size: int, topk_blocks: int
    ) -> Bool[Tensor, "T C"]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """The operations whose result can depend on the shape they run in, or that have a fast twin.

    Those over stored matrices come in three forms, see `plain_forms.py`. Those that are None by default stand in for what a module
    computes itself.
    """

    matmul: MatmulFn
    block_matmul: MatmulFn
    batched_matmul: BatchedMatmulFn
    pointwise: PointwiseFn
    attend: AttendFn
    linear: LinearFn = plain_forms.linear
    linears: LinearsFn = plain_forms.linears
    norm_linear: NormLinearFn = plain_forms.norm_linear
    grouped_linear: GroupedLinearFn = plain_forms.grouped_linear
    experts: ExpertsFn = plain_forms.experts
    combine: CombineFn = plain_forms.combine_with_shared
    norm_rotate_round: NormRotateRoundFn = plain_forms.norm_rotate_round
    select_entries: SelectEntriesFn = select_entries
    candidate_mask: CandidateMaskFn = candidate_mask
    attend_in_place: AttendInPlaceFn | None = None
    float32_linear: Float32LinearFn | None = None
    hyper_mix: HyperMixFn | None = None
    collapse_norm: CollapseNormFn | None = None
    spread: SpreadFn | None = None
    shared_expert: SharedExpertFn | None = None
    index_scores: IndexScoresFn | None = None
    route: RouteFn | None = None
    # Padding rows visit no experts, which the plain forms cannot skip.
    skips_padding: bool = False
    # The weights are repacked for the kernels when the model has been loaded.
    packs_weights: bool = False
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


def inductor_ops(*, batch_invariant: bool = False) -> Ops:
    """Pure PyTorch with fixed shapes, to be compiled: quantised weights are decoded to bfloat16 on the way."""
    return replace(
        reference_ops(batch_invariant=batch_invariant, static_shapes=True),
        linear=inductor_forms.linear,
        grouped_linear=inductor_forms.grouped_linear,
        experts=inductor_forms.experts,
    )


def triton_ops(*, batch_invariant: bool = False) -> Ops:
    """The Triton kernels for quantised weights, which are repacked for them; everything else as in `inductor_ops`.

    Raises: MissingExtra without triton. The device is checked by `ops.triton_kernels.launch.device_obstacle`.
    """
    try:
        from deepinfer.model import triton_forms
        from deepinfer.ops.triton_kernels import select as triton_select
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise MissingExtra("the Triton kernels need triton, which CUDA builds of torch bring along: pip install triton") from error
    # Rows of a kernel are independent by themselves; tiles of rows would fix the number of rows in what is compiled.
    return replace(
        inductor_ops(),
        linear=triton_forms.linear,
        linears=triton_forms.linears,
        norm_linear=triton_forms.norm_linear,
        grouped_linear=triton_forms.grouped_linear,
        experts=triton_forms.experts,
        combine=triton_forms.combine,
        attend=triton_forms.attend,
        attend_in_place=partial(triton_forms.attend_in_place, invariant=batch_invariant),
        float32_linear=triton_forms.float32_linear,
        norm_rotate_round=triton_forms.norm_rotate_round,
        hyper_mix=triton_forms.hyper_mix,
        collapse_norm=triton_forms.collapse_norm,
        spread=triton_forms.spread,
        shared_expert=triton_forms.shared_expert,
        index_scores=triton_forms.index_scores,
        route=triton_forms.route,
        select_entries=triton_select.select_entries,
        candidate_mask=triton_select.candidate_mask,
        packs_weights=True,
        skips_padding=True,
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
