"""A prefill engine on several ranks that spread each long prompt over all of them.

Rank 0 is an engine like any other: it draws the first tokens and hands the states over. What is spread is a prompt without its last
token; the cache that this leaves on rank 0 enters its scheduler as a state from another engine would. The other ranks own no
request. A prompt that is too short to be spread is rank 0's alone.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence

import torch

from deepinfer.engine_config import EngineConfig
from deepinfer.errors import AgreementError, DeepInferError, EngineClosed, StepError
from deepinfer.model.transformer import Transformer
from deepinfer.outputs import RequestOutput
from deepinfer.parallel.context_parallel import LAST_SLOT, cut_prompt, prefill_context
from deepinfer.parallel.hand_over import CacheState, read_cache
from deepinfer.parallel.ranks import Ranks
from deepinfer.runtime.device import Device
from deepinfer.runtime.engine_core import EngineCore, T
from deepinfer.runtime.request import Request
from deepinfer.tokenizer import Tokenizer

Listener = tuple[Callable[[RequestOutput], None], Callable[[DeepInferError], None]]  # to an output, to an error


class ContextEngineCore(EngineCore):
    """An `EngineCore` of role PREFILL whose group computes long prompts together.

    An error in the middle of a prompt leaves the peers waiting, so it ends the group: from then on every call raises `failure`.

    Attributes:
        num_spread: prompts that all ranks have computed together.
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer, config: EngineConfig, device: Device, ranks: Ranks) -> None:
        self.ranks, self.num_spread = ranks, 0
        self.failure: DeepInferError | None = None
        super().__init__(model, tokenizer, config, device)

    def share(self, requests: Sequence[T]) -> list[T]:
        return list(requests) if self.ranks.rank == 0 else []

    async def run(self) -> None:
        """As alone; and stop showing life at the end."""
        try:
            await super().run()
        finally:
            self.ranks.close()

    async def serve(self, requests: Sequence[Request], listeners: Sequence[Listener]) -> None:
        """Compute prompts in order, on rank 0 as requests of its own. Collective: every rank gives the same requests.

        Args:
            listeners: told of each request's outcome; on rank 0 only.

        Raises: AgreementError if the prompts differ; PeerLost; StepError for what goes wrong here; CapacityError.
        """
        if self.failure is not None:
            raise self.failure
        text = repr([request.prompt_token_ids for request in requests]).encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        given = await self.ranks.gather("prompts", (len(requests), digest))
        if len(set(given)) > 1:
            raise AgreementError(f"every rank must be given the same prompts; number and digest of prompts by rank: {given}")
        for index, request in enumerate(requests):
            self.ranks.doing = f"prompt {index} of {len(requests)}"
            cache = self._spread(request)
            if self.ranks.rank:
                continue
            if self._is_closing:
                raise EngineClosed("the engine was closed")
            await (self.submit(request, *listeners[index]) if cache is None else self.enter(request, cache, *listeners[index]))
            await asyncio.sleep(0)  # those that have begun go on between two prompts

    @torch.inference_mode()
    def _spread(self, request: Request) -> CacheState | None:
        """What a prompt without its last token leaves on rank 0; None for a prompt that is not spread, and elsewhere."""
        length, block_size = len(request.prompt_token_ids) - 1, self.limits.block_size
        if not self.can_spread(length):
            return None
        model, drafts = self.worker.model, self.worker.num_drafts > 0
        token_ids = torch.tensor(request.prompt_token_ids[:length])
        try:
            result = prefill_context(model, self.ranks, token_ids, block_size=block_size, observes_drafts=drafts)
            self.num_spread += 1
            blocks = tuple(range(1, 1 + self.limits.blocks_for(length)))
            return None if self.ranks.rank else read_cache(model, result.cache, LAST_SLOT, blocks, block_size, length, drafts)
        except Exception as error:
            if not isinstance(error, DeepInferError):
                error = StepError(f"rank {self.ranks.rank} at {self.ranks.doing} failed: {type(error).__name__}: {error}")
            self.failure = error
            self.ranks.close()
            raise self.failure from error

    def can_spread(self, length: int) -> bool:
        """Whether that many tokens make a block for each chunk; with drafts also a window for the last one, where rings end."""
        block_size = self.limits.block_size
        if self.limits.blocks_for(length) < 2 * self.ranks.size:
            return False
        start, end = cut_prompt(length, self.ranks.size, block_size)[-1]
        return self.worker.num_drafts == 0 or end - start >= self.worker.model.config.attention.window_size
