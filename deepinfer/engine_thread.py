"""The thread that runs an engine's loop, the door to it from other threads, and where it leaves outputs for them."""

import asyncio
import concurrent.futures
import copy
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from deepinfer.errors import DeepInferError, EngineClosed
from deepinfer.outputs import CompletionOutput, FinishReason, RequestOutput
from deepinfer.runtime.device import use_device
from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.request import Request

T = TypeVar("T")


class EngineThread:
    """The thread that runs an engine's loop, and the door to it from other threads. Knows nothing of `LLMEngine`."""

    def __init__(self, core: EngineCore) -> None:
        self._core: EngineCore | None = core
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=serve, args=(self._loop, core), name="deepinfer-engine", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._core is None

    @property
    def core(self) -> EngineCore:
        """For reading what never changes. Raises EngineClosed."""
        if (core := self._core) is None:
            raise EngineClosed("the engine was closed; load it again with LLMEngine.from_pretrained")
        return core

    def ask(self, question: Callable[[EngineCore], Coroutine[Any, Any, T]]) -> "concurrent.futures.Future[T]":
        """Run a coroutine on the engine's loop. What is asked before `close` is answered. Raises EngineClosed."""
        with self._lock:
            return asyncio.run_coroutine_threadsafe(question(self.core), self._loop)

    def close(self) -> None:
        """Stop the loop, drop the model, wait for the thread."""
        with self._lock:
            core, self._core = self._core, None
            if core is not None:
                with suppress(RuntimeError):  # the thread has died by an error of its own
                    self._loop.call_soon_threadsafe(core.close)
        # The garbage collector may drop an engine on any thread, this one included.
        if self._thread is not threading.current_thread():
            self._thread.join()


def serve(loop: asyncio.AbstractEventLoop, core: EngineCore) -> None:
    asyncio.set_event_loop(loop)
    use_device(core.worker.device.torch_device)
    try:
        loop.run_until_complete(core.run())
    finally:
        core.worker.device.close()
        loop.close()


class Sink:
    """Where the engine's thread leaves a request's newest output. Older states are overwritten, so it is bounded."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.future: concurrent.futures.Future[RequestOutput] = concurrent.futures.Future()
        self._latest: RequestOutput | None = None
        self._given: RequestOutput | None = None
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
        if self._loop is not None:
            # A consumer whose loop has been closed listens no more.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._event.set)

    async def changed(self) -> RequestOutput:
        """The newest output that has not been handed out. Raises what the request failed with."""
        while not self.future.done() and self._latest is self._given:
            self._event.clear()
            await self._event.wait()
        self._given = self.future.result() if self.future.done() else self._latest
        assert self._given is not None
        return self._given

    def last_output(self, request: Request) -> RequestOutput:
        """The newest output, or an empty one for a request that never started; "error" ends what has failed."""
        has_failed = self.future.done() and self.future.exception() is not None
        end: FinishReason = "error" if has_failed else "abort"
        if self._latest is not None:
            if not has_failed:
                return self._latest
            ended = [replace(c, finish_reason=c.finish_reason or end) for c in self._latest.outputs]
            return replace(self._latest, outputs=ended, finished=True)
        empty = [
            CompletionOutput(index=i, text="", token_ids=[], finish_reason=end, seed=request.seed + i)
            for i in range(request.params.n)
        ]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=empty,
            finished=True,
        )


def with_outputs(failures: dict[int, DeepInferError], outputs: list[RequestOutput]) -> DeepInferError:
    """The first of several failures by prompt, knowing its prompt, the others and what all prompts have given."""
    (index, error), *others = failures.items()
    # One failure of a step belongs to all requests in it; each call of `generate` tells of its own.
    error = copy.copy(error)
    error.prompt_index, error.outputs = index, list(outputs)
    for other, failure in others:
        error.add_note(f"prompt {other}: {failure}")
    return error
