"""The Triton kernels that read no quantised weights, on a GPU: attention, float32 products, streams, index scores, routing.

Each against its plain twin at published and odd sizes, independent of the batch, repeatable; a broken token stays in its row.
`torch.empty` gives NaN under the settings of `conftest.py`, so a place that a kernel forgets is found in every comparison.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from deepinfer.model.hyper_connection import HyperConnection, Mixes, collapse, spread
from deepinfer.model.indexer import Indexer
from deepinfer.model.numerics import Numerics, precision_named, reference_ops
from deepinfer.model.router import Router
from deepinfer.ops.attend import attend
from deepinfer.ops.elementwise import rms_norm
from deepinfer.ops.quantize import round_fp4_e4m3, round_fp4_ue8m0, round_fp8
from deepinfer.ops.rotate import rope_frequencies, rotate_last, rotation
from deepinfer.presets import flash_slice
from tests.kernels import random_activations, units

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

NUMERICS = Numerics(precision=precision_named("native"), ops=reference_ops())
COUNTS = (1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 65, 127, 129)
ROWS = 130
REPEATS = 100


class Case(NamedTuple):
    """A kernel and its twin over the same rows; every row of the inputs belongs to one row of the results."""

    inputs: tuple[Tensor, ...]
    run: Callable[..., tuple[Tensor, ...]]
    expected: tuple[Tensor, ...]
    tolerance: float  # of the largest difference, in `units`

    def part(self, rows: slice) -> tuple[Tensor, ...]:
        return tuple(t[rows].clone() for t in self.inputs)


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.set_float32_matmul_precision("highest")


def attend_case(heads: int, channels: int, places: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    """Lists with holes, one of them with a single place."""
    from deepinfer.ops.triton_kernels import attention

    q, kv = torch.randn(ROWS, heads, channels, device="cuda"), torch.randn(ROWS, places, channels, device="cuda")
    q, kv = q.to(dtype), kv.to(dtype)
    visible = torch.rand(ROWS, places, device="cuda") < 0.7
    visible[:, 0] = True
    visible[5, 1:] = False
    # What is not visible may hold anything.
    kv[~visible] = float("nan")
    sink, scale = torch.randn(heads, device="cuda"), channels**-0.5
    expected = attend(q.double(), kv.double(), visible, sink.double(), scale)

    def run(q: Tensor, kv: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
        return (attention.attend(q, kv, visible, sink, scale),)

    return Case((q, kv, visible), run, (expected,), 0.05 if dtype == torch.bfloat16 else 1e-4)


def float32_case(n: int, k: int, dtype: torch.dtype) -> Case:
    from deepinfer.ops.triton_kernels.float32_linear import float32_linear

    x = (torch.randn(ROWS, k, device="cuda") * torch.exp(torch.randn(ROWS, k, device="cuda"))).to(dtype)
    w = torch.randn(n, k, device="cuda").bfloat16()
    return Case((x,), lambda x: (float32_linear(x, w),), (x.double() @ w.double().T,), 5e-5)


def mix_case(dim: int, dtype: torch.dtype) -> Case:
    from deepinfer.ops.triton_kernels.beside import rejoin
    from deepinfer.ops.triton_kernels.hyper_mix import hyper_mix

    config = replace(flash_slice(), dim=dim)
    with torch.device("cuda"):
        hyper = HyperConnection(config, NUMERICS)
    m = config.hyper_connection.mult
    for parameter in hyper.parameters():
        parameter.data.normal_()
    hyper.fn.data.mul_((m * dim) ** -0.5)
    streams = torch.randn(ROWS, m, dim, device="cuda").to(dtype)
    c = hyper.config

    def run(streams: Tensor) -> tuple[Tensor, ...]:
        mixes = hyper_mix(streams, hyper.fn, hyper.base, hyper.scale, hyper.norm_eps, c.eps, c.sinkhorn_iters)
        rejoin(streams.device)
        return mixes

    return Case((streams,), run, tuple(hyper(streams)), 1e-4)


def streams_case(dim: int, dtype: torch.dtype) -> Case:
    """A sub-layer that does nothing: collapse and norm, coefficients beside, spread."""
    from deepinfer.ops.triton_kernels.hyper_mix import hyper_mix
    from deepinfer.ops.triton_kernels.residual_streams import collapse_norm
    from deepinfer.ops.triton_kernels.residual_streams import spread as spread_streams

    streams, gain = torch.randn(ROWS, 4, dim, device="cuda").to(dtype), torch.rand(dim, device="cuda").bfloat16() + 0.5
    fn, base, scale = torch.randn(24, 4 * dim, device="cuda") / dim, torch.randn(24, device="cuda"), torch.randn(3, device="cuda")
    pre = torch.rand(ROWS, 4, device="cuda")

    def run(streams: Tensor, pre: Tensor) -> tuple[Tensor, ...]:
        _, post, comb = hyper_mix(streams, fn, base, scale, 1e-6, 1e-6, 20)
        y = collapse_norm(streams, pre, gain, 1e-6)
        return y, spread_streams(y, streams, post, comb)

    y = rms_norm(collapse(streams, pre), gain, 1e-6)
    _, post, comb = hyper_mix(streams, fn, base, scale, 1e-6, 1e-6, 20)
    torch.cuda.synchronize()
    expected = spread(y, streams, Mixes(post, post, comb))
    return Case((streams, pre), run, (y, expected), 0.07 if dtype == torch.bfloat16 else 1e-4)


def finish_case(shape: tuple[int, ...], kind: int, normed: bool, dtype: torch.dtype = torch.bfloat16) -> Case:
    from deepinfer.ops.triton_kernels.norm_rotate_round import norm_rotate_round

    x, gain = random_activations(ROWS, math.prod(shape), "cuda", dtype).view(ROWS, *shape), None
    if normed:
        gain = torch.rand(shape[-1], device="cuda").bfloat16() + 0.5
    turns = rotation(torch.randint(0, 100_000, (ROWS,), device="cuda"), rope_frequencies(32, 10000.0).cuda())
    rounding = (lambda y: y, round_fp8, round_fp4_ue8m0, round_fp4_e4m3)[kind]
    expected = rounding(rotate_last(x if gain is None else rms_norm(x, gain, 1e-6), turns))

    def run(x: Tensor, turns: Tensor) -> tuple[Tensor, ...]:
        return (norm_rotate_round(x, turns, gain, 1e-6, kind),)

    # A norm's sum has another order: now and then the neighbouring number, which may be rounded to the neighbouring code.
    return Case((x, turns), run, (expected,), 1.5 if normed else 0.0)


def index_case(heads: int, channels: int, per_block: int, blocks: int) -> Case:
    """Four sequences whose blocks lie anywhere; rows see from nothing to everything."""
    from deepinfer.ops.triton_kernels.index_scores import index_scores

    count = 4 * blocks + 1
    keys = torch.randn(count * per_block, channels, device="cuda").bfloat16()
    tables = 1 + torch.randperm(4 * blocks, device="cuda").view(4, blocks)
    q = torch.randn(ROWS, heads, channels, device="cuda").bfloat16()
    weights = torch.rand(ROWS, heads, device="cuda").bfloat16() * heads**-0.5
    seq_ids = torch.arange(ROWS, device="cuda") % 4
    n_visible = torch.randint(0, blocks * per_block + 1, (ROWS,), device="cuda")
    n_visible[0], n_visible[1] = 0, blocks * per_block
    own = keys.view(count, per_block, channels)[tables].flatten(1, 2)[seq_ids]
    dots = torch.einsum("thd,tcd->thc", q.double(), own.double()).bfloat16()
    terms = (torch.relu(dots) * weights[:, :, None]).double()
    entry = torch.arange(own.shape[1], device="cuda")
    expected = terms.sum(dim=1).masked_fill(entry >= n_visible[:, None], float("-inf"))

    def run(q: Tensor, weights: Tensor, seq_ids: Tensor, n_visible: Tensor) -> tuple[Tensor, ...]:
        return (index_scores(q, weights, keys, tables, seq_ids, n_visible, per_block),)

    return Case((q, weights, seq_ids, n_visible), run, (expected,), 0.1)


CASES: dict[str, Callable[[], Case]] = {
    "attend, published": lambda: attend_case(64, 512, 640),
    "attend, odd": lambda: attend_case(3, 32, 77),
    "attend, draft": lambda: attend_case(64, 512, 133),
    "attend, float32": lambda: attend_case(4, 64, 200, torch.float32),
    "router": lambda: float32_case(384, 5120, torch.bfloat16),
    "head": lambda: float32_case(129280, 512, torch.bfloat16),
    "gate, float32": lambda: float32_case(512, 5120, torch.float32),
    "confidence": lambda: float32_case(1, 5376, torch.bfloat16),
    "odd product": lambda: float32_case(77, 200, torch.float32),
    "mix, published": lambda: mix_case(5120, torch.bfloat16),
    "mix, odd": lambda: mix_case(96, torch.bfloat16),
    "mix, float32": lambda: mix_case(160, torch.float32),
    "streams, published": lambda: streams_case(5120, torch.bfloat16),
    "streams, odd": lambda: streams_case(1056, torch.float32),
    "finish queries": lambda: finish_case((64, 512), 0, normed=False),
    "finish window rows": lambda: finish_case((512,), 1, normed=True),
    "finish entries": lambda: finish_case((512,), 3, normed=False),
    "finish index queries": lambda: finish_case((32, 128), 2, normed=False),
    "finish index keys": lambda: finish_case((128,), 2, normed=True),
    "finish, float32": lambda: finish_case((3, 96), 1, normed=False, dtype=torch.float32),
    "index, published": lambda: index_case(32, 128, 64, 20),
    "index, ratio 2": lambda: index_case(32, 128, 32, 33),
    "index, small": lambda: index_case(16, 32, 2, 7),
}


@cache
def case_named(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


def all_cases() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", CASES)


def check_equal(observed: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: object) -> None:
    for a, b in zip(observed, expected, strict=True):
        assert torch.equal(a, b), what


@all_cases()
def test_a_kernel_agrees_with_its_plain_twin(name: str) -> None:
    case = case_named(name)
    for observed, expected in zip(case.run(*case.inputs), case.expected, strict=True):
        assert observed.shape == expected.shape
        assert torch.equal(observed == float("-inf"), expected == float("-inf"))
        is_finite = expected > float("-inf")
        observed, expected = observed[is_finite].double(), expected[is_finite].double()
        largest = ((observed - expected).abs() / units(expected)).max()
        print(f"{name}: largest {float(largest):.2e}")
        assert largest <= case.tolerance


@all_cases()
def test_a_row_does_not_depend_on_its_company(name: str) -> None:
    case = case_named(name)
    whole = case.run(*case.inputs)
    for count in COUNTS:
        for rows in (slice(count), slice(ROWS - count, None)):
            check_equal(case.run(*case.part(rows)), tuple(t[rows] for t in whole), rows)


@all_cases()
@pytest.mark.parametrize("count", [1, 16, 130])
def test_a_kernel_repeats(name: str, count: int) -> None:
    case = case_named(name)
    inputs = case.part(slice(count))
    first = case.run(*inputs)
    assert not any(t.isnan().any() for t in first)
    for repeat in range(REPEATS):
        check_equal(case.run(*inputs), first, repeat)


@all_cases()
@pytest.mark.parametrize("count", [2, 40])
def test_a_broken_token_stays_in_its_row(name: str, count: int) -> None:
    case = case_named(name)
    # Row 1 sees everything that its sequence has.
    inputs = case.part(slice(1, 1 + count))
    expected = case.run(*inputs)
    broken = inputs[0].clone()
    broken[0].view(-1)[1] = float("nan")
    observed = case.run(broken, *inputs[1:])
    assert observed[0][0].isnan().any()
    check_equal(tuple(t[1:] for t in observed), tuple(t[1:] for t in expected), "other rows")


@all_cases()
def test_a_kernel_can_be_captured(name: str) -> None:
    case = case_named(name)
    inputs = case.part(slice(9))
    expected = case.run(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(*inputs)
    for _ in range(3):
        for tensor in out:
            tensor.fill_(float("nan"))
        graph.replay()
        check_equal(out, expected, "replay")


LONG = 20_000_000  # cycles of a processor that has something else to do: what does not wait is seen to be early


def test_a_reader_waits_for_what_runs_beside_it() -> None:
    from deepinfer.ops.triton_kernels.beside import beside, rejoin

    device, x = torch.device("cuda"), torch.full((1000,), 3.0, device="cuda")
    for _ in range(3):
        with beside(device):
            torch.cuda._sleep(LONG)
            y = x + 1
        rejoin(device)
        assert bool((y == 4).all())


def test_coefficients_that_nobody_keeps_are_written_to_nobody_elses_memory() -> None:
    from deepinfer.ops.triton_kernels.beside import beside, rejoin
    from deepinfer.ops.triton_kernels.hyper_mix import hyper_mix

    device, streams = torch.device("cuda"), torch.randn(ROWS, 4, 256, device="cuda").bfloat16()
    fn, base, scale = torch.randn(24, 1024, device="cuda"), torch.randn(24, device="cuda"), torch.randn(3, device="cuda")
    for _ in range(3):
        with beside(device):
            torch.cuda._sleep(LONG)
        hyper_mix(streams, fn, base, scale, 1e-6, 1e-6, 20)
        others = [torch.zeros(ROWS, *shape, device=device) for shape in ((4,), (4,), (4, 4)) for _ in range(4)]
        rejoin(device)
        assert not any(bool(other.any()) for other in others)


def test_streams_are_spread_in_a_graph_of_their_own() -> None:
    from deepinfer.ops.triton_kernels.residual_streams import spread as spread_streams

    streams, y = torch.randn(9, 4, 256, device="cuda").bfloat16(), torch.randn(9, 256, device="cuda").bfloat16()
    post, comb = torch.rand(9, 4, device="cuda"), torch.rand(9, 4, 4, device="cuda")
    expected = spread_streams(y, streams, post, comb)
    assert torch.equal(expected, spread(y, streams, Mixes(post, post, comb)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = spread_streams(y, streams, post, comb)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


def router_of(experts: int, chosen: int) -> Router:
    config = flash_slice()
    moe = replace(config.moe, n_routed_experts=experts, n_activated_experts=chosen)
    with torch.device("cuda"):
        router = Router(256, moe, NUMERICS)
    router.weight.data.normal_().mul_(256**-0.5)
    router.bias.data.normal_().mul_(0.05)
    return router


@pytest.mark.parametrize(("experts", "chosen"), [(384, 6), (128, 3), (16, 3), (7, 1), (33, 33)])
def test_routing_is_the_plain_one(experts: int, chosen: int) -> None:
    from deepinfer.ops.triton_kernels.route import route

    router, x = router_of(experts, chosen), torch.randn(ROWS, 256, device="cuda").bfloat16()
    expected = router(x)
    logits = router.plain(x)
    weights, ids = route(logits, router.bias, chosen, router.moe.route_scale)
    # Scores that differ by less than their own last bits may change places.
    same = (ids == expected.ids).all(dim=1)
    assert same.float().mean() > 0.98
    assert torch.equal(ids.sort(dim=1).values[same], expected.ids.sort(dim=1).values[same])
    torch.testing.assert_close(weights[same], expected.weights[same], rtol=1e-5, atol=1e-6)
    for count in COUNTS:
        check_equal(route(logits[:count], router.bias, chosen, router.moe.route_scale), (weights[:count], ids[:count]), count)


def test_equal_scores_go_to_the_lower_expert() -> None:
    from deepinfer.ops.triton_kernels.route import route

    logits = torch.zeros(3, 384, device="cuda")
    logits[1, 100:110] = 5.0
    logits[2, 7], logits[2, 383] = 30.0, 30.0  # beyond where softplus is the number itself
    _, ids = route(logits, torch.zeros(384, device="cuda"), 6, 1.5)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5], [100, 101, 102, 103, 104, 105], [7, 383, 0, 1, 2, 3]]


def test_a_broken_token_keeps_its_routing_within_the_experts() -> None:
    from deepinfer.ops.triton_kernels.route import route

    logits = torch.randn(4, 384, device="cuda")
    expected = route(logits, torch.zeros(384, device="cuda"), 6, 1.5)
    logits[2, 9] = float("nan")
    weights, ids = route(logits, torch.zeros(384, device="cuda"), 6, 1.5)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 384
    assert weights[2].isnan().any()
    kept = torch.tensor([0, 1, 3], device="cuda")
    check_equal((weights[kept], ids[kept]), (expected[0][kept], expected[1][kept]), "other rows")


def test_index_scores_are_those_of_the_module() -> None:
    """Through `Indexer._scores`, whose roundings the kernel repeats."""
    from deepinfer.ops.triton_kernels.index_scores import index_scores

    config = flash_slice()
    with torch.device("cuda"):
        indexer: Any = Indexer(config, 2, NUMERICS)
    keys = torch.randn(5 * 64, 128, device="cuda").bfloat16()
    q, weights = torch.randn(9, 32, 128, device="cuda").bfloat16(), torch.rand(9, 32, device="cuda").bfloat16()
    tables = torch.tensor([[1, 3], [4, 2]], device="cuda")
    seq_ids, n_visible = torch.arange(9, device="cuda") % 2, torch.full((9,), 128, device="cuda")
    plain = indexer._scores(q, weights, keys.view(5, 64, 128)[tables].flatten(1, 2), seq_ids)
    observed = index_scores(q, weights, keys, tables, seq_ids, n_visible, 64)
    largest = (observed.double() - plain.double()).abs().max() / plain.double().square().mean().sqrt()
    assert largest <= 2.0**-5


@pytest.mark.parametrize(
    ("heads", "channels", "window", "entries"), [(64, 512, 128, 512), (8, 64, 64, 64), (3, 32, 77, 0), (20, 128, 30, 700)]
)
def test_a_list_that_lies_in_three_places_is_attended_as_its_copy(heads: int, channels: int, window: int, entries: int) -> None:
    from deepinfer.ops.triton_kernels import attention

    def rows(count: int) -> Tensor:
        return torch.randn(count, channels, device="cuda").bfloat16()

    own, ring, pool = rows(ROWS), rows(700), rows(5000)
    q, sink = torch.randn(ROWS, heads, channels, device="cuda").bfloat16(), torch.randn(heads, device="cuda")
    is_own = torch.rand(ROWS, window, device="cuda") < 0.5
    near = torch.where(is_own, torch.randint(ROWS, is_own.shape, device="cuda"), torch.randint(700, is_own.shape, device="cuda"))
    far = torch.randint(5000, (ROWS, entries), device="cuda")
    visible = torch.rand(ROWS, window + entries, device="cuda") < 0.7
    visible[2], visible[3, 1:] = False, False
    # What nobody sees may hold anything.
    visible[:, :window] &= is_own | (near != 5)
    visible[:, window:] &= far != 8
    ring[5], pool[8] = float("nan"), float("nan")
    listed = torch.cat((torch.where(is_own[:, :, None], own[near.clamp(max=ROWS - 1)], ring[near]), pool[far]), dim=1)
    places = torch.cat((near, far), dim=1).int()

    def run(part: slice) -> Tensor:
        return attention.attend_in_place(q[part], own, ring, pool, places[part], is_own[part], visible[part], sink, channels**-0.5)

    whole = run(slice(None))
    assert torch.equal(whole, attention.attend(q, listed, visible, sink, channels**-0.5))
    for count in COUNTS:
        assert torch.equal(run(slice(count)), whole[:count]), count
    assert not whole.isnan().any()
    assert not whole[2].any()


def score_rows(dtype: torch.dtype, count: int) -> Tensor:
    """Scores of both signs with many ties, zeros of both signs, infinities, numbers that are none, and rows of nothing else."""
    scores = (torch.randn(40, count, device="cuda") * 8).round() / 8
    scores[3:9] = scores[3:9].relu()
    scores[7, ::3] = -0.0
    scores[10:20, count // 3 :] = float("-inf")
    scores[20, ::5], scores[21, 1::2] = float("nan"), float("inf")
    scores[22], scores[23], scores[24] = float("-inf"), 1.5, float("nan")
    return scores.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("count", "k"), [(8, 8), (100, 512), (512, 512), (513, 512), (2048, 512), (4096, 64), (20000, 512), (40000, 512)]
)
def test_selection_is_the_plain_one(count: int, k: int, dtype: torch.dtype) -> None:
    from deepinfer.ops.select import select_entries
    from deepinfer.ops.triton_kernels import select

    scores = score_rows(dtype, count)
    observed, expected = select.select_entries(scores, k).cpu(), select_entries(scores.cpu(), k)
    assert torch.equal(observed[:, : expected.shape[1]], expected)
    assert (observed[:, expected.shape[1] :] == -1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("count", "kept"), [(64, 4), (1000, 4), (2048, 16), (2048, 512), (16384, 128), (40000, 128)])
def test_candidates_are_the_plain_ones(count: int, kept: int, dtype: torch.dtype) -> None:
    from deepinfer.ops.select import candidate_mask
    from deepinfer.ops.triton_kernels import select

    scores = score_rows(dtype, count)
    visible = torch.randint(0, count + 1, (40,), device="cuda")
    visible[:3] = torch.tensor([0, 1, count])
    observed = select.candidate_mask(scores, visible, 64, kept).cpu()
    assert torch.equal(observed, candidate_mask(scores.cpu(), visible.cpu(), 64, kept))
