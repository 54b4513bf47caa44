"""A reference inference engine for DeepSeek-V4.1-Flash: readable, exact, fast.

`LLMEngine` generates; `load_model` gives the bare module; `deepinfer.model` is the architecture to read.
"""

from deepinfer.checkpoint.load import load_model
from deepinfer.config import ModelConfig
from deepinfer.engine import LLMEngine
from deepinfer.engine_config import EngineConfig
from deepinfer.errors import (
    Cancelled,
    CapacityError,
    CheckpointError,
    ConfigError,
    CorruptFile,
    DeepInferError,
    EngineClosed,
    MissingExtra,
    PromptTooLong,
    Rejected,
    RequestError,
    ShapeError,
    StepError,
    TensorMismatch,
    TokenizerError,
    UnsupportedModel,
)
from deepinfer.model.transformer import Transformer
from deepinfer.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from deepinfer.runtime.engine_core import EngineStats
from deepinfer.sampling_params import SamplingParams
from deepinfer.tokenizer import Tokenizer

__all__ = [
    "Cancelled",
    "CapacityError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "CorruptFile",
    "DeepInferError",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "LLMEngine",
    "Logprob",
    "MissingExtra",
    "ModelConfig",
    "PromptTooLong",
    "Rejected",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ShapeError",
    "StepError",
    "TensorMismatch",
    "Tokenizer",
    "TokenizerError",
    "Transformer",
    "UnsupportedModel",
    "load_model",
]
