"""A reference inference engine for DeepSeek-V4.1-Flash: readable, exact, fast.

`LLMEngine` generates; `load_model` gives the bare module; `deepinfer.model` is the architecture to read.
Names are imported when they are first used, so that `import deepinfer` and `deepinfer --help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.chat.recipe import Recipe
    from deepinfer.chat.response_parser import ResponseParser
    from deepinfer.chat.token_adder import TokenAdder
    from deepinfer.checkpoint.load import load_model
    from deepinfer.config import ModelConfig
    from deepinfer.engine import LLMEngine
    from deepinfer.engine_config import EngineConfig
    from deepinfer.errors import (
        AgreementError,
        CapacityError,
        CheckpointError,
        ConfigError,
        CorruptFile,
        DeepInferError,
        EngineClosed,
        GrammarError,
        MissingExtra,
        NothingToDraw,
        PeerLost,
        PromptTooLong,
        RecipeError,
        RecordingError,
        Rejected,
        RequestError,
        ShapeError,
        StepError,
        TensorMismatch,
        TokenizerError,
        UnsupportedModel,
    )
    from deepinfer.model.transformer import Transformer
    from deepinfer.outputs import ChatMessage, CompletionOutput, Logprob, RequestMetrics, RequestOutput, ToolCall
    from deepinfer.parallel.config import ParallelConfig
    from deepinfer.parallel.hand_over import RequestState
    from deepinfer.runtime.engine_core import EngineStats
    from deepinfer.sampling_params import SamplingParams
    from deepinfer.structured_outputs import StructuredOutputs
    from deepinfer.tokenizer import Tokenizer

_HOMES = {
    "deepinfer.chat.recipe": ("Recipe",),
    "deepinfer.chat.response_parser": ("ResponseParser",),
    "deepinfer.chat.token_adder": ("TokenAdder",),
    "deepinfer.checkpoint.load": ("load_model",),
    "deepinfer.config": ("ModelConfig",),
    "deepinfer.engine": ("LLMEngine",),
    "deepinfer.engine_config": ("EngineConfig",),
    "deepinfer.errors": (
        "AgreementError",
        "CapacityError",
        "CheckpointError",
        "ConfigError",
        "CorruptFile",
        "DeepInferError",
        "EngineClosed",
        "GrammarError",
        "MissingExtra",
        "NothingToDraw",
        "PeerLost",
        "PrefixFileError",
        "PromptTooLong",
        "RecipeError",
        "RecordingError",
        "Rejected",
        "RequestError",
        "ShapeError",
        "StepError",
        "TensorMismatch",
        "TokenizerError",
        "UnsupportedModel",
    ),
    "deepinfer.model.transformer": ("Transformer",),
    "deepinfer.outputs": ("ChatMessage", "CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput", "ToolCall"),
    "deepinfer.parallel.config": ("ParallelConfig",),
    "deepinfer.parallel.hand_over": ("RequestState",),
    "deepinfer.runtime.engine_core": ("EngineStats",),
    "deepinfer.sampling_params": ("SamplingParams",),
    "deepinfer.structured_outputs": ("StructuredOutputs",),
    "deepinfer.tokenizer": ("Tokenizer",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AgreementError",
    "CapacityError",
    "ChatMessage",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "CorruptFile",
    "DeepInferError",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "GrammarError",
    "LLMEngine",
    "Logprob",
    "MissingExtra",
    "ModelConfig",
    "NothingToDraw",
    "ParallelConfig",
    "PeerLost",
    "PrefixFileError",
    "PromptTooLong",
    "Recipe",
    "RecipeError",
    "RecordingError",
    "Rejected",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestState",
    "ResponseParser",
    "SamplingParams",
    "ShapeError",
    "StepError",
    "StructuredOutputs",
    "TensorMismatch",
    "TokenAdder",
    "Tokenizer",
    "TokenizerError",
    "ToolCall",
    "Transformer",
    "UnsupportedModel",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
