"""The engine's loop on one of several ranks.

Every rank runs the same program. A call of `LLMEngine.generate` opens a round on each of them; each rank serves its own share of
the requests, and the steps of a round are agreed on until nobody has work. Between rounds ranks do not talk.
"""

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from deepinfer.backends import choose_backend
from deepinfer.checkpoint.load import load_model
from deepinfer.config_json import load_config
from deepinfer.engine_config import EngineConfig
from deepinfer.errors import AgreementError, ConfigError, DeepInferError, StepError
from deepinfer.model.compiled import compile_model
from deepinfer.model.transformer import Transformer
from deepinfer.parallel.agreement import StepAgreement
from deepinfer.parallel.config import Role
from deepinfer.parallel.context_engine import ContextEngineCore
from deepinfer.parallel.expert_balance import ExpertBalance
from deepinfer.parallel.group_loop import GroupLoop
from deepinfer.parallel.packing_agreement import agree_on_packing
from deepinfer.parallel.placement import place_evenly
from deepinfer.parallel.ranks import Ranks
from deepinfer.parallel.voting import Motion
from deepinfer.runtime.device import Device, use_device
from deepinfer.runtime.engine_core import EngineCore, T
from deepinfer.runtime.loop import StepLoop
from deepinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Queues one request or state.
Submission = Callable[[], Awaitable[None]]


class GroupEngineCore(EngineCore):
    """An `EngineCore` whose steps are those of its group.

    A step that fails on one rank leaves its peers waiting, so it ends the group: from then on every call raises `failure`.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, config: EngineConfig, device: Device, balance: ExpertBalance
    ) -> None:
        self.ranks, self.balance = balance.ranks, balance
        self.failure: DeepInferError | None = None
        super().__init__(model, tokenizer, config, device)

    def _open_loop(self) -> StepLoop:
        agreement = StepAgreement(self.scheduler, self.ranks.gather, self.config.parallel)
        self.group_loop = GroupLoop(
            agreement, self.worker, self.config.async_scheduling, self._on_events, self.config.parallel.timeout_s
        )
        self.group_loop.digest = self.balance.placement.digest
        self.group_loop.on_agreed = self._on_agreed
        self.group_loop.after_step = self._after_step
        return self.group_loop

    def _on_agreed(self, iteration: int, motion: Motion, num_groups: int) -> None:
        self.ranks.doing = f"step {iteration} ({motion.value})"

    async def _after_step(self) -> None:
        await self.balance.end_step(self.group_loop.flush)
        self.group_loop.digest = self.balance.placement.digest

    def _step_failed(self, error: Exception) -> None:
        logger.exception("rank %d failed at %s; its group ends", self.ranks.rank, self.ranks.doing)
        kind = type(error).__name__
        if isinstance(error, TimeoutError):
            error = self.ranks.lost(f"the device did not finish within {self.config.parallel.timeout_s:g} s")
        if not isinstance(error, DeepInferError):
            error = StepError(f"rank {self.ranks.rank} at {self.ranks.doing} failed: {kind}: {error}")
        self.failure = error
        self.ranks.doing += f", where it failed ({kind})"
        self.ranks.close()
        self._fail(list(self.outputs.live.values()), error)

    async def run(self) -> None:
        """As alone; and stop showing life at the end."""
        try:
            await super().run()
        finally:
            self.ranks.close()

    # ---- rounds -------------------------------------------------------------------------------------------------------

    def share(self, requests: Sequence[T]) -> list[T]:
        """The requests (or states) that this rank owns: they are dealt in turn."""
        return list(requests[self.ranks.rank :: self.ranks.size])

    async def serve(self, submissions: Sequence[Submission]) -> None:
        """Take part in a round with these submissions of one's own, perhaps none. Returns when they are queued."""
        if self.failure is not None:
            raise self.failure
        left = len(submissions)
        self.group_loop.pending += left
        self.group_loop.open_round()
        self._wake.set()
        try:
            for submission in submissions:
                await submission()
                left -= 1
                self.group_loop.pending -= 1
        finally:
            self.group_loop.pending -= left

    def collect(self, outputs: list[T], num_requests: int) -> list[T]:
        """All ranks' outputs (or states) in the order of the requests on rank 0, an empty list elsewhere. Collective; blocks.

        Raises: AgreementError if the ranks were given different numbers of requests; PeerLost.
        """
        gathered = self.ranks.gather_objects((num_requests, outputs))
        if gathered is None:
            return []
        counts = [count for count, _ in gathered]
        if len(set(counts)) > 1:
            raise AgreementError(f"every rank must be given the same prompts; numbers of prompts by rank: {counts}")
        merged: list[T | None] = [None] * num_requests
        for rank, (_, of_rank) in enumerate(gathered):
            merged[rank :: self.ranks.size] = of_rank
        return [output for output in merged if output is not None]


