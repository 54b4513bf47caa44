"""The plain reading: sequences through the model with nothing but a cache, step by step, observed on the way.

The prompt goes in at once (or in chunks), then one token at a time: drawn by the model, or given (teacher forcing).
Sequences that are read together share every forward.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from deepinfer.config import ModelConfig
from deepinfer.dims import Float, Int, Shaped, Tensor
from deepinfer.errors import PromptTooLong, Rejected, StepError
from deepinfer.golden.observe import EMPTY_PLACE, Observation, observing
from deepinfer.model.cache import CacheSizes
from deepinfer.model.rows import Rows, pack_rows
from deepinfer.model.transformer import Transformer
from deepinfer.ops.sample import sample
from deepinfer.sampling_params import SamplingParams

BLOCK_SIZE = 64
CHUNK_TOKENS = 2048  # prompt tokens of a sequence in one forward, unless asked otherwise


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What came of one sequence of P prompt and n further tokens; R = P + n - 1 rows were run (P if n = 0).

    Attributes:
        token_ids: the further tokens, drawn or given.
        logits: of every row, float32: row r predicts the token at position r + 1.
        tensors: observed tensors by name, in execution order.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logits: Float[Tensor, "R V"]
    tensors: dict[str, Shaped[Tensor, "R ..."]]


@dataclass(slots=True)
class _Sequence:
    """A sequence while it is read."""

    prompt: list[int]
    given: list[int] | None
    tokens: list[int] = field(default_factory=list)
    num_fed: int = 0
    logits: list[Tensor] = field(default_factory=list)
    caught: dict[str, list[Tensor]] = field(default_factory=dict)

    def next_chunk(self, chunk_tokens: int) -> tuple[list[int], int]:
        known = self.prompt + self.tokens
        return known[self.num_fed : self.num_fed + chunk_tokens], self.num_fed

    def keep(self, tensors: dict[str, Tensor]) -> None:
        for name, value in tensors.items():
            self.caught.setdefault(name, []).append(value)


def read_sequences(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    given: Sequence[Sequence[int]] | None = None,
    params: SamplingParams | None = None,
    seed: int = 0,
    patterns: Sequence[str] = (),
    chunk_tokens: int = CHUNK_TOKENS,
    anchoring: Callable[[Transformer, Observation], AbstractContextManager[None]] | None = None,
    indices: Sequence[int] | None = None,
) -> list[Reading]:
    """Read prompts together, each to its end.

    Args:
        given: for each prompt the tokens that follow it, instead of drawing any.
        params: how tokens are drawn and when a sequence ends, if none are given; None reads the prompts only.
        indices: how messages number the prompts.
        anchoring: a context that may replace what modules return; entered after the hooks that observe.

    Raises: PromptTooLong; StepError for logits that are not finite, with the place.
    """
    limit = params.max_tokens if params is not None else 0
    if given is None and limit is None:
        raise Rejected("max_tokens = None: a recording needs a bound")
    sequences = [_Sequence(list(prompt), None if given is None else list(given[i])) for i, prompt in enumerate(prompts)]
    lengths = [len(s.prompt) + (len(s.given) if s.given is not None else limit or 0) for s in sequences]
    check_lengths(model.config, lengths)
    numbers = list(indices if indices is not None else range(len(prompts)))
    reader = _Reader(model, sequences, numbers, lengths, params, seed, chunk_tokens)
    with (
        torch.no_grad(),
        observing(model, patterns) as observation,
        anchoring(model, observation) if anchoring is not None else nullcontext(),
    ):
        while reader.step(observation):
            pass
    return [
        Reading(
            prompt_token_ids=s.prompt,
            token_ids=s.tokens,
            logits=torch.cat(s.logits),
            tensors={name: join_rows(name, parts) for name, parts in s.caught.items()},
        )
        for s in sequences
    ]


def stop_token_ids(params: SamplingParams, eos_token_id: int) -> set[int]:
    """Tokens that end a completion."""
    return {*params.stop_token_ids, *(() if params.ignore_eos else (eos_token_id,))}


def check_lengths(config: ModelConfig, lengths: Sequence[int]) -> None:
    """Raises: PromptTooLong for a sequence that the model was not made for."""
    for index, length in enumerate(lengths):
        if length > config.max_seq_len:
            raise PromptTooLong(f"prompt {index}: {length} tokens with what follows, the model takes {config.max_seq_len}")


def join_rows(name: str, parts: Sequence[Shaped[Tensor, "n ..."]]) -> Shaped[Tensor, "R ..."]:
    """Rows of several steps; lists of entries grow from step to step and are filled up on the right."""
    empty = EMPTY_PLACE.get(name.rpartition(".")[2])
    if empty is not None and ".indexer." in name:
        width = max(part.shape[1] for part in parts)
        parts = [fill_up(part, width, empty) for part in parts]
    return torch.cat(list(parts))


def fill_up(rows: Shaped[Tensor, "n C"], width: int, empty: float) -> Shaped[Tensor, "n W"]:
    """Rows widened to `width` places."""
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=empty) if rows.shape[1] < width else rows


class _Reader:
    """Runs the steps of some sequences that end at different times."""

    def __init__(
        self,
        model: Transformer,
        sequences: list[_Sequence],
        numbers: list[int],
        lengths: list[int],
        params: SamplingParams | None,
        seed: int,
        chunk_tokens: int,
    ) -> None:
        self.model, self.params, self.seed, self.chunk_tokens = model, params, seed, chunk_tokens
        self.live = list(enumerate(sequences))
        self.numbers = numbers
        blocks = -(-max(lengths) // BLOCK_SIZE)
        self.tables = [list(range(1 + i * blocks, 1 + (i + 1) * blocks)) for i in range(len(sequences))]
        self.cache = model.new_cache(
            CacheSizes(num_slots=len(sequences) + 1, num_blocks=len(sequences) * blocks + 1, block_size=BLOCK_SIZE)
        )

    def step(self, observation: Observation) -> bool:
        """One forward of every sequence that is not at its end. Returns False if none was left."""
        if not self.live:
            return False
        ids = [index for index, _ in self.live]
        chunks = [sequence.next_chunk(self.chunk_tokens) for _, sequence in self.live]
        tables = [self.tables[index] for index in ids]
        rows = pack_rows(chunks, [index + 1 for index in ids], tables, BLOCK_SIZE, self.model.device)
        observation.rows, observation.is_proposal = rows, False
        hidden = self.model.forward_rows(rows, self.cache)
        logits = self.model.logits(hidden.final)
        wants_drafts = len(self.model.mtp) > 0 and observation.wants_drafts
        if wants_drafts:
            assert hidden.main_hidden is not None
            self.model.observe_draft(hidden.main_hidden, rows, self.cache)
        caught = {name: value.cpu() for name, value in observation.take().items()}
        host, start = logits.float().cpu(), 0
        for (index, sequence), (chunk, first) in zip(self.live, chunks, strict=True):
            part = slice(start, start + len(chunk))
            start += len(chunk)
            check_finite(host[part], self.numbers[index], first, caught, part)
            sequence.logits.append(host[part])
            sequence.keep({name: value[part] for name, value in caught.items()})
            sequence.num_fed += len(chunk)
        self._extend(rows, host, chunks, observation if wants_drafts else None)
        return True

    def _extend(
        self, rows: Rows, logits: Float[Tensor, "T V"], chunks: Sequence[tuple[list[int], int]], drafts: Observation | None
    ) -> None:
        """The next token of every sequence whose known tokens have all been fed; those at their end leave."""
        last, start, grown = [], 0, []
        for (index, sequence), (chunk, _) in zip(self.live, chunks, strict=True):
            start += len(chunk)
            if sequence.num_fed == len(sequence.prompt) + len(sequence.tokens) and not self._is_full(sequence):
                last.append(start - 1)
                grown.append((index, sequence))
        if grown:
            drawn = self._draw(logits[last], [sequence.num_fed for _, sequence in grown])
            for (_, sequence), token in zip(grown, drawn.tolist(), strict=True):
                sequence.tokens.append(token if sequence.given is None else sequence.given[len(sequence.tokens)])
            if drafts is not None:
                self._propose([s for _, s in grown], [i for i, _ in grown], rows.positions[last], drafts)
        self.live = [(i, s) for i, s in self.live if not self._is_done(s)]

    def _is_full(self, sequence: _Sequence) -> bool:
        if sequence.given is not None:
            return len(sequence.tokens) == len(sequence.given)
        if self.params is None or self.params.max_tokens is None or len(sequence.tokens) >= self.params.max_tokens:
            return True
        stops = stop_token_ids(self.params, self.model.config.eos_token_id)
        return bool(sequence.tokens) and sequence.tokens[-1] in stops

    def _is_done(self, sequence: _Sequence) -> bool:
        """Whether nothing is left to feed: the last token of all is not."""
        return sequence.num_fed >= len(sequence.prompt) and self._is_full(sequence)

    def _draw(self, logits: Float[Tensor, "B V"], positions: Sequence[int]) -> Int[Tensor, " B"]:
        if self.params is None or self.params.temperature == 0:
            return logits.argmax(dim=-1)
        p, count = self.params, len(positions)
        return sample(
            logits,
            torch.full((count,), float(p.temperature)),
            torch.full((count,), max(p.top_k, 0)),
            torch.full((count,), float(p.top_p)),
            torch.full((count,), float(p.min_p)),
            torch.full((count,), self.seed),
            torch.tensor(positions),
        )

    def _propose(self, sequences: list[_Sequence], ids: list[int], positions: Int[Tensor, " B"], observation: Observation) -> None:
        """Greedy drafts behind the newest token of each sequence."""
        device = self.model.device
        observation.is_proposal = True
        tokens = torch.tensor([s.tokens[-1] for s in sequences], device=device)
        proposal = self.model.propose_draft(tokens, positions, torch.tensor(ids, device=device) + 1, self.cache)
        observation.keep_proposal(proposal)
        for name, value in observation.take_proposals(len(sequences)).items():
            for sequence, own in zip(sequences, value.cpu(), strict=True):
                sequence.keep({name: own[None]})


def check_finite(
    logits: Float[Tensor, "n V"], index: int, first: int, caught: dict[str, Shaped[Tensor, "T ..."]], part: slice
) -> None:
    """Raises: StepError that names the first row and, if one was observed, the first tensor that is not finite."""
    bad = ~logits.isfinite().all(dim=1)
    if not bad.any():
        return
    row = int(bad.nonzero()[0])
    for name, value in caught.items():
        own = value[part][row]
        # Scores of entries that may not be chosen are -inf.
        if own.is_floating_point() and not name.endswith(".scores") and not own.isfinite().all():
            raise StepError(f"prompt {index}, position {first + row}: {name} is not finite, and so are not the logits")
    raise StepError(
        f"prompt {index}, position {first + row}: the logits are not finite ({int((~logits[row].isfinite()).sum())} of "
        f"{logits.shape[1]}); weights that hold NaN or infinity do that. Observe '**' to see where it begins"
    )
