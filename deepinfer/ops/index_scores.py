"""Index scores of every row against the keys of its own sequence: `sum_h relu(q_h . k_c) * w_h`.

Each step is rounded to the activations' dtype as published (specification U2).

Legend: T rows, Hi index heads, Di channels, B sequences, C entries.
"""

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.ops.matmul import batched_matmul

ROWS_AT_ONCE = 128  # bounds the gathered copy of the keys


def weigh_dots(dots: Float[Tensor, "T Hi C"], weights: Float[Tensor, "T Hi"]) -> Float[Tensor, "T C"]:
    """Scores from the dot products of each head."""
    return (torch.relu(dots) * weights[:, :, None]).sum(dim=1)


def index_scores(
    q: Float[Tensor, "T Hi Di"], weights: Float[Tensor, "T Hi"], keys: Float[Tensor, "B C Di"], seq_ids: Int[Tensor, " T"]
) -> Float[Tensor, "T C"]:
    """Scores in the dtype of `q`, with the keys of each row's sequence gathered for it, some rows at a time."""
    return (_opaque if torch.compiler.is_compiling() else _by_rows)(q, weights, keys, seq_ids)


def _by_rows(q: Tensor, weights: Tensor, keys: Tensor, seq_ids: Tensor) -> Tensor:
    scores = q.new_empty(q.shape[0], keys.shape[1])
    for start in range(0, q.shape[0], ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        dots = batched_matmul(q[part], keys[seq_ids[part]].transpose(1, 2))
        scores[part] = weigh_dots(dots, weights[part])
    return scores


# A compiler would unroll the loop, and so make code for each number of rows.
@torch.library.custom_op("deepinfer::gathered_index_scores", mutates_args=())
def _opaque(q: Tensor, weights: Tensor, keys: Tensor, seq_ids: Tensor) -> Tensor:
    return _by_rows(q, weights, keys, seq_ids)


@_opaque.register_fake
def _(q: Tensor, weights: Tensor, keys: Tensor, seq_ids: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], keys.shape[1])
