"""The same products where the hardware multiplies block-scaled FP8 and FP4 itself (compute capability 10: Blackwell).

There nothing is decoded: tensor cores take codes and scales as they are stored in the checkpoint, so this layout needs no
packing (`packing.layout_for`). Activations are codes with one scale byte for 32 channels. Elsewhere Triton computes the same
products by decoding to bfloat16, slowly but exactly, which is how these kernels are tested.

Plain twins as in `fp8_linear.py` and `fp4_experts.py`, whose structure these follow; token tiles have at least 16 rows, because the
instructions do. wo_a, whose activations stay bfloat16, remains with `fp8_linear_bf16`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton_kernels.decode import fp8_scale, is_finite, power_of_two
from deepinfer.ops.triton_kernels.fp8_linear import add_parts_kernel, split_of
from deepinfer.ops.triton_kernels.launch import launch_options
from deepinfer.ops.triton_kernels.quantize import blocks_of, warps_of
from deepinfer.ops.triton_kernels.routing import prepare_order

ROWS = 128  # of an instruction
STEP = 128  # channels of a step of the loop
STAGES = 4
EXPERT_TOKENS = 16
FLOAT8_E4M3_MAX = tl.constexpr(448.0)
NAN_SCALE = tl.constexpr(255)  # what e8m0 calls NaN


@triton.jit
def to_codes(v, scale):
    """float32 in units of its block's scale, rounded to e4m3."""
    units = v * power_of_two(254 - scale)
    low = tl.maximum(units, -FLOAT8_E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(low, FLOAT8_E4M3_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def quantize_codes_kernel(x_ptr, codes_ptr, scales_ptr, K, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    k = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
    scale = fp8_scale(tl.max(tl.abs(v), 1))
    tl.store(codes_ptr + token * K + k, to_codes(v, scale[:, None]), mask=k < K)
    broken = tl.sum(tl.sum((is_finite(v) == 0).to(tl.int32), 1), 0)
    stored = tl.where(broken > 0, NAN_SCALE, scale).to(tl.uint8)
    tl.store(scales_ptr + token * (K // 32) + block, stored, mask=block * 32 < K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def block_scaled_linear_kernel(
    codes_ptr,  # float8_e4m3fn [M, K]
    code_scales_ptr,  # uint8 [M, K/32]
    weight_ptr,  # float8_e4m3fn [N, K]
    scale_ptr,  # uint8 [N/32, K/32]
    y_ptr,  # bfloat16 [M, N], or float32 [SPLIT, M, N]
    M,
    N,
    K,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = row < N, token < M
    channel, block = tl.arange(0, STEP), tl.arange(0, STEP // 32)
    w_at = weight_ptr + row.to(tl.int64)[:, None] * K + channel[None, :]
    ws_at = scale_ptr + (row // 32)[:, None] * (K // 32) + block[None, :]
    x_at = codes_ptr + token[None, :] * K + channel[:, None]
    xs_at = code_scales_ptr + token[:, None] * (K // 32) + block[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    steps = K // STEP // SPLIT
    for step in range(part * steps, (part + 1) * steps):
        w = tl.load(w_at + step * STEP, mask=is_row[:, None], other=0.0)
        ws = tl.load(ws_at + step * (STEP // 32), mask=is_row[:, None], other=0)
        x = tl.load(x_at + step * STEP, mask=is_token[None, :], other=0.0)
        xs = tl.load(xs_at + step * (STEP // 32), mask=is_token[:, None], other=0)
        acc = tl.dot_scaled(w, ws, "e4m3", x, xs, "e4m3", acc)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    place = part * M * N + token[None, :] * N + row[:, None]
    tl.store(y_ptr + place, acc.to(y_ptr.dtype.element_ty), mask=is_token[None, :] & is_row[:, None])


@triton.jit
def block_scaled_experts_kernel(
    codes_ptr,  # float8_e4m3fn: [T, K] (UP), or [P, K] in the pairs' order
    code_scales_ptr,  # uint8 [.., K/32]
    weight_ptr,  # uint8 [E, N, K/2]: w1 (UP) or w2
    scale_ptr,  # uint8 [E, N, K/32]
    up_weight_ptr,  # the same of w3 (UP)
    up_scale_ptr,
    y_ptr,  # UP: float8_e4m3fn [P, N] in the pairs' order; else bfloat16 [P, N] by pair
    y_scales_ptr,  # UP: uint8 [P, N/32]
    list_ptr,
    order_ptr,
    weights_ptr,  # float32 [P] by pair
    N,
    K,
    LIMIT: tl.constexpr,
    UP: tl.constexpr,
    TOPK: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    entry = list_ptr + tl.program_id(1) * 4
    expert = tl.load(entry).to(tl.int64)
    if expert < 0:
        return
    begin, end = tl.load(entry + 1), tl.load(entry + 2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    byte, channel, block = tl.arange(0, STEP // 2), tl.arange(0, STEP), tl.arange(0, STEP // 32)
    if UP:
        # Half of the rows are of w1 and half are the same ones of w3.
        half = tl.arange(0, ROWS) // (ROWS // 2)
        weight_row = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS) % (ROWS // 2)
        w_base = tl.where(half == 0, weight_ptr, up_weight_ptr)
        s_base = tl.where(half == 0, scale_ptr, up_scale_ptr)
        weight_row += expert * N
    else:
        weight_row = expert * N + row
        w_base = weight_ptr + row * 0
        s_base = scale_ptr + row * 0
    w_at = (w_base + weight_row * (K // 2))[:, None] + byte[None, :]
    ws_at = (s_base + weight_row * (K // 32))[:, None] + block[None, :]
    for start in range(begin, end, TOKENS):
        place = start + tl.arange(0, TOKENS)
        is_token = place < end
        pair = tl.load(order_ptr + place, mask=is_token, other=0)
        source = pair // TOPK if UP else place
        x_at = codes_ptr + source[None, :] * K + channel[:, None]
        xs_at = code_scales_ptr + source[:, None] * (K // 32) + block[None, :]
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
        for step in range(K // STEP):
            x = tl.load(x_at + step * STEP, mask=is_token[None, :], other=0.0)
            xs = tl.load(xs_at + step * (STEP // 32), mask=is_token[:, None], other=0)
            w = tl.load(w_at + step * (STEP // 2))
            ws = tl.load(ws_at + step * (STEP // 32))
            acc = tl.dot_scaled(w, ws, "e2m1", x, xs, "e4m3", acc)
        if UP:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, ROWS // 2, TOKENS)), (1, 2, 0)))
            gate = tl.minimum(gate.to(tl.bfloat16).to(tl.float32), LIMIT, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up.to(tl.bfloat16).to(tl.float32), -LIMIT, propagate_nan=tl.PropagateNan.ALL)
            up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            weight = tl.load(weights_ptr + pair, mask=is_token, other=0.0)
            hidden = (gate / (1.0 + tl.exp(-gate)) * up) * weight[None, :]
            hidden = tl.reshape(hidden.to(tl.bfloat16).to(tl.float32), (ROWS // 64, 32, TOKENS))
            scale = fp8_scale(tl.max(tl.abs(hidden), 1))
            codes = tl.reshape(to_codes(hidden, scale[:, None, :]), (ROWS // 2, TOKENS))
            hidden_row = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
            tl.store(y_ptr + place[None, :] * N + hidden_row[:, None], codes, mask=is_token[None, :])
            hidden_block = tl.program_id(0) * (ROWS // 64) + tl.arange(0, ROWS // 64)
            scales_at = y_scales_ptr + place[None, :] * (N // 32) + hidden_block[:, None]
            tl.store(scales_at, scale.to(tl.uint8), mask=is_token[None, :])
        else:
            tl.store(y_ptr + pair[None, :] * N + row[:, None], acc.to(tl.bfloat16), mask=is_token[None, :])
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def tokens_of_tile(t: int) -> int:
    """Tokens of a program, from 16 to 128."""
    return min(128, max(16, triton.next_power_of_2(t)))


@torch.library.custom_op("deepinfer::quantize_codes", mutates_args=(), device_types="cuda")
def quantize_codes(x: Tensor, pdl: bool = True) -> tuple[Tensor, Tensor]:
    """`[T, K]` activations to float8_e4m3fn codes `[T, K]` and scale bytes `[T, K/32]`; a token with NaN has NaN scales."""
    t, k = x.shape
    codes = torch.empty(t, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(t, k // 32, dtype=torch.uint8, device=x.device)
    if t:
        quantize_codes_kernel[(t,)](
            x.contiguous(), codes, scales, k, blocks_of(k), pdl, num_warps=warps_of(t), **launch_options(pdl)
        )
    return codes, scales


@quantize_codes.register_fake
def _(x: Tensor, pdl: bool = True) -> tuple[Tensor, Tensor]:
    t, k = x.shape
    return x.new_empty(t, k, dtype=torch.float8_e4m3fn), x.new_empty(t, k // 32, dtype=torch.uint8)


@torch.library.custom_op("deepinfer::block_scaled_linear", mutates_args=(), device_types="cuda")
def block_scaled_linear(codes: Tensor, code_scales: Tensor, weight: Tensor, scale: Tensor, pdl: bool = True) -> Tensor:
    """`x W^T` in bfloat16 `[T, N]`; weight and scale bytes in the checkpoint's layout, channels a multiple of 128."""
    (m, k), n = codes.shape, weight.shape[0]
    y = torch.empty(m, n, dtype=torch.bfloat16, device=codes.device)
    if not m:
        return y
    split, tokens = split_of(n, k), tokens_of_tile(m)
    out = torch.empty(split, m, n, dtype=torch.float32, device=codes.device) if split > 1 else y
    block_scaled_linear_kernel[(triton.cdiv(n, ROWS), split, triton.cdiv(m, tokens))](
        codes,
        code_scales,
        weight,
        scale,
        out,
        m,
        n,
        k,
        tokens,
        ROWS,
        STEP,
        split,
        pdl,
        num_warps=4,
        num_stages=STAGES,
        **launch_options(pdl),
    )
    if split > 1:
        add_parts_kernel[(triton.cdiv(m * n, 1024),)](out, y, m * n, split, 1024, pdl, num_warps=4, **launch_options(pdl))
    return y


@block_scaled_linear.register_fake
def _(codes: Tensor, code_scales: Tensor, weight: Tensor, scale: Tensor, pdl: bool = True) -> Tensor:
    return codes.new_empty(codes.shape[0], weight.shape[0], dtype=torch.bfloat16)


@torch.library.custom_op("deepinfer::block_scaled_experts", mutates_args=(), device_types="cuda")
def block_scaled_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w3: Tensor,
    w3_scale: Tensor,
    limit: float,
    holds_all: bool = True,
    pdl: bool = True,
) -> Tensor:
    """As `fp4_experts.fp4_experts`, over stacks in the checkpoint's layout: int8 `[E, N, K/2]` and scale bytes `[E, N, K/32]`."""
    (t, topk), (experts, d, half) = ids.shape, w2.shape
    f, pairs, device = 2 * half, t * topk, x.device
    allocate = torch.empty if holds_all else torch.zeros
    y = allocate((pairs, d), dtype=torch.bfloat16, device=device)
    if not pairs:
        return y.view(t, topk, d)
    codes, code_scales = quantize_codes(x, pdl)
    order, active = prepare_order(ids.contiguous(), experts, pdl)
    hidden = torch.empty(pairs, f, dtype=torch.float8_e4m3fn, device=device)
    hidden_scales = torch.empty(pairs, f // 32, dtype=torch.uint8, device=device)
    weights, slots = weights.contiguous(), min(pairs, experts)
    cut = (topk, ROWS, EXPERT_TOKENS, STEP, pdl)
    options = dict(num_warps=4, num_stages=STAGES, **launch_options(pdl))
    w1, w2, w3 = (w.view(torch.uint8) for w in (w1, w2, w3))
    block_scaled_experts_kernel[(2 * f // ROWS, slots)](
        codes,
        code_scales,
        w1,
        w1_scale,
        w3,
        w3_scale,
        hidden,
        hidden_scales,
        active,
        order,
        weights,
        f,
        2 * w1.shape[2],
        limit,
        True,
        *cut,
        **options,
    )
    block_scaled_experts_kernel[(d // ROWS, slots)](
        hidden,
        hidden_scales,
        w2,
        w2_scale,
        w2,
        w2_scale,
        y,
        hidden_scales,
        active,
        order,
        weights,
        d,
        f,
        limit,
        False,
        *cut,
        **options,
    )
    return y.view(t, topk, d)


@block_scaled_experts.register_fake
def _(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w3: Tensor,
    w3_scale: Tensor,
    limit: float,
    holds_all: bool = True,
    pdl: bool = True,
) -> Tensor:
    return x.new_empty(*ids.shape, w2.shape[1], dtype=torch.bfloat16)
