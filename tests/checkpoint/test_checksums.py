"""Damage that leaves a file well formed, and files of another checkpoint."""

import shutil
from pathlib import Path

import pytest

from deepinfer import CheckpointError, CorruptFile, TokenizerError, load_model
from deepinfer.checkpoint.checksums import CHECKSUMS_NAME, check_checksums
from deepinfer.checkpoint.locate import locate_checkpoint


@pytest.fixture
def mini(tmp_path: Path) -> Path:
    return Path(shutil.copytree(locate_checkpoint("mini"), tmp_path / "mini"))


def test_the_shipped_checkpoint_passes(mini: Path) -> None:
    check_checksums(mini)


@pytest.mark.parametrize("place", [0.3, 0.7, 0.999])
def test_one_flipped_bit_of_the_weights_is_noticed(mini: Path, place: float) -> None:
    path = sorted(mini.glob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 16
    path.write_bytes(data)
    with pytest.raises(CorruptFile, match=rf"{path.name}: damaged"):
        load_model(mini)


def test_another_tokenizer_of_the_same_size_is_noticed(mini: Path) -> None:
    path = mini / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"return": ', '"retunr": ', 1) if '"return": ' in text else text + " ", encoding="utf-8")
    with pytest.raises(TokenizerError, match="not the tokenizer that this checkpoint was written with"):
        load_model(mini)


def test_a_folder_without_digests_is_loaded_as_it_is(mini: Path) -> None:
    (mini / CHECKSUMS_NAME).unlink()
    load_model(mini)


def test_unreadable_digests_are_an_error(mini: Path) -> None:
    (mini / CHECKSUMS_NAME).write_text("[1]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        load_model(mini)
