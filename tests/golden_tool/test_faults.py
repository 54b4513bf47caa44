"""Planted faults: the comparison says that the builds differ, and names the faulty module first."""

from pathlib import Path

import pytest
import torch

from deepinfer.golden import Recording, Report, compare
from deepinfer.golden.observe import DEFAULT_PATTERNS
from tests.golden_tool.faults import FAULTS, Fault
from tests.golden_tool.recordings import ALL, clean_model, fresh_model, record_tiny

# Too small for the tolerances of rounded arithmetic, or hidden by it.
SEEN_IN_FLOAT32_ONLY = ("larger norm epsilon", "comb transposed", "one Sinkhorn round less")
QUICK_IN_NATIVE = ("nibbles swapped", "bias in the routing weights", "no sink")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, tuple[str, ...]], Recording]:
    folder = tmp_path_factory.mktemp("clean")
    cases = [("float32", ALL), ("native", ALL), ("float32", DEFAULT_PATTERNS)]
    return {
        (precision, patterns): record_tiny(folder / f"{i}", clean_model(precision), patterns=patterns)
        for i, (precision, patterns) in enumerate(cases)
    }


def compare_with(fault: Fault, golden: Recording, folder: Path) -> Report:
    """A recording of a model with the fault, compared with the clean one."""
    precision = golden.manifest.precision
    model = fresh_model(precision)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        fault.plant(model, patch)
        other = record_tiny(folder, model, patterns=golden.manifest.patterns)
    return compare(golden, other, model=clean_model(precision))


@pytest.mark.parametrize("name", FAULTS)
def test_report_names_the_faulty_module_first(name: str, recordings: dict, tmp_path: Path) -> None:
    report = compare_with(FAULTS[name], recordings["float32", ALL], tmp_path)
    assert report.exit_code == 1
    first = report.first_outside
    assert first is not None
    assert (first.name, first.module) == (FAULTS[name].name, FAULTS[name].module)


def test_there_are_many_faults() -> None:
    assert len(FAULTS) >= 15


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK_IN_NATIVE else pytest.mark.slow)
        for name in FAULTS
        if name not in SEEN_IN_FLOAT32_ONLY
    ],
)
def test_report_names_the_faulty_module_in_rounded_arithmetic_too(name: str, recordings: dict, tmp_path: Path) -> None:
    report = compare_with(FAULTS[name], recordings["native", ALL], tmp_path)
    assert report.exit_code == 1
    first = report.first_outside
    assert first is not None
    assert (first.name, first.module) == (FAULTS[name].name, FAULTS[name].module)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nibbles swapped", "layers.5"),
        ("window one larger", "layers.0.hc_ffn.pre"),
        ("uniform pooling", "layers.2.attn.entries"),
        ("one entry less", "layers.2.attn.indexer.selected"),
    ],
)
def test_few_tensors_still_name_the_block(name: str, expected: str, recordings: dict, tmp_path: Path) -> None:
    report = compare_with(FAULTS[name], recordings["float32", DEFAULT_PATTERNS], tmp_path)
    assert report.first_outside is not None
    assert report.first_outside.name == expected


def test_without_the_model_the_first_tensor_outside_is_the_same(recordings: dict, tmp_path: Path) -> None:
    golden = recordings["float32", ALL]
    fault = FAULTS["nibbles swapped"]
    model = fresh_model()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        fault.plant(model, patch)
        other = record_tiny(tmp_path, model)
    report = compare(golden, other)
    assert report.basis == "the recording alone"
    assert report.first_outside is not None
    assert report.first_outside.name == fault.name
    # Everything behind it inherits the difference: this is what anchoring avoids.
    inherited = sum(not t.is_within for t in report.prompts[0].tensors)
    anchored = sum(not t.is_within for t in compare(golden, other, model=clean_model()).prompts[0].tensors)
    assert anchored == 1
    assert inherited > 50
