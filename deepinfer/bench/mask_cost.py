"""What structured output costs a step: the same batch with a grammar for each sequence and without, side by side.

Both loops run alternately in one process. The host's part is what the loop spends in its phase "constrain", and in moving the
grammars along when a step is applied.
"""

import asyncio
import statistics
import time
from dataclasses import dataclass

from deepinfer.checkpoint.load import load_model
from deepinfer.checkpoint.locate import locate_checkpoint
from deepinfer.model.cache import CacheSizes
from deepinfer.model.numerics import reference_ops
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.device import open_device
from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.loop import StepLoop
from deepinfer.runtime.request import Request
from deepinfer.runtime.scheduler import Scheduler
from deepinfer.runtime.sequence import Sequence
from deepinfer.runtime.trace import Tracer
from deepinfer.runtime.worker import Worker
from deepinfer.sampling_params import SamplingParams
from deepinfer.structured.compiler import GrammarCompiler
from deepinfer.structured_outputs import StructuredOutputs
from deepinfer.tokenizer import Tokenizer

BLOCK_SIZE = 64
PROMPT_TOKENS = 32
WARM_UP_STEPS = 4
# Always in the middle of objects, strings and numbers, and never at its end.
ENDLESS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 24}, "age": {"type": "integer"}, "tags": {"type": "array"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 100_000,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskCost:
    """Steady decode of one batch; times are medians of stretches, for a step, in milliseconds.

    Attributes:
        free_ms, masked_ms: wall time of a step without and with grammars.
        constrain_ms: host time in which masks were built.
        share: of that in a step with grammars.
    """

    batch: int
    depth: int
    free_ms: float
    masked_ms: float
    constrain_ms: float
    share: float


class _Decode:
    """A batch that decodes for ever."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, batch: int, depth: int, steps: int, masked: bool) -> None:
        length = PROMPT_TOKENS + 2 * steps
        blocks = batch * -(-length // BLOCK_SIZE) + 1
        self.tracer = Tracer()
        limits = SchedulerLimits(
            max_num_seqs=batch, max_num_batched_tokens=2048, max_model_len=length, block_size=BLOCK_SIZE, num_blocks=blocks
        )
        device = open_device(model.device)
        sizes = CacheSizes(num_slots=batch + 1, num_blocks=blocks, block_size=BLOCK_SIZE, max_backtrack=0)
        buckets = (batch,) if device.can_capture else ()
        self.loop = StepLoop(Scheduler(limits), Worker(model, sizes, device, buckets), depth, lambda events: None, self.tracer.span)
        eos = model.config.eos_token_id
        form = StructuredOutputs(json=ENDLESS) if masked else None
        grammar = None if form is None else GrammarCompiler(tokenizer, eos).compile(form).result()
        for index in range(batch):
            prompt = tuple((7 * index + i) % (model.config.vocab_size - 8) + 3 for i in range(PROMPT_TOKENS))
            request = Request(
                request_id=str(index),
                prompt=None,
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=length, temperature=1.0, seed=index, structured_outputs=form),
                max_new_tokens=length - PROMPT_TOKENS,
                seed=index,
                eos_token_id=eos,
                stop_token_ids=frozenset(),
                arrival_s=0.0,
                grammar=grammar,
            )
            self.loop.scheduler.add(Sequence.open(request, 0, index, tokenizer))
        self.wall_ms: list[float] = []
        self.steps = 0

    async def _advance(self, count: int) -> None:
        for _ in range(count):
            await self.loop.step()

    def warm_up(self) -> None:
        asyncio.run(self._advance(WARM_UP_STEPS))
        self.tracer.clear()

    def stretch(self, count: int) -> None:
        start = time.perf_counter()
        asyncio.run(self._advance(count))
        self.wall_ms.append((time.perf_counter() - start) / count * 1e3)
        self.steps += count

    @property
    def constrain_ms(self) -> float:
        spans = [span for span in self.tracer.spans() if span.name == "constrain"]
        return sum(span.end_ms - span.start_ms for span in spans) / self.steps


def measure_mask_cost(
    path: str, precision: str, torch_device: str | None, batch: int, *, depth: int = 1, steps: int = 20, rounds: int = 3
) -> MaskCost:
    """Steady decode of `batch` sequences with and without a grammar, alternating `rounds` times over `steps` steps."""
    folder = locate_checkpoint(path)
    model = load_model(folder, precision, torch_device, ops=reference_ops(static_shapes=True))
    tokenizer = Tokenizer.from_folder(folder)
    total = WARM_UP_STEPS + steps * rounds
    free, masked = (_Decode(model, tokenizer, batch, depth, total, is_masked) for is_masked in (False, True))
    for run in (free, masked):
        run.warm_up()
    for _ in range(rounds):
        for run in (free, masked):
            run.stretch(steps)
    wall = statistics.median(masked.wall_ms)
    return MaskCost(
        batch=batch,
        depth=depth,
        free_ms=statistics.median(free.wall_ms),
        masked_ms=wall,
        constrain_ms=masked.constrain_ms,
        share=masked.constrain_ms / wall,
    )