def open_core(
    model: Transformer,
    tokenizer: Tokenizer,
    config: EngineConfig,
    device: Device,
    balance: ExpertBalance | None,
    context_ranks: Ranks | None,
) -> EngineCore:
    """The core of an engine, alone or in a group. Raises ConfigError for a group that nobody has joined."""
    check_supported(config)
    if balance is not None:
        return GroupEngineCore(model, tokenizer, config, device, balance)
    if context_ranks is not None:
        return ContextEngineCore(model, tokenizer, config, device, context_ranks)
    if config.parallel.num_ranks > 1:
        raise ConfigError(f"ParallelConfig.{config.parallel.size_name}: open the engine with LLMEngine.from_pretrained")
    return EngineCore(model, tokenizer, config, device)


def check_supported(config: EngineConfig) -> None:
    """Raise ConfigError for what does not go together with several ranks or with a role."""
    parallel = config.parallel
    is_alone = parallel.ep_size == 1 and parallel.role == Role.NORMAL
    if not is_alone and (config.enable_prefix_caching or config.replay != "full"):
        raise ConfigError("enable_prefix_caching and replay need a single process of role normal: a prefill must be withdrawable")
    if parallel.cp_size > 1 and (config.compile is True or config.kernels not in ("auto", "plain")):
        raise ConfigError(
            f"ParallelConfig.cp_size = {parallel.cp_size}, kernels = {config.kernels!r}, compile = {config.compile}: ranks that "
            "spread a prompt exchange rows inside attention, which is not compiled"
        )
    if parallel.cp_size > 1 and (parallel.ep_size > 1 or parallel.role != Role.PREFILL):
        raise ConfigError(
            f"ParallelConfig.cp_size = {parallel.cp_size}: prompts are spread by engines of role prefill whose experts are all on "
            f"each rank, got role {str(parallel.role)!r} and ep_size {parallel.ep_size}"
        )


def local_device(name: str | None, default: torch.device) -> torch.device:
    """The device of this rank: the one that was named, or the accelerator that `torchrun` gives to this process."""
    if name is not None or default.type == "cpu":
        return default
    device = torch.device(default.type, int(os.environ.get("LOCAL_RANK", "0")))
    use_device(device)
    return device


def load_share(folder: Path, config: EngineConfig, device: torch.device) -> tuple[Transformer, ExpertBalance]:
    """Join the group and load the experts that are this rank's at the start; everything else is on every rank. Collective.

    Raises: ConfigError if the model or the setting does not fit the group; what loading raises.
    """
    parallel = config.parallel
    check_supported(config)
    backend = choose_backend(config, device)
    model_config = load_config(folder)
    num_slots = parallel.slots_per_rank(model_config.moe.n_routed_experts) * parallel.ep_size
    placement = place_evenly(model_config.n_layers, model_config.moe.n_routed_experts, num_slots, parallel.ep_size)
    ranks = Ranks.open(parallel, device)
    try:
        model = load_model(
            folder,
            config.precision,
            device,
            ops=backend.ops,
            expert_ids=placement.experts_of(0, ranks.rank),
            agree=partial(agree_on_packing, ranks),
        )
        balance = ExpertBalance(model, ranks, parallel, placement)
    except BaseException:
        ranks.close()
        raise
    # Where experts are decides what can be compiled in one piece.
    if backend.compiles:
        compile_model(model)
    return model, balance
