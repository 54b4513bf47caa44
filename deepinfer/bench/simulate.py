"""What large groups would see: balance of expert loads before and after placement, and the votes under random traffic.

Loads are Zipf's law, or what `mini` routes on the sources of standard modules, its 16 experts stretched to the number asked for.
The placement is computed from one window and judged on the next one: for `mini` one of other modules.
"""

import importlib
import inspect
import math
import random
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.checkpoint.load import load_model
from deepinfer.checkpoint.locate import locate_checkpoint
from deepinfer.dims import Tensor
from deepinfer.model.moe import Experts, here
from deepinfer.parallel.config import ParallelConfig
from deepinfer.parallel.expert_parallel import feed_forwards
from deepinfer.parallel.load_counter import LoadCounter
from deepinfer.parallel.placement import imbalance, place_evenly, place_experts, plan_moves
from deepinfer.parallel.simulator import Arrival, simulate
from deepinfer.presets import flash_slice
from deepinfer.runtime.limits import SchedulerLimits
from deepinfer.runtime.plan import StepKind
from deepinfer.tokenizer import Tokenizer

WINDOW_STEPS = 1000
ROWS_PER_RANK = 64  # of a decode step
STEPS_JUDGED = 20
MODULES = (  # noqa: SIM905 - one a line would fill a screen
    "argparse ast asyncio.base_events bdb calendar codecs collections concurrent.futures.thread configparser copy csv dataclasses "
    "datetime decimal difflib doctest email.message enum fractions ftplib functools gettext gzip heapq html.parser http.client "
    "inspect ipaddress json.decoder logging mimetypes optparse os pathlib pdb pickle platform plistlib pprint queue random "
    "sched selectors shelve shutil smtplib socket ssl statistics string subprocess tarfile tempfile textwrap threading "
    "tokenize traceback types typing urllib.request uuid weakref xml.dom.minidom xmlrpc.client zipfile"
).split()
MODULE_TOKENS = 1024  # read of each module: traffic is a mixture of many requests
PUBLISHED_TOP_K = 6


@dataclass(frozen=True, slots=True)
class BalanceFigures:
    """Load of the fullest rank over the mean, averaged over layers; 1 is perfect.

    Attributes:
        before: experts in order, with replicas of the first ones.
        fitted: placed by load, in the window that the loads come from.
        after: the same in the next window.
        drift: what to expect of `after` for any placement that knows the first window alone, see `imbalance_by_drift`.
        step_before, step_after: for single decode steps of the next window, which also differ by chance.
        moved: share of all slots that changed; `moved_again` if a placement by the next window followed.
        sent_mib: bytes that a rank sends for one layer, in the published format and widths.
        placement_ms: time to compute the placement of one layer.
    """

    loads: str
    ranks: int
    slots_per_rank: int
    before: float
    fitted: float
    after: float
    drift: float
    step_before: float
    step_after: float
    moved: float
    moved_again: float
    sent_mib: float
    placement_ms: float


@dataclass(frozen=True, slots=True)
class VoteFigures:
    """A round of random requests, the same number for each rank.

    Attributes:
        waited, longest_wait: iterations from arrival to the first row.
        empty: share of a prefill step's ranks that had no rows.
        idle: the same of decode steps.
        us_per_iteration: host time of one rank in an iteration: votes, scheduler and loop.
    """

    ranks: int
    requests: int
    iterations: int
    prefills: int
    waited: float
    longest_wait: int
    empty: float
    idle: float
    withdrawals: int
    us_per_iteration: float


Shares = np.ndarray  # [layers, experts], each row sums to 1


def zipf_shares(n_layers: int, n_experts: int, exponent: float, rng: np.random.Generator) -> tuple[Shares, Shares]:
    """Expert k of a random order gets 1 / k^exponent; the same in both windows."""
    share = 1 / np.arange(1, n_experts + 1) ** exponent
    shares = np.stack([rng.permutation(share / share.sum()) for _ in range(n_layers)])
    return shares, shares


def measured_shares(n_experts: int, rng: np.random.Generator) -> tuple[Shares, Shares]:
    """What `mini` routes on two halves of the modules, stretched to `n_experts` by the rank of an expert in the first half."""
    halves = measure_loads("mini")
    first: list[np.ndarray] = []
    second: list[np.ndarray] = []
    for one, other in zip(*halves, strict=True):
        order = np.argsort(-one, kind="stable")
        places, wanted = np.arange(len(one)) / (len(one) - 1), np.arange(n_experts) / (n_experts - 1)
        ids = rng.permutation(n_experts)
        for half, loads in ((first, one), (second, other)):
            stretched = np.interp(wanted, places, loads[order])
            half.append((stretched / stretched.sum())[ids])
    return np.stack(first), np.stack(second)


@torch.inference_mode()
def measure_loads(preset: str) -> tuple[np.ndarray, np.ndarray]:
    """Expert counts `[layers, experts]` of every other module, and of the others."""
    model = load_model(preset, "float32", "cpu")
    tokenizer = Tokenizer.from_folder(locate_checkpoint(preset))
    counts = []
    for modules in (MODULES[::2], MODULES[1::2]):
        counter = LoadCounter(model.config.n_layers, model.config.moe.n_routed_experts, 1, 1)
        for index, ffn in enumerate(feed_forwards(model)):
            ffn.exchange = Counted(index, counter)
        for name in modules:
            ids = tokenizer.encode(inspect.getsource(importlib.import_module(name)))[:MODULE_TOKENS]
            model(torch.tensor(ids))
        counts.append(counter.take().numpy().astype(np.float64))
    return counts[0], counts[1]


