"""Random schemas, patterns, choices and grammars whose texts are short, and a check of a text for each."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jsonschema

from deepinfer import StructuredOutputs


class RandomForm(NamedTuple):
    """What to ask for, and what raises unless a text has that form."""

    form: StructuredOutputs
    check: Callable[[str], None]


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """JSON Schemas of the kinds that people write, with every length bounded."""
    names = st.sampled_from(["id", "name", "größe", "a b", 'q"', "tags"])
    leaves = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(
            lambda low, width: {"type": "integer", "minimum": low, "maximum": low + width}, st.integers(-50, 50), st.integers(0, 99)
        ),
        st.builds(
            lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, st.integers(0, 2), st.integers(0, 2)
        ),
        st.sampled_from([{"type": "string", "pattern": "^[a-f]{2,4}$"}, {"type": "string", "format": "date"}, {"const": "x/y"}]),
        st.builds(
            lambda values: {"enum": values}, st.lists(st.sampled_from([1, "a", "b\\c", None, 2.5, "日"]), min_size=1, max_size=3)
        ),
    )

    def grow(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        properties = st.dictionaries(names, inner, min_size=1, max_size=3)
        arrays = st.builds(
            lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
            inner,
            st.integers(0, 2),
            st.integers(0, 1),
        )
        return properties.flatmap(_object) | arrays | st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts})

    return st.recursive(leaves, grow, max_leaves=5)


def _object(properties: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    required = st.lists(st.sampled_from(sorted(properties)), unique=True)
    fixed = {"type": "object", "properties": properties, "additionalProperties": False}
    return required.map(lambda names: fixed | {"required": names})


def json_forms() -> st.SearchStrategy[RandomForm]:
    def build(schema: dict[str, Any], compact: bool) -> RandomForm:
        def check(text: str) -> None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))

        spaces = {"disable_any_whitespace": True} if compact else {"whitespace_pattern": " "}
        return RandomForm(StructuredOutputs(json=schema, **spaces), check)

    return st.builds(build, schemas(), st.booleans())


def patterns() -> st.SearchStrategy[str]:
    """Regular expressions that Python and Rust read alike, with every repetition bounded."""
    classes = st.sampled_from(["[a-f]", "[^a-z\\n]", "\\.", "é", "x", "/", "[0-9]", '"', "\\\\", "(?:ab|a)"])

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        counts = st.sampled_from(["?", "{2}", "{0,2}", "{1,3}"])
        return st.one_of(
            st.lists(inner, min_size=2, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
            st.builds(lambda part, count: f"(?:{part}){count}", inner, counts),
        )

    return st.recursive(classes, grow, max_leaves=6)


def regex_forms() -> st.SearchStrategy[RandomForm]:
    def build(pattern: str) -> RandomForm:
        def check(text: str) -> None:
            assert re.fullmatch(pattern, text), (pattern, text)

        return RandomForm(StructuredOutputs(regex=pattern), check)

    return patterns().map(build)


def choice_forms() -> st.SearchStrategy[RandomForm]:
    def build(texts: list[str]) -> RandomForm:
        def check(text: str) -> None:
            assert text in texts

        return RandomForm(StructuredOutputs(choice=tuple(texts)), check)

    return st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), min_size=1, max_size=4).map(build)


def grammar_forms() -> st.SearchStrategy[RandomForm]:
    """Balanced brackets around a leaf, which no regular expression describes; in the Lark variant or in GBNF."""

    def build(pairs: list[str], leaf: str, is_gbnf: bool) -> RandomForm:
        quoted = [[json.dumps(side) for side in pair] for pair in pairs]
        bodies = [f"{left} {{rule}} {right}" for left, right in quoted] + [json.dumps(leaf)] * 4
        rule, sign = ("root", "::=") if is_gbnf else ("start", ":")
        text = f"{rule} {sign} " + " | ".join(body.format(rule=rule) for body in bodies)

        def check(answer: str) -> None:
            while answer != leaf:
                assert any(answer[:1] + answer[-1:] == pair for pair in pairs), (text, answer)
                answer = answer[1:-1]

        return RandomForm(StructuredOutputs(grammar=text), check)

    pairs = st.lists(st.sampled_from(["()", "[]", "<>"]), min_size=1, max_size=3, unique=True)
    return st.builds(build, pairs, st.sampled_from(["x", "yz", "0"]), st.booleans())


FORMS_OF_KIND = {"json": json_forms(), "regex": regex_forms(), "choice": choice_forms(), "grammar": grammar_forms()}
