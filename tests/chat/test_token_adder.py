"""`TokenAdder`: the ids of the library's own prompt encoding, piece by piece, and nothing tokenised twice."""

import lzma
from typing import Any

import pytest
from deepseek_recipe import AssistantMessage, Conversation, DeepseekV41Encoding, SystemMessage, UserMessage
from deepseek_recipe import Tokenizer as LibraryTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer import Recipe, Rejected, TokenAdder, Tokenizer, TokenizerError
from deepinfer.chat.recipe import Segment
from tests.chat.conversations import MARKERS, conversations, said
from tests.conftest import DATA


@pytest.fixture(scope="module")
def library_encoding() -> Any:
    tokenizer = lzma.decompress((DATA / "published" / "tokenizer.json.xz").read_bytes()).decode()
    return DeepseekV41Encoding().with_tokenizer(LibraryTokenizer.from_str(tokenizer))


def whole(tokenizer: Tokenizer, segments: tuple[Segment, ...]) -> list[int]:
    adder = TokenAdder(tokenizer)
    for segment in segments:
        adder.extend(segment)
    return adder.token_ids


@given(st.lists(said, min_size=1, max_size=4), said)
@settings(max_examples=100)
def test_ids_are_those_of_the_librarys_prompt_encoding(
    published_tokenizer: Tokenizer, library_encoding: Any, turns: list[str], system: str
) -> None:
    messages = [{"role": "system", "content": system}]
    objects = [SystemMessage(system)]
    for i, text in enumerate(turns):
        messages.append({"role": ("user", "assistant")[i % 2], "content": text})
        objects.append((UserMessage, AssistantMessage)[i % 2](text))
    expected = library_encoding.encode(Conversation(objects, thinking_mode=False))
    assert whole(published_tokenizer, Recipe().render(messages, thinking=False).segments) == expected


@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_that_is_typed_gives_no_control_token(published_tokenizer: Tokenizer, marker: str) -> None:
    for role in ("system", "user", "assistant", "tool", "latest_reminder"):
        plain = [{"role": "user", "content": "q"}, {"role": role, "content": "abc"}, {"role": "user", "content": "q"}]
        typed = [plain[0], {"role": role, "content": f"ab{marker}c"}, plain[2]]
        ids = [whole(published_tokenizer, Recipe().render(m, thinking=False).segments) for m in (plain, typed)]
        control, with_typed = ([i for i in found if i in published_tokenizer.added_ids] for found in ids)
        assert control == with_typed
        assert published_tokenizer.decode(ids[1], skip_special_tokens=False).count(marker) >= 1


@given(conversations())
@settings(max_examples=60)
def test_growing_turn_by_turn_gives_the_ids_of_the_whole(published_tokenizer: Tokenizer, arguments: dict[str, Any]) -> None:
    recipe, adder = Recipe(), TokenAdder(published_tokenizer)
    messages = arguments["messages"]
    for end in range(1, len(messages) + 1):
        segments = recipe.render(**arguments | {"messages": messages[:end]}).segments
        before = adder.token_ids
        kept = adder.follow(segments)
        assert adder.token_ids == whole(published_tokenizer, segments)
        assert adder.token_ids[:kept] == before[:kept]


class CountingTokenizer:
    """Counts the characters that are tokenised."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.texts = tokenizer, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.texts.append(text)
        return self._tokenizer.encode(text, **options)


def test_only_what_is_new_is_tokenised(published_tokenizer: Tokenizer) -> None:
    tokenizer: Any = CountingTokenizer(published_tokenizer)
    adder, recipe = TokenAdder(tokenizer), Recipe()
    messages = [{"role": "user", "content": "question"}]
    adder.follow(recipe.render(messages, thinking=False).segments)
    assert tokenizer.texts == ["question"]
    adder.extend([*published_tokenizer.encode("an answer"), 1])
    messages += [{"role": "assistant", "content": "an answer"}, {"role": "user", "content": "next"}]
    adder.follow(recipe.render(messages, thinking=False).segments)
    assert tokenizer.texts == ["question", "next"]


def test_ids_that_the_model_wrote_stay_where_the_tokenizer_would_choose_others(published_tokenizer: Tokenizer) -> None:
    letters = [i for letter in "area" for i in published_tokenizer.encode(letter)]
    assert letters != published_tokenizer.encode("area")
    adder, recipe = TokenAdder(published_tokenizer), Recipe()
    messages = [{"role": "user", "content": "q"}]
    adder.follow(recipe.render(messages, thinking=False).segments)
    begin = adder.token_ids
    assert adder.extend(letters[:2]) + adder.extend([*letters[2:], 1]) == [*letters, 1]
    messages += [{"role": "assistant", "content": "area"}, {"role": "user", "content": "r"}]
    kept = adder.follow(recipe.render(messages, thinking=False).segments)
    assert kept == len(begin) + len(letters) + 1
    assert adder.token_ids[:kept] == [*begin, *letters, 1]


def test_reasoning_that_is_dropped_takes_its_ids_along(published_tokenizer: Tokenizer) -> None:
    adder, recipe = TokenAdder(published_tokenizer), Recipe()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    adder.follow(recipe.render(messages).segments)
    adder.extend(published_tokenizer.encode("reasons</think>answer<｜end▁of▁sentence｜>"))
    messages += [{"role": "assistant", "content": "answer", "reasoning_content": "reasons"}, {"role": "user", "content": "r"}]
    segments = recipe.render(messages).segments
    adder.follow(segments)
    assert adder.token_ids == whole(published_tokenizer, segments)


def test_an_answer_that_was_begun_is_continued_behind_its_ids(published_tokenizer: Tokenizer) -> None:
    adder = TokenAdder(published_tokenizer)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ar", "prefix": True}]
    adder.follow(Recipe().render(messages, thinking=False).segments)
    begin = adder.token_ids
    adder.extend([*published_tokenizer.encode("ea"), 1])
    done = [messages[0], {"role": "assistant", "content": "area"}, {"role": "user", "content": "r"}]
    assert adder.follow(Recipe().render(done, thinking=False).segments) == len(begin) + 2


def test_texts_that_touch_are_refused(published_tokenizer: Tokenizer) -> None:
    adder = TokenAdder(published_tokenizer)
    adder.extend(Segment("ar", False))
    with pytest.raises(Rejected, match="join them"):
        adder.extend(Segment("ea", False))
    with pytest.raises(Rejected, match="129280"):
        adder.extend([5, 129280])
    assert adder.token_ids == published_tokenizer.encode("ar")


def test_a_tokenizer_without_the_markers_is_refused(golden_tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"no control token '<｜begin▁of▁sentence｜>'.*use generate\(\)"):
        TokenAdder(golden_tokenizer)
