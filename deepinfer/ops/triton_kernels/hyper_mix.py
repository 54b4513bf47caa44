"""Hyper-connection coefficients in two launches: a float32 projection of the streams in chunks of channels, then Sinkhorn.

The plain twin is `model/hyper_connection.py` with `ops/sinkhorn.py`, where the iterations are forty small operations. Chunks are
added in order, so a token's coefficients do not depend on its company.

Legend: T tokens, M streams, K = M * D channels, R = 2 M + M M coefficients, C chunks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton_kernels.beside import beside

CHUNK = 256  # channels of one program
COLUMNS = 32  # coefficients and the sum of squares, padded
TOKENS = 16  # of one program


@triton.jit
def project_kernel(
    x_ptr,
    fn_ptr,
    partial_ptr,
    T,
    K,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    IS_BF16: tl.constexpr,
):
    """Partial dot products `[C, T, COLUMNS]` of one chunk; column R holds the sum of squares."""
    chunk = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, CHUNK, STEP):
        k = chunk * CHUNK + start + tl.arange(0, STEP)
        x_place = token[:, None].to(tl.int64) * K + k[None, :]
        x = tl.load(x_ptr + x_place, mask=(token[:, None] < T) & (k[None, :] < K), other=0.0)
        w = tl.load(fn_ptr + column[None, :] * K + k[:, None], mask=(column[None, :] < R) & (k[:, None] < K), other=0.0)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        if IS_BF16:
            # A float32 weight is the sum of three bfloat16 numbers, so that tensor cores multiply exactly.
            high = w.to(tl.bfloat16)
            rest = w - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            total = tl.dot(x, high, total)
            total = tl.dot(x, middle, total)
            total = tl.dot(x, (rest - middle.to(tl.float32)).to(tl.bfloat16), total)
        else:
            total = tl.dot(wide, w, total, input_precision="ieee")
    total = tl.where(column[None, :] == R, squares[:, None], total)
    place = (chunk * T + token[:, None]) * COLUMNS + column[None, :]
    tl.store(partial_ptr + place, total, mask=token[:, None] < T)


@triton.jit
def mix_kernel(
    partial_ptr,
    base_ptr,
    scale_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    T,
    one_over_k,
    norm_eps,
    eps,
    chunks,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    M: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """One token: sum the chunks, then `pre`, `post` and the Sinkhorn matrix `comb` `[from, to]`."""
    token = tl.program_id(0)
    chunk = tl.arange(0, C)
    m = tl.arange(0, M)
    rows = partial_ptr + (chunk * T + token) * COLUMNS
    is_real = chunk < chunks
    square = tl.sum(tl.load(rows + (2 * M + M * M), mask=is_real, other=0.0), 0)
    rms = tl.rsqrt(square * one_over_k + norm_eps)
    pre = tl.sum(tl.load(rows[:, None] + m[None, :], mask=is_real[:, None], other=0.0), 0) * rms
    post = tl.sum(tl.load(rows[:, None] + M + m[None, :], mask=is_real[:, None], other=0.0), 0) * rms
    cell = m[:, None] * M + m[None, :]
    comb = tl.sum(tl.load(rows[:, None, None] + 2 * M + cell[None, :, :], mask=is_real[:, None, None], other=0.0), 0) * rms
    pre = pre * tl.load(scale_ptr) + tl.load(base_ptr + m)
    post = post * tl.load(scale_ptr + 1) + tl.load(base_ptr + M + m)
    comb = comb * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * M + cell)
    tl.store(pre_ptr + token * M + m, 1 / (1 + tl.exp(-pre)) + eps)
    tl.store(post_ptr + token * M + m, 2 / (1 + tl.exp(-post)))
    comb = tl.exp(comb - tl.max(comb, 1)[:, None])
    comb = comb / tl.sum(comb, 1)[:, None] + eps
    comb = comb / (tl.sum(comb, 0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        comb = comb / (tl.sum(comb, 1)[:, None] + eps)
        comb = comb / (tl.sum(comb, 0)[None, :] + eps)
    tl.store(comb_ptr + token * M * M + cell, comb)


@torch.library.custom_op("deepinfer::hyper_mix", mutates_args=(), device_types="cuda")
def hyper_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`pre` `[T, M]`, `post` `[T, M]` and `comb` `[T, M, M]` of streams `[T, M, D]`, all float32. M is a power of two.

    They are being computed beside the current stream: `residual_streams.spread` waits for them. Keep `streams` alive until then.
    """
    t, m, d = streams.shape
    k, r = m * d, fn.shape[0]
    chunks = triton.cdiv(k, CHUNK)
    padded, grid, is_bf16 = triton.next_power_of_2(chunks), (chunks, triton.cdiv(t, TOKENS)), streams.dtype == torch.bfloat16
    with beside(streams.device):
        pre, post, comb = (torch.empty(t, *shape, device=streams.device) for shape in ((m,), (m,), (m, m)))
        if t == 0:
            return pre, post, comb
        partial = torch.empty(chunks, t, COLUMNS, device=streams.device)
        project_kernel[grid](streams.contiguous(), fn, partial, t, k, r, CHUNK, COLUMNS, TOKENS, 128, is_bf16, num_warps=4)
        mix_kernel[(t,)](
            partial, base, scale, pre, post, comb, t, 1.0 / k, norm_eps, eps, chunks, padded, COLUMNS, m, iterations, num_warps=1
        )
    return pre, post, comb


@hyper_mix.register_fake
def _(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    t, m, _ = streams.shape
    return fn.new_empty(t, m), fn.new_empty(t, m), fn.new_empty(t, m, m)
