import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from deepinfer.config_json import load_config
from deepinfer.dims import Tensor
from deepinfer.errors import TokenizerError
from deepinfer.token_map import build_normalizer, build_token_map
from deepinfer.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
RECORDED = json.loads((DATA / "published" / "tokenizer-cases.json").read_text(encoding="utf-8"))
GOLDEN_CASES = ["bf16_full", "select_full", "smooth_full", "swa_tiny"]


@pytest.fixture(scope="module")
def published_map(published_tokenizer: Tokenizer) -> Tensor:
    return build_token_map(published_tokenizer, load_config(DATA / "published"))


def test_published_map_has_the_published_digests(published_map: Tensor) -> None:
    recorded = RECORDED["engram_token_map"]
    assert published_map.dtype == torch.int64
    assert published_map.shape == (recorded["size"],)
    assert int(published_map.max()) + 1 == recorded["compressed_vocab"] == 99092
    for kind, key in (("<i4", "sha256"), ("<i8", "sha256_as_int64_le")):
        assert hashlib.sha256(published_map.numpy().astype(kind).tobytes()).hexdigest() == recorded[key]


def test_published_cases_give_the_recorded_compressed_ids(published_map: Tensor) -> None:
    for case in RECORDED["cases"]:
        assert published_map[case["ids"]].tolist() == case["engram_compressed_ids"], case["text"]


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_recorded_cases_give_the_recorded_map(name: str) -> None:
    folder = DATA / "golden" / name
    with safe_open(folder / "golden_f32.safetensors", "pt") as recorded:
        expected = recorded.get_tensor("engram_token_map")
    assert torch.equal(build_token_map(Tokenizer.from_folder(folder), load_config(folder)), expected)


def test_ids_are_numbered_by_first_appearance(published_map: Tensor) -> None:
    highest = torch.cummax(published_map, 0).values
    assert published_map[0] == 0
    assert int((highest[1:] - highest[:-1]).max()) == 1


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        (" The", "the"),
        ("CAFÉ", "cafe"),
        ("ﬁ①", "fi1"),
        (" ", " "),
        ("\t\r\n ", " "),
        ("a \t\n b", "a b"),
        # Mc and Me are stripped like Mn.
        ("का⃝", "क"),
        ("\u1f88", "α"),
        # Only spaces that Unicode calls white space are stripped at the ends.
        ("\x1cx\x1f", "\x1cx\x1f"),
        ("\u0301", ""),
    ],
)
def test_normaliser(text: str, normalised: str) -> None:
    assert build_normalizer().normalize_str(text) == normalised


def test_another_number_of_compressed_ids_is_refused(golden_tokenizer: Tokenizer) -> None:
    config = load_config(DATA / "golden" / "smooth_full")
    wrong = replace(config, engram=replace(config.engram, compressed_vocab_size=267))
    with pytest.raises(TokenizerError, match=r"268 compressed ids.*engram_compressed_vocab_size 267"):
        build_token_map(golden_tokenizer, wrong)


def test_another_vocabulary_is_refused(golden_tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"320 tokens.*vocab_size 129280"):
        build_token_map(golden_tokenizer, load_config(DATA / "published"))
