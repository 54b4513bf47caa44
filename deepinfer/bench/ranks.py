"""Expert parallelism against one device: `torchrun --nproc-per-node 2 -m deepinfer.bench.ranks --json OUT`.

Every rank first runs the whole model alone, then its part of it in the group, over the same rows: a prefill chunk and decode steps
with a cache of some length, the latter also as a captured graph that holds its collectives. Random weights at the published widths
in batch-invariant arithmetic, so that the group must give the bits of the whole model; on machines without accelerators a tiny
model, as a check of the command. Rank 0 reports, and writes the file after each row.

The time of the exchanges is taken on the device, between marks around each: launches that the device waits for count in steps that
are not captured, and waiting for the other ranks counts in all.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from deepinfer.backends import choose_backend
from deepinfer.bench.model_holder import release_memory
from deepinfer.bench.report import Report, check_writable
from deepinfer.bench.timed_ranks import TimedRanks, mark_maker
from deepinfer.checkpoint.load import default_device
from deepinfer.dims import Float, Tensor
from deepinfer.engine_config import EngineConfig
from deepinfer.model.cache import CacheSizes
from deepinfer.model.compiled import LEAST_ROWS, compile_model
from deepinfer.model.rows import Rows, pack_rows
from deepinfer.model.transformer import Transformer
from deepinfer.parallel.config import ParallelConfig
from deepinfer.parallel.expert_parallel import distribute_experts
from deepinfer.parallel.group_engine import local_device
from deepinfer.parallel.load_counter import LoadCounter
from deepinfer.parallel.packing_agreement import agree_on_packing
from deepinfer.parallel.placement import place_evenly
from deepinfer.presets import flash_slice, random_model, tiny_config
from deepinfer.runtime.device import open_device

WARM_UP = 2
TIMEOUT_S = 300.0  # ranks compile at the same time, but not equally fast
BLOCK = 64


@dataclass(frozen=True, slots=True)
class RanksFigures:
    """One kind of step, medians over the steps, of rank 0 where nothing else is said.

    Attributes:
        mode: "alone" with the whole model, every rank for itself, or in the "group".
        rows: of each rank.
        tokens_s: of all ranks together.
        exchange_ms, exchange_share: time in collectives, and its share of the step; None if it was not measured.
        equal_tokens: share of all ranks' rows whose greedy token is that of the whole model in steps that are not captured.
        largest_difference: of a logit, on any rank.
    """

    mode: str
    kind: str
    captured: bool
    ranks: int
    rows: int
    step_ms: float
    tokens_s: float
    exchange_ms: float | None
    exchange_share: float | None
    equal_tokens: float | None
    largest_difference: float | None


def synchronize(device: torch.device) -> None:
    """Wait for the device, if it is one to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class RepeatedStep:
    """A forward that can be run again and again: `rows` stay where they are, over a cache that has room for them."""

    def __init__(self, model: Transformer, ranks: TimedRanks, rows: Rows, num_logits: int) -> None:
        self.model, self.ranks, self.rows, self.num_logits = model, ranks, rows, num_logits
        num_blocks = int(rows.block_tables.max()) + 1
        self.cache = model.new_cache(CacheSizes(num_slots=rows.slots.shape[0] + 1, num_blocks=num_blocks, block_size=BLOCK))
        self.final = torch.empty(0)

    @torch.inference_mode()
    def run(self) -> None:
        """As an engine does: every row through the layers, logits for those that draw a token."""
        self.ranks.forget()
        self.final = self.model.forward_rows(self.rows, self.cache).final
        self.model.logits(self.final[-self.num_logits :])

    @torch.inference_mode()
    def logits(self) -> Float[Tensor, "T V"]:
        """Of all rows of the latest step."""
        return self.model.logits(self.final)


