"""The stored weight formats, bytes to values and back: FP8 in 32x32 tiles and FP4 in rows of 32.

* FP8: `weight` float8_e4m3fn `[out, in]`, `scale` float8_e8m0fnu `[ceil(out/32), ceil(in/32)]`.
* FP4: `weight` int8 `[out, in/2]`, two e2m1 codes a byte, **low nibble = even input channel**; `scale` `[out, in/32]`.
* Rows of an Engram table: `weight` float8_e4m3fn `[rows, De]`, `scale` `[rows, De/32]`.

An e8m0 byte b is 2^(b - 127). Every decoded value is exact in bfloat16 and float32. Leading dimensions (stacked experts) pass
through. Source: specification section 12.
"""

import torch
from einops import rearrange, repeat

from deepinfer.dims import Float, Shaped, Tensor
from deepinfer.ops.quantize import (
    FLOAT4_E2M1_MAX,
    FLOAT8_E4M3_MAX,
    FP4_UE8M0_AMAX_FLOOR,
    FP8_AMAX_FLOOR,
    round_e2m1,
    ue8m0_scale,
)

BLOCK = 32
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_e8m0(scale: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Scale bytes (float8_e8m0fnu) to float32; done on the exponent bits, which every device can do."""
    exponent = scale.view(torch.uint8).to(torch.int32)
    # Exponent 0 is the subnormal 2^-127 in float32.
    return torch.where(exponent == 0, 2.0**-127, (exponent << 23).view(torch.float32))


def decode_e2m1(codes: Shaped[Tensor, "... half"]) -> Float[Tensor, "... full"]:
    """Bytes with two e2m1 codes each to float32 values, low nibble first."""
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float32, device=codes.device)
    code = codes.view(torch.uint8).to(torch.int32)
    pairs = torch.stack((code & 15, code >> 4), dim=-1)
    return rearrange(values[pairs], "... half two -> ... (half two)")


def dequantize_fp8(weight: Shaped[Tensor, "... N K"], scale: Shaped[Tensor, "... Nb Kb"]) -> Float[Tensor, "... N K"]:
    """Exact float32 values of an FP8 matrix with one scale for each 32x32 tile; edge tiles may be smaller."""
    n, k = weight.shape[-2:]
    tiles = repeat(decode_e8m0(scale), "... nb kb -> ... (nb i) (kb j)", i=BLOCK, j=BLOCK)
    return weight.float() * tiles[..., :n, :k]


def dequantize_rows_fp8(weight: Shaped[Tensor, "... De"], scale: Shaped[Tensor, "... Sb"]) -> Float[Tensor, "... De"]:
    """Exact float32 values of FP8 rows with one scale for each 32 channels of a row."""
    return weight.float() * repeat(decode_e8m0(scale), "... sb -> ... (sb c)", c=BLOCK)


def dequantize_fp4(weight: Shaped[Tensor, "... N half"], scale: Shaped[Tensor, "... N Kb"]) -> Float[Tensor, "... N K"]:
    """Exact float32 values of an FP4 matrix with one scale for each row and 32 channels."""
    return decode_e2m1(weight) * repeat(decode_e8m0(scale), "... n kb -> ... n (kb c)", c=BLOCK)


def encode_e8m0(scale: Float[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Exact powers of two to scale bytes."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


def quantize_fp8(values: Float[Tensor, "N K"]) -> tuple[Shaped[Tensor, "N K"], Shaped[Tensor, "Nb Kb"]]:
    """Encode a matrix as FP8 with 32x32 tiles; N and K must be multiples of 32."""
    tiles = rearrange(values.float(), "(nb i) (kb j) -> nb kb i j", i=BLOCK, j=BLOCK)
    scale = ue8m0_scale(tiles.abs().amax(dim=(-1, -2)).clamp(min=FP8_AMAX_FLOOR), FLOAT8_E4M3_MAX)
    codes = (tiles / scale[..., None, None]).to(torch.float8_e4m3fn)
    return rearrange(codes, "nb kb i j -> (nb i) (kb j)"), encode_e8m0(scale)


def quantize_rows_fp8(values: Float[Tensor, "R De"]) -> tuple[Shaped[Tensor, "R De"], Shaped[Tensor, "R Sb"]]:
    """Encode table rows as FP8 with one scale for each 32 channels."""
    groups = rearrange(values.float(), "r (g c) -> r g c", c=BLOCK)
    scale = ue8m0_scale(groups.abs().amax(dim=-1).clamp(min=FP8_AMAX_FLOOR), FLOAT8_E4M3_MAX)
    codes = (groups / scale[..., None]).to(torch.float8_e4m3fn)
    return rearrange(codes, "r g c -> r (g c)"), encode_e8m0(scale)


def quantize_fp4(values: Float[Tensor, "... N K"]) -> tuple[Shaped[Tensor, "... N half"], Shaped[Tensor, "... N Kb"]]:
    """Encode a matrix as FP4 with one scale for each row and 32 channels, even channels in the low nibbles."""
    groups = rearrange(values.float(), "... (g c) -> ... g c", c=BLOCK)
    scale = ue8m0_scale(groups.abs().amax(dim=-1).clamp(min=FP4_UE8M0_AMAX_FLOOR), FLOAT4_E2M1_MAX)
    rounded = round_e2m1(groups / scale[..., None])
    magnitude = torch.bucketize(rounded.abs(), torch.tensor(E2M1_VALUES, device=values.device))
    codes = (magnitude + 8 * torch.signbit(rounded)).to(torch.uint8)
    pairs = rearrange(codes, "... g (half two) -> ... (g half) two", two=2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).view(torch.int8), encode_e8m0(scale)
