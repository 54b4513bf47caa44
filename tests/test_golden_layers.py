"""`native`, layer by layer: each layer gets the recorded input, so nothing that a layer below got wrong can excuse it."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from deepinfer.model.hyper_connection import first_stream
from deepinfer.model.indexer import Shared
from tests.golden import CASES, Session, choosing_as_recorded, fresh_model, observing, recorded, sums_as_recorded

pytestmark = pytest.mark.golden

# Two steps of bfloat16 relative to the row's largest value: where another library sums, last bits decide roundings.
TWO_STEPS = 2.0**-6
MOST_TIED_ROWS = 0.08  # share of rows whose choice among equal scores is taken from the recording


class Layered(NamedTuple):
    """One case driven layer by layer."""

    observed: dict[str, Tensor]  # "layers.L.name", rows first
    same_choices: dict[int, Tensor]  # layer -> rows whose experts and entries are the recorded ones
    tied_share: float


@torch.no_grad()
def drive_layers(case: str) -> Layered:
    recording = recorded(case, "native")
    model = fresh_model(case, "native")
    ids = recording["input_ids"]
    session = Session(model, *ids.shape)
    rows = session.rows([(sequence, 0) for sequence in ids])
    rope, shared, observed, same = model.rope(rows.positions), Shared(), {}, {}
    window = model.token_window(rows, session.cache) if model.config.engram.layer_ids else None

    def flat(name: str) -> Tensor:
        return recording[f"prefill.{name}"].flatten(0, 1)

    streams = flat("embed")[:, None].expand(-1, model.config.hyper_connection.mult, -1)
    assert torch.equal(flat("layers.0.pre_mix_in"), first_stream(streams))
    with choosing_as_recorded(model, recording) as replaced, observing(model) as captured:
        for index, layer in enumerate(model.layers):
            if layer.engram is not None:
                layer.engram(streams, window, model.token_window.pad)
                streams = flat(f"layers.{index}.engram_out")
            _, _, shared = layer(streams, flat(f"layers.{index}.pre_mix_in"), rows, rope, shared, session.cache.layers[index])
            same[index] = (captured[f"layers.{index}.router_idx"] == flat(f"layers.{index}.router_idx")).all(dim=1)
            selected = f"layers.{index}.index_topk"
            if selected in captured:
                width = recording[f"prefill.{selected}"].shape[-1]
                same[index] &= (captured[selected][:, :width] == flat(selected)).all(dim=1)
            streams = flat(f"layers.{index}.out")
        observed = dict(captured)
    choices = sum(1 for name in recording if name.startswith("prefill.") and name.endswith(("index_topk", "candidates")))
    return Layered(observed, same, sum(replaced.values()) / max(1, choices * ids.numel()))


@pytest.fixture(scope="module", params=CASES)
def layered(request: pytest.FixtureRequest) -> tuple[str, Layered]:
    return request.param, drive_layers(request.param)


@pytest.mark.parametrize("part", ["engram_out", "attn_out", "ffn_out", "out"])
def test_every_layer_given_its_recorded_input_gives_its_recorded_output(layered: tuple[str, Layered], part: str) -> None:
    case, driven = layered
    recording, wrong = recorded(case, "native"), []
    for name in (name for name in driven.observed if name.endswith(f".{part}")):
        expected = recording[f"prefill.{name}"].flatten(0, 1)
        if sums_as_recorded():
            if not torch.equal(driven.observed[name], expected):
                wrong.append(f"{name}: {int((driven.observed[name] != expected).sum())} of {expected.numel()} values differ")
            continue
        same = driven.same_choices[int(name.split(".")[1])]
        distance = (driven.observed[name].double() - expected.double()).flatten(1).abs().amax(dim=1)
        relative = (distance / expected.double().flatten(1).abs().amax(dim=1))[same]
        if float(relative.max()) > TWO_STEPS:
            wrong.append(f"{name}: off by {float(relative.max()):.4f} of the row's largest value")
    assert not wrong, "\n".join(wrong)


def test_choices_are_the_recorded_ones_but_for_few_ties(layered: tuple[str, Layered]) -> None:
    case, driven = layered
    print(case, driven.tied_share, [int((~s).sum()) for s in driven.same_choices.values()])
    assert driven.tied_share <= MOST_TIED_ROWS
    different = torch.stack([~same for same in driven.same_choices.values()]).double().mean()
    assert float(different) <= (0.0 if sums_as_recorded() else 0.02)
