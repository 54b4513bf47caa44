"""From prompts and sampling parameters to requests that can be served: everything that can be refused is refused here."""

import asyncio
import concurrent.futures
import hashlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from deepinfer.engine_config import EngineConfig
from deepinfer.errors import DeepInferError, EngineClosed, PromptTooLong, Rejected
from deepinfer.parallel.config import Role
from deepinfer.parallel.hand_over import first_token_only
from deepinfer.prompts import Prompt, to_token_ids
from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.request import Request
from deepinfer.sampling_checks import check_sampling, check_something_can_be_drawn, tokenize_bad_words
from deepinfer.sampling_params import SamplingParams, shown
from deepinfer.structured.compiler import GrammarCompiler
from deepinfer.structured.grammar import Grammar
from deepinfer.structured_outputs import StructuredOutputs
from deepinfer.tokenizer import Tokenizer


class RequestBuilder:
    """Numbers the requests of one engine, and owns the compiler of their grammars."""

    def __init__(self, tokenizer: Tokenizer, config: EngineConfig, eos_token_id: int) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._count, self._lock = 0, threading.Lock()
        self.grammars = GrammarCompiler(tokenizer, eos_token_id)

    def close(self) -> None:
        """Stop compiling."""
        self.grammars.close()

    def build(self, core: EngineCore, prompts: Any, sampling_params: Any) -> list[Request]:
        """One request for each prompt, a single prompt included."""
        single = isinstance(prompts, str | bytes | dict) or (
            isinstance(prompts, Sequence) and len(prompts) > 0 and all(isinstance(p, int) for p in prompts)
        )
        if not single and not isinstance(prompts, Sequence):
            raise Rejected(f"prompts: expected a text, a list of token ids or a list of prompts, got {type(prompts).__name__}")
        batch: Any = [prompts] if single else prompts
        return self.build_each(core, batch, sampling_params)

    def build_each(self, core: EngineCore, prompts: Sequence[Any], sampling_params: Any) -> list[Request]:
        """One request for each of several prompts. Raises RequestError, CapacityError or EngineClosed, naming the prompt."""
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(prompts)
        elif isinstance(sampling_params, Sequence):
            params = list(sampling_params)
        else:
            raise Rejected(f"sampling_params: expected SamplingParams or a list of them, got {type(sampling_params).__name__}")
        if len(params) != len(prompts):
            raise Rejected(f"sampling_params: {len(params)} for {len(prompts)} prompts; give one for all or one for each")
        for p in params:
            if isinstance(p, SamplingParams) and p.form is not None:
                self._compile(p.form)  # all of them at once, in the background
        requests = []
        for index, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self._request(core, index, prompt, p))
            except DeepInferError as error:
                error.prompt_index = index
                raise
        return requests

    def _request(self, core: EngineCore, index: int, prompt: Prompt, params: Any) -> Request:
        if not isinstance(params, SamplingParams):
            raise Rejected(f"sampling_params of prompt {index}: expected SamplingParams, got {type(params).__name__}")
        config, longest = core.worker.model.config, core.limits.max_model_len
        text, token_ids = to_token_ids(prompt, index, self._tokenizer, config)
        if len(token_ids) >= longest:
            raise PromptTooLong(f"prompt {index} has {len(token_ids)} tokens; the longest sequence is {longest}, output included")
        check_sampling(params, f"prompt {index}", config.vocab_size, self._config.max_logprobs)
        bad_words = tokenize_bad_words(params, self._tokenizer)
        room = longest - len(token_ids)
        max_new_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        grammar = self._grammar(index, params, max_new_tokens)
        count = self.next_count()
        eos = () if params.ignore_eos else (config.eos_token_id,)
        request = Request(
            request_id=str(count),
            prompt=text,
            prompt_token_ids=tuple(token_ids),
            params=params,
            max_new_tokens=max_new_tokens,
            seed=_drawn_seed(self._config.seed, count) if params.seed is None else params.seed,
            eos_token_id=config.eos_token_id,
            stop_token_ids=frozenset((*eos, *params.stop_token_ids)),
            arrival_s=time.monotonic(),
            bad_words=bad_words,
            grammar=grammar,
        )
        check_something_can_be_drawn(request, f"prompt {index}", config.vocab_size)
        is_prefill = self._config.parallel.role == Role.PREFILL
        core.limits.check_fits(first_token_only(request) if is_prefill else request, f"prompt {index}")
        return request

    def next_count(self) -> int:
        """A number that no other request of this engine has."""
        with self._lock:
            self._count += 1
            return self._count

    async def wait_for_grammar(self, params: Any) -> None:
        """Let other coroutines run until a grammar has been compiled, well or not."""
        if isinstance(params, SamplingParams) and params.form is not None:
            # The compilation is shared: whoever is cancelled leaves it to the others.
            compiled = asyncio.shield(asyncio.wrap_future(self._compile(params.form)))
            await asyncio.wait([compiled])
            if not compiled.cancelled():
                compiled.exception()  # `_grammar` raises it, naming the prompt

    def _compile(self, form: StructuredOutputs) -> "concurrent.futures.Future[Grammar]":
        """Start compiling a form, or find it compiled. Raises MissingExtra, EngineClosed."""
        try:
            return self.grammars.compile(form)
        except RuntimeError:  # its threads have gone
            raise EngineClosed("the engine was closed") from None

    def _grammar(self, index: int, params: SamplingParams, max_new_tokens: int) -> Grammar | None:
        """The grammar of a prompt. Raises Rejected, naming the prompt, if it is malformed or no text fits the limit."""
        form = params.form
        if form is None:
            return None
        vocab_size = len(self._tokenizer)
        if any(token >= vocab_size for token in form.reasoning_end):
            raise Rejected(f"reasoning_end of prompt {index}: {shown(form.reasoning_end)}: the vocabulary is [0, {vocab_size})")
        try:
            grammar = self._compile(form).result()
        except Rejected as error:
            raise Rejected(f"prompt {index}: {error}") from None
        except concurrent.futures.CancelledError:
            raise EngineClosed("the engine was closed while a grammar was compiled") from None
        needed = grammar.fewest_tokens + len(form.reasoning_end)
        if needed > max_new_tokens:
            raise Rejected(
                f"structured_outputs of prompt {index}: the shortest text of this form takes at least {needed} tokens, "
                f"max_tokens and the model's length leave {max_new_tokens}"
            )
        return grammar


def _drawn_seed(engine_seed: int, count: int) -> int:
    """The seed of a request that brings none. Far from its neighbours', because completions count up from it."""
    digest = hashlib.blake2b(f"{engine_seed}/{count}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
