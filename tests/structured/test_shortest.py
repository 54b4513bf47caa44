"""Bounds of the shortest text: never above it, and exact where the search ends by itself."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from deepinfer.structured.shortest import UNBOUNDED, fewest_bytes_of_schema, fewest_characters
from deepinfer.structured_outputs import StructuredOutputs
from tests.structured.random_forms import schemas
from tests.structured.tiny import tiny_compiler


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"regex": "a*"}, 0),
        ({"regex": "abc|b"}, 1),
        ({"regex": "b{9}"}, 9),
        ({"regex": "(abc){9}"}, 9),
        ({"regex": "[ab]{4}c"}, 2),  # ab, abc
        ({"choice": ["abcabc", "cccc"]}, 2),
        ({"grammar": 'start: "a" start "b" | "c" "c"'}, 2),
        ({"grammar": 'start: "a" start'}, UNBOUNDED),
    ],
    ids=str,
)
def test_the_shortest_text_of_a_small_form_is_known_exactly(form: dict[str, Any], expected: int) -> None:
    fewest = tiny_compiler().compile(StructuredOutputs(**form)).result().fewest_tokens
    assert fewest == expected or (expected == UNBOUNDED and fewest > 500)


def test_a_long_pattern_has_a_bound_from_its_size() -> None:
    # Too many texts to search; a token has at most three bytes.
    assert tiny_compiler().compile(StructuredOutputs(regex="[abc]{3000}")).result().fewest_tokens == 1000


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 8, 9, 1000])
def test_characters_are_found_by_asking(length: int) -> None:
    assert fewest_characters(lambda most: most >= length) == (length if length > 1 else 0)


@pytest.mark.parametrize(
    ("schema", "shortest"),
    [
        (True, "0"),
        ({"type": "string", "minLength": 5}, '"abcde"'),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 3}, "[true,true,true]"),
        ({"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}, "minItems": 2}, "[null,1]"),
        (
            {"type": "object", "properties": {"ab": {"type": "null"}, "c": {"type": "string"}}, "required": ["ab", "c"]},
            '{"ab":null,"c":""}',
        ),
        ({"type": ["string", "integer"], "minLength": 9}, "1"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "minLength": 3}]}, "null"),
        ({"allOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}, '"abc"'),
        ({"$defs": {"x": {"type": "null"}}, "type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 2}, "[null,null]"),
    ],
    ids=str,
)
def test_the_bytes_of_a_schema_are_a_lower_bound(schema: Any, shortest: str) -> None:
    bound = fewest_bytes_of_schema(schema)
    assert bound <= len(shortest)
    assert bound > 0.4 * len(shortest)


@given(schemas())
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_no_text_of_a_random_schema_is_shorter_than_its_bound(schema: dict[str, Any]) -> None:
    assert fewest_bytes_of_schema(schema) <= len(shortest_instance(schema).encode())


def shortest_instance(schema: dict[str, Any]) -> str:
    """The shortest text of a schema of `random_forms`, built directly."""

    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    if "anyOf" in schema:
        return min(map(shortest_instance, schema["anyOf"]), key=len)
    if "const" in schema or "enum" in schema:
        return min(map(dump, schema.get("enum", [schema.get("const")])), key=len)
    kind = schema["type"]
    if kind == "object":
        members = (f"{dump(name)}:{shortest_instance(schema['properties'][name])}" for name in schema["required"])
        return "{" + ",".join(members) + "}"
    if kind == "array":
        return "[" + ",".join([shortest_instance(schema["items"])] * schema["minItems"]) + "]"
    if kind == "integer":
        return min((str(i) for i in range(schema["minimum"], schema["maximum"] + 1)), key=len)
    if kind == "string":
        return (
            '"'
            + {"pattern": "aa", "format": "2026-01-01"}.get(next(iter(set(schema) - {"type"})), "a" * schema.get("minLength", 0))
            + '"'
        )
    return {"boolean": "true", "null": "null"}[kind]
