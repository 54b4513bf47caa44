"""The Triton kernels on a GPU: against their plain twins, independent of the batch, repeatable, and free of what was not written.

`torch.empty` gives NaN under the settings of `conftest.py`, so a place that a kernel forgets is found in every comparison.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from deepinfer.model.compiled import compile_function
from deepinfer.model.moe import Experts
from deepinfer.model.numerics import Numerics, inductor_ops, precision_named, reference_ops, triton_ops
from deepinfer.model.packed_weights import pack_model
from deepinfer.model.plain_forms import combine
from deepinfer.ops.elementwise import rms_norm
from deepinfer.ops.formats import dequantize_fp8
from deepinfer.ops.matmul import block_matmul
from deepinfer.ops.quantize import round_fp8
from deepinfer.ops.triton_kernels.packing import (
    CHECKPOINT_ORDER,
    MMA_SYNC,
    WGMMA,
    channel_places,
    interleave_rows,
    pack_fp4,
    pack_fp8,
    permute_channels,
    unpack_fp4,
    unpack_fp8,
)
from deepinfer.presets import flash_slice, random_model
from tests.kernels import check_kernel, packable_config, random_activations, random_fp4, random_fp8

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    # The compiler's own imports and advice, and the sync check's note that it is a prototype.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]

# Output rows, channels, groups (0: FP8 activations): every kind of FP8 matrix at the published widths, and the least one.
LINEARS = {
    "wq_a, wkv": (1792, 5120, 0),
    "wq_b": (32768, 1280, 0),
    "wo_a": (8192, 4096, 8),
    "wo_b": (5120, 8192, 0),
    "shared w1, w3": (4608, 5120, 0),
    "shared w2": (5120, 2304, 0),
    "indexer wq_b": (4096, 1280, 0),
    "engram wkv": (25600, 6144, 0),
    "main_proj": (5120, 15360, 0),
    "least": (64, 128, 0),
    "odd": (192, 640, 0),
    "odd groups": (384, 256, 3),
}
TOKENS = 130
COUNTS = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129)
REPEATS = 200


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.set_float32_matmul_precision("highest")


class LinearCase(NamedTuple):
    """A matrix, activations, the kernel over both and what the plain twin gives."""

    x: Tensor
    expected: Tensor
    run: Callable[..., Tensor]


@cache
def linear_case(name: str) -> LinearCase:
    from deepinfer.ops.triton_kernels.fp8_linear import fp8_linear, fp8_linear_bf16, new_arrivals
    from deepinfer.ops.triton_kernels.quantize import quantize_activations

    torch.manual_seed(0)
    n, k, groups = LINEARS[name]
    weight, scale = random_fp8(n, k, device="cuda")
    values = dequantize_fp8(weight, scale)
    packed, arrivals = pack_fp8(weight, scale, bf16=groups > 0), new_arrivals(n, torch.device("cuda"))
    if not groups:
        x = random_activations(TOKENS, k, "cuda")
        expected = block_matmul(round_fp8(x).float(), values).bfloat16()

        def run(x: Tensor, invariant: bool = True) -> Tensor:
            return fp8_linear(*quantize_activations(x, WGMMA), *packed, arrivals, invariant)

        return LinearCase(x, expected, run)
    x = random_activations(TOKENS, groups * k, "cuda").unflatten(1, (groups, k))
    by_group = values.double().unflatten(0, (groups, -1))
    expected = torch.einsum("tgk,grk->tgr", x.double(), by_group).flatten(1).bfloat16()

    def run_groups(x: Tensor, invariant: bool = True) -> Tensor:
        return fp8_linear_bf16(permute_channels(x, WGMMA), *packed, arrivals, groups, invariant)

    return LinearCase(x, expected, run_groups)


def check_repeats(run: Callable[[], Tensor]) -> None:
    first = run()
    assert not first.isnan().any()
    differing = sum(not torch.equal(run(), first) for _ in range(REPEATS))
    assert differing == 0, f"{differing} of {REPEATS} runs differ from the first"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("instruction", [MMA_SYNC, WGMMA])
@pytest.mark.parametrize(("tokens", "channels"), [(1, 128), (3, 1280), (130, 2304), (7, 5120), (2, 15360)])
def test_quantised_activations_are_the_plain_ones_to_the_bit(
    tokens: int, channels: int, instruction: int, dtype: torch.dtype
) -> None:
    from deepinfer.ops.triton_kernels.quantize import quantize_activations

    x = random_activations(tokens, channels, "cuda", dtype)
    x16, factor = quantize_activations(x, instruction)
    places = channel_places(channels, instruction).cuda()
    assert torch.equal(x16.float()[:, places] * factor[:, None], round_fp8(x.float()))


@pytest.mark.parametrize(("tokens", "channels"), [(1, 512), (5, 1280), (130, 5120)])
def test_the_fused_norm_is_the_plain_one_and_its_quantised_form_fits_it(tokens: int, channels: int) -> None:
    from deepinfer.ops.triton_kernels.quantize import norm_quantize_activations, quantize_activations

    x, gain = random_activations(tokens, channels, "cuda"), 1 + torch.rand(channels, device="cuda").bfloat16()
    y, x16, factor = norm_quantize_activations(x, gain, 1e-6, WGMMA)
    plain = rms_norm(x, gain, 1e-6)
    check_kernel(y, plain, "norm kernel", "norm")
    print(f"normalised values that are not bit-equal: {float((y != plain).double().mean()):.2e}")
    assert all(torch.equal(a, b) for a, b in zip((x16, factor), quantize_activations(y, WGMMA), strict=True))


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_agrees_with_its_plain_twin(name: str) -> None:
    case = linear_case(name)
    observed = case.run(case.x)
    print(f"not bit-equal: {float((observed != case.expected).double().mean()):.2e}")
    check_kernel(observed, case.expected, "kernel", name)


@pytest.mark.parametrize("name", LINEARS)
def test_a_row_of_a_linear_does_not_depend_on_its_company(name: str) -> None:
    case = linear_case(name)
    whole = case.run(case.x)
    for count in COUNTS:
        assert torch.equal(case.run(case.x[:count]), whole[:count]), count
        assert torch.equal(case.run(case.x[-count:]), whole[-count:]), count


@pytest.mark.parametrize("tokens", [1, 16, 33, 64, 130])
@pytest.mark.parametrize("name", ["wq_b", "wo_a", "wo_b", "shared w2"])
def test_a_linear_repeats(name: str, tokens: int) -> None:
    case = linear_case(name)
    check_repeats(lambda: case.run(case.x[:tokens]))


@pytest.mark.parametrize("name", ["wo_b", "odd"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_broken_token_stays_in_its_row_of_a_linear(name: str, tokens: int) -> None:
    case = linear_case(name)
    expected = case.run(case.x[:tokens])
    for value in (float("nan"), float("inf")):
        x = case.x[: tokens + 1].clone()
        x[-1, 70] = value
        observed = case.run(x)
        assert observed[-1].isnan().all()
        assert torch.equal(observed[:-1], expected)


def test_linears_can_be_captured_and_compiled() -> None:
    case = linear_case("shared w2")
    x = case.x[:9].clone()
    expected = case.run(x)
    check_captured(lambda: case.run(x), expected)
    torch.compiler.reset()
    assert torch.equal(torch.compile(case.run, fullgraph=True, dynamic=False)(x), expected)


def check_captured(run: Callable[[], Tensor], expected: Tensor) -> None:
    """A captured graph gives the same, three times, and nothing in it waits for the device."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            out = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


