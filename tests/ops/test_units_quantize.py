import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.ops.formats import E2M1_VALUES, decode_e2m1, decode_e8m0
from deepinfer.ops.quantize import (
    FLOAT4_E2M1_MAX,
    FLOAT8_E4M3_MAX,
    FP8_AMAX_FLOOR,
    round_e2m1,
    round_fp4_e4m3,
    round_fp4_ue8m0,
    round_fp8,
    ue8m0_scale,
)
from tests.golden import published_numbers, recorded_unit

ROUNDINGS = {"act_fp8": round_fp8, "act_fp4_g32": round_fp4_ue8m0, "act_fp4_g16": round_fp4_e4m3}
PUBLISHED = {"fp8_block32_ue8m0": round_fp8, "fp4_block32_ue8m0": round_fp4_ue8m0, "fp4_block16_e4m3": round_fp4_e4m3}

finite_rows = st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32).map(lambda row: torch.tensor([row]))


@pytest.mark.golden
@pytest.mark.parametrize("group", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_gives_the_recorded_values_in_both_dtypes(group: str, dtype: torch.dtype) -> None:
    unit = recorded_unit(group)
    rounded = ROUNDINGS[group](unit["x"].to(dtype))
    assert rounded.dtype == dtype
    assert torch.equal(rounded.bfloat16(), unit["qdq"])
    assert torch.equal(rounded.float(), unit["qdq"].float()), "every rounded value is exact in bfloat16"


@pytest.mark.golden
def test_rounded_fp8_values_are_the_recorded_codes_times_the_recorded_scales() -> None:
    unit = recorded_unit("act_fp8")
    scale = decode_e8m0(unit["scale_e8m0"]).repeat_interleave(32, dim=1)
    assert torch.equal(round_fp8(unit["x"]).float(), unit["codes"].view(torch.float8_e4m3fn).float() * scale)
    amax = unit["x"].float().unflatten(1, (-1, 32)).abs().amax(dim=2).clamp(min=FP8_AMAX_FLOOR)
    assert torch.equal(ue8m0_scale(amax, FLOAT8_E4M3_MAX), decode_e8m0(unit["scale_e8m0"]))


@pytest.mark.golden
@pytest.mark.parametrize("group", ["act_fp4_g32", "act_fp4_g16"])
def test_rounded_fp4_values_are_the_recorded_codes_times_the_recorded_scales(group: str) -> None:
    unit = recorded_unit(group)
    scale = decode_e8m0(unit["scale_e8m0"]) if "scale_e8m0" in unit else unit["scale_e4m3"].view(torch.float8_e4m3fn).float()
    values = decode_e2m1(unit["packed"]) * scale.repeat_interleave(128 // scale.shape[1], dim=1)
    assert torch.equal(ROUNDINGS[group](unit["x"]).float(), values)


@pytest.mark.golden
def test_e2m1_rounding_gives_the_recorded_values_and_codes() -> None:
    unit = recorded_unit("e2m1_round")
    rounded = round_e2m1(unit["x"])
    assert torch.equal(rounded, unit["y"])
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    assert torch.equal(rounded, values[unit["code"].long()])


@pytest.mark.golden
def test_e2m1_ties_go_to_the_even_code_as_published() -> None:
    ties = published_numbers()["e2m1_ties"]
    rounded, expected = round_e2m1(torch.tensor(ties["input"])), torch.tensor(ties["output"])
    assert torch.equal(rounded, expected)
    # A negative number that rounds to nothing keeps its sign.
    assert torch.equal(torch.signbit(rounded), torch.signbit(expected))


@pytest.mark.golden
@pytest.mark.parametrize("name", PUBLISHED)
def test_rounding_gives_the_published_examples(name: str) -> None:
    example = published_numbers()["fake_quant"]
    rounded = PUBLISHED[name](torch.tensor(example["input_bf16"], dtype=torch.bfloat16))
    assert torch.equal(rounded.float(), torch.tensor(example[name]["dequant_bf16"]))


def test_power_of_two_scale_is_the_smallest_that_holds_the_largest_value() -> None:
    amax = torch.tensor([448.0, 448.5, 224.0, 1.0, 6.0, 1e-4])
    scale = ue8m0_scale(amax, FLOAT8_E4M3_MAX)
    assert scale.tolist() == [1.0, 2.0, 0.5, 2.0**-8, 2.0**-6, 2.0**-22]
    assert ue8m0_scale(torch.tensor([6.0, 6.5, 3.0]), FLOAT4_E2M1_MAX).tolist() == [1.0, 2.0, 0.5]


@given(finite_rows)
def test_rounding_to_fp8_again_changes_nothing(row: Tensor) -> None:
    once = round_fp8(row)
    assert torch.equal(round_fp8(once), once)


@given(finite_rows)
def test_rounding_to_fp4_with_power_of_two_scales_again_changes_nothing(row: Tensor) -> None:
    once = round_fp4_ue8m0(row)
    assert torch.equal(round_fp4_ue8m0(once), once)


@given(finite_rows)
def test_rounded_values_stay_within_half_a_step(row: Tensor) -> None:
    amax = row.abs().amax().clamp(min=FP8_AMAX_FLOOR)
    scale = ue8m0_scale(amax, FLOAT8_E4M3_MAX)
    # Half a step of e4m3: 2^-4 of the value, but at least half the subnormal step.
    allowed = torch.maximum(row.abs() * 2.0**-4, scale * 2.0**-10)
    assert ((round_fp8(row) - row).abs() <= allowed).all()
    # e2m1 has no code between 4 and 6, so half a step is 1.
    scale = ue8m0_scale(row.abs().amax().clamp(min=1e-30), FLOAT4_E2M1_MAX)
    assert ((round_fp4_ue8m0(row) - row).abs() <= scale).all()


@given(st.integers(-8, 8), finite_rows)
def test_rounding_does_not_depend_on_the_neighbour_groups(shift: int, row: Tensor) -> None:
    neighbour = torch.full_like(row, 2.0**shift)
    assert torch.equal(round_fp8(torch.cat((neighbour, row), dim=1))[:, 32:], round_fp8(row))
    assert torch.equal(round_fp4_e4m3(torch.cat((neighbour, row), dim=1))[:, 32:], round_fp4_e4m3(row))
