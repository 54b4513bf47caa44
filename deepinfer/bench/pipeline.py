"""A scheduler, a worker and a loop with the settings of an engine and without its thread, for measurements."""

import asyncio
import time

from deepinfer.engine_config import EngineConfig
from deepinfer.model.cache import CacheSizes
from deepinfer.model.transformer import Transformer
from deepinfer.outputs import ReplayMode
from deepinfer.runtime.device import open_device
from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.loop import StepLoop
from deepinfer.runtime.recovery_settings import cache_names, max_backtrack, num_ring_snapshots, replay_policy
from deepinfer.runtime.request import Request
from deepinfer.runtime.scheduler import Scheduler, SequenceEvent
from deepinfer.runtime.sequence import Sequence
from deepinfer.runtime.worker import Worker
from deepinfer.sampling_params import SamplingParams

BLOCK_SIZE = 64


class Pipeline:
    """Runs greedy requests; `first_token_s` has the time from the addition of each sequence to its first token."""

    def __init__(
        self,
        model: Transformer,
        *,
        num_tokens: int,
        replay: ReplayMode = "full",
        caching: bool = False,
        max_num_seqs: int = 1,
        num_ring_snapshots_kept: int = 8,
        budget: int = 2048,
    ) -> None:
        """`num_tokens`: positions that the cache holds, of all sequences together."""
        self.model = model
        config = EngineConfig(
            replay=replay, enable_prefix_caching=caching, num_ring_snapshots=num_ring_snapshots_kept, max_num_seqs=max_num_seqs
        )
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=num_tokens,
            block_size=BLOCK_SIZE,
            num_blocks=-(-num_tokens // BLOCK_SIZE) + 2,
            num_ring_snapshots=num_ring_snapshots(config),
        )
        self.scheduler = Scheduler(limits, None, replay_policy(model, config), cache_names(model, config))
        sizes = CacheSizes(
            num_slots=limits.num_slots,
            num_blocks=limits.num_blocks,
            block_size=BLOCK_SIZE,
            max_backtrack=max_backtrack(limits),
        )
        self.loop = StepLoop(self.scheduler, Worker(model, sizes, open_device(model.device)), 1, self._on_events)
        self.added_s: dict[int, float] = {}
        self.first_token_s: dict[int, float] = {}

    def _on_events(self, events: list[SequenceEvent]) -> None:
        for event in events:
            seq_id = event.sequence.seq_id
            self.first_token_s.setdefault(seq_id, time.perf_counter() - self.added_s[seq_id])

    def add(self, prompt: tuple[int, ...], max_tokens: int) -> Sequence:
        """Queue a greedy request that runs to its length."""
        request = Request(
            request_id=str(len(self.added_s)),
            prompt=None,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
            max_new_tokens=max_tokens,
            seed=0,
            eos_token_id=self.model.config.eos_token_id,
            stop_token_ids=frozenset(),
            arrival_s=0.0,
        )
        sequence = Sequence(request, 0, len(self.added_s), list(prompt))
        self.added_s[sequence.seq_id] = time.perf_counter()
        self.scheduler.add(sequence)
        return sequence

    def run(self) -> None:
        """Until nothing is left."""

        async def steps() -> None:
            while await self.loop.step():
                pass

        asyncio.run(steps())
