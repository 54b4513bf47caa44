"""Stop strings against a search in the finished text: every cut into tokens finds the same end."""

import random

import pytest

from deepinfer.detokenizer import Detokenizer
from deepinfer.runtime.stop_strings import StopStrings
from deepinfer.tokenizer import Tokenizer


def bytes_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """One token for each byte."""
    of_byte = {tokenizer.token_bytes(i): i for i in range(3, 259)}
    return [of_byte[bytes([byte])] for byte in text.encode()]


def random_cut(text: str, tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """The text as tokens, some of them as the tokenizer would choose them, some of them single bytes."""
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), 3)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [i for part in parts for i in rng.choice([tokenizer.encode(part), bytes_of(part, tokenizer)])]


def first_end(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """Where the stop string that ends first ends and begins; of those, the longest."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    return min(found, default=None)


@pytest.mark.parametrize("include", [False, True])
def test_the_first_stop_string_is_found_across_tokens_and_characters(include: bool, golden_tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    alphabet, hits, held_back = "ab é深\n", 0, 0
    for _ in range(400):
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 25)))
        stops = ["".join(rng.choices(alphabet, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        strings = StopStrings(stops, Detokenizer(golden_tokenizer), include=include)
        shown, found = "", None
        for token in random_cut(text, golden_tokenizer, rng):
            found = strings.push(token, may_stop=True)
            assert strings.shown.startswith(shown), "text was taken back"
            shown = strings.shown
            held_back += len(strings.text) - len(shown)
            if found:
                break
        strings.finish()
        expected = first_end(text, stops)
        if expected is None:
            assert (found, strings.shown) == (None, text)
        else:
            end, start, stop = expected
            # Of several that one token completes, the first to end counts too: only the text decides, not the tokens.
            assert (found, strings.shown) == (stop, text[: end if include else start])
            hits += 1
    assert 100 < hits < 400
    assert (held_back > 0) == (not include)


def test_a_string_counts_only_if_it_ends_where_it_may_stop(golden_tokenizer: Tokenizer) -> None:
    tokens = bytes_of("xababx", golden_tokenizer)
    for first, expected in ((0, "x"), (3, "xab"), (5, None)):
        strings = StopStrings(["ab"], Detokenizer(golden_tokenizer), include=False)
        ends = [index for index, token in enumerate(tokens) if strings.push(token, may_stop=index >= first) is not None][:1]
        assert ends == ([] if expected is None else [2 if expected == "x" else 4])
        if expected is not None:
            assert strings.text.startswith(expected)


def test_an_unfinished_character_is_shown_when_the_text_is_over_and_not_behind_a_stop(golden_tokenizer: Tokenizer) -> None:
    half = bytes_of("é", golden_tokenizer)[:1]
    strings = StopStrings(["ab"], Detokenizer(golden_tokenizer), include=False)
    for token in bytes_of("xa", golden_tokenizer) + half:
        strings.push(token, may_stop=True)
    assert strings.shown == "x"
    strings.finish()
    strings.finish()
    assert strings.shown == "xa\ufffd"


def test_special_tokens_are_no_part_of_the_text_unless_they_are_shown(golden_tokenizer: Tokenizer) -> None:
    special = min(golden_tokenizer.special_ids)
    around = bytes_of("ab", golden_tokenizer)
    tokens = [around[0], special, around[1]]
    for skip, expected in ((True, "ab"), (False, None)):
        strings = StopStrings(["ab"], Detokenizer(golden_tokenizer, skip_special_tokens=skip), include=False)
        assert [strings.push(token, may_stop=True) for token in tokens] == [None, None, expected]
