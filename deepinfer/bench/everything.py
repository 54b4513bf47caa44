"""All measurements of one model in one process: it is loaded and compiled once, and all figures are of one run.

What fails or has no time left is noted, and the others go on.
"""

from deepinfer.bench.decode import measure_decode
from deepinfer.bench.layer import measure_chunk, measure_layer
from deepinfer.bench.model_holder import ModelHolder
from deepinfer.bench.overlap import measure_overlap
from deepinfer.bench.prefill import measure_prefill
from deepinfer.bench.replay_work import measure_work
from deepinfer.bench.report import Report
from deepinfer.engine_config import EngineConfig

BATCHES = (1, 16, 64, 128)
CONTEXT = 1024
LONG_CONTEXTS = (8192, 131_072, 1_000_000)
DELAYS_MS = (0.0, 2.0, 10.0)
PROMPTS = (1024, 8192, 131_072)
PREFILL, CHUNKS = 8192, (2048, 8192)
STEPS = 20


def measure_all(name: str, config: EngineConfig, report: Report) -> None:
    """Decode, long contexts, overlap, operations, prefill and stored prefixes. Fills `report`, each row with its part.

    Contexts and prompts beyond the model's length are left out.
    """
    holder = ModelHolder(name)
    model, backend = holder.open(config)
    longest = model.config.max_seq_len
    kernels = (config.kernels,)

    def fits(tokens: int) -> bool:
        return tokens + 10 * STEPS < longest

    def part(text: str) -> bool:
        report.part = text
        return not report.is_over(text)

    context = min(CONTEXT, longest // 2)
    if part("decode"):
        measure_decode(holder, config, report, kernels=kernels, batches=BATCHES, contexts=(context,), depths=(0, 1), steps=STEPS)
    if part("long context"):
        contexts = [tokens for tokens in LONG_CONTEXTS if fits(tokens)]
        measure_decode(holder, config, report, kernels=kernels, batches=(1,), contexts=contexts, depths=(1,), steps=STEPS)
    for batch in (BATCHES[0], BATCHES[-2]):
        if part(f"operations, batch {batch}"):
            with report.noting(f"operations, batch {batch}"):
                measure_layer(holder, config, report, batch=batch, context=context, steps=10)
    if part("overlap"):
        measure_overlap(holder, config, report, batches=BATCHES, contexts=(context,), delays_ms=DELAYS_MS, steps=STEPS)
    prompts = [tokens for tokens in PROMPTS if fits(tokens)] or [longest // 2]
    prefill = min(PREFILL, max(prompts))
    chunks = sorted({min(chunk, prefill) for chunk in CHUNKS})
    if part("operations, prefill"):
        with report.noting("operations, prefill"):
            measure_chunk(holder, config, report, tokens=prefill, chunk=chunks[-1], steps=3)
    if part("prefill"):
        measure_prefill(holder, config, report, kernels=kernels, tokens=[prefill], chunks=chunks)
    if part("work"):
        measure_work(model, backend.name, prompts, report)
    report.part = None
