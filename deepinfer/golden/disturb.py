"""How far the model itself carries a last bit: what predictions of two right builds may differ by.

In rounded arithmetic last bits decide roundings, and roundings decide choices. How much of it arrives at the logits depends on the
model and the text, so it is measured: the same reading again, with last bits of the streams changed behind every block.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepinfer.golden.observe import Observation
from deepinfer.model.transformer import Transformer


def disturbing(last_bit: float) -> Callable[..., Any]:
    """A context for `read_sequences(anchoring=...)`: every stream value moves by `last_bit` of itself, up, down or not at all."""

    @contextmanager
    def context(model: Transformer, observation: Observation) -> Iterator[None]:
        draw = torch.Generator().manual_seed(0)

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            streams = output[0]
            signs = torch.randint(-1, 2, streams.shape, generator=draw).to(streams.device)
            return (streams.float() * (1 + last_bit * signs)).to(streams.dtype), *output[1:]

        handles = [layer.register_forward_hook(hook) for layer in model.layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    return context
