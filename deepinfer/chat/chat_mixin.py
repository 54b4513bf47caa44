"""`chat` and `stream_chat` of an engine, on top of its `generate` and `stream`."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from deepinfer.chat.completion_reader import CompletionReader
from deepinfer.chat.messages import read_list
from deepinfer.chat.openai import chat_completion
from deepinfer.chat.recipe import ReasoningEffort, Recipe, RenderedPrompt, ToolChoice
from deepinfer.chat.response_parser import ResponseParser, library_tokenizer
from deepinfer.chat.token_adder import TokenAdder
from deepinfer.errors import DeepInferError, RecipeError, Rejected
from deepinfer.outputs import ChatMessage, RequestOutput
from deepinfer.prompts import Prompt
from deepinfer.sampling_params import SamplingParams, shown
from deepinfer.structured_outputs import StructuredOutputs
from deepinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import deepseek_recipe

Conversation = Sequence[dict[str, Any] | ChatMessage]


class ChatMixin:
    """Needs of its class: `tokenizer`, `name`, `generate` and `stream`."""

    if TYPE_CHECKING:
        tokenizer: Tokenizer
        name: str

        def generate(self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True) -> list[RequestOutput]: ...

        def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncGenerator[RequestOutput, None]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        thinking: bool = True,
        reasoning_effort: ReasoningEffort | None = None,
        response_format: dict[str, Any] | None = None,
        encoding_version: str = "v4.1",
        format: Literal["openai"] | None = None,
        use_tqdm: bool = True,
    ) -> Any:
        """Answer one conversation, or each of a list of conversations.

        Args:
            messages, tools, tool_choice, thinking, reasoning_effort, response_format: see `Recipe.render`.
            sampling_params: one for all conversations, or one for each; None is `SamplingParams()`, which ends an answer
                after 16 tokens. Structured output begins behind the reasoning.
            encoding_version: of the prompts.
            format: None gives a list of `RequestOutput`, whose completions have the answer taken apart in `message` beside
                its `text`; "openai" gives dictionaries as OpenAI's API, one for one conversation, a list for a list.

        The preset `mini` has the control tokens and was trained on source code only: what it answers means nothing.
        Ctrl-C gives back what is done, as in `generate`.

        Raises: RecipeError with the place of a fault in messages or tools; TokenizerError if the model's tokenizer has no
        control tokens for conversations; MissingExtra without `deepseek_recipe`; and what `generate` raises.
        """
        if format not in (None, "openai"):
            raise RecipeError("format", f"expected None or 'openai', got {shown(format)}")
        recipe = Recipe(encoding_version)
        conversations, is_single = _conversations(messages)
        prompts = []
        for index, conversation in enumerate(conversations):
            try:
                prompt = recipe.render(
                    conversation,
                    tools=tools,
                    tool_choice=tool_choice,
                    thinking=thinking,
                    reasoning_effort=reasoning_effort,
                    response_format=response_format,
                )
            except RecipeError as error:
                raise error if is_single else error.within("messages", f"messages[{index}]") from None
            prompts.append(prompt)
        ids = [_token_ids(TokenAdder(self.tokenizer), prompt) for prompt in prompts]
        each = sampling_params
        if not isinstance(each, Sequence):
            each = [each or SamplingParams()] * len(prompts)
        if len(each) == len(prompts):  # else `generate` says what is wrong
            each = [_after_reasoning(params, prompt, self.tokenizer) for params, prompt in zip(each, prompts, strict=True)]

        def read(outputs: list[Any]) -> list[RequestOutput]:
            return [
                _AnswerReader(prompt, params, self.tokenizer, self._library_tokenizer).read(output)
                for output, prompt, params in zip(outputs, prompts, each, strict=True)
            ]

        try:
            answers = read(self.generate([{"prompt_token_ids": i} for i in ids], each, use_tqdm=use_tqdm))
        except DeepInferError as error:
            if error.outputs is not None:
                error.outputs = list(read(error.outputs))
            raise
        if format is None:
            return answers
        completions = [
            chat_completion(answer, prompt, params, model=self.name, tokenizer=self.tokenizer)
            for answer, prompt, params in zip(answers, prompts, each, strict=True)
        ]
        return completions[0] if is_single else completions

    async def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        thinking: bool = True,
        reasoning_effort: ReasoningEffort | None = None,
        response_format: dict[str, Any] | None = None,
        encoding_version: str = "v4.1",
        token_adder: TokenAdder | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one conversation as they grow; texts, and those in `message`, only become longer.

        Args:
            token_adder: one that is kept from turn to turn: what it holds is not tokenised again, and the ids of the answer are
                added to it, those of an answer that is broken off too.

        The others are as in `chat`, and so is what is raised. Leaving the iteration, or cancelling it, aborts the answer.
        """
        params = sampling_params or SamplingParams()
        if token_adder is not None and params.n > 1:
            raise Rejected("token_adder takes one answer; SamplingParams.n is above 1")
        prompt = Recipe(encoding_version).render(
            messages,
            tools=tools,
            tool_choice=tool_choice,
            thinking=thinking,
            reasoning_effort=reasoning_effort,
            response_format=response_format,
        )
        params = _after_reasoning(params, prompt, self.tokenizer)
        adder = token_adder or TokenAdder(self.tokenizer)
        reader = _AnswerReader(prompt, params, self.tokenizer, self._library_tokenizer)
        answer: RequestOutput | None = None
        try:
            async with aclosing(self.stream({"prompt_token_ids": _token_ids(adder, prompt)}, params)) as outputs:
                async for output in outputs:
                    answer = reader.read(output)
                    yield answer
        finally:
            if token_adder is not None and answer is not None:
                token_adder.extend(answer.outputs[0].token_ids)

    @cached_property
    def _library_tokenizer(self) -> "deepseek_recipe.Tokenizer":
        return library_tokenizer(self.tokenizer.to_str())


