"""Matrix products `y = x w^T`, plain and in ascending blocks of 32 channels, optionally in fixed tiles of rows.

A product of 1 row and the same row inside a product of 7 may differ in the last bit, because libraries choose another kernel.
`row_tile` makes each row's result independent of its company: rows are copied into zero-padded tiles of one shape.

On CPU, bfloat16 products run without oneDNN. It serves bfloat16 on some CPUs only and sums in another order there; without it
every CPU gives the bits of the recordings.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F

from deepinfer.dims import Float, Tensor


def by_row_tiles(fn: Callable[..., Tensor], tile: int, *inputs: Tensor) -> Tensor:
    """Apply `fn` to zero-padded copies of `tile` leading rows of every input, and join the results.

    `fn` maps rows to rows. Copies matter: a tile that starts at an address with another alignment may take another code path.
    """
    rows = inputs[0].shape[0]
    results = []
    for start in range(0, rows, tile):
        real = min(tile, rows - start)
        padded = []
        for x in inputs:
            buffer = x.new_zeros((tile, *x.shape[1:]))
            buffer[:real] = x[start : start + real]
            padded.append(buffer)
        results.append(fn(*padded)[:real])
    return torch.cat(results) if results else fn(*inputs)


@contextmanager
def without_onednn() -> Iterator[None]:
    """Products inside do not go through oneDNN. (`torch.backends.mkldnn.flags` does the same but warns about TF32.)"""
    previous = bool(torch.backends.mkldnn.enabled)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = previous  # type: ignore[assignment]


def plain_kernels(x: Tensor) -> AbstractContextManager[None]:
    """A context in which products of `x` do not go through oneDNN, if that matters for it."""
    is_plain = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.compiler.is_compiling()
    return without_onednn() if is_plain else nullcontext()


def matmul(x: Float[Tensor, "T K"], w: Float[Tensor, "N K"], row_tile: int = 0) -> Float[Tensor, "T N"]:
    """`x w^T` in the operands' common dtype, accumulated in float32. `row_tile` 0: no tiles."""
    with plain_kernels(x):
        if row_tile:
            return by_row_tiles(lambda rows: F.linear(rows, w), row_tile, x)
        return F.linear(x, w)


def block_matmul(x: Float[Tensor, "T K"], w: Float[Tensor, "N K"], row_tile: int = 0, block: int = 32) -> Float[Tensor, "T N"]:
    """`x w^T` in float32, where the products of each `block` channels are summed first and then added in ascending order.

    With operands rounded to block-scaled values this is the published GEMM: scaling by powers of two is exact, so applying the
    scales before the block's dot product or after it gives the same bits.
    """
    if row_tile:
        return by_row_tiles(lambda rows: block_matmul(rows, w, 0, block), row_tile, x)
    total = F.linear(x[:, :block], w[:, :block])
    for start in range(block, x.shape[1], block):
        total = total + F.linear(x[:, start : start + block], w[:, start : start + block])
    return total


def batched_matmul(a: Float[Tensor, "T M K"], b: Float[Tensor, "T K N"], row_tile: int = 0) -> Float[Tensor, "T M N"]:
    """One product for each leading row, in tiles of `row_tile` rows when it is not 0."""
    with plain_kernels(a):
        if row_tile:
            return by_row_tiles(torch.bmm, row_tile, a, b)
        return torch.bmm(a, b)
