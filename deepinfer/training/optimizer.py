"""Muon for the matrices inside the blocks, AdamW for everything else.

Muon steps along the orthogonalised momentum, so that all directions of a matrix learn at one rate. Matrices of one shape are
orthogonalised together. The step is scaled to the size that AdamW's would have, so both share a schedule.
Source: K. Jordan et al., "Muon" (2024); the scale 0.2 sqrt(max(N, K)) is that of J. Liu et al., arXiv 2502.16982, section 2.2.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from deepinfer.dims import Float, Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
# Looked up by token, read by the softmax, or too small to have directions: AdamW's.
NOT_MUON = (
    "embed.weight",
    "head.weight",
    "gate.weight",
    ".fn",
    "weights_proj.weight",
    "q_weight",
    "k_weight",
    "confidence_head.proj.weight",
)


def orthogonalized(x: Float[Tensor, "n N K"]) -> Float[Tensor, "n N K"]:
    """Each matrix with its singular values moved to about 1, by a quintic iteration in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    wide = x.shape[-2] <= x.shape[-1]
    y = (x if wide else x.mT).bfloat16()
    y = y / (y.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return (y if wide else y.mT).to(x.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum with Nesterov's look-ahead, orthogonalised; a stack of experts is a stack of matrices."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[tuple(parameter.shape)].append(parameter)
            for shape, parameters in by_shape.items():
                self._step_shape(shape, parameters, group)

    def _step_shape(self, shape: tuple[int, ...], parameters: list[Tensor], group: dict[str, Any]) -> None:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        buffers = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            buffers.append(state["momentum"])
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, buffers, group["momentum"])
        steps = orthogonalized(torch.stack(ahead).view(-1, *shape[-2:])).view(len(parameters), *shape)
        scale = 0.2 * max(shape[-2:]) ** 0.5
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, list(steps.unbind(0)), alpha=-group["lr"] * scale)


def is_muon(name: str, parameter: Tensor) -> bool:
    return parameter.dim() >= 2 and not name.endswith(NOT_MUON)


class Optimizers:
    """Both optimisers under one schedule; parameters are all that have a gradient among those given."""

    def __init__(self, named: Iterator[tuple[str, nn.Parameter]], lr: float, weight_decay: float = 0.1) -> None:
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        matrices = [p for name, p in trained if is_muon(name, p)]
        tables = [p for name, p in trained if not is_muon(name, p) and name.endswith("embed.weight")]
        others = [p for name, p in trained if not is_muon(name, p) and not name.endswith("embed.weight")]
        self.parameters = [p for _, p in trained]
        fused = bool(trained) and trained[0][1].is_cuda
        self.all: list[torch.optim.Optimizer] = []
        if matrices:
            self.all.append(Muon(matrices, lr=lr, weight_decay=weight_decay))
        groups = [
            # A row of a table gets few gradients, each of which counts for one token.
            {"params": tables, "lr": 2 * lr, "weight_decay": 0.01},
            {"params": others, "lr": 0.5 * lr, "weight_decay": 0.0},
        ]
        self.all.append(torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, fused=fused))
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["peak"] = group["lr"]

    def step(self, factor: float, max_norm: float = 1.0) -> Float[Tensor, ""]:
        """One step at `factor` times the peak rates; returns the gradient norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self.all]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self.all, states, strict=True):
            optimizer.load_state_dict(state)


def schedule(done: float, warmup: float = 0.02, floor: float = 0.02) -> float:
    """Factor on the learning rate when the share `done` of the steps lies behind: a linear rise, then a linear fall."""
    if done < warmup:
        return max(done / warmup, 0.01)
    return floor + (1 - floor) * (1 - done) / (1 - warmup)
