"""Two configurations of the engine, alternating in one run: what one setting costs or gains on this machine."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deepinfer.backends import choose_backend
from deepinfer.bench.bench_model import bench_device, open_model, with_other_backend
from deepinfer.bench.decode import ROUNDS, steady_decode
from deepinfer.bench.model_holder import release_memory
from deepinfer.bench.report import Report
from deepinfer.engine_config import EngineConfig
from deepinfer.errors import ConfigError
from deepinfer.model.compiled import compilation_count

WORDS = {"true": True, "false": False, "none": None}
# What steady decode depends on; the rest sizes queues and caches.
COMPARABLE = (
    "kernels",
    "compile",
    "cuda_graphs",
    "batch_invariant",
    "async_scheduling",
    "num_speculative_tokens",
    "adaptive_verification",
)


def parse_settings(text: str, base: EngineConfig) -> EngineConfig:
    """`name=value,name=value` over `base`; an empty text is `base` itself.

    Raises: ConfigError that names an unknown field, one that cannot be compared, or what is not of this form.
    """
    settings: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, separator, value = part.partition("=")
        if not separator or name not in COMPARABLE:
            raise ConfigError(f"{part!r}: expected FIELD=VALUE with one of {', '.join(COMPARABLE)}")
        word = value.lower()
        settings[name] = WORDS[word] if word in WORDS else int(value) if value.lstrip("-").isdigit() else value
    return replace(base, **settings)


def compare(
    name: str,
    base: EngineConfig,
    report: Report,
    texts: tuple[str, str],
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    steps: int,
) -> None:
    """Two rows for every batch and context; `gain` is the first side's time for a token over the row's own. Fills `report`.

    The sides share their weights where both keep them in the same layout, else both are loaded.
    """
    first, second = (parse_settings(text, base) for text in texts)
    backends = [choose_backend(config, bench_device(config)) for config in (first, second)]
    model, _ = open_model(name, first)
    if backends[0] == backends[1]:
        other = model
    elif backends[0].ops.packs_weights == backends[1].ops.packs_weights:
        other = with_other_backend(model, backends[1])
    else:
        other, _ = open_model(name, second)
    sides = ((texts[0], model, first), (texts[1], other, second))
    for batch, context in itertools.product(batches, contexts):
        what = f"batch {batch}, context {context}"
        if report.is_over(what):
            continue
        with report.noting(what):
            runs = [steady_decode(m, c, batch, context, c.async_scheduling, steps * ROUNDS) for _, m, c in sides]
            for run in runs:
                run.warm_up()
            compiled = compilation_count()
            for _ in range(ROUNDS):
                for run in runs:
                    run.steps(steps)
            compiled = compilation_count() - compiled
            per_token = [run.median_ms / run.tokens_per_step for run in runs]
            for (text, _, _), run, own in zip(sides, runs, per_token, strict=True):
                mean, device, host = run.times(steps * ROUNDS)
                report.add(
                    {
                        "settings": text or "(as given)",
                        "batch": batch,
                        "context": context,
                        "wall_ms": run.median_ms,
                        "device_ms": device,
                        "host_ms": host,
                        "busy": device / mean,
                        "tokens_per_step": run.tokens_per_step,
                        "gain": per_token[0] / own,
                        "compiled": compiled,
                    }
                )
        runs = []
        release_memory()