class _AnswerReader:
    """Adds the prompt's text and the answers taken apart to the outputs of one conversation."""

    def __init__(
        self, prompt: RenderedPrompt, params: SamplingParams, tokenizer: Tokenizer, library: "deepseek_recipe.Tokenizer"
    ) -> None:
        self._prompt, self._params, self._tokenizer, self._library = prompt, params, tokenizer, library
        self._readers: dict[int, CompletionReader] = {}

    def read(self, output: RequestOutput) -> RequestOutput:
        """The output, further on than at the last call."""
        completions = []
        for completion in output.outputs:
            # Unique in this engine: an answer may go into a conversation with other answers.
            call_id = f"call_{output.request_id}_{completion.index}"
            if completion.index not in self._readers:
                parser = ResponseParser.for_prompt(self._prompt, tokenizer=self._library, tool_call_id=call_id)
                skips = self._params.skip_special_tokens
                self._readers[completion.index] = CompletionReader(parser, self._tokenizer, skip_special_tokens=skips)
            reader = self._readers[completion.index]
            reader.read(completion)
            completions.append(replace(completion, message=reader.parser.message))
        return replace(output, prompt=self._prompt.text, outputs=completions)


def _conversations(messages: object) -> tuple[list[Any], bool]:
    """The conversations, and whether it was one alone."""
    items = read_list(messages, "messages")
    is_list = bool(items) and all(isinstance(item, Sequence) and not isinstance(item, str | bytes) for item in items)
    return (items, False) if is_list else ([items], True)


def _after_reasoning(params: Any, prompt: RenderedPrompt, tokenizer: Tokenizer) -> Any:
    """Parameters whose structured output, if there is any, begins behind the reasoning that the prompt opens."""
    form = params.structured_outputs if isinstance(params, SamplingParams) else None
    opens_reasoning = prompt.response_start in ("reasoning", "continued_reasoning")
    if not isinstance(form, StructuredOutputs) or form.reasoning_end or not opens_reasoning:
        return params
    marker = tuple(tokenizer.encode("</think>"))
    return replace(params, structured_outputs=replace(form, reasoning_end=marker))


def _token_ids(adder: TokenAdder, prompt: RenderedPrompt) -> list[int]:
    adder.follow(prompt.segments)
    return adder.token_ids
