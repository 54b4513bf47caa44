"""Random weights in the stored formats, for tests of the kernels and of the seam in front of them."""

from dataclasses import replace

import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.ops.formats import BLOCK
from deepinfer.presets import tiny_config
from tests.tolerances import check_close

TOP_EXPONENT = 119  # products of a few thousand channels with activations of order 1 are then of order 1


def random_exponents(rows: int, columns: int, spread: int, stack: tuple[int, ...], device: torch.device | str) -> Tensor:
    """Scale bytes `[*stack, rows, columns]` of which the first row really spreads over `spread` powers of two."""
    low = TOP_EXPONENT - spread
    exponents = torch.randint(low, TOP_EXPONENT + 1, (*stack, rows, columns), device=device, dtype=torch.uint8)
    exponents[..., 0, 0], exponents[..., 0, -1] = low, TOP_EXPONENT
    return exponents.view(torch.float8_e8m0fnu)


def random_fp8(n: int, k: int, spread: int = 8, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Any codes but NaN, zeros of both signs and subnormals included."""
    codes = torch.randint(0, 256, (n, k), device=device, dtype=torch.uint8)
    codes = torch.where((codes & 127) == 127, codes - 1, codes)
    return codes.view(torch.float8_e4m3fn), random_exponents(n // BLOCK, k // BLOCK, spread, (), device)


def random_fp4(
    n: int, k: int, stack: tuple[int, ...] = (), spread: int = 8, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Any codes."""
    codes = torch.randint(-128, 128, (*stack, n, k // 2), device=device, dtype=torch.int8)
    return codes, random_exponents(n, k // BLOCK, spread, stack, device)


def random_activations(
    tokens: int, channels: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Rows whose blocks of 32 channels differ in size by some powers of two, as real ones do; one block is zero."""
    x = torch.randn(tokens, channels // BLOCK, BLOCK, device=device)
    x = x * torch.exp(torch.randn(tokens, channels // BLOCK, 1, device=device))
    x[:, 1] = 0
    return x.flatten(1).to(dtype)


def units(expected: Tensor) -> Tensor:
    """What differences are measured in: the values' root mean square, or an eighth of a value that is larger than eight of it.

    One step of bfloat16 is at most 2^-4 of the unit.
    """
    values = expected.double()
    return torch.maximum(values.square().mean().sqrt(), values.abs() / 8)


def check_kernel(observed: Tensor, expected: Tensor, subject: str, name: str) -> None:
    """`check_close` in `units`."""
    unit = units(expected)
    check_close(observed.double() / unit, expected.double() / unit, subject, "other sums", name)


def packable_config() -> ModelConfig:
    """`tiny_config` in widths that fill the tiles of packed matrices, except for the Engram's projection with 192 channels."""
    tiny = tiny_config()
    return replace(
        tiny,
        dim=256,
        attention=replace(tiny.attention, head_dim=64, q_lora_rank=128, o_lora_rank=64),
        moe=replace(tiny.moe, inter_dim=256),
    )
