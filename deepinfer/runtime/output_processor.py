"""From scheduler events to what users see: text, log probabilities, finished outputs. Runs on the host beside the device."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from deepinfer.detokenizer import Detokenizer
from deepinfer.errors import DeepInferError
from deepinfer.outputs import CompletionOutput, Logprob, ReplayMode, RequestMetrics, RequestOutput
from deepinfer.runtime.plan import TokenLogprobs
from deepinfer.runtime.request import Request
from deepinfer.runtime.scheduler import SequenceEvent
from deepinfer.runtime.sequence import Sequence, Status
from deepinfer.tokenizer import Tokenizer


@dataclass(slots=True)
class _Completion:
    """Text of one sequence so far; `num_tokens` counts what has been taken into it."""

    sequence: Sequence
    detokenizer: Detokenizer
    num_tokens: int = 0
    text: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative: float = 0.0
    accepted_per_step: list[int] = field(default_factory=list)
    is_flushed: bool = False


@dataclass(slots=True)
class LiveRequest:
    """A request with its sequences and where its outputs go.

    `on_output` is called on the engine's thread with a fresh `RequestOutput` whenever something changed, `on_error` at most once
    and instead of a finished output.
    """

    request: Request
    completions: list[_Completion]
    on_output: Callable[[RequestOutput], None]
    on_error: Callable[[DeepInferError], None]
    first_token_s: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])

    @property
    def sequences(self) -> list[Sequence]:
        return [c.sequence for c in self.completions]

    @property
    def is_finished(self) -> bool:
        return all(c.sequence.status is Status.FINISHED for c in self.completions)


class OutputProcessor:
    """Turns events into outputs; holds one `LiveRequest` for each unfinished request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        precision: str,
        clock: Callable[[], float],
        is_speculative: bool = False,
        replay_mode: ReplayMode = "full",
    ) -> None:
        self.tokenizer, self.precision, self.clock, self.is_speculative = tokenizer, precision, clock, is_speculative
        self.replay_mode: ReplayMode = replay_mode
        self.live: dict[str, LiveRequest] = {}

    def open(
        self,
        request: Request,
        sequences: list[Sequence],
        on_output: Callable[[RequestOutput], None],
        on_error: Callable[[DeepInferError], None],
    ) -> LiveRequest:
        """Start following a request."""
        skip = request.params.skip_special_tokens
        completions = [_Completion(s, Detokenizer(self.tokenizer, skip_special_tokens=skip)) for s in sequences]
        self.live[request.request_id] = LiveRequest(request, completions, on_output, on_error)
        return self.live[request.request_id]

    def process(self, events: list[SequenceEvent]) -> None:
        """Take in what a step brought and call `on_output` once for each request that it touched."""
        touched: dict[str, LiveRequest] = {}
        for event in events:
            live = self.live.get(event.sequence.request.request_id)
            if live is None:
                continue
            live.first_token_s = live.first_token_s or self.clock()
            self._extend(live.completions[event.sequence.index], event)
            touched[live.request.request_id] = live
        for live in touched.values():
            self.publish(live)

    def publish(self, live: LiveRequest) -> None:
        """Hand out the request's present state, and forget it once it has finished."""
        if live.is_finished:
            self.live.pop(live.request.request_id, None)
        live.on_output(self.snapshot(live))

    def _extend(self, completion: _Completion, event: SequenceEvent) -> None:
        sequence, result = event.sequence, event.result
        # The scheduler drops what a step drew behind the end of the text.
        kept = result.token_ids[: sequence.num_output_tokens - completion.num_tokens]
        completion.num_tokens += len(kept)
        completion.accepted_per_step.append(len(kept) - 1)
        if sequence.stop_strings is not None:
            completion.text = sequence.stop_strings.shown
        else:
            # A stop id that ended the text is no part of it, even where special tokens are shown. A complete grammar needs none.
            request = sequence.request
            ended_by_id = sequence.finish_reason == "stop" and kept[-1] in request.stop_token_ids
            hides_last = ended_by_id and not request.params.include_stop_str_in_output
            for token in kept[:-1] if hides_last else kept:
                completion.text += completion.detokenizer.push(token)
        for token, around in zip(kept, result.logprobs or (), strict=False):
            completion.logprobs.append(self._around(token, around))
            completion.cumulative += around.logprob

    def _around(self, token: int, around: TokenLogprobs) -> dict[int, Logprob]:
        entries = {token: Logprob(around.logprob, around.rank, self.tokenizer.decode([token], skip_special_tokens=False))}
        for rank, (other, value) in enumerate(around.top, start=1):
            entries.setdefault(other, Logprob(value, rank, self.tokenizer.decode([other], skip_special_tokens=False)))
        return entries

    def _prompt_logprobs(self, live: LiveRequest) -> list[dict[int, Logprob] | None] | None:
        """As far as they are known; the first completion's steps score the prompt for all."""
        request = live.request
        if request.params.prompt_logprobs is None:
            return None
        known = live.prompt_logprobs
        scores = live.sequences[0].prompt_scores[len(known) - 1 :]
        for token, around in zip(request.prompt_token_ids[len(known) :], scores, strict=False):
            known.append(self._around(token, around))
        return list(known)

    def snapshot(self, live: LiveRequest) -> RequestOutput:
        """An immutable view of the request now."""
        finished = live.is_finished
        request = live.request
        metrics = RequestMetrics(arrival_s=request.arrival_s, first_token_s=live.first_token_s)
        if finished:
            preemptions = sum(s.num_preemptions for s in live.sequences)
            replayed = sum(s.num_replayed_tokens for s in live.sequences)
            metrics = replace(metrics, finished_s=self.clock(), num_preemptions=preemptions, num_replayed_tokens=replayed)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[self._completion(c) for c in live.completions],
            finished=finished,
            prompt_logprobs=self._prompt_logprobs(live),
            metrics=metrics,
            num_cached_tokens=live.sequences[0].num_cached_tokens,
            precision=self.precision,
        )

    def _completion(self, c: _Completion) -> CompletionOutput:
        if c.sequence.status is Status.FINISHED and not c.is_flushed:
            if (strings := c.sequence.stop_strings) is not None:
                strings.finish()
                c.text = strings.shown
            else:
                c.text += c.detokenizer.finish()
            c.is_flushed = True
        with_logprobs = c.sequence.request.params.logprobs is not None
        hidden, experts = features_of(c.sequence)
        return CompletionOutput(
            index=c.sequence.index,
            text=c.text,
            token_ids=c.sequence.output_token_ids,
            cumulative_logprob=c.cumulative if with_logprobs else None,
            logprobs=list(c.logprobs) if with_logprobs else None,
            finish_reason=c.sequence.finish_reason,
            stop_reason=c.sequence.stop_reason,
            seed=c.sequence.seed,
            hidden_states=hidden,
            routed_experts=experts,
            replay_mode=self.replay_mode,
            accepted_per_step=list(c.accepted_per_step) if self.is_speculative else None,
        )


def features_of(sequence: Sequence) -> tuple[NDArray[np.float32] | None, NDArray[np.int32] | None]:
    """Hidden states and experts of every token but the last, once the sequence is over."""
    if sequence.status is not Status.FINISHED:
        return None, None
    count = len(sequence.token_ids) - 1
    hidden = [piece.hidden_states for piece in sequence.observed if piece.hidden_states is not None]
    experts = [piece.routed_experts for piece in sequence.observed if piece.routed_experts is not None]
    return (np.concatenate(hidden)[:count] if hidden else None), (np.concatenate(experts)[:count] if experts else None)
