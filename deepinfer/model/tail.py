"""The last rows of each sequence: all that the layers behind the last KV source need to compute of a prompt.

Those layers (the decoder half) own nothing but windows, which only the next tokens read. Every entry comes from the layers up to
the last source (the encoder half), which run on all rows. Source: specification section 17, "Decoder replay".
"""

from dataclasses import dataclass, replace

from deepinfer.config import ModelConfig
from deepinfer.dims import Int, Tensor
from deepinfer.model.indexer import Shared
from deepinfer.model.rows import Rows


def first_decoder_layer(config: ModelConfig) -> int:
    """The layer behind the last KV source; 0 if there is none, for then nothing but windows outlives a forward."""
    return max(config.kv_source_layers, default=-1) + 1


@dataclass(frozen=True, slots=True)
class Tail:
    """Which rows of a step go on.

    Attributes:
        row_ids: their places among all rows, ascending; of each sequence the last ones, or none.
        skipped: rows of each sequence before its first kept one.
        window_starts: as in `Rows`, for the layers that see the kept rows only.
    """

    row_ids: Int[Tensor, " t"]
    skipped: Int[Tensor, " B"]
    window_starts: Int[Tensor, " B"]

    def of_rows(self, rows: Rows) -> Rows:
        """The kept rows."""
        kept = self.row_ids
        seq_ids = rows.seq_ids[kept]
        return replace(
            rows,
            token_ids=rows.token_ids[kept],
            positions=rows.positions[kept],
            seq_ids=seq_ids,
            offsets=rows.offsets[kept] - self.skipped[seq_ids],
            remaining=rows.remaining[kept],
            window_starts=self.window_starts,
        )

    def of_shared(self, shared: Shared) -> Shared:
        """What the kept rows share."""
        selected, candidates = shared.selected, shared.candidates
        return Shared(
            shared.pool,
            None if selected is None else selected[self.row_ids],
            None if candidates is None else candidates[self.row_ids],
        )
