"""`LLMEngine`: prompts in, text out. The door to the engine's loop from scripts, notebooks and asyncio programs.

The loop is an asyncio task on a thread of its own, so `generate` works the same in a plain script, inside a running event loop
and beside other coroutines, and no caller can starve it.
"""

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

from deepinfer.checkpoint.load import default_device, load_model
from deepinfer.checkpoint.locate import locate_checkpoint
from deepinfer.engine_config import EngineConfig
from deepinfer.errors import ConfigError, DeepInferError, EngineClosed, PromptTooLong, Rejected
from deepinfer.model.numerics import reference_ops
from deepinfer.model.transformer import Transformer
from deepinfer.outputs import RequestOutput
from deepinfer.prompts import Prompt, to_token_ids
from deepinfer.runtime.device import open_device
from deepinfer.runtime.engine_core import EngineCore, EngineStats
from deepinfer.runtime.request import Request
from deepinfer.sampling_params import SamplingParams
from deepinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_SEED_STEP = 0x9E3779B97F4A7C15


class LLMEngine:
    """A model with everything needed to generate from it. Use as a context manager, or `close()` it."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, config: EngineConfig | None = None) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config or EngineConfig()
        self._request_count = 0
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._core = EngineCore(model, tokenizer, self.config, open_device(model.device))
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="deepinfer-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_pretrained(cls, path_or_preset: Path | str, **config: Any) -> Self:
        """Load a checkpoint folder in the published format, or a preset; keyword arguments are fields of `EngineConfig`.

        Raises: ConfigError, CheckpointError, TokenizerError or CapacityError with what was expected and what came.
        """
        try:
            engine_config = EngineConfig(**config)
        except TypeError as error:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise ConfigError(f"{error}; the fields of EngineConfig are: {known}") from error
        folder = locate_checkpoint(path_or_preset)
        device = engine_config.device or default_device()
        ops = reference_ops(batch_invariant=engine_config.batch_invariant)
        model = load_model(folder, engine_config.precision, device, ops=ops)
        return cls(model, Tokenizer.from_folder(folder), engine_config)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._core.run())

    # ---- generating ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; results in the order of the prompts.

        Args:
            prompts: one prompt or several; each a text, a list of token ids, or `{"prompt_token_ids": [...]}`.
            sampling_params: one for all prompts, or one for each; None is `SamplingParams()`.

        Ctrl-C ends what is running: the outputs come back with what was produced, unfinished ones with
        `finish_reason` "abort".

        Raises: RequestError or CapacityError naming the first prompt that cannot be served, before any has started.
        """
        self._check_open()
        requests = self._requests(prompts, sampling_params)
        sinks = [_Sink() for _ in requests]
        done: concurrent.futures.Future[None] = asyncio.run_coroutine_threadsafe(self._submit_all(requests, sinks), self._loop)
        progress = tqdm(total=len(requests), unit="request", disable=not use_tqdm, desc="generating")
        try:
            with progress:
                done.result()
                for sink in sinks:
                    sink.future.result()
                    progress.update()
        except KeyboardInterrupt:
            logger.warning("interrupted: %d requests end with what they have", sum(not s.future.done() for s in sinks))
            done.cancel()
            self._abort([r.request_id for r in requests])
        except BaseException:
            done.cancel()
            self._abort([r.request_id for r in requests])
            raise
        return [sink.last_or(request) for sink, request in zip(sinks, requests, strict=True)]

    async def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """Outputs of one prompt as they grow; each holds everything so far, the last one is `finished`.

        A slow consumer skips states and loses no text. Leaving the iteration, or cancelling it, aborts the request.
        """
        self._check_open()
        (request,) = self._requests([prompt], sampling_params)
        sink = _Sink(asyncio.get_running_loop())
        try:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._submit_all([request], [sink]), self._loop))
            while True:
                output = await sink.changed()
                yield output
                if output.finished:
                    return
        finally:
            if not sink.future.done():
                self._call(self._core.abort, request.request_id)

    async def agenerate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """The finished output of one prompt, for asyncio programs."""
        async for output in self.stream(prompt, sampling_params):
            if output.finished:
                return output
        raise EngineClosed("the engine was closed")

    async def _submit_all(self, requests: list[Request], sinks: "list[_Sink]") -> None:
        for request, sink in zip(requests, sinks, strict=True):
            await self._core.submit(request, sink.put, sink.fail)

    def _requests(self, prompts: Any, sampling_params: Any) -> list[Request]:
        """Validate everything before anything is queued."""
        single = isinstance(prompts, str | dict) or (
            isinstance(prompts, Sequence) and len(prompts) > 0 and all(isinstance(p, int) for p in prompts)
        )
        if not single and not isinstance(prompts, Sequence):
            raise Rejected(f"prompts: expected a text, a list of token ids or a list of prompts, got {type(prompts).__name__}")
        batch: list[Prompt] = [prompts] if single else list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(batch)
        else:
            params = list(sampling_params)
        if len(params) != len(batch):
            raise Rejected(f"sampling_params: {len(params)} for {len(batch)} prompts; give one for all or one for each")
        return [self._request(index, prompt, p) for index, (prompt, p) in enumerate(zip(batch, params, strict=True))]

    def _request(self, index: int, prompt: Prompt, params: Any) -> Request:
        if not isinstance(params, SamplingParams):
            raise Rejected(f"sampling_params of prompt {index}: expected SamplingParams, got {type(params).__name__}")
        config, longest = self.model.config, self._core.max_model_len
        text, token_ids = to_token_ids(prompt, index, self.tokenizer, config)
        if len(token_ids) >= longest:
            raise PromptTooLong(f"prompt {index} has {len(token_ids)} tokens; the longest sequence is {longest}, output included")
        outside = [i for i in params.stop_token_ids if i >= config.vocab_size]
        if outside:
            raise Rejected(f"stop_token_ids {outside}: outside the vocabulary [0, {config.vocab_size})")
        room = longest - len(token_ids)
        with self._lock:
            self._request_count += 1
            count = self._request_count
        seed = params.seed if params.seed is not None else ((self.config.seed + 1) * _SEED_STEP + count) % 2**62
        eos = () if params.ignore_eos else (config.eos_token_id,)
        return Request(
            request_id=str(count),
            prompt=text,
            prompt_token_ids=tuple(token_ids),
            params=params,
            max_new_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=seed,
            eos_token_id=config.eos_token_id,
            stop_token_ids=frozenset((*eos, *params.stop_token_ids)),
            arrival_s=time.monotonic(),
        )

    # ---- control ------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until nothing is queued, running or in flight."""
        self._check_open()
        asyncio.run_coroutine_threadsafe(self._core.flush(), self._loop).result()

    def stats(self) -> EngineStats:
        """A snapshot of queues, cache blocks and totals."""
        self._check_open()
        return self._call(self._core.stats).result()

    def close(self) -> None:
        """Stop the loop and free the model; running requests end with `EngineClosed`. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._loop.call_soon_threadsafe(self._core.close)
        thread.join()
        self._loop.close()
        # The tensors go with these references, also when the caller keeps the engine object.
        del self._core, self.model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._thread is None:
            raise EngineClosed("the engine was closed; load it again with LLMEngine.from_pretrained")

    def _call(self, fn: Any, *args: Any) -> "concurrent.futures.Future[Any]":
        """Run a plain function on the engine's loop."""

        async def call() -> Any:
            return fn(*args)

        return asyncio.run_coroutine_threadsafe(call(), self._loop)

    def _abort(self, request_ids: list[str]) -> None:
        def abort_all() -> None:
            for request_id in request_ids:
                self._core.abort(request_id)

        self._call(abort_all).result()


class _Sink:
    """Where the engine's thread leaves a request's newest output. Older states are overwritten, so it is bounded."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.future: concurrent.futures.Future[RequestOutput] = concurrent.futures.Future()
        self._latest: RequestOutput | None = None
        self._loop, self._event = loop, asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        self._latest = output
        if output.finished and not self.future.done():
            self.future.set_result(output)
        self._notify()

    def fail(self, error: DeepInferError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
        self._notify()

    def _notify(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def changed(self) -> RequestOutput:
        """The newest output that has not been handed out. Raises what the request failed with."""
        await self._event.wait()
        self._event.clear()
        if self.future.done():
            return self.future.result()
        assert self._latest is not None
        return self._latest

    def last_or(self, request: Request) -> RequestOutput:
        """The newest output, or an empty one for a request that never started."""
        if self._latest is not None:
            return self._latest
        return RequestOutput(
            request_id=request.request_id, prompt=request.prompt, prompt_token_ids=list(request.prompt_token_ids), finished=True
        )
