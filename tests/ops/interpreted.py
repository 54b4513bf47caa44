"""Runs Triton kernels on the CPU, in triton's interpreter: `TRITON_INTERPRET=1 python -m tests.ops.interpreted CASE ...`.

A program of its own, because the variable decides what `triton.jit` makes when triton is first imported. The interpreter's
conversions between float formats truncate or lose a carry; torch's, which round as a GPU does, take their place.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.model.hyper_connection import Mixes, collapse, spread
from deepinfer.model.plain_forms import combine_with_shared
from deepinfer.ops.elementwise import rms_norm, swiglu
from deepinfer.ops.quantize import round_fp4_e4m3, round_fp4_ue8m0, round_fp8
from deepinfer.ops.rotate import rope_frequencies, rotate_last, rotation

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUNDINGS: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x, round_fp8, round_fp4_ue8m0, round_fp4_e4m3)


def round_as_torch() -> None:
    """Give the interpreter conversions that round. Mutates triton's interpreter."""
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
    carriers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    results = {1: np.uint8, 2: np.uint16, 4: np.uint32}

    def convert(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        of_source, of_target = dtypes[source], dtypes[target]
        bits = torch.frombuffer(bytearray(values.tobytes()), dtype=carriers[of_source.itemsize])
        result = bits.view(of_source).float().to(of_target).view(carriers[of_target.itemsize])
        return result.numpy().view(results[of_target.itemsize]).reshape(values.shape)

    interpreter._convert_float = convert


def run(op: Any, *args: Any) -> Any:
    """The function behind a custom operation, which is registered for CUDA tensors only."""
    return op._init_fn(*args)


def vectors(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Groups of very different size, one of them zero."""
    x = torch.randn(*shape[:-1], shape[-1] // 32, 32) * torch.exp(2 * torch.randn(*shape[:-1], shape[-1] // 32, 1))
    x.view(-1, 32)[1] = 0
    return x.flatten(-2).to(dtype)


def norm_rotate_round(dtype: torch.dtype) -> None:
    """Rotation and rounding to the bit; behind a norm, whose sum has another order, nearly always."""
    from deepinfer.ops.triton_kernels.norm_rotate_round import norm_rotate_round as op

    for shape, half in (((5, 512), 32), ((3, 8, 128), 32), ((4, 96), 16), ((2, 4, 64), 32), ((3, 4, 32), 16)):
        turns = rotation(torch.randint(0, 100_000, shape[:1]), rope_frequencies(2 * half, 10000.0))
        for kind, rounding in enumerate(ROUNDINGS):
            x, gain = vectors(shape, dtype), (torch.rand(shape[-1]) + 0.5).bfloat16()
            observed = run(op, x, turns, None, 0.0, kind, False)
            assert torch.equal(observed, rounding(rotate_last(x, turns))), (shape, kind)
            observed = run(op, x, turns, gain, 1e-6, kind, False)
            expected = rounding(rotate_last(rms_norm(x, gain, 1e-6), turns))
            if dtype == torch.bfloat16 or kind:
                assert (observed == expected).float().mean() > 0.99, (shape, kind)
            else:
                torch.testing.assert_close(observed, expected)
            x[-1] = 0
            x.view(-1)[40] = float("nan")
            observed = run(op, x, turns, gain, 1e-6, kind, False)
            assert observed[0].isnan().any(), (shape, kind)
            assert not observed[-1].isnan().any(), (shape, kind)
            x.view(-1)[40] = float("-inf")
            observed = run(op, x, turns, None, 0.0, kind, False)
            torch.testing.assert_close(observed, rounding(rotate_last(x, turns)), rtol=0, atol=0, equal_nan=True)


def residual_streams(dtype: torch.dtype) -> None:
    """The spread streams to the bit, the collapsed ones up to their norm's sum."""
    from deepinfer.ops.triton_kernels import residual_streams as kernels

    kernels.rejoin = lambda device: None  # type: ignore[assignment]  # no streams on a CPU
    for tokens, streams_count, dim in ((3, 4, 96), (1, 2, 1280), (5, 4, 1056)):
        streams = torch.randn(tokens, streams_count, dim).to(dtype)
        y, gain = torch.randn(tokens, dim).to(dtype), (torch.rand(dim) + 0.5).bfloat16()
        pre, comb = torch.rand(tokens, streams_count), torch.rand(tokens, streams_count, streams_count)
        observed = run(kernels.spread, y, streams, pre, comb)
        assert torch.equal(observed, spread(y, streams, Mixes(pre, pre, comb))), dim
        observed, expected = (
            run(kernels.collapse_norm, streams, pre, gain, 1e-6, False),
            rms_norm(collapse(streams, pre), gain, 1e-6),
        )
        torch.testing.assert_close(observed, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        assert dtype == torch.float32 or (observed == expected).float().mean() > 0.99, dim


def norm_quantize(dtype: torch.dtype) -> None:
    """What is quantised is the norm that is returned, to the bit."""
    from deepinfer.ops.triton_kernels.packing import WGMMA, channel_places
    from deepinfer.ops.triton_kernels.quantize import norm_quantize_activations as op

    x, gain = vectors((3, 384), dtype), (torch.rand(384) + 0.5).bfloat16()
    normed, x16, factor = run(op, x, gain, 1e-6, WGMMA, False)
    torch.testing.assert_close(normed, rms_norm(x, gain, 1e-6), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert torch.equal(x16.float()[:, channel_places(384, WGMMA)] * factor[:, None], round_fp8(normed.float()))


def shared_expert(dtype: torch.dtype) -> None:
    """SwiGLU with quantisation, padded channels included; the sum over the experts, the shared one last."""
    from deepinfer.ops.triton_kernels import routing
    from deepinfer.ops.triton_kernels import shared_expert as kernels
    from deepinfer.ops.triton_kernels.packing import WGMMA, channel_places

    for tokens, width, first, channels, limit in ((3, 96, 128, 128, 10.0), (2, 256, 256, 256, 1.0), (2, 128, 128, 128, 0.0)):
        gate_up = (3 * torch.randn(tokens, 2 * first)).to(dtype)
        x16, factor = kernels.swiglu_quantize(gate_up, first, width, channels, limit, False)
        observed = x16.float()[:, channel_places(channels, WGMMA)] * factor[:, None]
        hidden = swiglu(gate_up[:, :width], gate_up[:, first : first + width], limit).to(dtype).float()
        expected = F.pad(round_fp8(hidden), (0, channels - width))
        assert (observed == expected).float().mean() > 0.98, (width, limit)
        torch.testing.assert_close(observed, expected, rtol=0.07, atol=1e-2)
    ids = torch.stack([torch.randperm(9)[:6] for _ in range(4)])
    outputs, shared, x = torch.randn(4, 6, 96).to(dtype), torch.randn(4, 96).to(dtype), torch.empty(0, dtype=dtype)
    assert torch.equal(routing.combine(outputs, ids, shared, dtype, False), combine_with_shared(outputs, ids, shared, x))


CASES = {fn.__name__: fn for fn in (norm_rotate_round, norm_quantize, residual_streams, shared_expert)}

if __name__ == "__main__":
    round_as_torch()
    for name in sys.argv[1:]:
        case, dtype = name.split("-")
        torch.manual_seed(0)
        CASES[case](DTYPES[dtype])
        print(name, "agrees")
