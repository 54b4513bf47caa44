"""Fixtures that several test files share: the recorded cases and the published tokenizer."""

import lzma
from pathlib import Path

import pytest
from hypothesis import settings

from deepinfer.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"

# What is built at first use would count against the example that happens to come first.
settings.register_profile("deepinfer", deadline=None)
settings.load_profile("deepinfer")


@pytest.fixture(scope="session")
def published_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The release's tokenizer, byte-identical; stored compressed for its 6 MB."""
    folder = tmp_path_factory.mktemp("published")
    source = DATA / "published"
    (folder / "tokenizer.json").write_bytes(lzma.decompress((source / "tokenizer.json.xz").read_bytes()))
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="session")
def golden_tokenizer() -> Tokenizer:
    """The 320 tokens of the recorded cases: three special ones, all bytes, 61 merges."""
    return Tokenizer.from_folder(DATA / "golden" / "smooth_full")
