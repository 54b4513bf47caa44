"""Which arithmetic an engine runs its model with: the plain definitions, what a compiler makes of them, or the Triton kernels."""

from typing import NamedTuple

import torch

from deepinfer.engine_config import EngineConfig
from deepinfer.errors import ConfigError
from deepinfer.model.numerics import Ops, inductor_ops, reference_ops, triton_ops
from deepinfer.ops.triton_kernels.launch import device_obstacle


class Backend(NamedTuple):
    """The operations of a model, and whether its parts are compiled."""

    ops: Ops
    compiles: bool
    name: str


def choose_backend(config: EngineConfig, device: torch.device) -> Backend:
    """The back end that `compile` and `kernels` ask for.

    "auto" takes the Triton kernels, compiled, where the device has them, and the plain definitions elsewhere; with `compile=True`
    what Inductor makes of the operations. Only `native` arithmetic has kernels. In a group of processes, whose kernels no two GPUs
    have run yet, it takes them with `compile=True` only.

    Raises: ConfigError for what this device or this combination cannot do.
    """
    is_fast = device.type == "cuda" and config.precision == "native"
    obstacle = device_obstacle(device)
    kernels = config.kernels
    if kernels == "auto":
        is_wanted = config.compile is True or (config.compile == "auto" and config.parallel.num_ranks == 1)
        without = "inductor" if config.compile is True else "plain"
        kernels = "triton" if is_fast and obstacle is None and is_wanted else without
    if kernels == "triton" and obstacle is not None:
        raise ConfigError(f'EngineConfig.kernels = "triton": {obstacle}')
    compiles = kernels != "plain" if config.compile == "auto" else bool(config.compile)
    if compiles and kernels == "plain":
        raise ConfigError(
            'EngineConfig.kernels = "plain", compile = True: the plain operations visit experts one by one, as their tokens '
            'decide, which cannot be compiled; kernels = "inductor" is the form for a compiler'
        )
    if config.batch_invariant and device.type == "cpu" and (kernels != "plain" or compiles):
        raise ConfigError(
            "EngineConfig.batch_invariant = True: on a CPU it is proven for the plain operations, not for compiled ones"
        )
    if config.batch_invariant and device.type != "cpu" and not (kernels == "triton" and compiles):
        raise ConfigError(
            f'EngineConfig.batch_invariant = True: on {device} it needs kernels = "triton" and compile = True, '
            f"got {kernels!r} and {compiles} with precision {config.precision!r}" + (f" ({obstacle})" if obstacle else "")
        )
    if kernels == "triton":
        return Backend(triton_ops(batch_invariant=config.batch_invariant), compiles, kernels)
    if kernels == "inductor":
        return Backend(inductor_ops(), compiles, kernels)
    return Backend(reference_ops(batch_invariant=config.batch_invariant, static_shapes=device.type != "cpu"), compiles, kernels)