class RanksMeasurement:
    """Both models over all kinds of steps; collective. Fills `report`."""

    def __init__(self, args: argparse.Namespace, report: Report) -> None:
        self.args, self.report, self.start_s = args, report, time.monotonic()
        self.device = local_device(None, default_device())
        on_cpu = self.device.type == "cpu"
        self.config = tiny_config() if on_cpu else flash_slice(args.layers)
        self.backend = choose_backend(EngineConfig(batch_invariant=True, compile="auto" if on_cpu else True), self.device)
        self.ranks = TimedRanks.open(ParallelConfig(ep_size=args.ep_size, timeout_s=TIMEOUT_S), self.device)
        self.expected: dict[str, Tensor] = {}

    def progress(self, what: str) -> None:
        """Say what begins, also to peers that wait for this rank."""
        self.ranks.doing = what
        held = torch.cuda.memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else 0.0
        print(f"{time.strftime('%H:%M:%S')} {time.monotonic() - self.start_s:6.1f} s {held:6.1f} GiB  {what}", flush=True)

    def measure(self) -> None:
        """The whole model, then the group: one model in memory at a time. Collective."""
        for mode, open_model in (("alone", self.open_whole), ("group", self.open_share)):
            self.progress(f"{mode}: making the model")
            model = open_model()
            self.measure_kind(mode, "prefill", model, self.rows_of(1, self.args.prompt, 0))
            # As in the engine: decode steps are as large on every rank.
            decode = replace(self.rows_of(self.args.rows, 1, self.args.context), is_even=True)
            self.measure_kind(mode, "decode", model, decode)
            del model
            # What is compiled may keep the weights that it was compiled for.
            torch.compiler.reset()
            release_memory()
        self.progress("done")
        self.ranks.close()
        # The process that keeps the signs of life may not go before the last ones have been given.
        self.ranks.gather_waiting("the end", ())

    def open_whole(self) -> Transformer:
        """All experts."""
        model = random_model(self.config, device=self.device, ops=self.backend.ops)
        if self.backend.compiles:
            compile_model(model)
        return model

    def open_share(self) -> Transformer:
        """This rank's experts, and the exchange with the others'."""
        config, n_experts, size = self.config, self.config.moe.n_routed_experts, self.ranks.size
        placement = place_evenly(config.n_layers, n_experts, -(-n_experts // size) * size, size)
        own = placement.experts_of(0, self.ranks.rank)
        agree = partial(agree_on_packing, self.ranks)
        model = random_model(config, device=self.device, ops=self.backend.ops, expert_ids=own, agree=agree)
        distribute_experts(model, self.ranks, placement, LoadCounter(config.n_layers, n_experts, 1, 0, self.device))
        if self.backend.compiles:
            compile_model(model)
        return model

    def rows_of(self, sequences: int, tokens: int, start: int) -> Rows:
        """Rows of this rank's own, the same whenever they are asked for."""
        generator = torch.Generator().manual_seed(self.ranks.rank)
        width = -(-(start + tokens) // BLOCK)
        tables = [range(1 + i * width, 1 + (i + 1) * width) for i in range(sequences)]
        ids = torch.randint(3, 256, (sequences, tokens), generator=generator)
        return pack_rows([(row, start) for row in ids], range(1, sequences + 1), tables, BLOCK, self.device)

    def measure_kind(self, mode: str, kind: str, model: Transformer, rows: Rows) -> None:
        """Steps as they are launched, and of decode also captured, without marks and with marks inside the graph."""
        is_decode, in_group = kind == "decode", mode == "group"
        step = RepeatedStep(model, self.ranks, rows, rows.positions.shape[0] if is_decode else LEAST_ROWS)
        self.progress(f"{mode}: {kind}, compiling" if self.backend.compiles else f"{mode}: {kind}")
        step.run()
        synchronize(self.device)
        self.progress(f"{mode}: {kind}, measuring")
        with self.ranks.marking(mark_maker(self.device)):
            step_s, exchange_ms = self.time(step.run)
        self.add(mode, kind, step, step_s, exchange_ms if in_group else None, captured=False)
        device = open_device(self.device)
        if not (is_decode and device.can_capture):
            return
        # What fails in a capture may leave its collectives in disorder, so this comes last; first without marks.
        for is_marked in (False, True)[: 1 + in_group]:
            what = f"{mode}: {kind}, captured" + (", with marks in the graph" if is_marked else "")
            self.progress(what)
            try:
                with self.ranks.marking(mark_maker(self.device, in_graphs=True)) if is_marked else nullcontext():
                    replay = device.capture(step.run)
                step_s, exchange_ms = self.time(replay)
                self.add(mode, kind, step, step_s, exchange_ms if is_marked else None, captured=True)
            except Exception as error:
                self.report.failed(what, error)
                return

    @torch.inference_mode()
    def time(self, run: Callable[[], None]) -> tuple[float, float]:
        """Median seconds of a step, and median milliseconds of its exchanges, as far as they were marked."""
        times, exchanges = [], []
        for _ in range(WARM_UP + self.args.steps):
            synchronize(self.device)
            start = time.perf_counter()
            run()
            synchronize(self.device)
            times.append(time.perf_counter() - start)
            exchanges.append(self.ranks.exchange_ms())
        return statistics.median(times[WARM_UP:]), statistics.median(exchanges[WARM_UP:])

    def add(self, mode: str, kind: str, step: RepeatedStep, step_s: float, exchange_ms: float | None, *, captured: bool) -> None:
        """Compare with the whole model, on all ranks, and report. Collective."""
        logits, count, size = step.logits(), step.rows.positions.shape[0], self.ranks.size
        expected = self.expected.setdefault(kind, logits.clone())
        num_equal = int((logits.argmax(1) == expected.argmax(1)).sum())
        difference = (logits - expected).abs().max().float()
        # Bits of floats that are not negative ascend as the floats do.
        found = self.ranks.gather_waiting("figures", (num_equal, int(difference.view(torch.int32))))
        largest = torch.tensor(max(bits for _, bits in found), dtype=torch.int32).view(torch.float32)
        figures = RanksFigures(
            mode=mode,
            kind=kind,
            captured=captured,
            ranks=size,
            rows=count,
            step_ms=step_s * 1e3,
            tokens_s=count * size / step_s,
            exchange_ms=exchange_ms,
            exchange_share=None if exchange_ms is None else exchange_ms / 1e3 / step_s,
            equal_tokens=sum(equal for equal, _ in found) / (count * size),
            largest_difference=float(largest),
        )
        self.report.add(asdict(figures))


def measure_ranks(args: argparse.Namespace, report: Report) -> None:
    """Everything, and leave the group. Collective."""
    RanksMeasurement(args, report).measure()
    # Graphs that hold collectives have gone by now.
    dist.destroy_process_group()


def main() -> None:
    """Measure; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8, help="backbone layers of the slice (default 8)")
    parser.add_argument("--rows", type=int, default=64, help="sequences of a decode step, each rank (default 64)")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prefill chunk, each rank (default 2048)")
    parser.add_argument("--context", type=int, default=1024, help="position of the decode rows (default 1024)")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each kind (default 10)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    args.ep_size = int(os.environ.get("WORLD_SIZE", "1"))
    is_first = os.environ.get("RANK", "0") == "0"
    check_writable(args.json, "--json")
    with open(os.devnull, "w") as nowhere, nullcontext() if is_first else redirect_stdout(nowhere):
        measure_ranks(args, Report("ranks", None, args.json if is_first else None))


if __name__ == "__main__":
    main()
