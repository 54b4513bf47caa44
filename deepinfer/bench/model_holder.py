"""One model in memory at a time, for measurements that need it in several forms or after each other."""

import gc

import torch

from deepinfer.backends import Backend, choose_backend
from deepinfer.bench.bench_model import bench_device, open_model, with_other_backend
from deepinfer.engine_config import EngineConfig
from deepinfer.model.transformer import Transformer


class ModelHolder:
    """One model at a time: the last one is reused where its weights have the right layout, else dropped before the next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._held: tuple[Transformer, Backend] | None = None

    def open(self, config: EngineConfig) -> tuple[Transformer, Backend]:
        """The model with the operations that `config` asks for. Raises: ConfigError, CapacityError."""
        backend = choose_backend(config, bench_device(config))
        if self._held is not None:
            model, held = self._held
            same_precision = model.numerics.precision.name == config.precision
            if same_precision and held == backend:
                return self._held
            if same_precision and held.ops.packs_weights == backend.ops.packs_weights:
                self._held = with_other_backend(model, backend), backend
                return self._held
            self._held = None
            del model
        release_memory()
        torch.compiler.reset()
        self._held = open_model(self.name, config)
        return self._held


def release_memory() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
