import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.ops.sinkhorn import sinkhorn, sum_in_order
from tests.golden import check_bits, published_numbers, recorded_unit
from tests.tolerances import check_close

EPS = 1e-6


@pytest.mark.golden
def test_mixing_matrix_has_the_recorded_bits() -> None:
    unit = recorded_unit("sinkhorn")
    logits = (unit["mixes"][:, 8:] * unit["scale"][2] + unit["base"][8:]).unflatten(1, (4, 4))
    check_bits(sinkhorn(logits, 20, EPS), unit["comb"], "sinkhorn")


@pytest.mark.golden
def test_one_round_less_is_seen() -> None:
    unit = recorded_unit("sinkhorn")
    logits = (unit["mixes"][:, 8:] * unit["scale"][2] + unit["base"][8:]).unflatten(1, (4, 4))
    assert not torch.equal(sinkhorn(logits, 19, EPS), unit["comb"])


@pytest.mark.golden
def test_mixing_matrix_is_the_published_example_up_to_the_softmax() -> None:
    example = published_numbers()["mhc_split_sinkhorn"]
    mixes, scale, base = (torch.tensor(example[name]) for name in ("mixes", "scale", "base"))
    logits = (mixes[:, 8:] * scale[2] + base[8:]).unflatten(1, (4, 4))
    observed = {
        "pre": torch.sigmoid(mixes[:, :4] * scale[0] + base[:4]) + EPS,
        "post": 2 * torch.sigmoid(mixes[:, 4:8] * scale[1] + base[4:8]),
        "comb_jk": sinkhorn(logits, example["iters"], example["eps"]),
    }
    for name, value in observed.items():
        check_close(value, torch.tensor(example[name]), "sinkhorn with torch.softmax", "float32", name)


def test_sum_runs_from_left_to_right() -> None:
    # In another order the small terms would survive: (1 + 2e-8) + 2e-8 is 1, but 1 + 4e-8 + .. need not be.
    x = torch.tensor([1.0, *[2.0**-25] * 7])
    assert float(sum_in_order(x, 0)) == 1.0
    assert float(sum_in_order(x.flip(0), 0)) > 1.0


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_rows_and_columns_sum_to_nearly_one(seed: int, size: int) -> None:
    logits = 3 * torch.randn(7, size, size, generator=torch.Generator().manual_seed(seed))
    mix = sinkhorn(logits, 200, EPS)
    for dim in (1, 2):
        torch.testing.assert_close(mix.sum(dim=dim), torch.ones(7, size), rtol=0, atol=5e-3)
