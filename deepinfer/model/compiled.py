"""The compiled reading: the same modules, each through `torch.compile` by itself.

Halves of layers are compiled one by one and not as a whole model: those of one kind share their code, so compile time does not
grow with depth. Where experts are in several processes, the exchange of pairs stays as it is written: the second half is compiled
in two, and the experts by themselves. Shapes are dynamic: one compilation serves every batch and chunk of two rows and more, and so
every row gets the same arithmetic whatever its company.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from deepinfer.model.block import Block, choose, feed_in_two, finish
from deepinfer.model.linear import StoredMatrix
from deepinfer.model.moe import here
from deepinfer.model.roundings import KeepRoundings
from deepinfer.model.transformer import Transformer

LEAST_ROWS = 2  # compilers take a size of 1 for a special case
# Kinds of layers times dtypes; beyond that the compiler gives up instead of compiling again.
MOST_VARIANTS = 64
INDUCTOR_OPTIONS = {
    # The model's roundings stay, see `roundings.py`.
    "joint_custom_pre_pass": KeepRoundings(),
    "emulate_precision_casts": True,
    # Rings and pools are read before they are written. With reads moved behind, each write would copy the whole of them.
    "reorder_for_locality": False,
    # Sums are cut alike for every number of rows and in every process.
    "split_reductions": False,
    "deterministic": True,
}


Fn = TypeVar("Fn", bound=Callable[..., Any])


def settings_of(backend: str) -> dict[str, Any]:
    """How everything is compiled: whole, and for every size."""
    options = INDUCTOR_OPTIONS if backend == "inductor" else None
    return {"fullgraph": True, "dynamic": True, "backend": backend, "options": options}


def compile_function(fn: Fn, backend: str = "inductor") -> Fn:
    """The function, compiled when it is first called."""
    compiled: Any = torch.compile(fn, **settings_of(backend))
    return cast(Fn, compiled)


def compile_model(model: Transformer, backend: str = "inductor") -> None:
    """Compile the parts of a model when they are first called. Mutates `model`: calls of its parts go to compiled code.

    Another thread that runs the model calls `set_up_compiler` first.
    """
    set_up_compiler()
    for matrix in model.modules():
        if isinstance(matrix, StoredMatrix):
            matrix.keep_scale_bytes()
    for module in parts(model):
        module.compile(**settings_of(backend))
    for module in staged(model):
        module.stages = type(module.stages)(*(compile_function(fn, backend) for fn in type(module).stages))
    for block in exchanging(model):
        in_two = feed_in_two(compile_function(choose, backend), compile_function(finish, backend))
        block.stages = block.stages._replace(feed=in_two)


@contextmanager
def uncompiled(model: Transformer) -> Iterator[None]:
    """Run the parts of a compiled model as they are written, so that hooks inside them are called."""
    calls = {module: module._compiled_call_impl for module in parts(model)}
    stages = {module: module.stages for module in staged(model)}
    forget_compiled(model)
    try:
        yield
    finally:
        for module, call in calls.items():
            module._compiled_call_impl = call
        for staged_module, functions in stages.items():
            staged_module.stages = functions


def forget_compiled(model: Transformer) -> None:
    """Undo `compile_model`."""
    for module in model.modules():
        module._compiled_call_impl = None
    for staged_module in staged(model):
        staged_module.stages = type(staged_module).stages


def set_up_compiler() -> None:
    """Prepare this thread for compiling parts when they are first called: since torch 2.12 each thread has settings of its own."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    # Sizes that happen to be equal in the first call need not be equal in the next.
    torch.fx.experimental._config.use_duck_shape = False


def parts(model: Transformer) -> list[nn.Module]:
    """The modules that are compiled as they are."""
    engrams: list[Any] = [layer.engram for layer in model.layers if layer.engram is not None]
    experts = [block.ffn.experts for block in exchanging(model)]
    return [model.rope, model.token_window, *engrams, *experts, model.norm, model.head]


def staged(model: Transformer) -> list[Any]:
    """The modules whose `stages` are compiled: each half of a block, and what runs between the blocks."""
    return [model, *model.layers, *model.mtp.blocks]


def exchanging(model: Transformer) -> list[Block]:
    """The blocks whose experts are in several processes, which is settled before a model is compiled."""
    blocks: list[Any] = list(model.layers)
    return [block for block in blocks if block.ffn.exchange is not here]


def is_compiled(model: Transformer) -> bool:
    """Whether `compile_model` has been here."""
    return model.norm._compiled_call_impl is not None


def compilation_count() -> int:
    """Graphs that this process has compiled so far: constant once everything has been warmed up."""
    counters: Any = torch._dynamo.utils.counters
    return int(counters["stats"]["unique_graphs"])
