"""`y = x W^T` in float32 for bfloat16 weights: router, heads, compressor. The weights are read once, as they are stored.

The plain twin promotes both operands to float32. Tensor cores do the same work exactly: a float32 activation is the sum of three
bfloat16 numbers, its parts, so three bfloat16 products with float32 sums hold every bit of every product. Parts and splits of the
channels depend on the weight's shape alone and are added in order, so a token's result does not depend on its company.

Legend: T tokens, N outputs, K channels, P parts of a token (1 or 3).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton_kernels.launch import launch_options

ROWS, STEP = 64, 128  # weight rows of a program, channels of a product
PROGRAMS = 264  # that fill a device: two for each of its 132 processors
MOST_TOKENS = 128  # columns of a program
PARTS = 3


@triton.jit
def parts_kernel(x_ptr, parts_ptr, count, BLOCK: tl.constexpr):
    """`x` as the sum of three bfloat16 numbers `[P, T, K]`."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < count, other=0.0).to(tl.float32)
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    tl.store(parts_ptr + i, high, mask=i < count)
    tl.store(parts_ptr + count + i, middle, mask=i < count)
    tl.store(parts_ptr + 2 * count.to(tl.int64) + i, (rest - middle.to(tl.float32)).to(tl.bfloat16), mask=i < count)


@triton.jit
def bf16_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    T,
    N,
    K,
    per_split,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Partial results `[split, T, N]` of some weight rows, some tokens and one split of the channels."""
    # Neighbours share weight rows, which the second finds in the cache.
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in range(split * per_split, tl.minimum((split + 1) * per_split, K), STEP):
        k = start + tl.arange(0, STEP)
        w = tl.load(w_ptr + n[:, None].to(tl.int64) * K + k[None, :], mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)
        x_place = token[None, :].to(tl.int64) * K + k[:, None]
        x = tl.load(x_ptr + x_place, mask=(token[None, :] < T) & (k[:, None] < K), other=0.0)
        total = tl.dot(w, x, total)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    place = (split * T + token[None, :]).to(tl.int64) * N + n[:, None]
    tl.store(out_ptr + place, total, mask=(n[:, None] < N) & (token[None, :] < T))


# `count` is no constant of the code: a variant for multiples of 16 would lay the terms out in another way and add them in
# another order.
@triton.jit(do_not_specialize=["count"])
def add_kernel(partial_ptr, out_ptr, count, terms, TERMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Add `terms` partial results of `count` numbers each."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    term = tl.arange(0, TERMS)
    mask = (term[:, None] < terms) & (i[None, :] < count)
    if PDL:
        tl.extra.cuda.gdc_wait()
    values = tl.load(partial_ptr + term[:, None].to(tl.int64) * count + i[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + i, tl.sum(values, 0), mask=i < count)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def splits_of(n: int, k: int) -> int:
    """Splits of the channels of a weight `[n, k]`: as many as fill the device, of at least two products each."""
    wanted = PROGRAMS // triton.cdiv(n, ROWS)
    return max(1, min(wanted, k // (2 * STEP), 32))


@torch.library.custom_op("deepinfer::float32_linear", mutates_args=(), device_types="cuda")
def float32_linear(x: Tensor, w: Tensor, pdl: bool = True) -> Tensor:
    """`[T, K]` of any float dtype times bfloat16 `[N, K]`: float32 `[T, N]`."""
    (t, k), n = x.shape, w.shape[0]
    y = torch.empty(t, n, device=x.device)
    if t == 0:
        return y
    x, parts = x.contiguous(), 1
    if x.dtype != torch.bfloat16:
        whole, parts = x, PARTS
        x = torch.empty(parts, t, k, dtype=torch.bfloat16, device=w.device)
        parts_kernel[(triton.cdiv(t * k, 1024),)](whole, x, t * k, 1024, num_warps=4)
    splits = splits_of(n, k)
    per_split = triton.cdiv(triton.cdiv(k, splits), STEP) * STEP
    splits = triton.cdiv(k, per_split)
    columns = parts * t
    tokens = min(max(triton.next_power_of_2(columns), 16), MOST_TOKENS)
    terms = parts * splits
    out = y if terms == 1 else torch.empty(splits, columns, n, device=x.device)
    grid = (triton.cdiv(columns, tokens), triton.cdiv(n, ROWS), splits)
    options = launch_options(pdl)
    bf16_kernel[grid](x, w, out, columns, n, k, per_split, ROWS, STEP, tokens, pdl, num_warps=4, num_stages=3, **options)
    if terms > 1:
        # A split's columns are the parts one after the other, so parts and splits are one dimension.
        padded = triton.next_power_of_2(terms)
        block = max(2048 // padded, 64)
        add_kernel[(triton.cdiv(t * n, block),)](out, y, t * n, terms, padded, block, pdl, num_warps=4, **options)
    return y


@float32_linear.register_fake
def _(x: Tensor, w: Tensor, pdl: bool = True) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0], dtype=torch.float32)
