"""What a model's name means."""

import logging
from pathlib import Path

import pytest

from deepinfer.checkpoint.locate import PRESET_FOLDER, locate_checkpoint
from deepinfer.errors import CheckpointError


def test_a_presets_name_is_the_preset_whatever_lies_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate_checkpoint("mini") == PRESET_FOLDER / "mini"
    (tmp_path / "mini").mkdir()
    with caplog.at_level(logging.WARNING):
        assert locate_checkpoint("mini") == PRESET_FOLDER / "mini"
    assert "./mini is the folder" in caplog.text
    assert locate_checkpoint("./mini") == Path("mini")
    assert locate_checkpoint(Path("mini")) == Path("mini")


def test_another_name_is_a_folder_or_nothing(tmp_path: Path) -> None:
    assert locate_checkpoint(tmp_path) == tmp_path
    with pytest.raises(CheckpointError, match="no such folder, and the presets are mini"):
        locate_checkpoint("maxi")
    with pytest.raises(CheckpointError, match="expected a folder or the name of a preset, got int"):
        locate_checkpoint(3)  # type: ignore[arg-type]
