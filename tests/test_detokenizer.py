import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deepinfer.detokenizer import Detokenizer
from deepinfer.errors import Rejected
from deepinfer.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
CASES = json.loads((DATA / "published" / "tokenizer-cases.json").read_text(encoding="utf-8"))["cases"]

# Bytes at which the rules of UTF-8 change: ends of the ASCII, continuation and lead ranges, and the four restricted leads.
EDGES = bytes.fromhex("41 7f 80 8f 90 9f a0 bf c1 c2 df e0 e1 ec ed ef f0 f1 f3 f4 f5 ff")

# Ids of the small tokenizer with its three special ones drawn often; of the published one from merged, byte and added tokens.
golden_ids = st.lists(st.one_of(st.integers(0, 319), st.integers(0, 2)))
published_ids = st.lists(
    st.one_of(st.integers(0, 129279), st.integers(3, 260), st.integers(128000, 129279), st.sampled_from([0, 1, 128821, 128825]))
)


def check_pieces(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> None:
    """Pieces must join to the whole text, and each must come as soon as it is complete and not before."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    text = ""
    for end, token_id in enumerate(ids, 1):
        text += detokenizer.push(token_id)
        so_far = tokenizer.decode(ids[:end], skip_special_tokens=skip_special_tokens)
        # Only an unfinished character may be held back; decoded by itself it is one U+FFFD.
        assert so_far in (text, text + "\ufffd")
    assert text + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("skip", [True, False])
@given(ids=golden_ids)
def test_pieces_join_to_the_decoded_text(golden_tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    check_pieces(golden_tokenizer, ids, skip)


@pytest.mark.parametrize("skip", [True, False])
@given(ids=published_ids)
# An emoji that a special token interrupts, and added tokens that are written in the byte alphabet.
@example(ids=[28927, 225, 53153, 0, 234])
@example(ids=[128805, 128821, 128840, 128847])
def test_pieces_join_to_the_text_of_the_published_tokenizer(published_tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    check_pieces(published_tokenizer, ids, skip)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_published_cases(published_tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    for skip, key in ((False, "decoded"), (True, "decoded_skip_special")):
        detokenizer = Detokenizer(published_tokenizer, skip_special_tokens=skip)
        assert "".join(map(detokenizer.push, case["ids"])) + detokenizer.finish() == case[key]


def test_every_published_token_gives_its_text(published_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(published_tokenizer, skip_special_tokens=False)
    for token_id in range(len(published_tokenizer)):
        text = detokenizer.push(token_id) + detokenizer.finish()
        assert text == published_tokenizer.decode([token_id], skip_special_tokens=False), token_id


def test_invalid_bytes_are_replaced_as_the_library_does(golden_tokenizer: Tokenizer) -> None:
    id_of = {golden_tokenizer.token_bytes(i): i for i in range(3, len(golden_tokenizer))}
    for ids in itertools.product([id_of[bytes([byte])] for byte in EDGES], repeat=3):
        check_pieces(golden_tokenizer, list(ids), skip_special_tokens=True)


def bytes_as_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    id_of = {tokenizer.token_bytes(i): i for i in range(3, len(tokenizer))}
    return [id_of[bytes([byte])] for byte in data]


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        ("€".encode(), ["", "", "€"]),
        ("😀!".encode(), ["", "", "", "😀", "!"]),
        # The lead byte can no longer be completed once something else follows it.
        (b"\xe2A", ["", "\ufffdA"]),
        (b"\xe2\x82\xe2\x82\xac", ["", "", "\ufffd", "", "€"]),
        (b"\x80\xffA", ["\ufffd", "\ufffd", "A"]),
        # A UTF-16 surrogate: the second byte already rules the first one out.
        (b"\xed\xa0\x80", ["", "\ufffd\ufffd", "\ufffd"]),
    ],
)
def test_text_comes_as_soon_as_it_is_complete(golden_tokenizer: Tokenizer, data: bytes, pieces: list[str]) -> None:
    detokenizer = Detokenizer(golden_tokenizer)
    assert [detokenizer.push(i) for i in bytes_as_ids(golden_tokenizer, data)] == pieces
    assert detokenizer.finish() == ""


def test_finish_replaces_an_unfinished_character_and_starts_anew(golden_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(golden_tokenizer)
    first, second, third = bytes_as_ids(golden_tokenizer, "€".encode())
    assert [detokenizer.push(first), detokenizer.push(second), detokenizer.finish(), detokenizer.finish()] == ["", "", "\ufffd", ""]
    assert [detokenizer.push(third), detokenizer.finish()] == ["\ufffd", ""]


def test_skipped_tokens_do_not_interrupt_a_character(golden_tokenizer: Tokenizer) -> None:
    first, second, third = bytes_as_ids(golden_tokenizer, "€".encode())
    ids = [first, 0, second, 1, third]
    detokenizer = Detokenizer(golden_tokenizer)
    assert "".join(map(detokenizer.push, ids)) == golden_tokenizer.decode(ids) == "€"
    keeping = Detokenizer(golden_tokenizer, skip_special_tokens=False)
    assert "".join(map(keeping.push, ids)) + keeping.finish() == "\ufffd<bos>\ufffd<eos>\ufffd"


@pytest.mark.parametrize("token_id", [-1, 320])
def test_rejected_id_leaves_the_sequence_as_it_was(golden_tokenizer: Tokenizer, token_id: int) -> None:
    detokenizer = Detokenizer(golden_tokenizer)
    first, second, third = bytes_as_ids(golden_tokenizer, "€".encode())
    detokenizer.push(first)
    with pytest.raises(Rejected, match=f"token id {token_id}"):
        detokenizer.push(token_id)
    assert detokenizer.push(second) + detokenizer.push(third) == "€"
