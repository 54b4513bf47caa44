"""Keeps the roundings of a model in what the compiler makes of it.

Roundings to bfloat16 are part of the model, but compilers treat them as an accident of storage: where the number is used again in
the same kernel, they leave the rounding out. Here each rounding becomes arithmetic on bits, which no compiler leaves out.
"""

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from deepinfer.dims import Float, Tensor

aten, prims = torch.ops.aten, torch.ops.prims

HALF_BELOW = 0x7FFF  # added to the bits of a float32, carries into bit 16 from more than one half on


def round_bits(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Float32 `x` rounded to a number that bfloat16 holds, ties to even; NaN stays NaN."""
    bits = aten.view.dtype(x, torch.int32)
    is_odd = aten.bitwise_and.Scalar(aten.bitwise_right_shift.Tensor_Scalar(bits, 16), 1)
    carried = aten.add.Tensor(aten.add.Scalar(bits, HALF_BELOW), is_odd)
    rounded = aten.view.dtype(aten.bitwise_and.Scalar(carried, -0x10000), torch.float32)
    return aten.where.self(aten.eq.Tensor(x, x), rounded, x)


class KeepRoundings(CustomGraphPass):
    """Puts `round_bits` in front of every conversion of float32 to bfloat16."""

    def __call__(self, graph: fx.Graph) -> None:
        rounding = fx.symbolic_trace(round_bits).graph
        for node in graph.find_nodes(op="call_function", target=prims.convert_element_type.default):
            source, dtype = node.args
            if dtype is torch.bfloat16 and source.meta["val"].dtype is torch.float32:
                with graph.inserting_before(node):
                    node.replace_input_with(source, _insert(graph, source, rounding))

    def uuid(self) -> Any:
        """What the compiler's caches tell versions of this pass apart by."""
        return get_hash_for_files((__file__,))


def _insert(graph: fx.Graph, source: fx.Node, rounding: fx.Graph) -> fx.Node:
    """A copy of `rounding` behind a node, with the example values that later passes look at."""
    copies: dict[fx.Node, fx.Node] = {next(iter(rounding.nodes)): source}
    result = graph.graph_copy(rounding, copies)
    for node in list(copies.values())[1:]:
        operation: Any = node.target
        node.meta["val"] = operation(*fx.node.map_arg(node.args, lambda arg: arg.meta["val"]))
    assert isinstance(result, fx.Node)
    return result
