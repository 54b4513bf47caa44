"""A group against one device, on the smallest model: figures that add up, and the bits of the whole model also from captures."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.backends import Backend
from deepinfer.bench import ranks as bench
from deepinfer.bench.report import Report
from deepinfer.bench.timed_ranks import HostMark, TimedRanks
from deepinfer.engine_config import EngineConfig
from deepinfer.model.numerics import reference_ops
from tests.parallel.in_process import CapturingDevice, HostRead, record_exchanges
from tests.parallel.spawn import run_ranks

STEPS = 2


def plain_backend(config: EngineConfig, device: torch.device) -> Backend:
    """What a capture can hold."""
    return Backend(reference_ops(batch_invariant=config.batch_invariant, static_shapes=True), False, "plain")


class RefusingDevice(CapturingDevice):
    """Where a group cannot be captured."""

    def capture(self, fn: Any) -> Any:
        fn()
        raise HostRead("not here")


def measure(rank: int, size: int, folder: Path, captures: str) -> dict[str, Any]:
    """The file that this rank writes."""
    record_exchanges()
    path = folder / f"{captures} {rank}.json"
    args = argparse.Namespace(layers=8, rows=3, prompt=20, context=40, steps=STEPS, ep_size=size)
    devices = {"inline": bench.open_device, "captures": lambda _: CapturingDevice(), "refuses": lambda _: RefusingDevice()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "choose_backend", plain_backend)
        patch.setattr(bench, "open_device", devices[captures])
        bench.measure_ranks(args, Report("ranks", None, path))
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=["inline", "captures", "refuses"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    return request.param, run_ranks(measure, 2, tmp_path_factory.mktemp("ranks"), request.param)


def test_every_kind_of_step_is_there(found: tuple[str, list[dict[str, Any]]]) -> None:
    captures, files = found
    expected = [(mode, kind, False) for mode in ("alone", "group") for kind in ("prefill", "decode")]
    if captures == "captures":
        expected = [*expected[:2], ("alone", "decode", True), *expected[2:], *[("group", "decode", True)] * 2]
    for file in files:
        assert [(row["mode"], row["kind"], row["captured"]) for row in file["rows"]] == expected
        # What cannot be captured is noted, once for each mode.
        assert len(file.get("failed", [])) == (2 if captures == "refuses" else 0)


def test_the_group_gives_the_bits_of_the_whole_model(found: tuple[str, list[dict[str, Any]]]) -> None:
    for file in found[1]:
        assert all(row["equal_tokens"] == 1 and row["largest_difference"] == 0 for row in file["rows"])


def test_figures_add_up(found: tuple[str, list[dict[str, Any]]]) -> None:
    files = found[1]
    for row in files[0]["rows"]:
        assert row["tokens_s"] == pytest.approx(2 * row["rows"] / row["step_ms"] * 1e3)
        is_marked = row["exchange_ms"] is not None
        assert is_marked == (row["mode"] == "group" and (not row["captured"] or row is files[0]["rows"][-1]))
        if is_marked and not row["captured"]:
            assert 0 < row["exchange_ms"] < row["step_ms"]
            assert row["exchange_share"] == pytest.approx(row["exchange_ms"] / row["step_ms"])


def test_marks_are_those_of_the_latest_step() -> None:
    begin, end = HostMark(), HostMark()
    begin.seconds, end.seconds = 1.0, 1.25
    ranks = TimedRanks.__new__(TimedRanks)
    ranks._marks = ((begin, end),) * 2
    assert ranks.exchange_ms() == 500
    ranks.forget()
    assert ranks.exchange_ms() == 0
