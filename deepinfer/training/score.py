"""Bits per byte of held-out modules, by either reading of the model.

Each module is read in windows of `context` tokens; a window scores the tokens that the one before it did not, so every token
of the text counts once, with at least `context - stride` tokens before it from the second window on. BOS is given; EOS, which
stands for no byte, is not scored.
"""

import lzma
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from tqdm import tqdm

from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.cache import CacheSizes
from deepinfer.model.rows import pack_rows
from deepinfer.model.transformer import Transformer
from deepinfer.tokenizer import Tokenizer
from deepinfer.training.data import HeldOutDocument
from deepinfer.training.whole_sequence import Ablation, Record, WholeSequence

CACHE_BLOCK = 64
# Tokens in one forward.
BATCH_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class Window:
    """Ids to feed and how many of the last predictions count."""

    ids: Int[Tensor, " n"]  # one more than is fed: the last is only a target
    scored: int


@dataclass(slots=True)
class Score:
    """Sums over held-out text."""

    nats: float = 0.0
    num_bytes: int = 0
    num_tokens: int = 0
    loads: dict[int, Float[Tensor, " E"]] = field(default_factory=dict)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.num_bytes


def windows_of(ids: Int[Tensor, " n"], context: int, stride: int) -> Iterator[Window]:
    """Windows over BOS and text; `ids` ends with EOS, which is dropped."""
    ids = ids[:-1]
    scored_to = 1
    while scored_to < ids.shape[0]:
        end = min(max(scored_to - (context - stride), 0) + context + 1, ids.shape[0])
        start = max(end - context - 1, 0)
        yield Window(ids[start:end], end - scored_to)
        scored_to = end


def batches(windows: Iterable[Window], max_tokens: int) -> Iterator[list[Window]]:
    """Windows of similar length together, longest first, within `max_tokens` after padding."""
    batch: list[Window] = []
    for window in sorted(windows, key=lambda w: -w.ids.shape[0]):
        if batch and (len(batch) + 1) * batch[0].ids.shape[0] > max_tokens:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


Forward = Callable[[list[Window], Score], list[Float[Tensor, "n D"]]]


def inference_forward(model: Transformer) -> Forward:
    """Final hidden rows by `Transformer.forward_rows`, the reading that serves."""

    def forward(batch: list[Window], score: Score) -> list[Tensor]:
        lengths = [window.ids.shape[0] - 1 for window in batch]
        blocks = [-(-length // CACHE_BLOCK) for length in lengths]
        first = [1 + sum(blocks[:i]) for i in range(len(blocks))]
        tables = [range(start, start + count) for start, count in zip(first, blocks, strict=True)]
        chunks = [(window.ids[:-1].tolist(), 0) for window in batch]
        rows = pack_rows(chunks, range(1, len(batch) + 1), tables, CACHE_BLOCK, model.device)
        cache = model.new_cache(CacheSizes(num_slots=len(batch) + 1, num_blocks=sum(blocks) + 1, block_size=CACHE_BLOCK))
        return list(model.forward_rows(rows, cache).final.split(lengths))

    return forward


def training_forward(reading: WholeSequence, ablation: Ablation) -> Forward:
    """Final hidden rows by the training reading, with something left out; expert loads are added to the score."""

    def forward(batch: list[Window], score: Score) -> list[Tensor]:
        lengths = [window.ids.shape[0] - 1 for window in batch]
        padded = torch.stack([F.pad(window.ids[:-1], (0, lengths[0] - n)) for window, n in zip(batch, lengths, strict=True)])
        record = Record()
        final = reading(padded.to(reading.model.device), ablation, record).final.unflatten(0, (len(batch), -1))
        if lengths[-1] == lengths[0]:
            # Padding would be counted as load.
            for layer, load in record.loads.items():
                score.loads[layer] = score.loads.get(layer, 0) + load
        return [row[:n] for row, n in zip(final, lengths, strict=True)]

    return forward


@torch.no_grad()
def score_documents(
    model: Transformer, forward: Forward, documents: list[HeldOutDocument], context: int, stride: int, name: str
) -> Score:
    """Sum the loss of all documents."""
    score = Score(num_bytes=sum(document.num_bytes for document in documents))
    windows = [window for document in documents for window in windows_of(document.ids, context, stride)]
    total = sum(window.scored for window in windows)
    with tqdm(total=total, desc=name, unit="token", disable=None) as progress:
        for batch in batches(windows, BATCH_TOKENS):
            for window, final in zip(batch, forward(batch, score), strict=True):
                logits = model.logits(final[-window.scored :])
                targets = window.ids[-window.scored :].to(logits.device)
                score.nats += float(F.cross_entropy(logits, targets, reduction="sum"))
                score.num_tokens += window.scored
                progress.update(window.scored)
    return score


def xz_bits_per_byte(documents: list[HeldOutDocument], tokenizer: Tokenizer) -> float:
    """`xz -9` over all documents in one stream: it may learn from the ones before."""
    text = b"".join(tokenizer.token_bytes(int(i)) for document in documents for i in document.ids[1:-1])
    return len(lzma.compress(text, preset=9)) * 8 / len(text)
