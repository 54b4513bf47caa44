"""One table: checkpoint names, and where each tensor goes in the module tree.

The modules carry the checkpoint's own names; only two things differ. Hyper-connection parameters are flat in the checkpoint
(`hc_attn_fn`) and a module here (`hc_attn.fn`), and the checkpoint has one tensor for each expert where a module stacks them.
Source: specification section 12 and its tensor index.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from deepinfer.config import ModelConfig
from deepinfer.model.moe import Experts
from deepinfer.model.numerics import Numerics, precision_named, reference_ops
from deepinfer.model.transformer import Transformer

# Known tensors that the text model does not use.
IGNORED = re.compile(r"(vision\.|aligner\.|image_(start|end|newline)$)|.*\.ffn\.gate\.bias_vl$")
HYPER_CONNECTION = re.compile(r"\.hc_(attn|ffn)\.(fn|base|scale)$")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One checkpoint tensor: its name, what it must look like, and which parameter (and member of a stack) it fills.

    `parameter` is None for a tensor that the text model does not use.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter: str | None
    member: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_specs(model: nn.Module) -> Iterator[TensorSpec]:
    """Every checkpoint tensor that a (possibly meta-device) model needs, in the model's order."""
    stacks = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    for parameter_name, parameter in model.named_parameters():
        stack = next((name for name in stacks if parameter_name.startswith(name + ".")), None)
        if stack is None:
            name = HYPER_CONNECTION.sub(r".hc_\1_\2", parameter_name)
            yield TensorSpec(name, tuple(parameter.shape), parameter.dtype, parameter_name)
            continue
        suffix = parameter_name.removeprefix(stack)
        for member, expert in enumerate(stacks[stack].expert_ids):
            yield TensorSpec(f"{stack}.{expert}{suffix}", tuple(parameter.shape[1:]), parameter.dtype, parameter_name, member)


def meta_model(config: ModelConfig, numerics: Numerics | None = None, expert_ids: tuple[int, ...] | None = None) -> Transformer:
    """The module tree without memory behind its parameters."""
    if numerics is None:
        numerics = Numerics(precision=precision_named("native"), ops=reference_ops())
    with torch.device("meta"):
        return Transformer(config, numerics, expert_ids)


def stored_specs(config: ModelConfig, expert_ids: tuple[int, ...] | None = None) -> Iterator[TensorSpec]:
    """Every tensor that a published checkpoint holds for text: the model's, and beside each routing bias the one for images."""
    for spec in tensor_specs(meta_model(config, expert_ids=expert_ids)):
        yield spec
        if spec.name.endswith(".ffn.gate.bias"):
            yield TensorSpec(f"{spec.name}_vl", spec.shape, spec.dtype, None)


def is_ignored(name: str) -> bool:
    """Whether a tensor is known but without use for text (vision tower, image routing bias)."""
    return IGNORED.match(name) is not None
