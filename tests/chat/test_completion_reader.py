"""`CompletionReader`: from the ids of a growing completion to its message, in agreement with the completion's text."""

from dataclasses import replace
from typing import Any

import deepseek_recipe
import pytest

from deepinfer import ChatMessage, CompletionOutput, ResponseParser, Tokenizer
from deepinfer.chat.completion_reader import CompletionReader
from tests.chat.scripted import EOS


@pytest.fixture
def reader(published_tokenizer: Tokenizer, library: deepseek_recipe.Tokenizer) -> CompletionReader:
    return CompletionReader(ResponseParser("content", tokenizer=library), published_tokenizer)


def completion(text: str, token_ids: list[int], **fields: Any) -> CompletionOutput:
    return CompletionOutput(index=0, text=text, token_ids=token_ids, **fields)


def test_a_growing_completion_gives_what_is_new(reader: CompletionReader, published_tokenizer: Tokenizer) -> None:
    ids = published_tokenizer.encode("one two three")
    assert len(ids) == 3
    events = [reader.read(completion(published_tokenizer.decode(ids[:n]), ids[:n])) for n in (1, 1, 3)]
    assert ["".join(event.text for event in found) for found in events] == ["one", "", " two three"]
    assert reader.read(completion("one two three", [*ids, EOS], finish_reason="stop")) == []
    assert reader.parser.message == ChatMessage(content="one two three")


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_text_that_ends_within_a_character_is_the_completions(
    cut: int, reader: CompletionReader, published_tokenizer: Tokenizer
) -> None:
    ids = published_tokenizer.encode("so 𒀀")
    assert len(ids) == 5
    text = published_tokenizer.decode(ids[:cut])
    reader.read(completion("so", ids[:1]))
    reader.read(completion(text, ids[:cut], finish_reason="length"))
    assert reader.parser.message.content == text


def test_bytes_that_are_no_text_do_not_stop_what_follows(reader: CompletionReader, published_tokenizer: Tokenizer) -> None:
    broken = published_tokenizer.encode("𒀀")[:-1]
    ids = [*broken, *published_tokenizer.encode("abc")]
    text = published_tokenizer.decode(ids)
    assert text == "\ufffdabc"
    reader.read(completion(text, ids))
    assert reader.parser.message.content == text


def test_a_text_that_ends_with_bytes_that_are_no_text_is_the_completions(
    reader: CompletionReader, published_tokenizer: Tokenizer
) -> None:
    ids = [*published_tokenizer.encode("abc"), published_tokenizer.encode("𒀀")[-1]]
    reader.read(completion("abc\ufffd", ids))
    reader.read(completion("abc\ufffd", ids, finish_reason="length"))
    assert reader.parser.message.content == "abc\ufffd"


def test_a_marker_in_ordinary_tokens_is_text(published_tokenizer: Tokenizer, library: deepseek_recipe.Tokenizer) -> None:
    text = "about </think></think>yes"
    ids = published_tokenizer.encode("about </think>", split_special_tokens=True) + published_tokenizer.encode("</think>yes")
    reader = CompletionReader(ResponseParser("reasoning", tokenizer=library), published_tokenizer)
    reader.read(completion(text, ids, finish_reason="length"))
    assert reader.parser.message == ChatMessage(content="yes", reasoning_content="about </think>")


def test_an_answer_that_never_began_is_an_empty_one(reader: CompletionReader) -> None:
    assert reader.read(completion("", [], finish_reason="abort")) == []
    assert reader.parser.message == ChatMessage(content="")


def test_what_stopped_an_answer_is_no_part_of_it(reader: CompletionReader, published_tokenizer: Tokenizer) -> None:
    ids = published_tokenizer.encode("one two three")
    reader.read(completion("one", ids[:2]))
    assert reader.parser.message.content == "one"
    # Stopped by a string that begins within the third token.
    reader.read(completion("one two th", ids, finish_reason="stop", stop_reason="ree"))
    assert reader.parser.message.content == "one two th"


def test_a_stop_id_that_is_an_ordinary_token_is_left_out(reader: CompletionReader, published_tokenizer: Tokenizer) -> None:
    ids = published_tokenizer.encode("one two three")
    reader.read(completion("one two", ids, finish_reason="stop", stop_reason=ids[-1]))
    assert reader.parser.message.content == "one two"


def test_special_tokens_are_shown_or_skipped_as_in_the_text(
    published_tokenizer: Tokenizer, library: deepseek_recipe.Tokenizer
) -> None:
    ids = [*published_tokenizer.encode("one"), 2, *published_tokenizer.encode(" two"), EOS]
    for skip, text in ((True, "one two"), (False, "one<｜▁pad▁｜> two")):
        found = CompletionReader(ResponseParser(tokenizer=library), published_tokenizer, skip_special_tokens=skip)
        state = completion(text, ids, finish_reason="stop")
        found.read(replace(state, token_ids=ids[:1], text="one", finish_reason=None))
        found.read(state)
        assert found.parser.message.content == text
