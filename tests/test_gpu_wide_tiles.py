"""What many rows go through where bits may depend on their number: other tiles of experts, attention and linears, on a GPU."""

import pytest
import torch
from torch import Tensor

from deepinfer.ops.attend import attend
from tests.kernels import check_kernel
from tests.test_gpu_kernels import LINEARS, NUM_EXPERTS, Routed, experts_case, linear_case, pytestmark, routed

__all__ = ["pytestmark"]

MANY = 700  # tokens of six experts among NUM_EXPERTS: more than any tile


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("skew", [0.0, 2.0])
@pytest.mark.parametrize(("dim", "inter_dim", "experts"), [(5120, 2304, NUM_EXPERTS), (256, 256, 7), (512, 768, 33)])
def test_wide_experts_agree_with_their_plain_twin(dim: int, inter_dim: int, experts: int, skew: float) -> None:
    case, batch = experts_case(dim, inter_dim, experts), routed(MANY, dim, experts, skew)
    observed = case.run(*batch, invariant=False)
    assert not torch.equal(observed, case.run(*batch)), "both went through the same tiles"
    expected = case.plain(batch.x, batch.weights, batch.ids)
    check_kernel(observed, expected, "expert kernel", f"{experts} experts")
    for _ in range(20):
        assert torch.equal(case.run(*batch, invariant=False), observed)


def test_wide_experts_leave_rows_alone() -> None:
    """Pairs of nobody give zeros, a broken token breaks its own rows, and pieces are what the whole is."""
    case, batch = experts_case(256, 256, 16), routed(MANY, 256, 16)
    whole = case.run(*batch, invariant=False)
    marked = torch.where(batch.ids >= 9, 16, batch.ids)
    expected = torch.where(batch.ids[:, :, None] >= 9, 0.0, whole)
    assert torch.equal(case.run(batch.x, marked, batch.weights, False, invariant=False), expected)
    broken = Routed(batch.x.clone(), batch.ids, batch.weights)
    broken.x[5, 70] = float("nan")
    observed = case.run(*broken, invariant=False)
    assert observed[5].isnan().all()
    assert torch.equal(observed[6:], whole[6:])
    assert torch.equal(observed[:5], whole[:5])
    many = Routed(*(torch.cat([tensor] * 17) for tensor in batch))  # beyond what is computed at once
    assert torch.equal(case.run(*many, invariant=False), torch.cat([whole] * 17))


@pytest.mark.parametrize("name", [name for name in LINEARS if name not in {"least", "engram wkv", "main_proj"}])
def test_a_linear_of_many_tokens_agrees_whatever_its_split(name: str) -> None:
    case = linear_case(name)
    x = torch.cat([case.x] * 16)
    observed = case.run(x, invariant=False)
    check_kernel(observed, torch.cat([case.expected] * 16), "kernel", name)
    # Few tokens have one way of being summed.
    assert torch.equal(case.run(case.x[:128], invariant=False), case.run(case.x[:128]))


@pytest.mark.parametrize(("rows", "heads", "entries"), [(64, 64, 512), (300, 64, 0), (100, 20, 700), (2048, 64, 1024)])
def test_wide_attention_agrees_with_its_plain_twin(rows: int, heads: int, entries: int) -> None:
    from deepinfer.ops.triton_kernels.attention import attend_in_place

    window, channels = 128, 512
    torch.manual_seed(0)
    pool, q = torch.randn(5000, channels, device="cuda").bfloat16(), torch.randn(rows, heads, channels, device="cuda").bfloat16()
    places = torch.randint(5000, (rows, window + entries), device="cuda", dtype=torch.int32)
    is_own = torch.zeros(rows, window, dtype=torch.bool, device="cuda")
    visible = torch.rand(rows, window + entries, device="cuda") < 0.7
    visible[2], visible[3, 1:] = False, False
    visible &= places != 8
    pool[8] = float("nan")
    sink = torch.randn(heads, device="cuda")

    def run(invariant: bool) -> Tensor:
        return attend_in_place(q, pool, pool, pool, places, is_own, visible, sink, channels**-0.5, invariant)

    observed = run(False)
    assert not torch.equal(observed, run(True)), "both went through the same cut"
    parts = range(0, rows, 64)
    expected = torch.cat(
        [attend(q[i : i + 64], pool[places[i : i + 64]], visible[i : i + 64], sink, channels**-0.5) for i in parts]
    )
    check_kernel(observed, expected, "kernel", f"{rows} rows")
    assert not observed[2].any()
    for _ in range(20):
        assert torch.equal(run(False), observed)