class Counted:
    """All experts are here, and what each gets is counted; an `ExpertExchange`."""

    def __init__(self, layer: int, counter: LoadCounter) -> None:
        self.layer, self.counter = layer, counter

    def __call__(self, experts: Experts, x: Tensor, weights: Tensor, ids: Tensor, *, is_even: bool = False) -> Tensor:
        self.counter.record(self.layer, ids)
        return here(experts, x, weights, ids)


def measure_balance(name: str, shares: tuple[Shares, Shares], ranks: int, top_k: int, seed: int = 0) -> BalanceFigures:
    """One redundant slot for each rank, as far as that divides."""
    rng = np.random.default_rng(seed)
    n_layers, n_experts = shares[0].shape
    slots_per_rank = -(-n_experts // ranks) + 1
    pairs = ranks * ROWS_PER_RANK * top_k
    window, following = (np.stack([rng.multinomial(WINDOW_STEPS * pairs, layer) for layer in half]) for half in shares)
    old = place_evenly(n_layers, n_experts, slots_per_rank * ranks, ranks)
    start = time.perf_counter()
    new = place_experts(window.astype(float).tolist(), slots_per_rank * ranks, old)
    placement_ms = (time.perf_counter() - start) * 1e3 / n_layers
    steps = [np.stack([rng.multinomial(pairs, layer) for layer in shares[1]]) for _ in range(STEPS_JUDGED)]

    def mean(counts: list[np.ndarray], which: int) -> float:
        placement = (old, new)[which]
        return float(np.mean([[imbalance(c[i], placement.layers[i], ranks) for i in range(n_layers)] for c in counts]))

    again = place_experts(following.astype(float).tolist(), slots_per_rank * ranks, new)
    moves, num_slots = plan_moves(old, new), n_layers * slots_per_rank * ranks
    away = sum(move.source // slots_per_rank != move.target // slots_per_rank for move in moves)
    return BalanceFigures(
        loads=name,
        ranks=ranks,
        slots_per_rank=slots_per_rank,
        before=mean([following], 0),
        fitted=mean([window], 1),
        after=mean([following], 1),
        drift=float(np.mean([imbalance_by_drift(*pair, slots_per_rank, ranks) for pair in zip(window, following, strict=True)])),
        step_before=mean(steps, 0),
        step_after=mean(steps, 1),
        moved=len(moves) / num_slots,
        moved_again=len(plan_moves(new, again)) / num_slots,
        sent_mib=away / n_layers / ranks * published_expert_bytes() / 2**20,
        placement_ms=placement_ms,
    )


def imbalance_by_drift(before: np.ndarray, after: np.ndarray, slots_per_rank: int, ranks: int) -> float:
    """Imbalance to expect after loads have changed, of a placement that was perfect before and knew nothing of the change.

    A rank's load is a sum of `slots_per_rank` shares that add up to 1. If experts change independently by a standard deviation of
    s, the rank's changes by s times the root of the sum of squared shares, which is least if they are equal: s / sqrt(slots). The
    fullest of many ranks is that many standard deviations above the mean that the largest of as many normal values is. Fewer
    slots a rank are worse, whatever the placement; experts that change alike and share a rank make it worse, and better where
    changes cancel.

    Args:
        before, after: loads of a layer's experts.
    """
    shares = before / before.sum()
    change = after / after.sum() / np.maximum(shares, np.finfo(np.float64).tiny) - 1
    deviation = float(np.sqrt((shares * change**2).sum()))
    # Blom's approximation to the mean of the largest.
    largest = statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return 1 + deviation / math.sqrt(slots_per_rank) * largest


def published_expert_bytes() -> float:
    """Three FP4 matrices with a scale byte for each 32 channels."""
    config = flash_slice()
    return 3 * config.dim * config.moe.inter_dim * (1 / 2 + 1 / 32)


def measure_votes(ranks: int, requests_per_rank: int = 4, seed: int = 0) -> VoteFigures:
    """Requests of random lengths at random times, over caches that are a little too small for all of them."""
    rng = random.Random(seed)
    arrivals = [
        Arrival(rank, rng.randint(0, 100), rng.randint(1, 200), rng.randint(1, 60))
        for rank in range(ranks)
        for _ in range(requests_per_rank)
    ]
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512, block_size=16, num_blocks=40)
    start = time.perf_counter()
    traces = simulate(arrivals, ParallelConfig(ep_size=ranks), limits)
    seconds = time.perf_counter() - start
    waits = [trace.admitted_at.get(name, at) - at for trace in traces for name, at in trace.queued_at.items()]
    kinds = [kind for trace in traces for kind in trace.kinds]
    iterations = len(traces[0].agreed)

    def share(kind: StepKind, of: StepKind) -> float:
        return kinds.count(kind) / max(kinds.count(kind) + kinds.count(of), 1)

    return VoteFigures(
        ranks=ranks,
        requests=len(arrivals),
        iterations=iterations,
        prefills=traces[0].kinds.count(StepKind.PREFILL) + traces[0].kinds.count(StepKind.EMPTY_PREFILL),
        waited=float(np.mean(waits)),
        longest_wait=max(waits),
        empty=share(StepKind.EMPTY_PREFILL, StepKind.PREFILL),
        idle=share(StepKind.IDLE, StepKind.DECODE),
        withdrawals=traces[0].withdrawals,
        us_per_iteration=seconds * 1e6 / iterations / ranks,
    )
