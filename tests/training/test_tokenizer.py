import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import TokenizerError
from deepinfer.tokenizer import BYTE_OF_CHARACTER, Tokenizer
from deepinfer.training import corpus
from deepinfer.training import tokenizer as training
from deepinfer.training.corpus import Document, HeldOut, Source

VOCAB_SIZE = 450
TEXTS = [Path(module.__file__ or "").read_text(encoding="utf-8") for module in (corpus, training)]
PUBLISHED = Path(__file__).parents[1] / "data" / "published"
CONTROL = [token.content for token in training.FIRST_TOKENS + training.LAST_TOKENS]


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return training.learn_tokenizer(TEXTS, VOCAB_SIZE)


@pytest.fixture(scope="module")
def learned(content: dict[str, Any]) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))


def test_the_vocabulary_has_exactly_the_size_asked_for(content: dict[str, Any], learned: Tokenizer) -> None:
    assert len(learned) == VOCAB_SIZE
    assert sorted(content["model"]["vocab"].values()) == list(range(VOCAB_SIZE - len(training.LAST_TOKENS)))
    assert {learned.token(i) for i in range(3, 3 + training.NUM_BYTES)} == BYTE_OF_CHARACTER.keys()


def test_learning_again_from_the_same_texts_gives_the_same(content: dict[str, Any]) -> None:
    assert training.learn_tokenizer(TEXTS, VOCAB_SIZE) == content
    assert training.learn_tokenizer(reversed(TEXTS), VOCAB_SIZE) == content


def test_control_tokens_are_atomic_wherever_they_stand(learned: Tokenizer) -> None:
    last = range(VOCAB_SIZE - len(training.LAST_TOKENS), VOCAB_SIZE)
    assert CONTROL[:3] == ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    for name, token_id in zip(CONTROL, [0, 1, 2, *last], strict=True):
        assert learned.encode(name) == [token_id]
        ids = learned.encode(f"x = {name}y")
        assert ids.count(token_id) == 1
        assert learned.decode(ids, skip_special_tokens=False) == f"x = {name}y"
    assert learned.special_ids == {0, 1, 2}


@given(st.one_of(st.text(), st.lists(st.one_of(st.sampled_from([*CONTROL, " ", "\n", "\t"]), st.text())).map("".join)))
def test_every_text_comes_back(learned: Tokenizer, text: str) -> None:
    assert learned.decode(learned.encode(text), skip_special_tokens=False) == text
    plain = learned.encode(text, split_special_tokens=True)
    assert learned.decode(plain, skip_special_tokens=False) == text
    assert learned.added_ids.isdisjoint(plain)


def test_the_layout_is_the_published_one(published_tokenizer: Tokenizer) -> None:
    published = json.loads(published_tokenizer.to_str())
    written = training.learn_tokenizer(TEXTS, VOCAB_SIZE, "published")
    for part in ("version", "truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"):
        assert written[part] == published[part], part
    flags = {token["content"]: {**token, "id": None} for token in published["added_tokens"]}
    assert all(flags[token["content"]] == {**token, "id": None} for token in written["added_tokens"])
    assert all(isinstance(merge, str) for merge in written["model"]["merges"])


def test_the_settings_are_the_published_ones() -> None:
    published = json.loads((PUBLISHED / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert training.tokenizer_settings(published["model_max_length"]) == published


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("f(x):\n        return", ["f", "(x", "):\n       ", " return"]),
        ("a,\n    b", ["a", ",\n   ", " b"]),
        ("pass\n\n    # x", ["pass", "\n\n   ", " #", " x"]),
        ("a  \n  b", ["a", "  \n ", " b"]),
        ("pass\n\n\ndef", ["pass", "\n\n\n", "def"]),
        ("a\n\tb", ["a", "\n", "\tb"]),
        ("x = 12345", ["x", " =", " ", "123", "45"]),
    ],
)
def test_a_line_break_takes_the_indentation_along(learned: Tokenizer, text: str, pieces: list[str]) -> None:
    split = learned.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == pieces


@pytest.mark.parametrize("vocab_size", [training.MIN_VOCAB_SIZE - 1, training.MAX_VOCAB_SIZE + 1, -1])
def test_impossible_sizes_are_refused(vocab_size: int) -> None:
    with pytest.raises(TokenizerError, match="must be from"):
        training.learn_tokenizer(TEXTS, vocab_size)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(TokenizerError, match="too few for 400"):
        training.learn_tokenizer(["abc"], 400)


def test_without_merges_every_byte_is_a_token() -> None:
    content = training.learn_tokenizer([], training.MIN_VOCAB_SIZE)
    smallest = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))
    assert len(smallest.encode("aé漢\n")) == 1 + 2 + 3 + 1


def test_documents_stand_between_bos_and_eos(learned: Tokenizer) -> None:
    texts = ["x = '<think>' # é\n", "", f"y = {CONTROL[1]!r}\n"]
    documents = [Document("p", f"{i}.py", text, "") for i, text in enumerate(texts)]
    ids, index = training.encode_documents(learned, documents)
    assert ids.dtype == np.uint16
    assert index[-1]["end"] == len(ids)
    for entry, text in zip(index, texts, strict=True):
        bos, *inside, eos = ids[entry["start"] : entry["end"]].tolist()
        assert (bos, eos) == (training.BOS_ID, training.EOS_ID)
        # What looks like a control token is text in a source file.
        assert learned.added_ids.isdisjoint(inside)
        assert learned.decode(inside) == text
        assert entry["bytes"] == len(text.encode())


def make_corpus(folder: Path) -> tuple[Path, list[Source]]:
    paths = {"kept": TEXTS[1][:3000], "own": TEXTS[0]}
    sources = []
    for name, text in paths.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "a.py").write_text(text, encoding="utf-8")
        sources.append(Source(name=name, version="1", licence="MIT", root=folder / name, paths=("a.py",)))
    corpus.collect_corpus(folder, HeldOut(frozenset({"kept"}), frozenset()), sources)
    return folder, sources


def test_stages_skip_what_is_there_and_repair_what_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, sources = make_corpus(tmp_path / "corpus")
    out = tmp_path / "out"

    def run() -> dict[str, Any]:
        assert len(training.write_tokenizer(folder, out, 400, sources=sources)) == 400
        return training.write_ids(folder, out, sources)

    record = run()
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "tokenizer_origin.json", "ids.json"} | {
        "train.npy",
        "held_out.npy",
    }
    for part in ("train", "held_out"):
        assert len(np.load(out / f"{part}.npy")) == record[part]["ids"] == record[part]["documents"][-1]["end"]
    for name in files:
        (out / name).write_bytes(files[name][:40])
        assert run() == record
        assert {path.name: path.read_bytes() for path in out.iterdir()} == files, name
    monkeypatch.setattr(training, "learn_tokenizer", None)
    monkeypatch.setattr(training, "encode_documents", None)
    assert run() == record


def test_the_command_explains_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenizer", "--help"])
    with pytest.raises(SystemExit):
        training.main()
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--corpus", "--out", "--vocab-size", "--split", "--max-length"))
