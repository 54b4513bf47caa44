"""`LLMEngine`: prompts in, text out. The door to the engine's loop from scripts, notebooks and asyncio programs.

The loop is an asyncio task on a thread of its own, so `generate` works the same in a plain script, inside a running event loop
and beside other coroutines, and no caller can starve it.
"""

import asyncio
import concurrent.futures
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from tqdm.auto import tqdm

from deepinfer.backends import choose_backend
from deepinfer.chat.chat_mixin import ChatMixin
from deepinfer.checkpoint.load import default_device, load_model
from deepinfer.checkpoint.locate import locate_checkpoint
from deepinfer.engine_config import EngineConfig
from deepinfer.engine_thread import EngineThread, Sink, with_outputs
from deepinfer.errors import ConfigError, DeepInferError, EngineClosed, Rejected
from deepinfer.model.compiled import compile_model
from deepinfer.model.transformer import Transformer
from deepinfer.outputs import RequestOutput
from deepinfer.parallel.config import Role
from deepinfer.parallel.context_engine import ContextEngineCore
from deepinfer.parallel.expert_balance import ExpertBalance
from deepinfer.parallel.group_engine import GroupEngineCore, Submission, check_supported, load_share, local_device, open_core
from deepinfer.parallel.hand_over import RequestState, check_fits, first_token_only
from deepinfer.parallel.ranks import Ranks
from deepinfer.prompts import Prompt
from deepinfer.request_builder import RequestBuilder
from deepinfer.runtime.device import open_device
from deepinfer.runtime.engine_core import EngineCore, EngineStats
from deepinfer.runtime.request import Request
from deepinfer.sampling_params import SamplingParams
from deepinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")
SubmitAll = Callable[[EngineCore, list[Request], "list[Sink]"], Coroutine[Any, Any, None]]


