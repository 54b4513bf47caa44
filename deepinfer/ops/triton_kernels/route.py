"""Choosing experts in one launch: scores, the biased choice, weights.

The plain twin is `Router.forward` in `model/router.py`. A program holds all scores of a token and takes the largest again and
again; equal ones go to the lower expert id.

Legend: T tokens, E experts, K chosen ones.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton_kernels.launch import launch_options

THRESHOLD = 20.0  # beyond which torch's softplus is the number itself
SUM_FLOOR = 1e-20


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    E,
    scale,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SUM_FLOOR: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED)
    bias = tl.load(bias_ptr + e, mask=e < E, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(logits_ptr + token * E + e, mask=e < E, other=0.0)
    # log(1 + u) without the digits that 1 + u loses. A minimum would drop NaN.
    u = tl.exp(tl.where(x > THRESHOLD, THRESHOLD, x))
    w = 1 + u
    softplus = tl.where(w == 1, u, tl.log(w) * (u / (w - 1)))
    score = tl.sqrt(tl.where(x > THRESHOLD, x, softplus))
    biased = tl.where(e < E, score + bias, float("-inf"))
    place = tl.arange(0, WIDTH)
    chosen = tl.zeros((WIDTH,), tl.float32)
    ids = tl.zeros((WIDTH,), tl.int64)
    for i in tl.static_range(K):
        best = tl.max(biased, 0)
        # A score that is not a number equals nothing; the token then gets some expert and stays broken by its weight.
        index = tl.min(tl.where((biased == best) | (biased != biased), e, PADDED - 1), 0)
        own = tl.sum(tl.where(e == index, score, 0.0), 0)
        chosen = tl.where(place == i, own, chosen)
        ids = tl.where(place == i, index.to(tl.int64), ids)
        biased = tl.where(e == index, float("-inf"), biased)
    total = 1.0
    if K > 1:
        total = tl.sum(chosen, 0) + SUM_FLOOR
    is_real = place < K
    tl.store(weights_ptr + token * K + place, chosen / total * scale, mask=is_real)
    tl.store(ids_ptr + token * K + place, tl.minimum(ids, E - 1), mask=is_real)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@torch.library.custom_op("deepinfer::route", mutates_args=(), device_types="cuda")
def route(logits: Tensor, bias: Tensor, count: int, scale: float, pdl: bool = True) -> tuple[Tensor, Tensor]:
    """Weights float32 and ids int64, `[T, K]` each, best biased score first, of float32 logits `[T, E]`."""
    t, e = logits.shape
    weights = torch.empty(t, count, device=logits.device)
    ids = torch.empty(t, count, dtype=torch.int64, device=logits.device)
    if t:
        padded, width = triton.next_power_of_2(e), triton.next_power_of_2(count)
        route_kernel[(t,)](
            logits.contiguous(),
            bias,
            weights,
            ids,
            e,
            scale,
            count,
            padded,
            width,
            THRESHOLD,
            SUM_FLOOR,
            pdl,
            num_warps=2,
            **launch_options(pdl),
        )
    return weights, ids


@route.register_fake
def _(logits: Tensor, bias: Tensor, count: int, scale: float, pdl: bool = True) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], count)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)
