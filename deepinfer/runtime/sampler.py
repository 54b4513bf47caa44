"""From logits to tokens for the sampling rows of a step. Batch mates do not matter."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch

from deepinfer.dims import Bool, Float, Int, Tensor
from deepinfer.ops.noise import TARGET
from deepinfer.ops.sample import log_distribution, sample, token_logprobs
from deepinfer.ops.select import NEG_INF
from deepinfer.runtime.constraints import Continuations, SamplerInputs
from deepinfer.runtime.plan import SchedulerOutputs, SequencePlan, SequenceResult, StepResult, TokenLogprobs
from deepinfer.runtime.staging import move_record

DRAWING_INPUTS = ("temperature", "top_k", "top_p", "min_p", "seeds")


class SamplingKind(NamedTuple):
    """What a step's sampling consists of, as the host knows it: graphs and code are one for each kind."""

    any_random: bool
    any_filter: bool
    num_top: int | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingMetadata:
    """Parameters of the S sequences that sample; `rows` gives those of each row with logits.

    Attributes:
        stops: tokens that may not be drawn at positions below `first_stop` (min_tokens); None if no row has any.
        num_top: most probable tokens to report; None: no log probabilities at all.
    """

    temperature: Float[Tensor, " S"]
    top_k: Int[Tensor, " S"]
    top_p: Float[Tensor, " S"]
    min_p: Float[Tensor, " S"]
    seeds: Int[Tensor, " S"]
    stops: Bool[Tensor, "S V"] | None
    first_stop: Int[Tensor, " S"]
    any_random: bool
    any_filter: bool
    num_top: int | None

    @classmethod
    def greedy(cls, count: int) -> "SamplingMetadata":
        """Parameters of `count` greedy sequences."""
        zeros, numbers = torch.zeros(count, dtype=torch.int64), torch.zeros(count)
        return cls(
            temperature=numbers,
            top_k=zeros,
            top_p=torch.ones(count),
            min_p=numbers.clone(),
            seeds=zeros.clone(),
            stops=None,
            first_stop=zeros.clone(),
            any_random=False,
            any_filter=False,
            num_top=None,
        )

    @property
    def kind(self) -> SamplingKind:
        """What the parameters ask for."""
        return SamplingKind(self.any_random, self.any_random and self.any_filter, self.num_top)

    def drawing_inputs(self) -> list[Tensor]:
        """What drawing reads of each sequence, in a fixed order."""
        return [getattr(self, name) for name in DRAWING_INPUTS]

    def with_drawing_inputs(self, tensors: list[Tensor]) -> "SamplingMetadata":
        """The same parameters over other tensors, in the order of `drawing_inputs`."""
        return replace(self, **dict(zip(DRAWING_INPUTS, tensors, strict=True)))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> "SamplingMetadata":
        """A copy on the device."""
        return move_record(self, device)

    def rows(self, places: Int[Tensor, " n"]) -> "SamplingMetadata":
        """The parameters of some sequences, in any order and number."""
        tensors = {name: value[places] for name in self.__slots__ if isinstance(value := getattr(self, name), Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplerOutput:
    """What the sampler drew, on the device or on the host.

    Attributes:
        token_ids: the verified token for each row that got logits.
        emitted: tokens that each sampling group keeps: accepted drafts and one more.
        n_drafts: drafts of each sampling group that were verified.
        survival: what had been estimated for the drafts on offer.
        peaks: the largest logit that each row could draw from; not finite where nothing can be drawn.
    """

    token_ids: Int[Tensor, " R"]
    emitted: Int[Tensor, " S"]
    peaks: Float[Tensor, " R"]
    n_drafts: Int[Tensor, " S"]
    survival: Float[Tensor, "S k"]
    logprobs: Float[Tensor, " R"] | None = None
    ranks: Int[Tensor, " R"] | None = None
    top_logprobs: Float[Tensor, "R n"] | None = None
    top_ids: Int[Tensor, "R n"] | None = None


Drawn = TypeVar("Drawn", bound=SamplerOutput)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenScores:
    """Log probability and rank of given tokens, and the most probable tokens in their places."""

    logprobs: Float[Tensor, " R"]
    ranks: Int[Tensor, " R"]
    top_logprobs: Float[Tensor, "R n"]
    top_ids: Int[Tensor, "R n"]


def stage_sampling(plan: SchedulerOutputs, vocab_size: int) -> SamplingMetadata:
    """Sampling parameters of a plan, as host tensors."""
    rows = [seq for seq in plan.sequences if seq.is_sampling]
    params = [seq.request.params for seq in rows]
    stops = None
    if any(seq.num_output_tokens < p.min_tokens for seq, p in zip(rows, params, strict=True)):
        stops = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
        for row, seq in enumerate(rows):
            stops[row, sorted(seq.request.stop_token_ids)] = True
    wanted = [num_top(p.logprobs, vocab_size) for p in params if p.logprobs is not None]
    floats = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
    ints = [[max(p.top_k, 0) for p in params], [_wrapped(seq.seed) for seq in rows], [_first_stop(seq) for seq in rows]]
    temperature, top_p, min_p = torch.tensor(floats, dtype=torch.float32).unbind(0)
    top_k, seeds, first_stop = torch.tensor(ints, dtype=torch.int64).unbind(0)
    return SamplingMetadata(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        stops=stops,
        first_stop=first_stop,
        any_random=any(p.temperature > 0 for p in params),
        any_filter=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
        num_top=max(wanted) if wanted else None,
    )


def num_top(wanted: int, vocab_size: int) -> int:
    """Most probable tokens that `logprobs` stands for."""
    return vocab_size if wanted < 0 else min(wanted, vocab_size)


def _first_stop(seq: SequencePlan) -> int:
    """First position at which the sequence may stop by itself; its length ends it first if `min_tokens` is beyond that."""
    request = seq.request
    return len(request.prompt_token_ids) + min(request.params.min_tokens, request.max_new_tokens)


def _wrapped(seed: int) -> int:
    """A seed plus a completion index may pass 2^63 - 1; int64 wraps."""
    return (seed + 2**63) % 2**64 - 2**63


def constrain(
    logits: Float[Tensor, "n V"],
    meta: SamplingMetadata,
    positions: Int[Tensor, " n"],
    inputs: SamplerInputs,
    texts: Continuations | None,
) -> Float[Tensor, "n V"]:
    """The logits that each row's absolute position draws from, given the text before it; None if nothing depends on that.

    The given ones stay as they are, for log probabilities.
    """
    if meta.stops is not None:
        logits = logits.masked_fill(meta.stops & (positions < meta.first_stop)[:, None], NEG_INF)
    return logits if texts is None else inputs.constrain(logits, texts)


def choose(
    logits: Float[Tensor, "R V"], meta: SamplingMetadata, positions: Int[Tensor, " R"], role: int = TARGET
) -> Int[Tensor, " R"]:
    """A token for each row's absolute position, drawn from constrained logits with the noise of `role`."""
    return sample(
        logits,
        meta.temperature,
        meta.top_k,
        meta.top_p,
        meta.min_p,
        meta.seeds,
        positions,
        any_random=meta.any_random,
        any_filter=meta.any_filter,
        role=role,
    )


def log_distribution_of(logits: Float[Tensor, "R V"], meta: SamplingMetadata) -> Float[Tensor, "R V"]:
    """Log probabilities that `choose` draws with."""
    return log_distribution(logits, meta.temperature, meta.top_k, meta.top_p, meta.min_p, any_filter=meta.any_filter)


def report(logits: Float[Tensor, "R V"], drawn: Drawn, num_top: int | None) -> Drawn:
    """Add the log probabilities of the unmodified logits, if they are wanted."""
    if num_top is None:
        return drawn
    chosen, ranks, top, top_ids = token_logprobs(logits, drawn.token_ids, num_top)
    return replace(drawn, logprobs=chosen, ranks=ranks, top_logprobs=top, top_ids=top_ids)


def to_result(plan: SchedulerOutputs, host: SamplerOutput) -> StepResult:
    """Split the host copy into one result for each row group."""
    tokens, emitted, drafts = host.token_ids.tolist(), host.emitted.tolist(), host.n_drafts.tolist()
    survival, peaks = host.survival.tolist(), host.peaks.tolist()
    results, row, group = [], 0, 0
    for seq in plan.sequences:
        if not seq.is_sampling:
            results.append(SequenceResult())
            continue
        kept = range(row, row + emitted[group])
        wanted = seq.request.params.logprobs
        logprobs = None if wanted is None else tuple(logprobs_of_row(host, r, wanted) for r in kept)
        results.append(
            SequenceResult(
                token_ids=tuple(tokens[r] for r in kept),
                logprobs=logprobs,
                n_drafts=drafts[group],
                survival=tuple(survival[group][: seq.n_drafts]),
                failure=_failure([peaks[r] for r in kept] + [around.logprob for around in logprobs or ()]),
            )
        )
        row, group = row + 1 + drafts[group], group + 1
    return StepResult(step_seq=plan.step_seq, sequences=tuple(results))


def _failure(values: list[float]) -> str | None:
    """Why the largest logits and the log probabilities of tokens drawn are no result, or None if they are."""
    strange = next((value for value in values if not math.isfinite(value)), None)
    if strange == NEG_INF:
        return "no token can be drawn: what the request forbids, and logits of -inf, leave none"
    return None if strange is None else f"the model's logits are not finite (found {strange})"


def logprobs_of_row(host: SamplerOutput | TokenScores, row: int, count: int) -> TokenLogprobs:
    """One row of a host copy, with `count` of its most probable tokens; -1: all."""
    assert host.logprobs is not None
    assert host.ranks is not None
    assert host.top_ids is not None
    assert host.top_logprobs is not None
    count = num_top(count, host.top_ids.shape[1])
    top = zip(host.top_ids[row, :count].tolist(), host.top_logprobs[row, :count].tolist(), strict=True)
    return TokenLogprobs(logprob=float(host.logprobs[row]), rank=int(host.ranks[row]), top=tuple(top))
