"""How long until the first token: a fresh process with empty compile caches, then another one that finds them filled.

This module is both sides: `measure_cold_start` starts processes, `python -m deepinfer.bench.cold_start` is what they run.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepinfer.bench.report import Report
from deepinfer.engine_config import EngineConfig
from deepinfer.errors import StepError

CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
PROMPT_LENGTHS = (1, 3, 40, 200)  # after the warm-up: whatever is compiled for one of them has been missed
MARK = "figures: "


def measure_cold_start(name: str, config: EngineConfig, report: Report, *, timeout_s: float) -> None:
    """A row for the cold start and one for the warm one. Fills `report`.

    Raises: StepError with the end of what the process said, if it fails or takes longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="deepinfer-compile-") as folder:
        for start in ("cold", "warm"):
            if not report.is_over(f"{start} start"):
                report.add({"start": start} | _first_token(name, config, Path(folder), timeout_s))


def _first_token(name: str, config: EngineConfig, folder: Path, timeout_s: float) -> dict[str, Any]:
    """Run a fresh process; its figures, and the whole time as seen from outside."""
    environment = os.environ | {variable: str(folder / variable.lower()) for variable in CACHE_VARIABLES}
    # Both processes read the same clock.
    begin = time.time()
    command = [sys.executable, "-m", "deepinfer.bench.cold_start", name, as_text(config), str(begin)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise StepError(f"no first token within {timeout_s:.0f} s; --timeout gives it longer") from error
    seconds = time.time() - begin
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        raise StepError(f"the process ended with status {done.returncode}: {(done.stderr or done.stdout).strip()[-400:]}")
    figures: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return figures | {"process_s": seconds}


def as_text(config: EngineConfig) -> str:
    """A configuration of one process as JSON; `from_text` undoes it."""
    return json.dumps({name: value for name, value in asdict(config).items() if name != "parallel"})


def from_text(text: str) -> EngineConfig:
    """Undo `as_text`."""
    return EngineConfig(**json.loads(text))


def first_token(name: str, config: EngineConfig, begin: float) -> dict[str, Any]:
    """Load, warm up and generate in this process, with the time of each part in seconds.

    Returns: `first_token_s` counts from `begin`, when the process was started; `graphs` are compiled graphs, `recompiled` those
    that came after the warm-up.
    """
    from deepinfer.bench.bench_model import bench_tokenizer, open_model
    from deepinfer.engine import LLMEngine
    from deepinfer.model.compiled import compilation_count
    from deepinfer.sampling_params import SamplingParams

    imported = time.time()
    model, backend = open_model(name, config)
    loaded = time.time()
    with LLMEngine(model, bench_tokenizer(name, model.config), config) as engine:
        # The engine answers once it has warmed up.
        engine.flush()
        warm, graphs = time.time(), compilation_count()
        engine.generate([5, 6, 7], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        first = time.time()
        for length in PROMPT_LENGTHS:
            prompts = [[3 + (i + length) % 200 for i in range(length)] for length in range(length, length + config.max_num_seqs)]
            engine.generate(prompts, SamplingParams(max_tokens=4, temperature=0.8, seed=1), use_tqdm=False)
        recompiled = compilation_count() - graphs
    return {
        "kernels": backend.name,
        "first_token_s": first - begin,
        "import_s": imported - begin,
        "load_s": loaded - imported,
        "warm_up_s": warm - loaded,
        "token_s": first - warm,
        "graphs": graphs,
        "recompiled": recompiled,
    }


def main(arguments: list[str]) -> int:
    """The fresh process: a model's name, a configuration as JSON, when it was started; prints one line with the figures."""
    name, settings, begin = arguments
    print(MARK + json.dumps(first_token(name, from_text(settings), float(begin))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
