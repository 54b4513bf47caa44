"""A tokenizer of a handful of tokens, forms in the shape of trees, and every string of such a form by enumeration."""

import json
from collections.abc import Iterator
from functools import cache
from itertools import product

import hypothesis.strategies as st
import tokenizers

from deepinfer.structured.compiler import GrammarCompiler
from deepinfer.tokenizer import Tokenizer

EOS = 1
SPECIAL = ("<s>", "</s>", "<pad>")
CONTROL = "<think>"
TEXTS = ("a", "b", "c", "ab", "bc", "ca", "abc", "aa")
# A pattern and all the strings that it matches, which the pattern's builder counted out itself.
Form = tuple[str, frozenset[str]]


@cache
def tiny_tokenizer() -> Tokenizer:
    """Three special tokens, eight texts over a, b and c, and a control token."""
    vocab = {token: i for i, token in enumerate((*SPECIAL, *TEXTS, CONTROL))}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [{"id": vocab[token], "content": token, **flags, "special": token in SPECIAL} for token in (*SPECIAL, CONTROL)]
    merges = [["a", "b"], ["b", "c"], ["c", "a"], ["ab", "c"], ["a", "a"]]
    parts = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(parts)))


@cache
def tiny_compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer(), EOS)


def token_id(text: str) -> int:
    return len(SPECIAL) + TEXTS.index(text)


def literal(character: str) -> Form:
    return character, frozenset({character})


def alternation(parts: list[Form]) -> Form:
    return f"(?:{'|'.join(pattern for pattern, _ in parts)})", frozenset[str]().union(*(strings for _, strings in parts))


def concatenation(parts: list[Form]) -> Form:
    strings = frozenset("".join(pieces) for pieces in product(*(strings for _, strings in parts)))
    return "".join(pattern for pattern, _ in parts), strings


def repetition(part: Form, low: int, high: int) -> Form:
    pattern, strings = part
    found = {"".join(pieces) for count in range(low, high + 1) for pieces in product(strings, repeat=count)}
    return f"(?:{pattern}){{{low},{high}}}", frozenset(found)


def forms() -> st.SearchStrategy[Form]:
    """Patterns of a few dozen strings."""

    def grow(parts: st.SearchStrategy[Form]) -> st.SearchStrategy[Form]:
        few = st.lists(parts, min_size=1, max_size=3)
        counts = st.sampled_from([(0, 1), (1, 2), (0, 2), (3, 3)])
        repeated = st.builds(lambda part, count: repetition(part, *count), parts, counts)
        return (few.map(alternation) | few.map(concatenation) | repeated).filter(lambda form: len(form[1]) <= 60)

    return st.recursive(st.sampled_from("abc").map(literal), grow, max_leaves=6)


def legal(strings: frozenset[str], text: str) -> set[int]:
    """Token ids that may follow `text`: those after which one of the strings can still be reached, and the end of one."""
    ids = {token_id(token) for token in TEXTS if any(s.startswith(text + token) for s in strings)}
    return ids | ({EOS} if text in strings else set())


def spellings(strings: frozenset[str], most: int) -> Iterator[tuple[str, list[int]]]:
    """Texts on the way to one of the strings with their tokens, shortest spellings first."""
    queue: list[tuple[str, list[int]]] = [("", [])]
    for text, ids in queue:
        yield text, ids
        if len(queue) < most:
            queue += [(text + TEXTS[i - len(SPECIAL)], [*ids, i]) for i in sorted(legal(strings, text) - {EOS})]
