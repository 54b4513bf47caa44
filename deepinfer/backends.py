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

    "auto" is plain: the compiled reading has to be asked for with `compile=True`, and then "auto" takes the fastest kernels that
    the device has. Only `native` arithmetic has fast forms of its own.

    Raises: ConfigError for what this device or this combination cannot do.
    """
    is_fast = device.type == "cuda" and config.precision == "native"
    obstacle = device_obstacle(device)
    kernels = config.kernels
    if kernels == "auto":
        fastest = "triton" if is_fast and obstacle is None else "inductor"
        kernels = fastest if config.compile is True else "plain"
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
