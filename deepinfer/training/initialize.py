"""Starting values of every parameter of a model that trains."""

import math

import torch
from torch import nn

from deepinfer.config import ModelConfig
from deepinfer.model.hyper_connection import HyperConnection
from deepinfer.model.transformer import Transformer

EMBED_STD = 0.3
# Projections that write to the residual streams start small, so that a fresh model is close to its embedding.
WRITERS = ("wo_b.weight", "w2.weight")


@torch.no_grad()
def initialize(model: Transformer, seed: int) -> None:
    """Fill all parameters. Mutates `model`; the values depend on the seed and on the order of the parameters only."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    for name, parameter in model.named_parameters():
        parameter.copy_(_start(name, parameter, config, generator))
    sub_layer = 0
    for module in model.modules():
        if isinstance(module, HyperConnection):
            _start_streams(module, sub_layer)
            sub_layer += 1


def _start(name: str, parameter: nn.Parameter, config: ModelConfig, generator: torch.Generator) -> torch.Tensor:
    def normal(std: float) -> torch.Tensor:
        return torch.randn(parameter.shape, generator=generator) * std

    if name.endswith((".hash", "attn_sink", "gate.bias")):
        return torch.zeros(parameter.shape)
    if parameter.dim() == 1 or name.endswith(("q_weight", "k_weight")):
        return torch.ones(parameter.shape)
    if "markov_head" in name:
        return normal(0.02)
    if name.endswith(("embed.weight",)):
        return normal(EMBED_STD)
    width = parameter.shape[-1]
    std = 1 / math.sqrt(width)
    if name.endswith(WRITERS):
        std /= math.sqrt(2 * config.n_layers)
    if name in ("head.weight",) or name.endswith(("confidence_head.proj.weight", "wgate.weight")):
        std *= 0.1
    values = normal(std)
    if name.endswith("engram.wkv.weight"):
        # The last rows give the value that is added to every stream; the others only decide how much of it.
        values[-config.dim :] *= 0.1
    return values


def _start_streams(hyper: HyperConnection, sub_layer: int) -> None:
    """Read mostly one stream, another one in each sub-layer, write to all, and keep the streams apart."""
    m = hyper.config.mult
    hyper.scale.fill_(0.1)
    pre, post, comb = torch.full((m,), -1.5), torch.full((m,), -0.2), torch.full((m, m), -5.0)
    # The next sub-layer reads with this `pre`; streams that all were alike would never come to differ.
    pre[(sub_layer + 1) % m], post[sub_layer % m] = 0.5, 0.4
    comb.fill_diagonal_(0.0)
    hyper.base.copy_(torch.cat((pre, post, comb.flatten())))
