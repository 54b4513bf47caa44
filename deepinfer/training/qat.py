"""Float32 masters for every parameter, and the rounding that the export will do, seen by the forward and not by the gradient.

A model that trains is the project's own `Transformer` whose matrices and Engram tables are replaced by the classes here; all
other modules stay as they are. Rounding is off during pre-training and on while the model is finished (`set_rounding`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from deepinfer.config import ModelConfig
from deepinfer.dims import Float, Int, Shaped, Tensor
from deepinfer.model.engram import EngramTable
from deepinfer.model.linear import Float32Linear, Linear, StoredMatrix
from deepinfer.model.norm import RMSNorm
from deepinfer.model.numerics import Numerics, Precision, reference_ops
from deepinfer.model.router import Router
from deepinfer.model.transformer import Transformer
from deepinfer.ops.elementwise import rms_norm
from deepinfer.ops.formats import BLOCK
from deepinfer.ops.quantize import FLOAT8_E4M3_MAX, FP8_AMAX_FLOOR, round_fp4_ue8m0, round_fp8, ue8m0_scale


def straight_through(rounding: Callable[[Tensor], Tensor], x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`rounding(x)` with the gradient of the identity."""
    with torch.no_grad():
        error = rounding(x.detach()) - x
    return x + error


def round_tiles_fp8(w: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """The values of `quantize_fp8(w)`: e4m3 with one scale for each 32x32 tile."""
    tiles = rearrange(w.float(), "(nb i) (kb j) -> nb kb i j", i=BLOCK, j=BLOCK)
    scale = ue8m0_scale(tiles.abs().amax(dim=(-1, -2), keepdim=True).clamp(min=FP8_AMAX_FLOOR), FLOAT8_E4M3_MAX)
    codes = (tiles / scale).to(torch.float8_e4m3fn).float()
    return rearrange(codes * scale, "nb kb i j -> (nb i) (kb j)")


def round_bf16(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return x.bfloat16().to(x.dtype)


# Rounding of a matrix by its format in the exported checkpoint.
WEIGHT_ROUNDING: dict[str, Callable[[Tensor], Tensor]] = {"fp8": round_tiles_fp8, "fp4": round_fp4_ue8m0, "bf16": round_bf16}


class MasterMatrix(StoredMatrix):
    """A float32 matrix (or stack) that knows the format it will be exported in."""

    def __init__(self, source: StoredMatrix, export_format: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.fmt = source.in_features, source.out_features, "bf16"
        shape = (*source.weight.shape[:-2], source.out_features, source.in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32))
        self.register_buffer("expanded", None, persistent=False)
        self.export_format, self.rounding = export_format, False

    @property
    def rounds_inputs(self) -> bool:
        """Whether activations are rounded to FP8 in front of this matrix."""
        return self.rounding and self.export_format != "bf16"

    def values(self, dtype: torch.dtype, part: int | Shaped[Tensor, " ids"] | None = None) -> Float[Tensor, "*stack N K"]:
        weight = self.weight if part is None else self.weight[part]
        if self.rounding:
            weight = straight_through(WEIGHT_ROUNDING[self.export_format], weight)
        return weight.to(dtype)


def each_by_itself(x: Float[Tensor, "T K"], matrices: tuple[Any, ...], numerics: Numerics) -> tuple[Float[Tensor, "T N"], ...]:
    """Products of one input, each master with the rounding that its export will bring."""
    return tuple(matrix(x) for matrix in matrices)


class MasterLinear(MasterMatrix, Linear):
    """`Linear` over a master; `forward_groups` (wo_a) rounds the matrix only, as the release does."""

    def __init__(self, source: Linear, export_format: str) -> None:
        super().__init__(source, export_format)
        self.numerics = source.numerics

    def forward(self, x: Float[Tensor, "T K"]) -> Float[Tensor, "T N"]:
        return super().forward(straight_through(round_fp8, x) if self.rounds_inputs else x)


class MasterFloat32Linear(MasterMatrix, Float32Linear):
    """`Float32Linear` over a master."""

    def __init__(self, source: Float32Linear, export_format: str) -> None:
        super().__init__(source, export_format)
        self.numerics = source.numerics


class MasterRouter(MasterMatrix, Router):
    """`Router` over a master; its bias is moved by the load and not by the loss."""

    def __init__(self, source: Router, export_format: str) -> None:
        super().__init__(source, export_format)
        self.numerics, self.moe = source.numerics, source.moe
        self.bias = nn.Parameter(torch.empty(source.bias.shape, dtype=torch.float32), requires_grad=False)


class MasterNorm(RMSNorm):
    """`RMSNorm` whose gain is stored in bfloat16 in the end."""

    def __init__(self, source: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.eps, self.rounding = source.eps, False
        self.weight = nn.Parameter(torch.empty(source.weight.shape, dtype=torch.float32))

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        weight = straight_through(round_bf16, self.weight) if self.rounding else self.weight
        return rms_norm(x, weight, self.eps)


class MasterTable(nn.Module):
    """An Engram table in float32, looked up with gradients."""

    def __init__(self, source: EngramTable) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(source.weight.shape, dtype=torch.float32))
        self.rounding = False

    def forward(self, row_ids: Int[Tensor, "T X"]) -> Float[Tensor, "T X De"]:
        weight = straight_through(round_fp8, self.weight) if self.rounding else self.weight
        return F.embedding(row_ids, weight)


MASTERS: dict[type, Callable[[Any, str], MasterMatrix]] = {
    Linear: MasterLinear,
    Float32Linear: MasterFloat32Linear,
    Router: MasterRouter,
    StoredMatrix: MasterMatrix,
}


def build_trainable(config: ModelConfig, activation_dtype: torch.dtype, device: torch.device | str) -> Transformer:
    """A `Transformer` of float32 masters for the (quantised) configuration of the export; values are not initialised."""
    precision = Precision(name="training", activation_dtype=activation_dtype, quantize_activations=False, round_caches=False)
    with torch.device("meta"):
        model = Transformer(config, Numerics(precision=precision, ops=replace(reference_ops(), linears=each_by_itself)))
        _replace_stored(model)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                value = torch.empty(parameter.shape, dtype=torch.float32, device=device)
                trained = not (isinstance(module, Router) and name == "bias")
                module._parameters[name] = nn.Parameter(value, requires_grad=trained)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model


def _replace_stored(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, EngramTable):
            setattr(module, name, MasterTable(child))
        elif type(child) is RMSNorm:
            setattr(module, name, MasterNorm(child))
        elif type(child) in MASTERS:
            setattr(module, name, MASTERS[type(child)](child, str(child.fmt)))
        else:
            _replace_stored(child)


def set_rounding(model: nn.Module, rounding: bool) -> None:
    """Switch the rounding of matrices, tables and activations on or off. Mutates `model`."""
    for module in model.modules():
        if isinstance(module, MasterMatrix | MasterNorm | MasterTable):
            module.rounding = rounding
