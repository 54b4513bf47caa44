"""`native`, layer by layer: each layer gets the recorded input, so nothing that a layer below got wrong can excuse it."""

import pytest
import torch

from tests.golden import CASES, fresh_model, recorded, sums_as_recorded
from tests.layered import PARTS, Layered, drive_layers, far_layers

pytestmark = pytest.mark.golden

MOST_TIED_ROWS = 0.08  # share of rows whose choice among equal scores is taken from the recording


@pytest.fixture(scope="module", params=CASES)
def layered(request: pytest.FixtureRequest) -> tuple[str, Layered]:
    return request.param, drive_layers(request.param, fresh_model(request.param, "native"))


@pytest.mark.parametrize("part", PARTS)
def test_every_layer_given_its_recorded_input_gives_its_recorded_output(layered: tuple[str, Layered], part: str) -> None:
    case, driven = layered
    if not sums_as_recorded():
        assert not (wrong := far_layers(case, driven, part)), "\n".join(wrong)
        return
    recording, wrong = recorded(case, "native"), []
    for name in (name for name in driven.observed if name.endswith(f".{part}")):
        expected = recording[f"prefill.{name}"].flatten(0, 1)
        if not torch.equal(driven.observed[name], expected):
            wrong.append(f"{name}: {int((driven.observed[name] != expected).sum())} of {expected.numel()} values differ")
    assert not wrong, "\n".join(wrong)


def test_choices_are_the_recorded_ones_but_for_few_ties(layered: tuple[str, Layered]) -> None:
    case, driven = layered
    print(case, driven.tied_share, [int((~s).sum()) for s in driven.same_choices.values()])
    assert driven.tied_share <= MOST_TIED_ROWS
    different = torch.stack([~same for same in driven.same_choices.values()]).double().mean()
    assert float(different) <= (0.0 if sums_as_recorded() else 0.02)
