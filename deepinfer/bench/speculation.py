"""What drafts gain: whole requests on real prompts, without drafts and with them alternating in one run on one model.

Texts are equal in all of them (`match` verification), so the wall time of a batch is the comparison; tokens per step explain it.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from deepinfer.bench.bench_model import bench_tokenizer, open_model
from deepinfer.bench.decode import row_of
from deepinfer.bench.model_holder import release_memory
from deepinfer.bench.report import Report
from deepinfer.engine import LLMEngine
from deepinfer.engine_config import EngineConfig
from deepinfer.errors import CapacityError, StepError
from deepinfer.sampling_params import SamplingParams

ROUNDS = 3
WARM_UP_ROUNDS = 2  # the draft budget makes its trials in the second, when everything has been captured

# Beginnings in the style that `mini` was trained on; none is from its corpus.
TEXTS = (
    'class Inventory:\n    """Items in stock, by name."""\n\n    def __init__(self, items=None):\n        self.items = dict(',
    'import os\nimport sys\n\n\ndef find_files(root, suffix):\n    """Yield the paths below a folder with a suffix."""\n    for ',
    "def parse_header(line):\n    name, _, value = line.partition(':')\n    if not value:\n        raise ValueError(",
    "class Node:\n    def __init__(self, value, left=None, right=None):\n        self.value = value\n        self.left = left\n",
    "def test_empty_queue_gives_none():\n    queue = Queue(maxsize=4)\n    assert queue.get() is None\n\n\ndef test_",
    'import json\n\n\ndef load_settings(path):\n    with open(path, encoding="utf-8") as file:\n        settings = json.',
    "from dataclasses import dataclass\n\n\n@dataclass\nclass Point:\n    x: float\n    y: float\n\n    def distance(self, ",
    'def read_config(path, default=None):\n    """Read a configuration file.\n\n    Args:\n        path: of the file.\n',
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationFigures:
    """One batch with one number of drafts.

    Attributes:
        wall_ms: of the whole batch, prefill included, median of the rounds.
        gain: wall time without drafts over this one, of the same run; 1 for the first row of a batch.
        tokens_per_step: tokens a sequence gained from a step in the measured rounds.
        same_text: whether the tokens are those of the first row. With last-bit ties they may differ, unless `batch_invariant`.
    """

    batch: int
    drafts: int
    adaptive: bool
    tokens: int
    wall_ms: float
    ms_per_step: float
    tokens_per_step: float
    accepted: float
    tokens_per_s: float
    gain: float
    same_text: float


@dataclass(slots=True)
class _Run:
    """One engine and what it did."""

    engine: LLMEngine
    config: EngineConfig
    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    generated: int = 0
    verified: int = 0
    accepted: int = 0
    token_ids: list[list[int]] = field(default_factory=list)

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> None:
        """Serve the batch once and add up what it took."""
        before, start = self.engine.stats(), time.perf_counter()
        outputs = self.engine.generate(prompts, params, use_tqdm=False)
        self.seconds.append(time.perf_counter() - start)
        # A step in flight when the last token came is applied later.
        self.engine.flush()
        after = self.engine.stats()
        self.steps += after.steps - before.steps
        self.generated += after.generated_tokens - before.generated_tokens
        self.verified += after.verified_tokens - before.verified_tokens
        self.accepted += after.accepted_tokens - before.accepted_tokens
        self.token_ids = [output.outputs[0].token_ids for output in outputs]

    def forget(self) -> None:
        """What was done so far was a warm-up."""
        self.seconds.clear()
        self.steps = self.generated = self.verified = self.accepted = 0


def measure_speculation(
    name: str,
    config: EngineConfig,
    report: Report,
    *,
    batches: Sequence[int],
    drafts: Sequence[int],
    with_adaptive: bool,
    max_tokens: int,
    temperature: float,
) -> None:
    """A row for every batch and number of drafts, and with the number chosen by the engine. Fills `report`."""
    model, _ = open_model(name, config)
    tokenizer = bench_tokenizer(name, model.config)
    texts = [tokenizer.encode(text) for text in TEXTS]
    longest = max(map(len, texts)) + max_tokens + 1
    kinds = [(k, False) for k in drafts] + ([(max(drafts), True)] if with_adaptive and max(drafts) else [])
    for batch in batches:
        what = f"batch {batch}"
        if report.is_over(what):
            continue
        prompts = [_variant(texts[i % len(texts)], i // len(texts)) for i in range(batch)]
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1, ignore_eos=True)
        runs: list[_Run] = []
        try:
            for k, is_adaptive in kinds:
                own = replace(
                    config,
                    max_num_seqs=batch,
                    max_model_len=min(longest, model.config.max_seq_len),
                    max_num_batched_tokens=max(config.max_num_batched_tokens, batch * (1 + k)),
                    num_speculative_tokens=k,
                    adaptive_verification=is_adaptive,
                )
                runs.append(_Run(LLMEngine(model, tokenizer, own), own))
            for _ in range(WARM_UP_ROUNDS):
                for run in runs:
                    run.generate(prompts, params)
            for run in runs:
                run.forget()
            for _ in range(ROUNDS):
                for run in runs:
                    run.generate(prompts, params)
            for run in runs:
                report.add(row_of(_figures(run, runs[0], batch, max_tokens)))
        except (RuntimeError, CapacityError, StepError) as error:
            report.failed(what, error)
        finally:
            for run in runs:
                run.engine.close()
        del runs
        release_memory()


def _variant(token_ids: list[int], number: int) -> list[int]:
    """The same text cut a little shorter, so that no two requests are equal."""
    return token_ids[: max(len(token_ids) - number, 1)]


def _figures(run: _Run, first: _Run, batch: int, max_tokens: int) -> SpeculationFigures:
    wall, base = statistics.median(run.seconds), statistics.median(first.seconds)
    same = sum(a == b for a, b in zip(run.token_ids, first.token_ids, strict=True))
    return SpeculationFigures(
        batch=batch,
        drafts=run.config.num_speculative_tokens,
        adaptive=run.config.adaptive_verification and run.config.num_speculative_tokens > 0,
        tokens=max_tokens,
        wall_ms=wall * 1e3,
        ms_per_step=sum(run.seconds) / max(run.steps, 1) * 1e3,
        tokens_per_step=run.generated / max(run.steps, 1) / batch,
        accepted=run.accepted / max(run.verified, 1),
        tokens_per_s=run.generated / sum(run.seconds),
        gain=base / wall,
        same_text=same / batch,
    )
