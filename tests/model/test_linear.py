import pytest
import torch
from safetensors.torch import load_file

from deepinfer.errors import ShapeError
from deepinfer.model.linear import Linear, StoredMatrix
from deepinfer.model.numerics import Numerics, precision_named, reference_ops
from tests.golden import CASES, GOLDEN, fresh_model, recorded, shared_model


@pytest.mark.golden
def test_decoded_weights_are_those_of_the_decoded_checkpoint() -> None:
    decoded = load_file(GOLDEN / "swa_tiny" / "model_dequant.safetensors")
    compared = 0
    for name, module in shared_model("swa_tiny", "float32").named_modules():
        if not isinstance(module, StoredMatrix) or not module.is_quantized:
            continue
        values = module.values(torch.bfloat16)
        stack, _, matrix = name.rpartition(".")
        parts = (
            {f"{stack}.{i}.{matrix}.weight": part for i, part in enumerate(values)}
            if values.dim() == 3
            else {f"{name}.weight": values}
        )
        for part, value in parts.items():
            assert torch.equal(value, decoded[part]), part
            compared += 1
    # Five attention matrices, and three of each of the five experts, in three layers.
    assert compared == 3 * (5 + 3 * 5)


@pytest.mark.golden
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_weights_decoded_at_each_use_give_the_bits_of_weights_decoded_once(case: str) -> None:
    ids = recorded(case, "native")["input_ids"]
    kept, decoding = shared_model(case, "native"), fresh_model(case, "native")
    for module in decoding.modules():
        if isinstance(module, StoredMatrix):
            assert module.expanded is not None
            module.expanded = None
    assert torch.equal(decoding(ids), kept(ids))


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ShapeError, match="fp6"):
        Linear(32, 32, "fp6", Numerics(precision=precision_named("native"), ops=reference_ops()))


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "fp4"])
@pytest.mark.parametrize("precision", ["native", "float32"])
def test_linear_gives_the_input_dtype_and_rounds_activations_for_quantised_weights_in_native_only(fmt: str, precision: str) -> None:
    numerics = Numerics(precision=precision_named(precision), ops=reference_ops())
    linear, exact = Linear(64, 32, fmt, numerics), torch.randn(5, 64)
    linear.weight.view(torch.uint8).fill_(0x38)  # 1.0 in e4m3, and some value in the others
    if linear.is_quantized:
        linear.scale.view(torch.uint8).fill_(127)
    x = exact.to(numerics.precision.activation_dtype)
    y = linear(x)
    assert y.dtype == x.dtype
    plain = x.float() @ linear.values(torch.float32).T
    rounds = fmt != "bf16" and precision == "native"
    # A bfloat16 result is within 2^-8 of the exact product of the same operands; FP8 activations are not.
    is_near = torch.allclose(y.float(), plain, rtol=2.0**-8, atol=1e-4)
    assert is_near != rounds
