"""A model that trains, filled from a checkpoint in the published format: for looking at a shipped model with gradients' eyes.

The decoded values are fixed points of their own rounding, so under `set_rounding` this is the checkpoint's model.
"""

from pathlib import Path

import torch

from deepinfer.checkpoint.load import load_model
from deepinfer.dims import Float, Tensor
from deepinfer.model.engram import EngramTable
from deepinfer.model.linear import StoredMatrix
from deepinfer.model.transformer import Transformer
from deepinfer.ops.formats import dequantize_rows_fp8
from deepinfer.training.qat import build_trainable, set_rounding


@torch.no_grad()
def masters_from_checkpoint(folder: Path, activation_dtype: torch.dtype, device: torch.device | str) -> Transformer:
    """The checkpoint as masters, with rounding on."""
    stored = load_model(folder, "float32", device)
    model = build_trainable(stored.config, activation_dtype, device)
    values = decoded_parameters(stored)
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])
    model.token_window.token_map = stored.token_window.token_map
    set_rounding(model, True)
    return model


def decoded_parameters(stored: Transformer) -> dict[str, Float[Tensor, "..."]]:
    """Float32 values of all parameters of an inference model, scales applied."""
    values: dict[str, Tensor] = dict(stored.named_parameters())
    for name, module in stored.named_modules():
        if isinstance(module, EngramTable):
            values[f"{name}.weight"] = dequantize_rows_fp8(module.weight, module.scale)
        elif isinstance(module, StoredMatrix):
            values[f"{name}.weight"] = module.values(torch.float32)
    return {name: value.float() for name, value in values.items() if value.dtype != torch.float8_e8m0fnu}
