"""What a build produced for one prompt, wherever it was read from: tokens, predictions, named tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from deepinfer.dims import Float, Int, Shaped, Tensor

NO_TOKEN = -1  # fills up rows that report fewer tokens than others


@dataclass(frozen=True, slots=True)
class Predictions:
    """Distributions over the next token at consecutive positions, whole or of the reported tokens only.

    Attributes:
        first: position of row 0; row r predicts the token at position `first + r + 1`.
        logits: unnormalised; None if only some tokens are reported.
        token_ids, logprobs: reported tokens of each row, `NO_TOKEN` behind them.
    """

    first: int
    logits: Float[Tensor, "R V"] | None = None
    token_ids: Int[Tensor, "R n"] | None = None
    logprobs: Float[Tensor, "R n"] | None = None

    def __len__(self) -> int:
        rows = self.logits if self.logits is not None else self.token_ids
        return 0 if rows is None else rows.shape[0]

    @classmethod
    def reported(cls, first: int, rows: Sequence[Mapping[int, float]]) -> "Predictions":
        """From a map of token id to log probability for each row."""
        width = max((len(row) for row in rows), default=0)
        ids = torch.full((len(rows), width), NO_TOKEN)
        values = torch.full((len(rows), width), float("-inf"))
        for r, row in enumerate(rows):
            ids[r, : len(row)] = torch.tensor(list(row), dtype=torch.int64)
            values[r, : len(row)] = torch.tensor(list(row.values()), dtype=torch.float32)
        return cls(first, None, ids, values)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOutput:
    """The output of one build for one prompt.

    Attributes:
        where: file and line, for messages.
        prompt_token_ids: None if the file does not say.
        token_ids: what was generated.
        has_token_ids: whether the file says what was generated: nothing generated is not the same as nothing said.
        tensors: by our names, one row for each position, or for each proposal.
    """

    where: str
    prompt_token_ids: list[int] | None
    token_ids: list[int]
    predictions: Predictions | None = None
    tensors: Mapping[str, Shaped[Tensor, "R ..."]] = field(default_factory=dict)
    has_token_ids: bool = True
