"""What a request wants to know beside its tokens: log probabilities of its prompt, hidden states, routed experts.

A step of which no request wants any has no `StepObservations`, and nothing is staged, computed or copied for it.

Legend: P prompt rows to score, F rows whose features are kept, L layers, K experts of a token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.compiled import is_compiled
from deepinfer.model.moe import MoE
from deepinfer.model.router import RouterOutput
from deepinfer.model.transformer import Hidden, Layer, Transformer
from deepinfer.ops.sample import token_logprobs
from deepinfer.runtime.plan import Observed, SchedulerOutputs, StepResult, TokenLogprobs
from deepinfer.runtime.sampler import TokenScores, logprobs_of_row, num_top
from deepinfer.runtime.staging import host_copy, to_device

SCORED_AT_ONCE = 256  # rows; bounds the logits of a long prompt chunk, V float32 each


@dataclass(slots=True, eq=False)
class StepObservations:
    """The rows of one step that are watched, and what was seen there. Each field is written once, in the order of the launches.

    Attributes:
        score_rows, feature_rows: rows to score, and those whose hidden states or experts are kept, as row group and place in it;
            the device knows where a group's rows begin.
        score_tokens: prompt tokens that follow the rows to score.
        num_top: most probable tokens to report beside those.
        final: hidden rows to be scored, until the sampler's turn.
    """

    score_rows: Int[Tensor, "P 2"]
    score_tokens: Int[Tensor, " P"]
    num_top: int
    feature_rows: Int[Tensor, "F 2"]
    wants_hidden: bool
    wants_experts: bool
    final: Float[Tensor, "P D"] | None = None
    scores: TokenScores | None = None
    hidden: Float[Tensor, "F D"] | None = None
    experts: Int[Tensor, "F L K"] | None = None

    def take(self, hidden: Hidden, experts: list[Int[Tensor, "T K"]], first_rows: Int[Tensor, " B"]) -> None:
        """Keep what the forward leaves for the watched rows, given where each row group begins.

        A draft that got no row shows some other one, to be dropped.
        """
        places = to_device([self.score_rows, self.feature_rows], hidden.final.device)
        score_rows, feature_rows = ((first_rows[rows[:, 0]] + rows[:, 1]).clamp(max=len(hidden.final) - 1) for rows in places)
        if len(self.score_rows):
            self.final = hidden.final[score_rows]
        if self.wants_hidden:
            self.hidden = hidden.final[feature_rows]
        if self.wants_experts:
            self.experts = torch.stack(experts, dim=1)[feature_rows].to(torch.int32)

    def score(self, to_logits: Callable[[Tensor], Tensor]) -> None:
        """Score the prompt tokens behind the watched rows, as many at a time as memory allows."""
        if self.final is None:
            return
        (tokens,) = to_device([self.score_tokens], self.final.device)
        pieces = zip(self.final.split(SCORED_AT_ONCE), tokens.split(SCORED_AT_ONCE), strict=True)
        columns = zip(*(token_logprobs(to_logits(final), ids, self.num_top) for final, ids in pieces), strict=True)
        logprobs, ranks, top, top_ids = map(torch.cat, columns)
        self.scores = TokenScores(logprobs=logprobs, ranks=ranks, top_logprobs=top, top_ids=top_ids)
        self.final = None

    def to_host(self) -> "StepObservations":
        """Host copies, made without waiting; valid once the event recorded after them has passed."""

        def copied(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else host_copy(tensor)

        scores = self.scores
        if scores is not None:
            scores = TokenScores(**{name: host_copy(getattr(scores, name)) for name in TokenScores.__slots__})
        return StepObservations(
            self.score_rows,
            self.score_tokens,
            self.num_top,
            self.feature_rows,
            self.wants_hidden,
            self.wants_experts,
            scores=scores,
            hidden=copied(self.hidden),
            experts=copied(self.experts),
        )


def stage_observations(plan: SchedulerOutputs, vocab_size: int) -> StepObservations | None:
    """The watched rows of a plan; None if there are none."""
    score_rows: list[tuple[int, int]] = []
    score_tokens: list[int] = []
    feature_rows: list[tuple[int, int]] = []
    wanted, wants_hidden, wants_experts = [0], False, False
    for group, seq in enumerate(plan.sequences):
        params = seq.request.params
        for position in seq.scored:
            score_rows.append((group, position - seq.start))
            score_tokens.append(seq.request.prompt_token_ids[position + 1])
        if seq.scored and params.prompt_logprobs is not None:
            wanted.append(num_top(params.prompt_logprobs, vocab_size))
        if params.returns_features:
            feature_rows += [(group, place) for place in range(seq.q_cap)]
        wants_hidden |= params.return_hidden_states
        wants_experts |= params.return_routed_experts
    if not score_rows and not feature_rows:
        return None
    return StepObservations(
        torch.tensor(score_rows, dtype=torch.int64).view(-1, 2),
        torch.tensor(score_tokens, dtype=torch.int64),
        max(wanted),
        torch.tensor(feature_rows, dtype=torch.int64).view(-1, 2),
        wants_hidden,
        wants_experts,
    )


@contextmanager
def recorded_experts(model: Transformer, wanted: bool) -> Iterator[list[Int[Tensor, "T K"]]]:
    """The experts that each backbone layer chooses in the forwards of this context, in layer order; empty if not wanted.

    Compiled layers run uncompiled meanwhile, which may change last bits.
    """
    chosen: list[Tensor] = []

    def record(_module: object, _inputs: object, output: RouterOutput) -> None:
        chosen.append(output.ids)

    layers = cast(list[Layer], list(model.layers)) if wanted else []
    handles = [cast(MoE, layer.ffn).gate.register_forward_hook(record) for layer in layers]
    # Compiled code knows of no hook that came after it.
    stance = torch.compiler.set_stance("force_eager") if wanted and is_compiled(model) else nullcontext()
    try:
        with stance:
            yield chosen
    finally:
        for handle in handles:
            handle.remove()


def with_observations(result: StepResult, plan: SchedulerOutputs, seen: StepObservations) -> StepResult:
    """The result of a step with what `seen`, a host copy, holds for each row group. Features of rejected drafts are left out."""
    results, scored, features = [], 0, 0
    for seq, outcome in zip(plan.sequences, result.sequences, strict=True):
        params = seq.request.params
        scores: tuple[TokenLogprobs, ...] = ()
        if seq.scored and seen.scores is not None and params.prompt_logprobs is not None:
            scores = tuple(logprobs_of_row(seen.scores, scored + i, params.prompt_logprobs) for i in range(len(seq.scored)))
            scored += len(seq.scored)
        kept = slice(features, features + seq.q_cap - seq.n_drafts + outcome.num_accepted)
        hidden, experts = seen.hidden, seen.experts
        if not scores and not params.returns_features:
            results.append(outcome)
            continue
        observed = Observed(
            prompt_scores=scores,
            hidden_states=hidden[kept].float().numpy() if hidden is not None and params.return_hidden_states else None,
            routed_experts=experts[kept].numpy() if experts is not None and params.return_routed_experts else None,
        )
        features += seq.q_cap if params.returns_features else 0
        results.append(outcome._replace(observed=observed))
    return StepResult(step_seq=result.step_seq, sequences=tuple(results))
