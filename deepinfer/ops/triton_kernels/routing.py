"""Which pairs of token and choice each expert gets, by counting; and the sum over a token's experts.

No sort and no look from the host: a product has programs for as many experts as could be active, and those behind the last
active one return at once. The launch that counts also quantises the activations, since the products wait for both.
A *pair* is `token * topk + choice`. Pairs are ordered by expert, then by token.
The plain twins are `experts` and `combine` of `model/plain_forms.py`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton_kernels.launch import launch_options
from deepinfer.ops.triton_kernels.quantize import blocks_of, store_quantized, warps_of

PAIR_TILE = 64
LIST_FIELDS = 4  # expert, its first place in the order, the place behind its last, unused
TOKEN_TILE = tl.constexpr(8)  # tokens that an expert's weights are decoded for at once
LARGE_TILES = 4  # token tiles of a program for an expert with more tokens


@triton.jit
def prepare_kernel(
    x_ptr,
    ids_ptr,
    x16_ptr,
    factor_ptr,
    order_ptr,
    list_ptr,
    P,
    pair_tiles,
    K,
    BLOCKS: tl.constexpr,
    P2: tl.constexpr,
    E: tl.constexpr,
    E2: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    # Program 0 lists active experts, with SPLIT those of more than a token tile from the back; -1 in between.
    # The next ones find the places of PAIR_TILE pairs each, the others quantise a token each.
    program = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if program == 0:
        expert = tl.arange(0, E2)
        i = tl.arange(0, P2)
        count = tl.histogram(tl.load(ids_ptr + i, mask=i < P, other=E).to(tl.int32), E2)
        count = tl.where(expert < E, count, 0)
        is_active = (count > 0).to(tl.int32)
        end = tl.cumsum(count, 0)
        is_large = ((count > TOKEN_TILE) & SPLIT).to(tl.int32)
        num_large = tl.sum(is_large, 0)
        is_small = is_active - is_large
        slot = tl.where(is_large > 0, P - tl.cumsum(is_large, 0), tl.cumsum(is_small, 0) - is_small)
        tl.store(list_ptr + slot * 4, expert, mask=is_active > 0)
        tl.store(list_ptr + slot * 4 + 1, end - count, mask=is_active > 0)
        tl.store(list_ptr + slot * 4 + 2, end, mask=is_active > 0)
        tl.store(list_ptr + i * 4, i * 0 - 1, mask=(i >= tl.sum(is_small, 0)) & (i < P - num_large))
    elif program <= pair_tiles:
        pair = (program - 1) * 64 + tl.arange(0, 64)
        key = tl.load(ids_ptr + pair, mask=pair < P, other=E).to(tl.int32) * P2 + pair
        rank = tl.zeros((64,), tl.int32)
        for start in range(0, P, 64):
            other = start + tl.arange(0, 64)
            other_key = tl.load(ids_ptr + other, mask=other < P, other=E).to(tl.int32) * P2 + other
            rank += tl.sum((other_key[:, None] < key[None, :]).to(tl.int32), 0)
        tl.store(order_ptr + rank, pair, mask=pair < P)
    else:
        token = (program - 1 - pair_tiles).to(tl.int64)
        k = tl.arange(0, BLOCKS)[:, None] * 32 + tl.arange(0, 32)[None, :]
        v = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
        store_quantized(v, k, token, x16_ptr, factor_ptr, K, 2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def combine_kernel(
    y_ptr,
    ids_ptr,
    shared_ptr,  # [T, N], added last, if SHARED
    out_ptr,
    N,
    TOPK: tl.constexpr,
    TOPK2: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    choice = tl.arange(0, TOPK2)
    if PDL:
        tl.extra.cuda.gdc_wait()
    ids = tl.load(ids_ptr + token * TOPK + choice, mask=choice < TOPK, other=2**30).to(tl.int32)
    # Padding gets distinct ranks behind the real ones.
    ids = tl.where(choice < TOPK, ids, ids + choice)
    # A padding token has the same id in all places, that of no expert: ranks must differ all the same.
    is_before = (ids[None, :] < ids[:, None]) | ((ids[None, :] == ids[:, None]) & (choice[None, :] < choice[:, None]))
    rank = tl.sum(is_before.to(tl.int32), 1)
    first = tl.sum(tl.where(rank == 0, choice, 0), 0)
    total = tl.load(y_ptr + (token * TOPK + first) * N + n, mask=n < N, other=0.0).to(tl.float32)
    for i in tl.static_range(1, TOPK):
        nth = tl.sum(tl.where(rank == i, choice, 0), 0)
        total += tl.load(y_ptr + (token * TOPK + nth) * N + n, mask=n < N, other=0.0).to(tl.float32)
    if SHARED:
        total += tl.load(shared_ptr + token * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


class Prepared(NamedTuple):
    """What the expert products need of the activations and of the routing."""

    x16: Tensor  # float16 [T, K] in the channel order of mma.sync
    factor: Tensor  # float32 [T]
    order: Tensor  # int32 [P], pairs by expert
    active: Tensor  # int32 [P, LIST_FIELDS]


def prepare(x: Tensor, ids: Tensor, num_experts: int, split: bool, pdl: bool) -> Prepared:
    """Quantise the tokens and sort their pairs by expert, in one launch.

    Args:
        x: `[T, K]`, any float dtype.
        ids: int32 or int64 `[T, topk]`; `num_experts` means an expert that is not held here, whose pairs come last.
        split: list experts with more than TOKEN_TILE pairs from the back of the list.
    """
    (t, k), pairs, device = x.shape, ids.numel(), x.device
    prepared = Prepared(
        torch.empty(t, k, dtype=torch.float16, device=device),
        torch.empty(t, dtype=torch.float32, device=device),
        torch.empty(pairs, dtype=torch.int32, device=device),
        torch.empty(pairs, LIST_FIELDS, dtype=torch.int32, device=device),
    )
    launch(x, ids, prepared, t, num_experts, split, pdl)
    return prepared


def prepare_order(ids: Tensor, num_experts: int, pdl: bool) -> tuple[Tensor, Tensor]:
    """`order` and `active` alone."""
    unused = torch.empty(1, dtype=torch.float32, device=ids.device)
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    active = torch.empty(ids.numel(), LIST_FIELDS, dtype=torch.int32, device=ids.device)
    launch(unused[None], ids, Prepared(unused, unused, order, active), 0, num_experts, False, pdl)
    return order, active


def launch(x: Tensor, ids: Tensor, prepared: Prepared, tokens: int, num_experts: int, split: bool, pdl: bool) -> None:
    """List, sort, and quantise the first `tokens` tokens."""
    pairs, k = ids.numel(), x.shape[1]
    pair_tiles = triton.cdiv(pairs, PAIR_TILE)
    prepare_kernel[(1 + pair_tiles + tokens,)](
        x,
        ids,
        *prepared,
        pairs,
        pair_tiles,
        k,
        blocks_of(k),
        max(16, triton.next_power_of_2(pairs)),
        num_experts,
        # One bin more than there are experts, for pairs of none.
        max(16, triton.next_power_of_2(num_experts + 1)),
        split,
        pdl,
        num_warps=warps_of(tokens),
        **launch_options(pdl),
    )


def combine(outputs: Tensor, ids: Tensor, shared: Tensor | None, dtype: torch.dtype, pdl: bool) -> Tensor:
    """Sum `[T, K, D]` over K in float32, ascending by expert id `[T, K]`, then `shared` `[T, D]`, if there is any; in `dtype`."""
    t, topk, n = outputs.shape
    out = torch.empty(t, n, dtype=dtype, device=outputs.device)
    if t:
        columns = 1024
        combine_kernel[(t, triton.cdiv(n, columns))](
            outputs.contiguous(),
            ids.contiguous(),
            outputs if shared is None else shared.contiguous(),
            out,
            n,
            topk,
            triton.next_power_of_2(topk),
            columns,
            shared is not None,
            pdl,
            num_warps=4,
            **launch_options(pdl),
        )
    return out


@torch.library.custom_op("deepinfer::combine_experts", mutates_args=(), device_types="cuda")
def combine_experts(outputs: Tensor, ids: Tensor, pdl: bool = True) -> Tensor:
    """Sum `[T, K, D]` over K in float32, ascending by expert id `[T, K]`; the ids of a token are distinct."""
    return combine(outputs, ids, None, torch.float32, pdl)


@combine_experts.register_fake
def _(outputs: Tensor, ids: Tensor, pdl: bool = True) -> Tensor:
    return outputs.new_empty(outputs.shape[0], outputs.shape[2], dtype=torch.float32)
