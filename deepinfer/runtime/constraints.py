"""What the sampler of a step needs to know of the tokens before its rows: staged when the step before has been applied.

`SamplingMetadata` holds what a request's parameters say at any time; it is staged with the forward, while the tokens of the step
before may still be unknown. What depends on tokens is staged here, in `pre_sampler_sync`, from confirmed tokens alone. Rows behind
drafts of the same step add those on the device. Nothing is built, copied or computed for what no request of the step uses.

Legend: R rows with logits, S sampling groups, n rows to draw for (the R rows, or one for each group while drafting), V tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

import torch

from deepinfer.dims import Bool, Float, Int, Tensor
from deepinfer.ops.bad_words import ANYTHING, NO_TOKEN, completed_tokens
from deepinfer.ops.penalize import add_counts, penalize
from deepinfer.ops.select import NEG_INF
from deepinfer.runtime.grammar_masks import unpack
from deepinfer.runtime.plan import SchedulerOutputs
from deepinfer.runtime.sequence import Sequence
from deepinfer.runtime.staging import move_record


class Continuations(NamedTuple):
    """The texts that n rows draw the next token of: confirmed tokens of a sampling group, then tokens that the device knows."""

    groups: Int[Tensor, " n"]
    tokens: Int[Tensor, "n E"]  # `NO_TOKEN` behind the last

    @property
    def lengths(self) -> Int[Tensor, " n"]:
        """Tokens behind the confirmed ones."""
        return (self.tokens != NO_TOKEN).sum(dim=1)

    def with_drawn(self, token_ids: Int[Tensor, " n"]) -> "Continuations":
        """The same texts, each one token longer; `tokens` must be full or packed to the left."""
        longer = torch.cat((self.tokens, torch.full_like(token_ids, NO_TOKEN)[:, None]), dim=1)
        return Continuations(self.groups, longer.scatter(1, self.lengths[:, None], token_ids[:, None]))


class RowsWithLogits(Protocol):
    """The part of `deepinfer.runtime.step_state.LogitRows` that tells the texts of rows."""

    @property
    def fed_next(self) -> Int[Tensor, " R"]: ...

    @property
    def group(self) -> Int[Tensor, " R"]: ...

    @property
    def place(self) -> Int[Tensor, " R"]: ...

    @property
    def draft_follows(self) -> Bool[Tensor, " R"]: ...


class Constraint(Protocol):
    """One kind of change to the logits that tokens are drawn from."""

    def to(self, device: torch.device) -> Self:
        """A copy on the device."""
        ...

    def apply(self, logits: Float[Tensor, "n V"], texts: Continuations) -> Float[Tensor, "n V"]:
        """Changed logits. Rows of requests that do not use it keep theirs to the bit."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Record:
    def to(self, device: torch.device) -> Self:
        return move_record(self, device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllowedTokens(_Record):
    """`allowed_token_ids`. A shorter list repeats its first id; `is_limited` says which groups have one."""

    ids: Int[Tensor, "S A"]
    is_limited: Bool[Tensor, " S"]

    @classmethod
    def stage(cls, sequences: list[Sequence]) -> Self | None:
        lists = [s.request.params.allowed_token_ids for s in sequences]
        if all(ids is None for ids in lists):
            return None
        longest = max(len(ids) for ids in lists if ids is not None)
        rows = [[] if ids is None else list(ids) for ids in lists]
        padded = [ids + [ids[0] if ids else 0] * (longest - len(ids)) for ids in rows]
        return cls(ids=torch.tensor(padded), is_limited=torch.tensor([bool(ids) for ids in rows]))

    def apply(self, logits: Float[Tensor, "n V"], texts: Continuations) -> Float[Tensor, "n V"]:
        ids = self.ids[texts.groups]
        rows = torch.arange(ids.shape[0], device=ids.device)[:, None].expand_as(ids)
        is_allowed = (~self.is_limited[texts.groups])[:, None].expand_as(logits).clone()
        is_allowed.index_put_((rows, ids), torch.ones((), dtype=torch.bool, device=ids.device))
        return logits.masked_fill(~is_allowed, NEG_INF)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BadWords(_Record):
    """`bad_words` as token sequences: the last output tokens of each group, and what its sequences begin and end with."""

    tails: Int[Tensor, "S P"]
    prefixes: Int[Tensor, "S W P"]
    last: Int[Tensor, "S W"]

    @classmethod
    def stage(cls, sequences: list[Sequence]) -> Self | None:
        words = [s.request.bad_words for s in sequences]
        if not any(words):
            return None
        count, longest = max(map(len, words)), max(len(word) for group in words for word in group) - 1
        tails, prefixes = torch.full((len(words), longest), NO_TOKEN), torch.full((len(words), count, longest), ANYTHING)
        last = torch.full((len(words), count), NO_TOKEN)
        for group, (sequence, own) in enumerate(zip(sequences, words, strict=True)):
            if own and longest:
                tail = sequence.last_output_tokens(longest)
                tails[group, longest - len(tail) :] = torch.tensor(tail, dtype=torch.int64)
            for place, word in enumerate(own):
                last[group, place] = word[-1]
                prefixes[group, place, longest - len(word) + 1 :] = torch.tensor(word[:-1], dtype=torch.int64)
        return cls(tails=tails, prefixes=prefixes, last=last)

    def apply(self, logits: Float[Tensor, "n V"], texts: Continuations) -> Float[Tensor, "n V"]:
        known = torch.cat((self.tails[texts.groups], texts.tokens), dim=1)
        places = texts.lengths[:, None] + torch.arange(self.tails.shape[1], device=known.device)
        is_bad = completed_tokens(known.gather(1, places), self.prefixes[texts.groups], self.last[texts.groups], logits.shape[1])
        return logits.masked_fill(is_bad, NEG_INF)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LogitBias(_Record):
    """`logit_bias`; shorter lists add 0 to token 0."""

    ids: Int[Tensor, "S B"]
    values: Float[Tensor, "S B"]

    @classmethod
    def stage(cls, sequences: list[Sequence]) -> Self | None:
        pairs = [list(s.request.params.bias_pairs) for s in sequences]
        longest = max(map(len, pairs), default=0)
        if longest == 0:
            return None
        padded = [own + [(0, 0.0)] * (longest - len(own)) for own in pairs]
        ids = torch.tensor([[token for token, _ in own] for own in padded])
        return cls(ids=ids, values=torch.tensor([[value for _, value in own] for own in padded], dtype=torch.float32))

    def apply(self, logits: Float[Tensor, "n V"], texts: Continuations) -> Float[Tensor, "n V"]:
        ids = self.ids[texts.groups]
        rows = torch.arange(ids.shape[0], device=ids.device)[:, None].expand_as(ids)
        return logits.index_put((rows, ids), self.values[texts.groups], accumulate=True)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Penalties(_Record):
    """`repetition_penalty`, `frequency_penalty`, `presence_penalty`, and the tokens of the groups that use one."""

    prompt_groups: Int[Tensor, " p"]
    prompt_tokens: Int[Tensor, " p"]
    output_groups: Int[Tensor, " o"]
    output_tokens: Int[Tensor, " o"]
    repetition: Float[Tensor, " S"]
    frequency: Float[Tensor, " S"]
    presence: Float[Tensor, " S"]

    @classmethod
    def stage(cls, sequences: list[Sequence]) -> Self | None:
        params = [s.request.params for s in sequences]
        if not any(p.has_penalty for p in params):
            return None
        prompts = [s.request.prompt_token_ids if p.repetition_penalty != 1 else () for s, p in zip(sequences, params, strict=True)]
        outputs = [s.output_token_ids if p.has_penalty else [] for s, p in zip(sequences, params, strict=True)]

        def floats(values: list[float]) -> Float[Tensor, " S"]:
            return torch.tensor(values, dtype=torch.float32)

        def lengths(tokens: list[tuple[int, ...]] | list[list[int]]) -> Int[Tensor, " m"]:
            return torch.arange(len(tokens)).repeat_interleave(torch.tensor([len(own) for own in tokens]))

        return cls(
            prompt_groups=lengths(prompts),
            prompt_tokens=torch.tensor([i for own in prompts for i in own], dtype=torch.int64),
            output_groups=lengths(outputs),
            output_tokens=torch.tensor([i for own in outputs for i in own], dtype=torch.int64),
            repetition=floats([p.repetition_penalty for p in params]),
            frequency=floats([p.frequency_penalty for p in params]),
            presence=floats([p.presence_penalty for p in params]),
        )

    def apply(self, logits: Float[Tensor, "n V"], texts: Continuations) -> Float[Tensor, "n V"]:
        groups, (rows, vocab) = texts.groups, logits.shape
        counts = torch.zeros(self.repetition.shape[0], vocab, dtype=torch.int32, device=logits.device)
        in_prompt = add_counts(torch.zeros_like(counts), self.prompt_groups, self.prompt_tokens) > 0
        counts = add_counts(counts, self.output_groups, self.output_tokens)[groups]
        if texts.tokens.shape[1]:
            every_row = torch.arange(rows, device=logits.device)[:, None].expand_as(texts.tokens)
            counts = add_counts(counts, every_row.flatten(), texts.tokens.flatten())
        is_seen = in_prompt[groups] | (counts > 0)
        return penalize(logits, counts, is_seen, self.repetition[groups], self.frequency[groups], self.presence[groups])


# In the order of vLLM's sampler: a bias is added before penalties scale it.
_STAGES: tuple[Callable[[list[Sequence]], Constraint | None], ...] = (
    AllowedTokens.stage,
    BadWords.stage,
    LogitBias.stage,
    Penalties.stage,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplerInputs:
    """History-dependent inputs of one step's sampler, on the host or (after `to`) on the device.

    Attributes:
        allowed: tokens that may be drawn for each group behind its confirmed tokens and behind each of its drafts, whether or
            not they get a row. Packed: bit i of byte j is token 8 j + i. None if every row may draw every token.
        constraints: changes to the logits, in the order in which they are made.
        forced: for each group the tokens that are drawn next whatever the logits say, `NO_TOKEN` behind them; the last column
            stands for everything beyond.
    """

    allowed: Int[Tensor, "S Q W"] | None = None
    constraints: tuple[Constraint, ...] = ()
    forced: Int[Tensor, "S F"] | None = None

    @property
    def leaves_logits(self) -> bool:
        """Whether no row's logits are changed."""
        return self.allowed is None and not self.depend_on_text

    @property
    def depend_on_text(self) -> bool:
        """Whether `Continuations` are needed."""
        return bool(self.constraints) or self.forced is not None

    def to(self, device: torch.device) -> "SamplerInputs":
        """A copy on the device."""
        return replace(move_record(self, device), constraints=tuple(c.to(device) for c in self.constraints))

    def mask(self, logits: Float[Tensor, "R V"], group: Int[Tensor, " R"], place: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        """The logits without those of tokens that their row may not draw: row `place` of sampling group `group`."""
        if self.allowed is None:
            return logits
        return logits.masked_fill(~unpack(self.allowed[group, place], logits.shape[1]), NEG_INF)

    def constrain(self, logits: Float[Tensor, "n V"], texts: Continuations) -> Float[Tensor, "n V"]:
        """The logits that tokens are drawn from; where a token is forced, it alone."""
        for constraint in self.constraints:
            logits = constraint.apply(logits, texts)
        if self.forced is None:
            return logits
        places = texts.lengths.clamp(max=self.forced.shape[1] - 1)
        forced = self.forced[texts.groups].gather(1, places[:, None])
        certain = torch.full_like(logits, NEG_INF).scatter(1, forced.clamp(min=0), 0.0)
        return torch.where(forced == NO_TOKEN, logits, certain)


UNCONSTRAINED = SamplerInputs()


def rows_behind_drafts(rows: RowsWithLogits, shape: tuple[int, int]) -> Continuations:
    """The texts of the rows with logits: row i of a group stands behind the first i drafts of the step. `shape` is (S, 1 + k)."""
    drafts = rows.fed_next.new_full(shape, NO_TOKEN)
    drafts[rows.group, rows.place] = torch.where(rows.draft_follows, rows.fed_next, NO_TOKEN)
    drafts = drafts[:, :-1]
    place = torch.arange(drafts.shape[1], device=drafts.device)
    return Continuations(rows.group, torch.where(place < rows.place[:, None], drafts[rows.group], NO_TOKEN))


def groups_behind_run(drawn: Int[Tensor, "S Q1"], accepted: Int[Tensor, " S"]) -> Continuations:
    """The texts of the groups after a step that kept `accepted` drafts and one token more."""
    place = torch.arange(drawn.shape[1], device=drawn.device)
    kept = torch.where(place <= accepted[:, None], drawn, NO_TOKEN)
    return Continuations(torch.arange(drawn.shape[0], device=drawn.device), kept)


def build_sampler_inputs(plan: SchedulerOutputs, sequences: list[Sequence], num_drafts: int) -> SamplerInputs:
    """Inputs of a planned step whose predecessors have all been applied.

    `sequences` belong to the plan's row groups. Those that have ended or were preempted since (their epoch differs) get whatever
    comes of their present tokens: their rows are dropped.
    """
    sampling = [sequence for sequence, row in zip(sequences, plan.sequences, strict=True) if row.is_sampling]
    staged = (stage(sampling) for stage in _STAGES)
    return SamplerInputs(constraints=tuple(c for c in staged if c is not None), forced=_stage_forced(sampling, num_drafts))


def _stage_forced(sequences: list[Sequence], num_drafts: int) -> Int[Tensor, "S F"] | None:
    """Forced tokens from the next one on, as many as a step can verify and draft."""
    horizon = 2 * num_drafts + 1
    rows = [s.request.params.forced_token_ids[s.num_output_tokens :][:horizon] for s in sequences]
    if not any(rows):
        return None
    return torch.tensor([[*row, *[NO_TOKEN] * (horizon + 1 - len(row))] for row in rows])
