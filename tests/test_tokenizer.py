import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from deepinfer.config_json import load_config
from deepinfer.errors import Rejected, TokenizerError
from deepinfer.tokenizer import BYTE_OF_CHARACTER, Tokenizer

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden" / "smooth_full"
CASES = json.loads((DATA / "published" / "tokenizer-cases.json").read_text(encoding="utf-8"))["cases"]

# The release's tokens that structure a chat; most are not flagged special.
CONTROL = {"<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1, "<｜System｜>": 128799, "<｜User｜>": 128803}
CONTROL |= {"<｜Assistant｜>": 128804, "<think>": 128821, "</think>": 128822, "｜DSML｜": 128825, "<｜deepseek_image｜>": 129264}

texts = st.text(st.characters(exclude_categories=["Cs"]))
look_alikes = st.lists(st.one_of(st.sampled_from(sorted(CONTROL)), st.sampled_from("<｜think|>▁ ab\n"), texts)).map("".join)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder with a tokenizer that a test may change."""
    shutil.copyfile(GOLDEN / "tokenizer.json", tmp_path / "tokenizer.json")
    return tmp_path


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_published_cases_give_the_recorded_ids_and_texts(published_tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert published_tokenizer.encode(case["text"]) == case["ids"]
    assert published_tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
    assert published_tokenizer.decode(case["ids"]) == case["decoded_skip_special"]


def test_sizes_count_added_tokens(published_tokenizer: Tokenizer, golden_tokenizer: Tokenizer) -> None:
    assert len(published_tokenizer) == published_tokenizer.vocab_size == 129280
    assert (len(published_tokenizer.added_ids), len(published_tokenizer.special_ids)) == (1283, 1229)
    assert len(golden_tokenizer) == 320
    assert golden_tokenizer.added_ids == golden_tokenizer.special_ids == {0, 1, 2}


def test_check_against_names_both_sizes(published_tokenizer: Tokenizer) -> None:
    config = load_config(DATA / "published")
    published_tokenizer.check_against(config)
    with pytest.raises(TokenizerError, match=r"129280 tokens.*vocab_size 129281"):
        published_tokenizer.check_against(replace(config, vocab_size=129281))


@pytest.mark.parametrize(("text", "token_id"), CONTROL.items())
def test_control_tokens_are_matched_in_text_unless_split(published_tokenizer: Tokenizer, text: str, token_id: int) -> None:
    assert published_tokenizer.encode(text) == [token_id]
    split = published_tokenizer.encode(text, split_special_tokens=True)
    assert published_tokenizer.added_ids.isdisjoint(split)
    assert published_tokenizer.decode(split) == text


@given(text=look_alikes)
@example(text="<｜User｜>" * 3 + "<｜Us<｜User｜>er｜>")
def test_split_text_never_holds_an_added_token(published_tokenizer: Tokenizer, text: str) -> None:
    ids = published_tokenizer.encode(text, split_special_tokens=True)
    assert published_tokenizer.added_ids.isdisjoint(ids)
    assert published_tokenizer.decode(ids) == text


@given(text=texts)
def test_both_encodings_agree_on_text_without_control_tokens(published_tokenizer: Tokenizer, text: str) -> None:
    ids = published_tokenizer.encode(text)
    if published_tokenizer.added_ids.isdisjoint(ids):
        assert published_tokenizer.encode(text, split_special_tokens=True) == ids


@given(parts=st.lists(st.tuples(texts, st.sampled_from(sorted(CONTROL)))))
def test_encoding_between_control_tokens_is_independent(published_tokenizer: Tokenizer, parts: list[tuple[str, str]]) -> None:
    assume(not any(control in text for text, _ in parts for control in CONTROL))
    ids: list[int] = []
    for text, control in parts:
        ids += [*published_tokenizer.encode(text, split_special_tokens=True), CONTROL[control]]
    assert published_tokenizer.encode("".join(text + control for text, control in parts)) == ids


def test_split_text_avoids_an_added_token_that_merges_would_build(folder: Path) -> None:
    parts = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    left, right = parts["model"]["merges"][0]
    whole = left + right
    added = parts["added_tokens"][0] | {"id": parts["model"]["vocab"][whole], "content": whole}
    edit(folder / "tokenizer.json", added_tokens=[*parts["added_tokens"], added])
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode(whole + "<bos>", split_special_tokens=True)
    assert tokenizer.added_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == (whole + "<bos>").replace("Ġ", " ")


def test_truncation_and_padding_of_the_file_are_ignored(folder: Path, golden_tokenizer: Tokenizer) -> None:
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2, "pad_type_id": 0}
    edit(folder / "tokenizer.json", truncation=truncation, padding=padding | {"pad_token": "<pad>"})
    text = "a text longer than that"
    assert Tokenizer.from_folder(folder).encode(text) == golden_tokenizer.encode(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"bytes", "expected str, got bytes"), (None, "got NoneType"), ("ab\ud83d", r"character 2 is U\+D83D, a lone surrogate")],
)
@pytest.mark.parametrize("split", [False, True])
def test_what_is_no_text_is_rejected(golden_tokenizer: Tokenizer, text: Any, message: str, split: bool) -> None:
    with pytest.raises(Rejected, match=message):
        golden_tokenizer.encode(text, split_special_tokens=split)


@pytest.mark.parametrize(
    ("token_id", "message"),
    [(320, r"token id 320: .* 0 to 319"), (-1, "token id -1"), (2**40, "outside"), (1.0, "expected an integer, got float")],
)
def test_what_is_no_token_id_is_rejected(golden_tokenizer: Tokenizer, token_id: Any, message: str) -> None:
    for use in (lambda i: golden_tokenizer.decode([0, i]), golden_tokenizer.token, golden_tokenizer.token_bytes):
        with pytest.raises(Rejected, match=message):
            use(token_id)


def test_byte_alphabet_covers_each_byte_once() -> None:
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))
    assert (BYTE_OF_CHARACTER["Ġ"], BYTE_OF_CHARACTER["Ċ"], BYTE_OF_CHARACTER["A"]) == (0x20, 0x0A, 0x41)


def test_to_str_rebuilds_the_same_tokenizer(folder: Path, golden_tokenizer: Tokenizer) -> None:
    (folder / "tokenizer.json").write_text(golden_tokenizer.to_str(), encoding="utf-8")
    text = "<bos>the same text"
    assert Tokenizer.from_folder(folder).encode(text) == golden_tokenizer.encode(text)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: expected the tokenizer .*No such file"):
        Tokenizer.from_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"not json", b"{}", b"\xff\xfe", b'{"model": 3}'])
def test_unreadable_file_is_named(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: expected"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("decoder", [None, {"type": "Fuse"}])
def test_other_kinds_of_tokenizer_are_refused(folder: Path, decoder: dict[str, str] | None) -> None:
    edit(folder / "tokenizer.json", decoder=decoder)
    with pytest.raises(TokenizerError, match="expected a byte-level BPE"):
        Tokenizer.from_folder(folder)


def test_gap_in_the_ids_is_refused(folder: Path) -> None:
    parts = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = parts["model"]["vocab"]
    last = max(vocab, key=vocab.__getitem__)
    edit(folder / "tokenizer.json", model=parts["model"] | {"vocab": vocab | {last: 400}})
    with pytest.raises(TokenizerError, match="ids 0 to 319; id 319 has none"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('{"add_bos_token": true}', "add_bos_token = True: expected false or nothing"),
        ("[]", "expected a JSON object, found list"),
        ("{", "expected a JSON object"),
    ],
)
def test_settings_that_would_change_ids_are_refused(folder: Path, settings: str, message: str) -> None:
    (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json: {message}"):
        Tokenizer.from_folder(folder)
