"""The recorded cases end to end: every recorded tensor, in every precision that was recorded."""

import re
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.golden import (
    CASES,
    PRECISIONS,
    as_recorded,
    fresh_model,
    recorded,
    recorded_facts,
    replay,
    shared_model,
    sums_as_recorded,
)
from tests.tolerances import difference, recorded_differences, tolerance

pytestmark = pytest.mark.golden

# Inputs, and margins that the recording derives from what is compared.
NOT_COMPARED = re.compile(r"(.*\.)?(input_ids|margin|engram_token_map|router_margin|index_margin)$")


@cache
def observed(case: str, precision: str) -> dict[str, Tensor]:
    """A replay of one recording; in `native`, where index scores tie often, with ties broken as recorded."""
    recording = recorded(case, precision)
    return as_recorded(replay(shared_model(case, precision), recording, ties_as_recorded=precision == "native"), recording)


def all_recordings() -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("case", "precision"), [(case, precision) for case in CASES for precision in PRECISIONS])


def rounded_recordings_need_recorded_sums(precision: str) -> None:
    if precision != "float32" and not sums_as_recorded():
        pytest.skip("this machine's float32 sums differ from the recording's in the last bit, and that moves roundings")


@all_recordings()
def test_every_recorded_tensor_is_observed(case: str, precision: str) -> None:
    names = {name for name in recorded(case, precision) if not NOT_COMPARED.match(name)}
    assert names <= observed(case, precision).keys()


@all_recordings()
def test_replay_agrees_with_every_recorded_tensor(case: str, precision: str) -> None:
    rounded_recordings_need_recorded_sums(precision)
    expected = {name: value for name, value in recorded(case, precision).items() if not NOT_COMPARED.match(name)}
    differences = list(recorded_differences(case, precision, observed(case, precision), expected))
    assert len(differences) == len(expected)
    wrong = [str(found) for found in differences if not found.is_allowed]
    assert not wrong, "\n".join(wrong)


@all_recordings()
def test_logits_stay_near_the_recording_on_any_machine(case: str, precision: str) -> None:
    mode = precision if precision == "float32" else f"{precision}, other sums"
    for name in ("prefill.logits", "decode.logits"):
        found = difference(name, observed(case, precision)[name], recorded(case, precision)[name], tolerance("logits", mode, case))
        assert found.is_allowed, f"{found}\n{found.allowed.reason}"


@all_recordings()
def test_first_greedy_token_is_the_one_that_was_fed(case: str, precision: str) -> None:
    rounded_recordings_need_recorded_sums(precision)
    first = observed(case, precision)["prefill.logits"][:, -1].argmax(dim=-1)
    assert first.tolist() == recorded_facts(case, precision)["first_decode_id"]
    assert torch.equal(first, recorded(case, precision)["decode.input_ids"][:, 0])


@pytest.mark.parametrize("case", CASES)
def test_token_map_built_from_the_tokenizer_is_the_recorded_one(case: str) -> None:
    model = shared_model(case, "float32")
    if not model.config.engram.layer_ids:
        pytest.skip("a model without Engram needs no token map")
    assert torch.equal(model.token_window.token_map, recorded(case, "float32")["engram_token_map"])


def test_rows_before_the_first_tie_need_no_help_to_be_bit_equal() -> None:
    """Ties are the only reason why an unaided replay of `select_full` differs: no row does before a choice does."""
    rounded_recordings_need_recorded_sums("native")
    recording = recorded("select_full", "native")
    unaided = as_recorded(replay(shared_model("select_full", "native"), recording), recording)
    choices = [name for name in recording if name.endswith((".index_topk", ".candidates"))]
    for part in ("prefill", "decode"):
        logits = (unaided[f"{part}.logits"] != recording[f"{part}.logits"]).any(dim=-1)[0]
        chosen = torch.stack(
            [(unaided[name].long() != recording[name].long()).any(dim=-1)[0] for name in choices if name.startswith(part)]
        ).any(dim=0)
        assert chosen.any(), "there are ties in the recording; if this replay met them all, it no longer shows anything"
        first = int(chosen.nonzero()[0])
        assert not logits[:first].any(), f"{part}: rows differ before the first tie, which is in row {first}"
        assert logits.sum() <= {"prefill": 3, "decode": 8}[part]


@pytest.mark.parametrize("precision", ["float32", "float32_kv"])
@pytest.mark.parametrize("case", ["select_full", "bf16_full"])
def test_published_index_keys_reproduce_what_the_published_decode_loses(case: str, precision: str) -> None:
    """The published decode scores against another layer's keys in every other step; `golden.json` says what that costs."""
    rounded_recordings_need_recorded_sums(precision)
    recording = recorded(case, precision)
    cost = recorded_facts(case, precision)["asis_decode_vs_prefill_logits"]
    published = replay(fresh_model(case, precision, published_index_keys=True), recording)["decode.logits"]
    whole = torch.cat((recording["input_ids"], recording["decode.input_ids"]), dim=1)
    with torch.no_grad():
        prefill = shared_model(case, precision)(whole)[:, recording["input_ids"].shape[1] :]
    distance = (published - prefill).double()
    assert float(distance.abs().max()) == pytest.approx(cost["max"], abs=1e-4)
    assert float(distance.square().mean().sqrt()) == pytest.approx(cost["rms"], abs=1e-5)


def test_published_index_keys_change_nothing_while_every_entry_is_selected() -> None:
    recording = recorded("smooth_full", "float32")
    published = replay(fresh_model("smooth_full", "float32", published_index_keys=True), recording)["decode.logits"]
    assert torch.equal(published, observed("smooth_full", "float32")["decode.logits"])
