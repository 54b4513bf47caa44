"""Fixtures that several test files share, and the settings under which every test runs."""

import lzma
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from deepinfer.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"

# What is built at first use would count against the example that happens to come first. The same examples in every run.
settings.register_profile("deepinfer", deadline=None, derandomize=True)
settings.load_profile("deepinfer")

# Memory that was never written holds NaN, and an operation whose result may vary is an error.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
# The models of the tests are tiny: threads would wait for each other. Also, sums are split by the number of threads, and the
# recordings are met bit for bit with one.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


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
