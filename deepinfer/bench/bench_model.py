"""The model of a measurement: a checkpoint, a preset, or a slice of the published widths with random weights.

`flash_slice:8` has 8 layers, `flash_slice:8:16` also no more than 16 experts in each. Random weights are made on the device.
"""

import copy
import re
from dataclasses import replace
from pathlib import Path

import tokenizers
import torch

from deepinfer.backends import Backend, choose_backend
from deepinfer.checkpoint.load import default_device, load_model
from deepinfer.checkpoint.locate import locate_checkpoint
from deepinfer.checkpoint.tensor_map import stored_specs
from deepinfer.config import ModelConfig
from deepinfer.config_json import load_config
from deepinfer.engine_config import EngineConfig
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.model.compiled import compile_model, forget_compiled
from deepinfer.model.transformer import Transformer
from deepinfer.presets import byte_tokenizer_json, flash_slice, random_model
from deepinfer.runtime.device import free_memory_bytes
from deepinfer.tokenizer import Tokenizer

SLICE = re.compile(r"flash_slice(?::(\d+))?(?::(\d+))?")


def slice_config(name: str) -> ModelConfig | None:
    """The configuration that `flash_slice[:LAYERS[:EXPERTS]]` stands for; None if the name is not of that form."""
    found = SLICE.fullmatch(name)
    if found is None:
        return None
    layers, experts = found.groups()
    config = flash_slice() if layers is None else flash_slice(int(layers))
    if experts is None:
        return config
    most = int(experts)
    least = config.moe.n_activated_experts
    if most < least:
        raise ConfigError(f"{name}: {most} experts, but each token visits {least}")
    return replace(
        config,
        moe=replace(config.moe, n_routed_experts=min(most, config.moe.n_routed_experts)),
        draft=replace(config.draft, n_routed_experts=min(most, config.draft.n_routed_experts)),
    )


def model_config(name: str) -> ModelConfig:
    """The configuration of a slice, a preset or a checkpoint folder. Raises: ConfigError, CheckpointError."""
    found = slice_config(name)
    return load_config(locate_checkpoint(name)) if found is None else found


def bench_device(config: EngineConfig) -> torch.device:
    """The device that a configuration names. Raises: ConfigError if this machine does not have it."""
    if config.device is None:
        return default_device()
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {config.device}: this machine has no CUDA device")
    return device


def open_model(name: str, config: EngineConfig) -> tuple[Transformer, Backend]:
    """Load or make the model, with the operations that `config` asks for, compiled if they are.

    Raises: ConfigError for what the device cannot do, CapacityError if the weights do not fit.
    """
    device = bench_device(config)
    backend = choose_backend(config, device)
    sliced = slice_config(name)
    if sliced is None:
        model = load_model(name, config.precision, device, ops=backend.ops)
    else:
        check_room(name, sliced, device)
        model = random_model(sliced, precision=config.precision, device=device, ops=backend.ops)
    if backend.compiles:
        compile_model(model)
    return model, backend


def check_room(name: str, config: ModelConfig, device: torch.device) -> None:
    """Raise CapacityError, naming the sizes, if the weights alone are larger than what is free."""
    needed = sum(spec.nbytes for spec in stored_specs(config))
    free = free_memory_bytes(device)
    if needed > free:
        raise CapacityError(
            f"{name}: the weights take {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free on {device}; "
            f"fewer layers or experts need less (flash_slice:6:16)"
        )


def bench_tokenizer(name: str, config: ModelConfig) -> Tokenizer:
    """The model's tokenizer; the byte tokenizer for random weights."""
    if slice_config(name) is None:
        return Tokenizer.from_folder(Path(locate_checkpoint(name)))
    return Tokenizer(tokenizers.Tokenizer.from_str(byte_tokenizer_json(config.vocab_size)))


def with_other_backend(model: Transformer, backend: Backend) -> Transformer:
    """The same weights, not copied, under other operations that keep them in the same layout."""
    assert model.numerics.ops.packs_weights == backend.ops.packs_weights
    memo: dict[int, object] = {id(model.numerics): replace(model.numerics, ops=backend.ops)}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = tensor
    twin = copy.deepcopy(model, memo)
    forget_compiled(twin)
    if backend.compiles:
        compile_model(twin)
    return twin


def weight_bytes(model: Transformer) -> int:
    """Memory behind every parameter and buffer, shared memory counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())}
    return sum(storages.values())
