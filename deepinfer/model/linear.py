"""A matrix in whatever format it is stored in, and the linear map over it.

What a product rounds depends on the format and is in `plain_forms.py`; a few small projections are computed in float32
throughout.
"""

from typing import Any

import torch
from torch import nn

from deepinfer.dims import Float, Shaped, Tensor, UInt8
from deepinfer.errors import ShapeError
from deepinfer.model.numerics import Numerics
from deepinfer.ops.formats import BLOCK, dequantize_fp4, dequantize_fp8

# Weights in another layout than the checkpoint's: `unpack(part)` gives the latter. See `packed_weights.py`.
PackedWeights = Any

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
        # What the weights were repacked to, and the larger whole that matrices of one input make together.
        self.packed: PackedWeights | None = None
        self.joined: PackedWeights | None = None
        # The device multiplies the stored codes and scales as they are.
        self.block_scaled = False

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
        return self._decoded(dtype, part)

    def _decoded(self, dtype: torch.dtype, part: int | Shaped[Tensor, " ids"] | None = None) -> Float[Tensor, "*stack N K"]:
        if self.fmt == "bf16":
            return (self.weight if part is None else self.weight[part]).to(dtype)
        decode = dequantize_fp8 if self.fmt == "fp8" else dequantize_fp4
        return decode(*self.stored(part)).to(dtype)

    def stored(
        self, part: int | Shaped[Tensor, " ids"] | None = None
    ) -> tuple[Shaped[Tensor, "*stack N w"], UInt8[Tensor, "*stack Nb Kb"]]:
        """Weight and scale bytes of a quantised matrix in the checkpoint's layout, of the whole or of some members of the stack."""
        if self.packed is not None:
            return self.packed.unpack(part)
        scale = self.scale.view(torch.uint8) if self.scale_bytes is None else self.scale_bytes
        # Bytes are indexed, because not every device can gather float8.
        return (self.weight, scale) if part is None else (self.weight[part], scale[part])

    def hold(self, packed: PackedWeights) -> None:
        """Keep the values in another layout instead of the checkpoint's. Drops `weight`, `scale` and what was decoded from them."""
        self.packed = packed
        self.weight = self.scale = self.scale_bytes = self.expanded = None  # type: ignore[assignment]

    def keep_scale_bytes(self) -> None:
        """Read the scales as bytes from now on: the compiler's code generators do not know float8_e8m0fnu."""
        if self.is_quantized and self.packed is None:
            self.scale_bytes = self.scale.view(torch.uint8)

    def record(self, member: int) -> UInt8[Tensor, " bytes"]:
        """Everything that is stored of one member of a stack: the bytes of its weight, then those of its scales."""
        return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in self._stored(member)])

    def store_record(self, member: int, record: UInt8[Tensor, " bytes"]) -> None:
        """Replace one member of a stack by a `record` of another. Mutates the parameters and what is decoded from them."""
        parts = self._stored(member)
        for part, of_part in zip(parts, record.split([part.nbytes for part in parts]), strict=True):
            place = part.view(torch.uint8)
            place.copy_(of_part.view(place.shape))
        if self.expanded is not None:
            self.expanded[member] = self._decoded(self.expanded.dtype, member)

    def _stored(self, member: int) -> list[Tensor]:
        if self.packed is not None:
            return [tensor[member] for tensor in self.packed.tensors()]
        return [parameter[member] for parameter in self.parameters(recurse=False)]

    def expand(self, dtype: torch.dtype) -> None:
        """Keep the decoded values in `dtype` from now on."""
        self.expanded = self._decoded(dtype)


class Linear(StoredMatrix):
    """`y = x W^T` without bias, in the input's dtype."""

    def __init__(self, in_features: int, out_features: int, fmt: str, numerics: Numerics) -> None:
        super().__init__(in_features, out_features, fmt)
        self.numerics = numerics

    def forward(self, x: Float[Tensor, "T K"]) -> Float[Tensor, "T N"]:
        return self.numerics.ops.linear(x, self, self.numerics)

    def forward_groups(self, x: Float[Tensor, "T G K"]) -> Float[Tensor, "T G R"]:
        """Group g of the input times rows `[g R, (g + 1) R)` of the matrix, without rounding the activations (wo_a, U10)."""
        return self.numerics.ops.grouped_linear(x, self, self.numerics)


class Float32Linear(StoredMatrix):
    """`y = x W^T` computed in float32 whatever the precision: input and weight are promoted, the result stays float32."""

    def __init__(self, in_features: int, out_features: int, numerics: Numerics) -> None:
        super().__init__(in_features, out_features, "bf16")
        self.numerics = numerics

    def forward(self, x: Float[Tensor, "T K"]) -> Float[Tensor, "T N"]:
        if (fast := self.numerics.ops.float32_linear) is not None:
            return fast(x, self, self.numerics)
        return self.plain(x)

    def plain(self, x: Float[Tensor, "T K"]) -> Float[Tensor, "T N"]:
        """The definition."""
        return self.numerics.ops.matmul(x.float(), self.values(torch.float32))
