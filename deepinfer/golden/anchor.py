"""Comparing modules one by one: our modules get the inputs that the other build's modules had.

A difference that arises in one module would otherwise be seen in every module behind it, and in rounded arithmetic one last bit
grows until nothing can be told apart. So wherever the other build's recording has what a module returned, our module's own
result is compared and then replaced by the recorded one, and its readers start from equal inputs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from deepinfer.dims import Int, Shaped, Tensor
from deepinfer.golden.observe import Observation
from deepinfer.golden.reading import fill_up
from deepinfer.model.attention import Attention
from deepinfer.model.block import Block
from deepinfer.model.hyper_connection import HyperConnection, Mixes
from deepinfer.model.indexer import Indexer, IndexerOutput
from deepinfer.model.rope import RotaryEmbedding
from deepinfer.model.router import Router, RouterOutput
from deepinfer.model.transformer import Transformer

# Called several times in one proposal, so that a recorded tensor does not say which call it is of.
REPEATED = ("markov_head", "confidence_head")
# For each kind of module, the recorded fields that are needed to replace its result.
NEEDED: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (Block, ("", "hc_ffn.pre")),
    (HyperConnection, ("pre", "post", "comb")),
    (Indexer, ("selected",)),
    (Router, ("ids", "weights")),
)


class Anchors:
    """Tensors that the other build recorded for one sequence, as replacements for what our modules return."""

    def __init__(self, tensors: Mapping[str, Shaped[Tensor, "R ..."]]) -> None:
        self.tensors = tensors
        self._proposals: dict[str, int] = {}

    @contextmanager
    def __call__(self, model: Transformer, observation: Observation) -> Iterator[None]:
        """Replace results while the context lasts. The model must read this one sequence alone."""
        handles = []
        for path, module in model.named_modules():
            names = [f"{path}.{field}" if field else path for field in self._needed(module)]
            is_known = path not in ("", "head") and all(name in self.tensors for name in names)
            if is_known and not any(part in path for part in REPEATED) and not isinstance(module, RotaryEmbedding):
                handles.append(module.register_forward_hook(self._replacing(path, observation)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @staticmethod
    def _needed(module: nn.Module) -> tuple[str, ...]:
        return next((fields for kind, fields in NEEDED if isinstance(module, kind)), ("",))

    def _replacing(self, path: str, observation: Observation) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            rows = observation.rows
            assert rows is not None
            is_draft = path.startswith("mtp.")
            # The embedding and the head also serve the draft blocks; features of the draft blocks are not proposals.
            if is_draft != observation.is_proposal and "main_" not in path:
                return output
            place: Int[Tensor, " T"] | int = rows.positions.cpu()
            if observation.is_proposal:
                place = self._proposals.get(path, 0)
                self._proposals[path] = place + 1

            def recorded(field: str, like: Tensor) -> Tensor:
                value = self.tensors[f"{path}.{field}" if field else path][place]
                return value.to(device=like.device, dtype=like.dtype)

            return replaced(module, output, recorded, lambda field: f"{path}.{field}" in self.tensors)

        return hook


def replaced(module: nn.Module, output: Any, recorded: Callable[[str, Tensor], Tensor], has: Callable[[str], bool]) -> Any:
    """A module's result with the recorded tensors in place of its own."""
    if isinstance(module, Block):
        return recorded("", output[0]), recorded("hc_ffn.pre", output[1]), output[2]
    if isinstance(module, Attention):
        return recorded("", output[0]), output[1]
    if isinstance(module, HyperConnection):
        return Mixes(recorded("pre", output.pre), recorded("post", output.post), recorded("comb", output.comb))
    if isinstance(module, Router):
        return RouterOutput(recorded("weights", output.weights), recorded("ids", output.ids))
    if isinstance(module, Indexer):
        # Entries are listed up to the width of this forward; what is chosen beyond it cannot exist yet.
        width = output.scores.shape[1]
        selected = recorded("selected", output.selected)[:, : output.selected.shape[1]].clamp(max=width - 1)
        candidates = output.candidates
        if candidates is not None and has("candidates"):
            candidates = fill_up(recorded("candidates", candidates), width, 0)[:, :width]
        return IndexerOutput(selected, candidates, output.scores)
    return recorded("", output)
