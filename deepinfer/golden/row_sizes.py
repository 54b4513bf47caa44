"""How large a row of each observed tensor is: found by one forward of one token, before anything is recorded."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from deepinfer.golden.observe import observing
from deepinfer.golden.reading import BLOCK_SIZE
from deepinfer.model.cache import CacheSizes
from deepinfer.model.rows import pack_rows
from deepinfer.model.transformer import Transformer


class RowSize(NamedTuple):
    """Shape and dtype of one row, and whether rows are proposals instead of positions."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_proposal: bool


@torch.no_grad()
def row_sizes(model: Transformer, patterns: Sequence[str], num_tokens: int) -> dict[str, RowSize]:
    """Rows of the tensors that `patterns` choose, in execution order, at the last of `num_tokens` positions.

    Lists of entries have their full length there. The values are those of a token without a past and mean nothing.
    """
    blocks = -(-num_tokens // BLOCK_SIZE)
    cache = model.new_cache(CacheSizes(num_slots=2, num_blocks=blocks + 1, block_size=BLOCK_SIZE))
    rows = pack_rows([([0], num_tokens - 1)], [1], [range(1, blocks + 1)], BLOCK_SIZE, model.device)
    sizes = {}
    with observing(model, patterns) as observation:
        observation.rows = rows
        hidden = model.forward_rows(rows, cache)
        model.logits(hidden.final)
        if observation.wants_drafts and hidden.main_hidden is not None:
            model.observe_draft(hidden.main_hidden, rows, cache)
        for name, value in observation.take().items():
            sizes[name] = RowSize(tuple(value.shape[1:]), value.dtype, False)
        if observation.wants_drafts and hidden.main_hidden is not None:
            observation.is_proposal = True
            proposal = model.propose_draft(rows.token_ids, rows.positions, rows.slots, cache)
            observation.keep_proposal(proposal)
            for name, value in observation.take_proposals(1).items():
                sizes[name] = RowSize(tuple(value.shape[1:]), value.dtype, True)
    return sizes
