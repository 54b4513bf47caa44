"""From logits to tokens for the sampling rows of a step. Batch mates do not matter."""

from dataclasses import dataclass, replace

import torch

from deepinfer.dims import Bool, Float, Int, Tensor
from deepinfer.ops.sample import sample, token_logprobs
from deepinfer.ops.select import NEG_INF
from deepinfer.runtime.plan import SchedulerOutputs, SequenceResult, StepResult, TokenLogprobs
from deepinfer.runtime.staging import to_device

NO_TOKEN = -1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingMetadata:
    """Parameters of the S sampling rows; `blocked` names tokens that may not be drawn (min_tokens)."""

    temperature: Float[Tensor, " S"]
    top_k: Int[Tensor, " S"]
    top_p: Float[Tensor, " S"]
    min_p: Float[Tensor, " S"]
    seeds: Int[Tensor, " S"]
    blocked: Bool[Tensor, "S V"] | None
    any_random: bool
    any_filter: bool
    num_top: int | None  # most probable tokens to report; None: no log probabilities at all

    def to(self, device: torch.device) -> "SamplingMetadata":
        """A copy on the device."""
        tensors = {name: value for name in self.__slots__ if isinstance(value := getattr(self, name), Tensor)}
        return replace(self, **dict(zip(tensors, to_device(list(tensors.values()), device), strict=True)))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplerOutput:
    """What the sampler drew, on the device or (after `to_host`) on the host."""

    token_ids: Int[Tensor, " S"]
    logprobs: Float[Tensor, " S"] | None = None
    ranks: Int[Tensor, " S"] | None = None
    top_logprobs: Float[Tensor, "S n"] | None = None
    top_ids: Int[Tensor, "S n"] | None = None

    def to_host(self) -> "SamplerOutput":
        """Host copies, made without waiting; valid once the event recorded after them has passed."""
        tensors = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        return replace(self, **{name: _host_copy(value) for name, value in tensors.items()})


def _host_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def stage_sampling(plan: SchedulerOutputs, vocab_size: int) -> SamplingMetadata:
    """Sampling parameters of a plan, as host tensors."""
    rows = [seq for seq in plan.sequences if seq.is_sampling]
    params = [seq.request.params for seq in rows]
    blocked = None
    if any(seq.num_output_tokens < p.min_tokens for seq, p in zip(rows, params, strict=True)):
        blocked = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
        for row, seq in enumerate(rows):
            if seq.num_output_tokens < params[row].min_tokens:
                blocked[row, sorted(seq.request.stop_token_ids)] = True
    wanted = [p.logprobs for p in params if p.logprobs is not None]
    return SamplingMetadata(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32),
        top_k=torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int64),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
        seeds=torch.tensor([_wrapped(seq.seed) for seq in rows], dtype=torch.int64),
        blocked=blocked,
        any_random=any(p.temperature > 0 for p in params),
        any_filter=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
        num_top=max(wanted) if wanted else None,
    )


def _wrapped(seed: int) -> int:
    """A seed plus a completion index may pass 2^63 - 1; int64 wraps."""
    return (seed + 2**63) % 2**64 - 2**63


def draw(logits: Float[Tensor, "S V"], meta: SamplingMetadata, positions: Int[Tensor, " S"]) -> SamplerOutput:
    """Draw the token at each row's absolute position; log probabilities are those of the unmodified logits."""
    allowed = logits if meta.blocked is None else logits.masked_fill(meta.blocked, NEG_INF)
    token_ids = sample(
        allowed,
        meta.temperature,
        meta.top_k,
        meta.top_p,
        meta.min_p,
        meta.seeds,
        positions,
        any_random=meta.any_random,
        any_filter=meta.any_filter,
    )
    if meta.num_top is None:
        return SamplerOutput(token_ids=token_ids)
    chosen, ranks, top, top_ids = token_logprobs(logits, token_ids, meta.num_top)
    return SamplerOutput(token_ids=token_ids, logprobs=chosen, ranks=ranks, top_logprobs=top, top_ids=top_ids)


def to_result(plan: SchedulerOutputs, host: SamplerOutput) -> StepResult:
    """Split the host copy into one result for each row group."""
    tokens = host.token_ids.tolist()
    results, row = [], 0
    for seq in plan.sequences:
        if not seq.is_sampling:
            results.append(SequenceResult())
            continue
        logprobs = None
        wanted = seq.request.params.logprobs
        if wanted is not None:
            logprobs = (_token_logprobs(host, row, wanted),)
        results.append(SequenceResult(token_ids=(tokens[row],), logprobs=logprobs))
        row += 1
    return StepResult(step_seq=plan.step_seq, sequences=tuple(results))


def _token_logprobs(host: SamplerOutput, row: int, count: int) -> TokenLogprobs:
    assert host.logprobs is not None
    assert host.ranks is not None
    assert host.top_ids is not None
    assert host.top_logprobs is not None
    top = zip(host.top_ids[row, :count].tolist(), host.top_logprobs[row, :count].tolist(), strict=True)
    return TokenLogprobs(logprob=float(host.logprobs[row]), rank=int(host.ranks[row]), top=tuple(top))
