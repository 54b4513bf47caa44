"""Expert parallelism against one device: `torchrun --nproc-per-node 2 -m deepinfer.bench.ranks --json OUT`.

Every rank first runs the whole model alone, then its part of it in the group, over the same rows: a prefill chunk and decode steps
with a cache of some length. Random weights at the published widths; on a machine without accelerators a tiny model, as a check of
the command. Reported by rank 0: tokens per second of all ranks together, the share of a step spent in the exchange between ranks
(none of it is hidden: the step waits for it), and whether the greedy tokens are those of the whole model.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from deepinfer.checkpoint.load import default_device
from deepinfer.dims import Tensor
from deepinfer.model.cache import CacheSizes
from deepinfer.model.numerics import Ops, inductor_ops, reference_ops
from deepinfer.model.rows import Rows, pack_rows
from deepinfer.model.transformer import Transformer
from deepinfer.parallel.config import ParallelConfig
from deepinfer.parallel.expert_parallel import distribute_experts
from deepinfer.parallel.group_engine import local_device
from deepinfer.parallel.load_counter import LoadCounter
from deepinfer.parallel.placement import place_evenly
from deepinfer.parallel.ranks import Ranks
from deepinfer.presets import flash_slice, random_model, tiny_config

WARM_UP = 2


class TimedRanks(Ranks):
    """A group that counts the seconds its exchanges take, with the device idle before and after each."""

    exchange_s = 0.0

    def _all_to_all(self, result: Tensor, rows: Tensor, received: list[int] | None, sent: list[int] | None) -> None:
        synchronize(rows.device)
        start = time.perf_counter()
        super()._all_to_all(result, rows, received, sent)
        synchronize(rows.device)
        self.exchange_s += time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class RanksFigures:
    """One kind of step, medians over the steps.

    Attributes:
        alone_tokens_s, group_tokens_s: of all ranks together, each alone with the whole model or in the group.
        exchange_share: time in collectives (waiting for slower ranks included) over the time of a step.
        equal_tokens: share of rows whose greedy token is that of the whole model.
    """

    kind: str
    ranks: int
    rows: int
    alone_ms: float
    group_ms: float
    alone_tokens_s: float
    group_tokens_s: float
    exchange_share: float
    equal_tokens: float
    largest_difference: float


def synchronize(device: torch.device) -> None:
    """Wait for the device, if it is one to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@torch.inference_mode()
def run_steps(
    model: Transformer, rows: Rows, sizes: CacheSizes, steps: int, count_s: Callable[[], float]
) -> tuple[float, float, Tensor]:
    """Median seconds of a step, median seconds of it that `count_s` counts, and the logits."""
    cache, times, counted = model.new_cache(sizes), [], []
    logits = torch.empty(0)
    for _ in range(WARM_UP + steps):
        synchronize(model.device)
        start, before = time.perf_counter(), count_s()
        logits = model.logits(model.forward_rows(rows, cache).final)
        synchronize(model.device)
        times.append(time.perf_counter() - start)
        counted.append(count_s() - before)
    return statistics.median(times[WARM_UP:]), statistics.median(counted[WARM_UP:]), logits


def measure_ranks(args: argparse.Namespace) -> list[RanksFigures]:
    """Both kinds of steps, whole and split. Collective."""
    device = local_device(None, default_device())
    on_cpu = device.type == "cpu"
    config = tiny_config() if on_cpu else flash_slice(args.layers)
    ops: Ops = reference_ops(batch_invariant=True) if on_cpu else inductor_ops()
    parallel = ParallelConfig(ep_size=args.ep_size, timeout_s=300)
    n_experts = config.moe.n_routed_experts
    placement = place_evenly(config.n_layers, n_experts, parallel.slots_per_rank(n_experts) * args.ep_size, args.ep_size)
    ranks = TimedRanks.open(parallel, device)
    generator = torch.Generator().manual_seed(ranks.rank)

    def rows_of(sequences: int, tokens: int, start: int) -> Rows:
        width = -(-(start + tokens) // 64)
        tables = [range(1 + i * width, 1 + (i + 1) * width) for i in range(sequences)]
        ids = torch.randint(3, 256, (sequences, tokens), generator=generator)
        return pack_rows([(row, start) for row in ids], range(1, sequences + 1), tables, 64, device)

    # As in the engine: decode steps are as large on every rank.
    kinds = {"prefill": rows_of(1, args.prompt, 0), "decode": replace(rows_of(args.rows, 1, args.context), is_even=True)}
    width = -(-max(args.prompt, args.rows * (-(-(args.context + 1) // 64) * 64)) // 64)
    sizes = CacheSizes(num_slots=args.rows + 1, num_blocks=width + 1)
    whole = random_model(config, device=device, ops=ops)
    alone = {kind: run_steps(whole, rows, sizes, args.steps, lambda: 0.0) for kind, rows in kinds.items()}
    del whole
    part = random_model(config, device=device, ops=ops, expert_ids=placement.experts_of(0, ranks.rank))
    distribute_experts(part, ranks, placement, LoadCounter(config.n_layers, n_experts, 1, 0, device))
    figures = []
    for kind, rows in kinds.items():
        group_s, exchange_s, logits = run_steps(part, rows, sizes, args.steps, lambda: ranks.exchange_s)
        alone_s, _, expected = alone[kind]
        count, size = rows.positions.shape[0], ranks.size
        figures.append(
            RanksFigures(
                kind=kind,
                ranks=size,
                rows=count,
                alone_ms=alone_s * 1e3,
                group_ms=group_s * 1e3,
                alone_tokens_s=count * size / alone_s,
                group_tokens_s=count * size / group_s,
                exchange_share=exchange_s / group_s,
                equal_tokens=float((logits.argmax(1) == expected.argmax(1)).float().mean()),
                largest_difference=float((logits - expected).abs().max()),
            )
        )
    ranks.close()
    return figures if ranks.rank == 0 else []


def main() -> None:
    """Measure and print, on rank 0."""
    import os

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8, help="backbone layers of the slice (default 8)")
    parser.add_argument("--rows", type=int, default=64, help="sequences of a decode step, each rank (default 64)")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prefill chunk, each rank (default 2048)")
    parser.add_argument("--context", type=int, default=1024, help="position of the decode rows (default 1024)")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each kind (default 10)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    args.ep_size = int(os.environ.get("WORLD_SIZE", "1"))
    figures = [asdict(f) for f in measure_ranks(args)]
    if figures:
        print(json.dumps(figures, indent=1))
        if args.json:
            args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
