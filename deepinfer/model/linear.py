"""A matrix in whatever format it is stored in, and the linear map over it.

The rounding of a product depends on the format (section 6): FP8 and FP4 weights see FP8 activations in `native`, bf16 weights
see plain ones, and a few small projections are computed in float32 throughout.
"""

import torch
from torch import nn

from deepinfer.dims import Float, Shaped, Tensor
from deepinfer.errors import ShapeError
from deepinfer.model.numerics import Numerics
from deepinfer.ops.formats import BLOCK, dequantize_fp4, dequantize_fp8
from deepinfer.ops.quantize import round_fp8

FORMATS = ("bf16", "fp8", "fp4")


class StoredMatrix(nn.Module):
    """A matrix `[out, in]`, or a stack of them `[*stack, out, in]`, in its stored format.

    Parameters are named as in the checkpoint: `weight`, and `scale` for the quantised formats. `expand()` keeps the decoded
    values beside them, which a small model affords and a published one does not.
    """

    def __init__(self, in_features: int, out_features: int, fmt: str, stack: tuple[int, ...] = ()) -> None:
        super().__init__()
        if fmt not in FORMATS:
            raise ShapeError(f"weight format {fmt!r}: expected one of {FORMATS}")
        self.in_features, self.out_features, self.fmt = in_features, out_features, fmt
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "bf16": ((out_features, in_features), torch.bfloat16),
            "fp8": ((out_features, in_features), torch.float8_e4m3fn),
            "fp4": ((out_features, in_features // 2), torch.int8),
        }
        shape, dtype = shapes[fmt]
        self.weight = nn.Parameter(torch.empty((*stack, *shape), dtype=dtype), requires_grad=False)
        if fmt != "bf16":
            rows = out_features if fmt == "fp4" else -(-out_features // BLOCK)
            scale = torch.empty((*stack, rows, -(-in_features // BLOCK)), dtype=torch.float8_e8m0fnu)
            self.scale = nn.Parameter(scale, requires_grad=False)
        self.register_buffer("expanded", None, persistent=False)
        self.expanded: Tensor | None
        self.register_buffer("scale_bytes", None, persistent=False)
        self.scale_bytes: Tensor | None

    @property
    def is_quantized(self) -> bool:
        return self.fmt != "bf16"

    def values(self, dtype: torch.dtype, part: int | Shaped[Tensor, " ids"] | None = None) -> Float[Tensor, "*stack N K"]:
        """Decoded values in `dtype`, of the whole matrix or of some members of the stack.

        Exact in float32 and bfloat16 alike: both hold every stored value.
        """
        if self.expanded is not None:
            chosen = self.expanded if part is None else self.expanded[part]
            return chosen.to(dtype)
        weight = self.weight if part is None else self.weight[part]
        if self.fmt == "bf16":
            return weight.to(dtype)
        # Bytes are indexed, because not every device can gather float8.
        scale_bytes = self.scale.view(torch.uint8) if self.scale_bytes is None else self.scale_bytes
        scale = scale_bytes if part is None else scale_bytes[part]
        decode = dequantize_fp8 if self.fmt == "fp8" else dequantize_fp4
        return decode(weight, scale).to(dtype)

    def keep_scale_bytes(self) -> None:
        """Read the scales as bytes from now on: the compiler's code generators do not know float8_e8m0fnu."""
        if self.is_quantized:
            self.scale_bytes = self.scale.view(torch.uint8)

    def expand(self, dtype: torch.dtype) -> None:
        """Keep the decoded values in `dtype` from now on."""
        self.expanded = None
        self.expanded = self.values(dtype)


def product(x: Float[Tensor, "T K"], w: Float[Tensor, "N K"], quantized: bool, numerics: Numerics) -> Float[Tensor, "T N"]:
    """`x w^T` rounded as `numerics` says for a weight that is stored quantised or not; `w` holds float32 or `x.dtype` values."""
    precision, ops = numerics.precision, numerics.ops
    if quantized and precision.quantize_activations:
        return ops.block_matmul(round_fp8(x).float(), w.float()).to(x.dtype)
    return ops.matmul(x, w.to(x.dtype))


class Linear(StoredMatrix):
    """`y = x W^T` without bias, in the input's dtype."""

    def __init__(self, in_features: int, out_features: int, fmt: str, numerics: Numerics) -> None:
        super().__init__(in_features, out_features, fmt)
        self.numerics = numerics

    def forward(self, x: Float[Tensor, "T K"]) -> Float[Tensor, "T N"]:
        quantize = self.is_quantized and self.numerics.precision.quantize_activations
        w = self.values(torch.float32 if quantize else x.dtype)
        return product(x, w, self.is_quantized, self.numerics)

    def forward_groups(self, x: Float[Tensor, "T G K"]) -> Float[Tensor, "T G R"]:
        """Group g of the input times rows `[g R, (g + 1) R)` of the matrix, without rounding the activations (wo_a, U10)."""
        w = self.values(x.dtype).unflatten(0, (x.shape[1], -1))
        return torch.stack([self.numerics.ops.matmul(x[:, g], w[g]) for g in range(x.shape[1])], dim=1)


class Float32Linear(StoredMatrix):
    """`y = x W^T` computed in float32 whatever the precision: input and weight are promoted, the result stays float32."""

    def __init__(self, in_features: int, out_features: int, numerics: Numerics) -> None:
        super().__init__(in_features, out_features, "bf16")
        self.numerics = numerics

    def forward(self, x: Float[Tensor, "T K"]) -> Float[Tensor, "T N"]:
        return self.numerics.ops.matmul(x.float(), self.values(torch.float32))
