"""What the approximations of `bounded` replay cost: held-out text, by the number of rows that run again.

Each piece of text is a known prefix and new tokens behind it. All new tokens are fed (none is drawn), so every reading predicts the
same tokens and only their probabilities differ.

* recovery: the prefix's entries are stored, its windows are not; the last `rows` of it run again.
* truncation: the prefix is computed, behind the last KV source on its last `rows` only.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from deepinfer.dims import Float, Tensor
from deepinfer.errors import ConfigError
from deepinfer.model.cache import CacheSizes, ModelCache
from deepinfer.model.rows import pack_rows
from deepinfer.model.tail import Tail, first_decoder_layer
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.replay import BOUNDED_TAIL_EXTRA
from deepinfer.tokenizer import Tokenizer
from deepinfer.training.corpus import HeldOut

BLOCK_SIZE = 64
WHOLE, ALONE = 1, 2  # slots: of the full run, and of the runs that start in the middle


@dataclass(frozen=True, slots=True)
class Piece:
    """A known prefix and the tokens behind it."""

    token_ids: tuple[int, ...]
    num_known: int
    num_bytes: int  # of the tokens that are predicted from the new ones


@dataclass(slots=True)
class Drift:
    """One reading of all pieces, compared with the full one.

    Attributes:
        max_dlogprob, mean_dlogprob: absolute difference of the log probability of the text's own next token, in nats.
        flips: rows whose most probable token is another one.
    """

    what: str
    rows: int
    max_dlogprob: float = 0.0
    mean_dlogprob: float = 0.0
    flips: int = 0
    tokens: int = 0
    bits_per_byte: float = 0.0


def held_out_pieces(tokenizer: Tokenizer, count: int, num_known: int, num_new: int) -> list[Piece]:
    """The beginnings of the modules of the running Python that `mini` was never trained on.

    Raises: ConfigError if there are too few that are long enough.
    """
    pieces: list[Piece] = []
    for name in sorted(HeldOut.read().modules):
        spec = find_spec(name)
        if len(pieces) == count or spec is None or spec.origin is None:
            continue
        ids = tuple(tokenizer.encode(Path(spec.origin).read_text(encoding="utf-8")))[: num_known + num_new]
        if len(ids) == num_known + num_new:
            scored = b"".join(tokenizer.token_bytes(i) for i in ids[num_known + 1 :])
            pieces.append(Piece(ids, num_known, len(scored)))
    if len(pieces) < count:
        raise ConfigError(f"{len(pieces)} held-out modules have {num_known + num_new} tokens, {count} were asked for")
    return pieces


def depths(model: Transformer) -> tuple[int, int]:
    """Rows from which on recovery, and truncation, are exact: L (W - 1) and d (W - 1)."""
    config = model.config
    reach = config.attention.window_size - 1
    return config.n_layers * reach, (config.n_layers - first_decoder_layer(config)) * reach


def measure_drift(model: Transformer, pieces: Iterable[Piece], rows: Iterable[int]) -> Iterator[Drift]:
    """The full reading, then both approximations for each number of `rows`, and the numbers at which they are exact."""
    pieces = list(pieces)
    full = [_Reading(model, piece) for piece in pieces]
    total = sum(piece.num_bytes for piece in pieces)
    yield _summary("full", 0, full, full, total)
    window, (recovery, truncation) = model.config.attention.window_size, depths(model)
    for what, exact in (("recovery", recovery), ("truncation", truncation)):
        published = window if what == "recovery" else window + BOUNDED_TAIL_EXTRA
        for count in sorted({*rows, published, exact - window, exact}):
            if 0 <= count <= min(piece.num_known for piece in pieces):
                yield _summary(what, count, full, [reading.again(what, count) for reading in full], total)


def _summary(what: str, rows: int, full: "list[_Reading]", others: "list[_Reading]", num_bytes: int) -> Drift:
    drift = Drift(what, rows)
    nats, total = 0.0, 0.0
    for a, b in zip(full, others, strict=True):
        difference = (a.logprobs - b.logprobs).abs()
        drift.max_dlogprob = max(drift.max_dlogprob, float(difference.max()))
        drift.flips += int((a.best != b.best).sum())
        drift.tokens += difference.shape[0]
        nats -= float(b.logprobs.sum())
        total += float(difference.sum())
    drift.mean_dlogprob, drift.bits_per_byte = total / drift.tokens, nats / math.log(2) / num_bytes
    return drift


class _Reading:
    """Log probabilities of a piece's new tokens, each from the rows before it. The full reading makes the memory for the others."""

    @torch.inference_mode()
    def __init__(self, model: Transformer, piece: Piece, memory: ModelCache | None = None, what: str = "", rows: int = 0) -> None:
        self.model, self.piece = model, piece
        blocks, known = -(-len(piece.token_ids) // BLOCK_SIZE), piece.num_known
        self.memory = memory or model.new_cache(CacheSizes(num_slots=3, num_blocks=1 + blocks, block_size=BLOCK_SIZE))
        start = known - rows if what == "recovery" else 0
        slot = ALONE if what else WHOLE
        packed = pack_rows([(piece.token_ids[start:-1], start)], [slot], [range(1, 1 + blocks)], BLOCK_SIZE, model.device)

        def one(value: int) -> Tensor:
            return torch.tensor([value], device=model.device)

        tail = None
        if what == "recovery":
            packed = replace(packed, window_starts=one(start), write_floors=one(known))
            before = torch.arange(max(start - self.memory.history_rows, 0), start, device=model.device)
            ids = torch.tensor(piece.token_ids, device=model.device)[before]
            model.token_window.recall(ids, torch.full_like(before, slot), before, self.memory)
        elif what == "truncation":
            skipped = known - rows
            kept = torch.arange(skipped, len(piece.token_ids) - 1, device=model.device)
            tail = Tail(kept, one(skipped), one(skipped))
        final = model.forward_rows(packed, self.memory, tail).final
        new = len(piece.token_ids) - 1 - known
        logprobs: Float[Tensor, "n V"] = model.logits(final[-new:]).log_softmax(dim=-1)
        following = torch.tensor(piece.token_ids[known + 1 :], device=model.device)
        self.logprobs = logprobs.gather(1, following[:, None]).squeeze(1)
        self.best = logprobs.argmax(dim=-1)

    def again(self, what: str, rows: int) -> "_Reading":
        """The same text by an approximation, on the memory that the full reading has left."""
        return _Reading(self.model, self.piece, self.memory, what, rows)