NUM_EXPERTS, TOPK = 40, 6


class ExpertsCase(NamedTuple):
    """The plain module and the kernels over the same weights."""

    plain: Experts
    run: Callable[..., Tensor]


def experts_case(dim: int, inter_dim: int, num_experts: int = NUM_EXPERTS) -> ExpertsCase:
    from deepinfer.ops.triton_kernels.fp4_experts import fp4_experts

    torch.manual_seed(0)
    config = replace(flash_slice(), dim=dim)
    moe = replace(config.moe, inter_dim=inter_dim, n_routed_experts=num_experts, n_activated_experts=TOPK)
    with torch.device("cuda"):
        plain = Experts(config, moe, Numerics(precision=precision_named("native"), ops=reference_ops()))
    stored = {}
    for name, n, k in (("w1", inter_dim, dim), ("w3", inter_dim, dim), ("w2", dim, inter_dim)):
        stored[name] = random_fp4(n, k, (num_experts,), device="cuda")
        matrix = plain.get_submodule(name)
        matrix.weight, matrix.scale = (nn.Parameter(value, requires_grad=False) for value in stored[name])
    both = [interleave_rows(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(stored["w1"], stored["w3"], strict=True)]
    up = pack_fp4(both[0].view(torch.int8), both[1].view(torch.float8_e8m0fnu))
    down = pack_fp4(*stored["w2"])

    def run(x: Tensor, ids: Tensor, weights: Tensor, holds_all: bool = True, invariant: bool = True) -> Tensor:
        return fp4_experts(x, ids, weights, *up, *down, moe.swiglu_limit, holds_all, invariant)

    return ExpertsCase(plain, run)


@cache
def published_experts() -> ExpertsCase:
    """Published widths with fewer experts: what a program does is the same, and the plain twin takes its time."""
    return experts_case(5120, 2304)


class Routed(NamedTuple):
    x: Tensor
    ids: Tensor
    weights: Tensor

    def rows(self, part: slice) -> "Routed":
        return Routed(self.x[part], self.ids[part], self.weights[part])


def routed(tokens: int, dim: int = 5120, num_experts: int = NUM_EXPERTS, skew: float = 0.0) -> Routed:
    """Distinct experts for each token in any order; with `skew` some are chosen by nearly all tokens, and some by none."""
    popularity = skew * torch.randn(num_experts, device="cuda")
    ids = (torch.randn(tokens, num_experts, device="cuda") + popularity).topk(TOPK, dim=1).indices
    ids = ids[:, torch.randperm(TOPK, device="cuda")]
    return Routed(random_activations(tokens, dim, "cuda"), ids, torch.rand(tokens, TOPK, device="cuda"))


@pytest.mark.parametrize("skew", [0.0, 3.0])
def test_experts_agree_with_their_plain_twin(skew: float) -> None:
    case, batch = published_experts(), routed(TOKENS, skew=skew)
    observed, expected = case.run(batch.x, batch.ids, batch.weights), case.plain(batch.x, batch.weights, batch.ids)
    print(f"not bit-equal: {float((observed != expected).double().mean()):.2e}")
    check_kernel(observed, expected, "expert kernel", "pairs")
    check_kernel(combine(observed, batch.ids), combine(expected, batch.ids), "expert kernel", "combined")


@pytest.mark.parametrize(("dim", "inter_dim", "experts"), [(256, 256, 6), (512, 768, 8), (1024, 256, 33)])
def test_experts_of_other_sizes_agree_with_their_plain_twin(dim: int, inter_dim: int, experts: int) -> None:
    case = experts_case(dim, inter_dim, experts)
    for tokens in (1, 5, 70):
        batch = routed(tokens, dim, experts)
        observed, expected = case.run(batch.x, batch.ids, batch.weights), case.plain(batch.x, batch.weights, batch.ids)
        check_kernel(observed, expected, "expert kernel", f"{tokens} tokens")


@pytest.mark.parametrize("skew", [0.0, 3.0])
def test_a_row_of_the_experts_does_not_depend_on_its_company(skew: float) -> None:
    case, batch = published_experts(), routed(300, skew=skew)
    # With 300 tokens, experts with more than 8 take the other launch.
    whole = case.run(*batch)
    for count in (*COUNTS, 130, 255, 256):
        for part in (slice(count), slice(-count, None)):
            assert torch.equal(case.run(*batch.rows(part)), whole[part]), count


def test_experts_that_get_every_token_and_experts_that_get_none() -> None:
    case, batch = published_experts(), routed(TOKENS)
    ids = torch.arange(TOPK, device="cuda").expand(TOKENS, -1) * 7
    everyone = batch._replace(ids=ids.contiguous())
    expected = case.plain(everyone.x, everyone.weights, everyone.ids)
    check_kernel(case.run(*everyone), expected, "expert kernel", "one list for all")
    many = Routed(*(torch.cat([t] * 3) for t in everyone))
    assert torch.equal(case.run(*many), torch.cat([case.run(*everyone)] * 3))


def test_many_tokens_are_computed_in_pieces() -> None:
    case, batch = experts_case(256, 256, 12), routed(2100, 256, 12)
    whole = case.run(*batch)
    assert torch.equal(whole[:130], case.run(*batch.rows(slice(130))))
    assert torch.equal(whole[-70:], case.run(*batch.rows(slice(-70, None))))


def test_pairs_of_experts_that_are_not_held_give_zeros() -> None:
    case, batch = published_experts(), routed(50)
    elsewhere = batch.ids >= 20
    marked = torch.where(elsewhere, NUM_EXPERTS, batch.ids)
    expected = torch.where(elsewhere[:, :, None], 0.0, case.run(*batch))
    assert torch.equal(case.run(batch.x, marked, batch.weights, False), expected)
    nobody = torch.full_like(batch.ids, NUM_EXPERTS)
    assert torch.equal(case.run(batch.x, nobody, batch.weights, False), torch.zeros_like(expected))


@pytest.mark.parametrize("tokens", [1, 16, 64, 130])
def test_experts_repeat(tokens: int) -> None:
    case, batch = published_experts(), routed(tokens, skew=1.0)
    check_repeats(lambda: case.run(*batch))


@pytest.mark.parametrize(("dim", "experts", "tokens"), [(256, 16, 620), (256, 16, 1800), (512, 8, 300)])
def test_experts_repeat_where_none_has_few_tokens(dim: int, experts: int, tokens: int) -> None:
    """The launch for experts with few tokens then has nothing to do, and must not let the one behind it overtake."""
    case, batch = experts_case(dim, 256, experts), routed(tokens, dim, experts)
    check_repeats(lambda: case.run(*batch))
    rows = slice(tokens // 3, tokens // 3 + 100)
    assert torch.equal(case.run(*batch)[rows], case.run(*batch.rows(rows)))


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_broken_token_stays_in_its_rows_of_the_experts(tokens: int) -> None:
    case, batch = published_experts(), routed(tokens + 1)
    expected = case.run(*batch.rows(slice(tokens)))
    for value in (float("nan"), float("inf")):
        broken = batch._replace(x=batch.x.clone())
        broken.x[-1, 70] = value
        observed = case.run(*broken)
        assert observed[-1].isnan().all()
        assert torch.equal(observed[:-1], expected)


def test_outputs_are_summed_as_the_plain_combine_sums_them() -> None:
    from deepinfer.ops.triton_kernels.routing import combine_experts

    for tokens, width, topk in ((1, 5120, 6), (130, 5120, 6), (9, 1000, 3), (4, 64, 1)):
        outputs = torch.randn(tokens, topk, width, device="cuda").bfloat16()
        ids = torch.stack([torch.randperm(384, device="cuda")[:topk] for _ in range(tokens)])
        assert torch.equal(combine_experts(outputs, ids), combine(outputs, ids))


def test_a_token_without_experts_is_summed_within_its_own_outputs() -> None:
    """A padding token has the id of no expert in every place; whole numbers, because the order of equal ids is open."""
    from deepinfer.ops.triton_kernels.routing import combine_experts

    outputs = torch.randint(-8, 9, (5, 6, 1024), device="cuda").bfloat16()
    ids = torch.stack([torch.randperm(384, device="cuda")[:6] for _ in range(5)])
    ids[2:] = 384
    assert torch.equal(combine_experts(outputs, ids), combine(outputs, ids))


def test_experts_can_be_captured_and_compiled() -> None:
    from deepinfer.ops.triton_kernels.routing import combine_experts

    case, batch = published_experts(), routed(9)

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return combine_experts(case.run(x, ids, weights), ids)

    expected = layer(*batch)
    check_captured(lambda: layer(*batch), expected)
    torch.compiler.reset()
    assert torch.equal(torch.compile(layer, fullgraph=True, dynamic=False)(*batch), expected)


@pytest.mark.parametrize("num_experts", [7, 128, 384])
@pytest.mark.parametrize("tokens", [1, 37, 2048])
def test_pairs_are_sorted_by_expert_and_active_experts_listed(num_experts: int, tokens: int) -> None:
    from deepinfer.ops.triton_kernels.routing import prepare

    batch = routed(tokens, 128, num_experts, skew=2.0)
    marked = torch.where(batch.ids == 3, num_experts, batch.ids)
    expected = marked.flatten().argsort(stable=True)
    counts = marked.flatten().bincount(minlength=num_experts + 1)[:num_experts]
    ends = counts.cumsum(0)
    for split in (False, True):
        prepared = prepare(batch.x, marked, num_experts, split, True)
        assert torch.equal(prepared.order.long(), expected)
        found = {e: (a, b) for e, a, b, _ in prepared.active.tolist() if e >= 0}
        assert found == {e: (int(ends[e] - counts[e]), int(ends[e])) for e in counts.nonzero().flatten().tolist()}
        large = int((counts > 8).sum()) if split else 0
        small = int((counts > 0).sum()) - large
        assert (prepared.active[:small, 0] >= 0).all()
        assert (prepared.active[tokens * TOPK - large :, 0] >= 0).all()


@torch.no_grad()
def test_a_feed_forward_agrees_in_all_three_forms_compiled_or_not() -> None:
    x = random_activations(19, 256, "cuda")
    forms = {"plain": reference_ops(), "inductor": inductor_ops(), "triton": triton_ops()}
    layers = {name: random_model(packable_config(), device="cuda", ops=ops).layers[0].ffn for name, ops in forms.items()}
    assert layers["triton"].experts.w1.packed is not None
    expected = layers["plain"](x)
    for name in ("inductor", "triton"):
        check_kernel(layers[name](x), expected, "expert kernel", name)
        torch.compiler.reset()
        # As a model is compiled: without its settings the compiler leaves out roundings between operations that it fuses.
        check_kernel(compile_function(layers[name])(x), expected, "expert kernel", f"{name}, compiled")


@torch.no_grad()
@pytest.mark.parametrize("tokens", [2, 19, 130])
def test_a_feed_forward_with_its_shared_expert_beside_it_repeats_and_can_be_captured(tokens: int) -> None:
    layer = random_model(packable_config(), device="cuda", ops=triton_ops()).layers[0].ffn
    x = random_activations(tokens, 256, "cuda")
    assert layer.shared_experts.w1.joined is not None
    check_repeats(lambda: layer(x))
    check_captured(lambda: layer(x), layer(x))


@torch.no_grad()
def test_a_sequence_does_not_depend_on_its_company_in_a_model_over_the_kernels() -> None:
    model = random_model(packable_config(), device="cuda", ops=triton_ops(batch_invariant=True))
    ids = torch.randint(277, (5, 33), device="cuda")
    together = model(ids)
    assert together.isfinite().all()
    for i in range(5):
        assert torch.equal(model(ids[i]), together[i])


@torch.no_grad()
def test_values_of_packed_weights_are_the_stored_ones_on_the_device() -> None:
    for fmt, (weight, scale) in (("fp8", random_fp8(128, 256, device="cuda")), ("fp4", random_fp4(128, 512, (3,), device="cuda"))):
        pack, unpack = (pack_fp8, unpack_fp8) if fmt == "fp8" else (pack_fp4, unpack_fp4)
        again, scale_again = unpack(pack(weight, scale))
        assert torch.equal(again.view(torch.uint8), weight.view(torch.uint8))
        assert torch.equal(scale_again, scale.view(torch.uint8))


@pytest.mark.parametrize("tokens", [1, 17, 130])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (5120, 2304), (1792, 5120)])
def test_the_block_scaled_linear_agrees_with_its_plain_twin(n: int, k: int, tokens: int) -> None:
    from deepinfer.ops.triton_kernels.block_scaled import block_scaled_linear, quantize_codes

    (weight, scale), x = random_fp8(n, k, device="cuda"), random_activations(tokens, k, "cuda")
    codes, code_scales = quantize_codes(x)
    values = codes.float() * torch.exp2(code_scales.float() - 127).repeat_interleave(32, dim=1)
    assert torch.equal(values, round_fp8(x.float()))
    expected = block_matmul(round_fp8(x).float(), dequantize_fp8(weight, scale)).bfloat16()
    check_kernel(block_scaled_linear(codes, code_scales, weight, scale.view(torch.uint8)), expected, "kernel", f"{tokens} tokens")
    x[-1, 40] = float("nan")
    observed = block_scaled_linear(*quantize_codes(x), weight, scale.view(torch.uint8))
    assert observed[-1].isnan().all()
    assert not observed[:-1].isnan().any()


@torch.no_grad()
def test_a_feed_forward_in_the_checkpoints_layout_agrees_with_the_plain_one() -> None:
    x = random_activations(19, 256, "cuda")
    plain = random_model(packable_config(), device="cuda", ops=reference_ops())
    # Packed by what this device is, the model would not keep the layout.
    native = random_model(packable_config(), device="cuda", ops=replace(triton_ops(), packs_weights=False))
    assert pack_model(native, CHECKPOINT_ORDER) == 2
    assert native.layers[0].ffn.experts.w1.block_scaled
    check_kernel(native.layers[0].ffn(x), plain.layers[0].ffn(x), "expert kernel", "feed-forward")
    ids = torch.randint(277, (2, 20), device="cuda")
    assert native(ids).isfinite().all()