class LLMEngine(ChatMixin):
    """A model with everything needed to generate from it. Use as a context manager, or `close()` it.

    On several ranks (`EngineConfig.parallel`) every process makes the same calls with the same prompts.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        *,
        name: str = "model",
        balance: ExpertBalance | None = None,
        context_ranks: Ranks | None = None,
    ) -> None:
        tokenizer.check_against(model.config)
        self.name, self.tokenizer, self.config = name, tokenizer, config or EngineConfig()
        self._requests = RequestBuilder(tokenizer, self.config, model.config.eos_token_id)
        core = open_core(model, tokenizer, self.config, open_device(model.device), balance, context_ranks)
        self._thread = EngineThread(core)
        # An engine that is dropped without `close`, or that the program leaves open, ends as well.
        weakref.finalize(self, self._thread.close)
        weakref.finalize(self, self._requests.close)

    @classmethod
    def from_pretrained(cls, path_or_preset: Path | str, **config: Any) -> Self:
        """Load a checkpoint folder in the published format, or a preset; keyword arguments are fields of `EngineConfig`.

        Raises: ConfigError, CheckpointError, TokenizerError or CapacityError with what was expected and what came.
        """
        unknown = sorted(set(config) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise ConfigError(f"unknown settings {', '.join(unknown)}; the fields of EngineConfig are: {known}")
        engine_config = EngineConfig(**config)
        folder = locate_checkpoint(path_or_preset)
        device = _torch_device(engine_config.device)
        name = folder.resolve().name
        if engine_config.parallel.ep_size > 1:
            model, balance = load_share(folder, engine_config, local_device(engine_config.device, device))
            return cls(model, Tokenizer.from_folder(folder), engine_config, name=name, balance=balance)
        context_ranks: Ranks | None = None
        if engine_config.parallel.cp_size > 1:
            check_supported(engine_config)
            device = local_device(engine_config.device, device)
            context_ranks = Ranks.open(engine_config.parallel, device)
        backend = choose_backend(engine_config, device)
        model = load_model(folder, engine_config.precision, device, ops=backend.ops)
        if backend.compiles:
            compile_model(model)
        return cls(model, Tokenizer.from_folder(folder), engine_config, name=name, context_ranks=context_ranks)

    def __repr__(self) -> str:
        if self._thread.is_closed:
            return f"LLMEngine({self.name!r}, closed)"
        model, limits = self.model, self._thread.core.limits
        return (
            f"LLMEngine({self.name!r}, {model.numerics.precision.name}, on {model.device}, "
            f"up to {limits.max_num_seqs} sequences of {limits.max_model_len} tokens)"
        )

    @property
    def model(self) -> Transformer:
        """The bare module."""
        return self._thread.core.worker.model

    # ---- generating ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; results in the order of the prompts. Of several ranks, rank 0 returns them all, the others none.

        Args:
            prompts: one prompt or several; each a text, a list of token ids, or `{"prompt_token_ids": [...]}`.
            sampling_params: one for all prompts, or one for each; None is `SamplingParams()`.

        Ctrl-C ends what is running: the outputs come back with what was produced, unfinished ones with
        `finish_reason` "abort".

        Grammars of structured output are compiled before the first prompt starts; what other callers ask for goes on meanwhile.

        Raises: RequestError or CapacityError naming the first prompt that cannot be served, before any has started. A request that
            fails on the way (NothingToDraw, StepError) ends no other: when all have ended, the first such error is raised with
            `outputs`, in which what failed has `finish_reason` "error", and `prompt_index`.
        """
        self._check_role("generate", Role.NORMAL)
        requests = self._requests.build(self._thread.core, prompts, sampling_params)
        outputs = self._run(self._share(requests), _submit_all, use_tqdm)
        return self._collect(outputs, len(requests))

    def prefill(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestState]:
        """Process every prompt up to its first token, in an engine of role PREFILL.

        The states, in the order of the prompts, go on in the `resume` of another engine, in this process or another one (they can
        be pickled). Of several ranks, rank 0 returns them all; with `cp_size` it also owns all of them, and the others help.

        Raises: as `generate`; Rejected for `n` other than 1, structured outputs, and whatever returns something of prompt tokens.
        """
        self._check_role("prefill", Role.PREFILL)
        requests = self._requests.build(self._thread.core, prompts, sampling_params)
        if any(request.params.n != 1 for request in requests):
            raise Rejected("prefill takes n = 1: give a prompt several times, with seeds of its own")
        if any(request.grammar is not None or request.params.needs_every_row for request in requests):
            raise Rejected("prefill hands over no structured outputs, prompt log probabilities or features")
        own, shortened = self._share(requests), [first_token_only(request) for request in requests]
        self._run(self._share(shortened), partial(_prefill_all, shortened), use_tqdm)
        states = self._thread.ask(lambda core: _take_states(core, own)).result()
        return self._collect(states, len(requests))

    def resume(self, states: Sequence[RequestState], *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete requests that were prefilled elsewhere, in an engine of role DECODE; results in the order of the states.

        Outputs are those of one engine that does everything, but for `request_id`, which is this engine's. Of several ranks, each
        gives the same states and rank 0 returns all outputs.

        Raises: Rejected for a state of another model; CapacityError if one can never fit.
        """
        self._check_role("resume", Role.DECODE)
        limits = self._thread.core.limits
        for state in states:
            check_fits(state, self.model, limits.num_speculative_tokens)
            limits.check_fits(state.request, f"request {state.request.request_id}")
        renamed = [replace(state, request=replace(state.request, request_id=str(self._requests.next_count()))) for state in states]
        own = self._share(renamed)
        outputs = self._run([state.request for state in own], partial(_resume_all, own), use_tqdm)
        return self._collect(outputs, len(renamed))

    def _check_role(self, method: str, role: Role) -> None:
        if self.config.parallel.role != role:
            raise Rejected(
                f"{method} needs ParallelConfig.role = {role.value!r}; this engine's is {str(self.config.parallel.role)!r}"
            )

    def _share(self, requests: list[T]) -> list[T]:
        """Those that this rank owns."""
        return self._thread.core.share(requests)

    def _collect(self, results: list[T], num_requests: int) -> list[T]:
        """Those of all ranks."""
        core = self._thread.core
        if not isinstance(core, GroupEngineCore):
            return results
        self.flush()  # the last vote too: a peer waits for it
        return core.collect(results, num_requests)

    def _run(self, requests: list[Request], submit_all: "SubmitAll", use_tqdm: bool) -> list[RequestOutput]:
        """Queue requests, wait for all of them, and end what is left when that is interrupted.

        Raises: the first failure, when all have ended.
        """
        sinks = [Sink() for _ in requests]
        failures: dict[int, DeepInferError] = {}
        submission: concurrent.futures.Future[None] | None = None
        try:
            with tqdm(total=len(requests), unit="request", disable=not use_tqdm, desc="generating") as progress:
                submission = self._thread.ask(lambda core: submit_all(core, requests, sinks))
                submission.result()
                for index, sink in enumerate(sinks):
                    if (failure := sink.future.exception()) is not None:
                        assert isinstance(failure, DeepInferError)
                        failures[index] = failure
                    progress.update()
        except BaseException as error:
            unfinished = sum(not sink.future.done() for sink in sinks)
            self._abandon(submission, requests)
            if not isinstance(error, KeyboardInterrupt):
                raise
            logger.warning("interrupted: %d of %d requests end with what they have", unfinished, len(requests))
        outputs = [sink.last_output(request) for sink, request in zip(sinks, requests, strict=True)]
        if failures:
            raise with_outputs(failures, outputs)
        return outputs

    async def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one prompt as they grow; each holds everything so far, the last one is `finished`.

        A slow consumer skips states and loses no text. Leaving the iteration, or cancelling it, aborts the request.
        """
        if isinstance(self._thread.core, GroupEngineCore):
            raise Rejected("stream and agenerate serve one process; on several ranks all of them call generate")
        self._check_role("stream", Role.NORMAL)
        await self._requests.wait_for_grammar(sampling_params)
        (request,) = self._requests.build_each(self._thread.core, [prompt], sampling_params)
        sink = Sink(asyncio.get_running_loop())
        try:
            await asyncio.wrap_future(self._thread.ask(lambda core: _submit_all(core, [request], [sink])))
            while True:
                output = await sink.changed()
                yield output
                if output.finished:
                    return
        finally:
            if not sink.future.done():
                with suppress(EngineClosed):
                    self._thread.ask(lambda core: _abort_all(core, [request]))

    async def agenerate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """The finished output of one prompt, for asyncio programs."""
        async with aclosing(self.stream(prompt, sampling_params)) as outputs:
            async for output in outputs:
                if output.finished:
                    return output
        raise EngineClosed("the engine was closed")

    # ---- control ------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until nothing is queued, running or in flight."""
        self._thread.ask(lambda core: core.flush()).result()

    def stats(self) -> EngineStats:
        """A snapshot of queues, cache blocks and totals."""

        async def stats(core: EngineCore) -> EngineStats:
            return core.stats()

        return self._thread.ask(stats).result()

    def save_prefix_cache(self, path: Path | str) -> int:
        """Write every stored prefix to a file that an engine with the same model and settings can load; returns its tokens.

        Waits until nothing runs. Raises: ConfigError with `enable_prefix_caching` off, PrefixFileError.
        """
        return self._thread.ask(lambda core: core.save_prefixes(Path(path))).result()

    def load_prefix_cache(self, path: Path | str) -> int:
        """Take in the prefixes of a file, as far as memory is free; returns their tokens. Waits until nothing runs.

        Raises: ConfigError with `enable_prefix_caching` off; PrefixFileError if the file is damaged or belongs to another model or
            setting: the engine then goes on without it.
        """
        return self._thread.ask(lambda core: core.load_prefixes(Path(path))).result()

    def close(self) -> None:
        """Stop the loop and free the model; running requests end with `EngineClosed`. Safe to call twice."""
        self._thread.close()
        self._requests.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _abandon(self, submission: "concurrent.futures.Future[None] | None", requests: list[Request]) -> None:
        """Take back requests whose caller has gone; returns when they have ended."""
        if submission is not None:
            submission.cancel()
        with suppress(EngineClosed):
            self._thread.ask(lambda core: _abort_all(core, requests)).result()


async def _submit_all(core: EngineCore, requests: list[Request], sinks: "list[Sink]") -> None:
    await _queue(core, [partial(core.submit, r, sink.put, sink.fail) for r, sink in zip(requests, sinks, strict=True)])


async def _prefill_all(everyone: list[Request], core: EngineCore, requests: list[Request], sinks: "list[Sink]") -> None:
    if isinstance(core, ContextEngineCore):
        await core.serve(everyone, [(sink.put, sink.fail) for sink in sinks])
    else:
        await _submit_all(core, requests, sinks)


async def _resume_all(states: list[RequestState], core: EngineCore, requests: list[Request], sinks: "list[Sink]") -> None:
    await _queue(core, [partial(core.resume, s, sink.put, sink.fail) for s, sink in zip(states, sinks, strict=True)])


async def _queue(core: EngineCore, submissions: Sequence[Submission]) -> None:
    if isinstance(core, GroupEngineCore):
        await core.serve(submissions)
        return
    for submit in submissions:
        await submit()


async def _take_states(core: EngineCore, requests: list[Request]) -> list[RequestState]:
    return core.exports.take(requests)


async def _abort_all(core: EngineCore, requests: list[Request]) -> None:
    for request in requests:
        core.abort(request.request_id)


def _torch_device(name: str | None) -> torch.device:
    """The device of that name. Raises ConfigError if this machine does not have it."""
    if name is None:
        return default_device()
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    # What a build of torch does not know it says in one of these.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"EngineConfig.device = {name!r}: no such device here; {reason}") from error
    return device
