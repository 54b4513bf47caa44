"""Where a form is malformed: line and column of a grammar or a pattern, JSON pointer of a schema."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from deepinfer.structured.source import is_gbnf, lark_regex_pieces, place
from deepinfer.structured_outputs import StructuredOutputs

Check = Callable[[Any], str]  # a schema -> what is wrong with it, "" if nothing

_SCHEMAS_BY_NAME = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_LARK_PREFIX = len("start: /")


def describe_fault(form: StructuredOutputs, message: str, check_schema: Check) -> str:
    """One line: the field, the place in it, and what llguidance's `message` says about it."""
    kind = form.kind
    if kind in ("json", "json_object"):
        pointer, found = locate_in_schema(form.schema, check_schema)
        if not found:
            return f"StructuredOutputs.whitespace_pattern: {_first_line(message)}"
        return f"StructuredOutputs.{kind}, at {json.dumps(pointer)}: {_first_line(found)}"
    where = _place_in_pattern(form.regex, message) if form.regex is not None else _place_in_grammar(form, message)
    return f"StructuredOutputs.{kind}{where}: {_first_line(message)}"


def _first_line(message: str) -> str:
    """What is said, without the place in llguidance's own text and without its picture of it."""
    explained = re.search(r"^error: (.*)$", message, re.MULTILINE)
    if explained:
        return explained.group(1)
    line = message.strip().splitlines()[0] if message.strip() else "not accepted by llguidance"
    return re.sub(r"^(at )?\d+\(\d+\): ", "", line)


def _place_in_grammar(form: StructuredOutputs, message: str) -> str:
    """What is reported of a translated grammar are lines of the translation."""
    found = re.match(r"(?:at )?(\d+)\((\d+)\):", message)
    if form.grammar is None or found is None or is_gbnf(form.grammar):
        return ""
    return f", line {found.group(1)}, column {found.group(2)}"


def _place_in_pattern(pattern: str, message: str) -> str:
    """The regex parser underlines the place below the pattern; elsewhere only the rule it stands in is known."""
    picture = re.search(r"^ {4}(.*)\n {4}( *)\^", message, re.MULTILINE)
    if picture is None:
        found = re.match(r"(?:at )?1\((\d+)\):", message)
        column = int(found.group(1)) - 1 - _LARK_PREFIX if found else 0
    else:
        column = len(picture.group(2))
    pieces = lark_regex_pieces(pattern)
    index = next((i for i in range(len(pieces)) if sum(map(len, pieces[: i + 1])) > column), len(pieces) - 1)
    return f", {place(pattern, index)}"


def locate_in_schema(schema: Any, check: Check) -> tuple[str, str]:
    """JSON pointer of the innermost part that is wrong by itself in the same way as the whole, and what is wrong with it."""
    rooted = {"root": _moved(schema, "#/root")}
    message, pointer = check(schema), ""
    inside = schema
    while True:
        for part, child in _parts(inside):
            if check(rooted | {"$ref": f"#/root{pointer}{part}"}) == message:
                pointer, inside = pointer + part, child
                break
        else:
            return pointer, message


def _moved(schema: Any, base: str) -> Any:
    """The schema with its references to itself as they are when it stands at `base` of another one."""
    if isinstance(schema, list):
        return [_moved(item, base) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, base) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = base + reference[1:]
    return moved


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside one, with their pointers from it; definitions first, because others refer to them."""
    if not isinstance(schema, dict):
        return
    for key in _SCHEMAS_BY_NAME:
        if isinstance(schema.get(key), dict):
            for name, child in schema[key].items():
                yield f"/{key}/{name.replace('~', '~0').replace('/', '~1')}", child
    for key in _LISTS_OF_SCHEMAS:
        if isinstance(schema.get(key), list):
            yield from ((f"/{key}/{index}", child) for index, child in enumerate(schema[key]))
    for key in _SCHEMAS:
        if isinstance(schema.get(key), dict):
            yield f"/{key}", schema[key]
