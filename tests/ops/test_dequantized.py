"""The compiler's forms of quantised products against the plain ones."""

import torch

from deepinfer.ops.dequantized import e2m1_value, gathered_experts, grouped_experts, grouped_linear, linear_fp8, pair_product
from deepinfer.ops.elementwise import swiglu
from deepinfer.ops.formats import E2M1_VALUES, dequantize_fp4, dequantize_fp8
from deepinfer.ops.matmul import block_matmul, matmul
from deepinfer.ops.quantize import round_fp8
from tests.kernels import check_kernel, random_activations, random_fp4, random_fp8


def test_codes_become_values_by_their_bits() -> None:
    codes = torch.arange(16, dtype=torch.int32)
    expected = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
    assert torch.equal(e2m1_value(codes), expected)


def test_a_linear_agrees_with_blockwise_sums() -> None:
    (weight, scale), x = random_fp8(96, 160), random_activations(7, 160)
    plain = block_matmul(round_fp8(x).float(), dequantize_fp8(weight, scale)).bfloat16()
    check_kernel(linear_fp8(x, weight, scale.view(torch.uint8)), plain, "kernel", "linear")


def test_groups_see_their_own_rows() -> None:
    x, w = torch.randn(5, 3, 32).bfloat16(), torch.randn(12, 32).bfloat16()
    plain = torch.stack([matmul(x[:, g], w[4 * g : 4 * g + 4]) for g in range(3)], dim=1)
    check_kernel(grouped_linear(x, w), plain, "kernel", "groups")


def test_both_forms_of_the_experts_agree_with_each_expert_by_itself() -> None:
    d, f, e, limit = 64, 96, 8, 1.5
    stored = {name: random_fp4(n, k, (e,)) for name, n, k in (("w1", f, d), ("w2", d, f), ("w3", f, d))}
    values = {name: dequantize_fp4(*pair) for name, pair in stored.items()}
    args = [(weight, scale.view(torch.uint8)) for weight, scale in stored.values()]
    x, weights = random_activations(9, d), torch.rand(9, 3)
    # Expert 5 gets every token and expert 0 none.
    ids = torch.stack([torch.cat((torch.tensor([5]), torch.tensor([1, 2, 3, 4, 6, 7])[torch.randperm(6)[:2]])) for _ in range(9)])

    def product(row: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        return block_matmul(round_fp8(row).float(), values[name][expert]).bfloat16()

    plain = torch.empty(9, 3, d, dtype=torch.bfloat16)
    for t in range(9):
        for j, expert in enumerate(ids[t].tolist()):
            row = x[t : t + 1]
            hidden = swiglu(product(row, "w1", expert), product(row, "w3", expert), limit) * weights[t, j]
            plain[t, j] = product(hidden.bfloat16(), "w2", expert)[0]
    for form in (gathered_experts, grouped_experts):
        observed = form(x, ids, weights, *args, limit)
        check_kernel(observed, plain, "expert kernel", form.__name__)


def test_pairs_read_the_matrix_of_their_expert() -> None:
    weight, scale = random_fp4(32, 64, (4,))
    experts, x = torch.tensor([3, 0, 3]), torch.randn(3, 64)
    expected = torch.stack([x[i].double() @ dequantize_fp4(weight, scale)[e].double().T for i, e in enumerate(experts)])
    torch.testing.assert_close(pair_product(x, weight, scale.view(torch.uint8), experts).double(), expected, rtol=1e-5, atol=1e-5)
