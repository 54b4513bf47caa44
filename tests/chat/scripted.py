"""An engine without a model: it answers what a test tells it to, token by token."""

from collections.abc import AsyncGenerator
from typing import Any

from deepinfer import CompletionOutput, Logprob, RequestOutput, SamplingParams, Tokenizer
from deepinfer.chat.chat_mixin import ChatMixin
from deepinfer.detokenizer import Detokenizer

EOS = 1


class ScriptedEngine(ChatMixin):
    """`generate` and `stream` give the answers in order, one for each completion. `prompts` and `params` hold what was asked."""

    name = "scripted"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.answers, self.prompts = tokenizer, list[list[int]](), list[list[int]]()
        self.params: list[SamplingParams] = []

    def ids(self, answer: list[int] | str) -> list[int]:
        return [*self.tokenizer.encode(answer), EOS] if isinstance(answer, str) else answer

    def generate(self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True) -> list[RequestOutput]:
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params or SamplingParams()] * len(prompts)
        return [self.states(prompt, params)[-1] for prompt, params in zip(prompts, each, strict=True)]

    async def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> AsyncGenerator[RequestOutput, None]:
        for state in self.states(prompt, sampling_params or SamplingParams()):
            yield state

    def states(self, prompt: Any, params: SamplingParams) -> list[RequestOutput]:
        """The request's outputs, one for each token; an answer that does not end with EOS ends by length."""
        self.prompts.append(prompt["prompt_token_ids"])
        self.params.append(params)
        answers = [self.answers.pop(0) for _ in range(params.n)]
        return [
            RequestOutput(
                request_id=str(len(self.prompts)),
                prompt=None,
                prompt_token_ids=self.prompts[-1],
                outputs=[self.completion(index, answer, step, params) for index, answer in enumerate(answers)],
                finished=step >= max(map(len, answers)),
            )
            for step in range(1, max(map(len, answers)) + 1)
        ]

    def completion(self, index: int, answer: list[int], step: int, params: SamplingParams) -> CompletionOutput:
        ids = answer[:step]
        has_ended = step >= len(answer)
        stops = has_ended and answer[-1] == EOS
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=params.skip_special_tokens)
        text = "".join(map(detokenizer.push, ids[:-1] if stops else ids)) + (detokenizer.finish() if has_ended else "")
        logprobs = None
        if params.logprobs is not None:
            # The chosen token is second; the first is the id before it.
            logprobs = [{i: Logprob(-0.5, 2, str(i)), i - 1: Logprob(-0.25, 1, str(i - 1))} for i in ids]
        reason: Any = ("stop" if stops else "length") if has_ended else None
        return CompletionOutput(index=index, text=text, token_ids=ids, finish_reason=reason, logprobs=logprobs)
