"""The forms of quantised products behind one seam: plain, for a compiler, and over packed weights."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from deepinfer.checkpoint.load import load_model
from deepinfer.errors import ConfigError
from deepinfer.model.linear import Linear
from deepinfer.model.moe import Experts
from deepinfer.model.numerics import Numerics, inductor_ops, precision_named, reference_ops, triton_ops
from deepinfer.model.packed_weights import pack_experts, pack_linears, pack_model, packing_obstacle
from deepinfer.model.transformer import Transformer
from deepinfer.ops.triton_kernels.packing import CHECKPOINT_ORDER
from deepinfer.presets import random_model, tiny_config
from tests.golden import CASES, GOLDEN, recorded, shared_model
from tests.kernels import check_kernel, packable_config, random_activations, random_fp4, random_fp8
from tests.tolerances import TABLE, check_close

IDS = torch.randint(277, (2, 21), generator=torch.Generator().manual_seed(0))


@pytest.mark.golden
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_form_for_a_compiler_gives_the_recorded_logits_up_to_the_order_of_sums(case: str) -> None:
    ids = recorded(case, "native")["input_ids"]
    logits = load_model(GOLDEN / case, "native", "cpu", ops=inductor_ops())(ids)
    specific = f"{case}/logits" if (f"{case}/logits", "native, other sums") in TABLE else "logits"
    check_close(logits, shared_model(case, "native")(ids), specific, "native, other sums")


@torch.no_grad()
def test_the_form_for_a_compiler_agrees_with_the_plain_one_in_float32_to_the_order_of_sums() -> None:
    config = tiny_config()
    plain, compilable = (random_model(config, precision="float32", device="cpu", ops=o) for o in (reference_ops(), inductor_ops()))
    check_close(compilable(IDS), plain(IDS), "continuation", "float32")


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_linear_for_a_compiler_rounds_as_the_plain_one(tokens: int) -> None:
    linear = Linear(256, 96, "fp8", Numerics(precision=precision_named("native"), ops=inductor_ops()))
    linear.weight, linear.scale = (nn.Parameter(t, requires_grad=False) for t in random_fp8(96, 256))
    x = random_activations(tokens, 256)
    check_kernel(linear(x), reference_ops().linear(x, linear, linear.numerics), "kernel", "linear")
    groups = random_activations(tokens, 512).unflatten(1, (2, 256))
    plain = reference_ops().grouped_linear(groups, linear, linear.numerics)
    check_kernel(linear.forward_groups(groups), plain, "kernel", "groups")


def quantized_experts(expert_ids: tuple[int, ...] | None = None) -> Experts:
    """Eight experts whose weights depend on the expert alone."""
    config = packable_config()
    stack = Experts(config, config.moe, Numerics(precision=precision_named("native"), ops=inductor_ops()), expert_ids)
    for name in ("w1", "w2", "w3"):
        torch.manual_seed(3)
        matrix = stack.get_submodule(name)
        weight, scale = random_fp4(matrix.out_features, matrix.in_features, (8,))
        held = list(stack.expert_ids)
        matrix.weight = nn.Parameter(weight[held], requires_grad=False)
        matrix.scale = nn.Parameter(scale.view(torch.uint8)[held].view(scale.dtype), requires_grad=False)
        matrix.keep_scale_bytes()
    return stack


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("expert_ids", [None, (1, 4, 6)])
def test_experts_for_a_compiler_agree_with_one_expert_after_the_other(tokens: int, expert_ids: tuple[int, ...] | None) -> None:
    stack = quantized_experts(expert_ids)
    x, weights = random_activations(tokens, 256), torch.rand(tokens, 2)
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(tokens)])
    observed = stack(x, weights, ids)
    plain = reference_ops().experts(x, weights, ids, stack)
    check_kernel(observed, plain, "expert kernel", "experts")
    if expert_ids is not None:
        elsewhere = ~torch.isin(ids, torch.tensor(expert_ids))
        assert not observed[elsewhere].any()


def packed_bytes(model: Transformer) -> int:
    tensors = [*model.parameters(), *(b for m in model.modules() for b in m._buffers.values() if b is not None)]
    return sum(storage.nbytes() for storage in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values())


@torch.no_grad()
def test_a_packed_model_holds_one_copy_and_gives_the_same_bits() -> None:
    model = random_model(packable_config(), device="cpu")
    for module in model.modules():
        if getattr(module, "expanded", None) is not None:
            module.expanded = None
    expected, before = model(IDS), packed_bytes(model)
    layer = model.layers[2]
    assert pack_model(model) == 0
    # 192 channels, of which a packed matrix has a multiple of 128.
    assert model.layers[1].engram.wkv.packed.padded_channels == 256
    assert layer.attn.wo_a.packed.bf16
    for matrix in (layer.attn.wq_b, layer.attn.wkv, layer.attn.indexer.wq_b, layer.ffn.shared_experts.w2, layer.ffn.experts.w3):
        assert matrix.packed is not None
        assert matrix.weight is None
        assert matrix.scale is None
        assert matrix.scale_bytes is None
    assert torch.equal(model(IDS), expected)
    # A byte a row and a counter a tile more than the checkpoint, and scales of 32 bits for FP8.
    assert packed_bytes(model) < 1.02 * before


def test_matrices_of_one_input_are_parts_of_one() -> None:
    model = random_model(packable_config(), device="cpu")
    pack_model(model)
    attn, shared = model.layers[0].attn, model.layers[0].ffn.shared_experts
    assert attn.wq_a.joined is attn.wkv.joined
    assert shared.w1.joined is shared.w3.joined
    assert shared.w2.joined is None
    whole = attn.wq_a.joined.words
    assert attn.wq_a.packed.words.data_ptr() == whole.data_ptr()
    assert attn.wkv.packed.words.data_ptr() == whole[attn.wq_a.out_features // 64].data_ptr()


def test_nothing_is_packed_without_quantised_activations() -> None:
    model = random_model(packable_config(), precision="float32", device="cpu")
    assert pack_model(model) == 0
    assert all(getattr(module, "packed", None) is None for module in model.modules())


def test_what_cannot_be_packed_exactly_stays_and_says_why() -> None:
    model = random_model(packable_config(), device="cpu")
    attn, stack = model.layers[0].attn, model.layers[0].ffn.experts
    attn.wq_b.scale.view(torch.uint8)[0, 0] = 60
    assert "spread" in str(pack_linears([attn.wq_b]))
    assert attn.wq_b.packed is None
    stack.w3.scale.view(torch.uint8)[5, 7, 0] = 60
    assert "spread" in str(packing_obstacle(stack))
    assert stack.w1.packed is None
    unclamped = quantized_experts()
    unclamped.swiglu_limit = 0.0
    assert "may reach inf" in str(packing_obstacle(unclamped))
    config = replace(packable_config(), moe=replace(packable_config().moe, n_activated_experts=1))
    assert Experts(config, config.moe, model.numerics).largest_weight == float("inf")
    assert "groups have 64" not in str(pack_linears([attn.wo_a], 2))
    assert "groups have 32 rows" in str(pack_linears([model.layers[1].attn.wo_a], 4))


def test_batch_invariant_arithmetic_refuses_experts_that_no_kernel_takes() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    model = random_model(packable_config(), device="cpu", ops=reference_ops())
    model.layers[3].ffn.experts.w3.scale.view(torch.uint8)[5, 7, 0] = 60
    for module in model.modules():
        if hasattr(module, "numerics"):
            module.numerics = replace(module.numerics, ops=triton_ops(batch_invariant=True))
    with pytest.raises(ConfigError, match=r"layers\.3\.ffn\.experts cannot be packed .* spread over"):
        pack_model(model)


def test_members_of_a_packed_stack_are_unpacked_one_by_one() -> None:
    stack = quantized_experts()
    expected = [m.values(torch.float32) for m in (stack.w1, stack.w3, stack.w2)]
    pack_experts(stack)
    for matrix, values in zip((stack.w1, stack.w3, stack.w2), expected, strict=True):
        assert torch.equal(matrix.values(torch.float32), values)
        assert torch.equal(matrix.values(torch.float32, 5), values[5])
        assert torch.equal(matrix.values(torch.float32, torch.tensor([6, 0])), values[[6, 0]])


@torch.no_grad()
def test_the_checkpoint_layout_packs_only_the_matrix_whose_activations_are_not_quantised() -> None:
    model = random_model(packable_config(), device="cpu")
    expected = model(IDS)
    assert pack_model(model, CHECKPOINT_ORDER) == 2
    attn, ffn = model.layers[0].attn, model.layers[0].ffn
    assert attn.wo_a.packed is not None
    for matrix in (attn.wq_a, attn.wkv, attn.wq_b, attn.wo_b, ffn.shared_experts.w1, ffn.experts.w3):
        assert matrix.block_scaled
        assert matrix.packed is None
    # 192 channels do not fill the kernel's steps.
    assert not model.layers[1].engram.wkv.block_scaled
    assert torch.equal(model(IDS), expected)
