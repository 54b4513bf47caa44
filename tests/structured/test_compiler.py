"""Compiled in the background, each form once, refused with the place of its fault."""

import builtins
import re
import threading
from concurrent.futures import wait
from typing import Any

import pytest

from deepinfer.errors import MissingExtra, Rejected
from deepinfer.structured import compiler as compiler_module
from deepinfer.structured.compiler import GrammarCompiler
from deepinfer.structured_outputs import StructuredOutputs
from tests.structured.tiny import EOS, tiny_compiler, tiny_tokenizer


def fault_of(**form: Any) -> str:
    with pytest.raises(Rejected) as caught:
        tiny_compiler().compile(StructuredOutputs(**form)).result()
    return str(caught.value)


NESTED = {"type": "object", "properties": {"a/b": {"type": "array", "items": {"type": "strin"}}}}


@pytest.mark.parametrize(
    ("form", "where", "what"),
    [
        ({"regex": "a(b"}, "regex, line 1, column 2", "unclosed group"),
        ({"regex": "a/b[z-a]"}, "regex, line 1, column 5", "range"),
        ({"regex": "ab\n(c"}, "regex, line 2, column 1", "unclosed group"),
        ({"regex": "(a)\\1"}, "regex, line 1, column 4", "backreferences"),
        ({"regex": "a(?=b)"}, "regex, line 1, column 2", "look-around"),
        ({"regex": "a\\"}, "regex, line 1", ""),
        ({"regex": "[^\\x00-\\U0010FFFF]"}, "regex", "no text"),
        ({"grammar": 'start: "a" b\n b: c\n'}, "grammar, line 2, column 5", "unknown name"),
        ({"grammar": 'start: "a'}, "grammar, line 1, column 10", "lexer error"),
        ({"grammar": 'root: "a"'}, "grammar", "start"),
        ({"grammar": 'root ::= "a" ('}, "grammar, line 1, column 15", "Expected"),
        ({"grammar": 'root ::= "a" | c'}, "grammar", "'c'"),
        ({"grammar": 'start: start "a"'}, "grammar", "no text"),
        ({"json": NESTED}, 'json, at "/properties/a~1b/items"', "strin"),
        ({"json": {"$defs": {"x": {"type": "strin"}}, "$ref": "#/$defs/x"}}, 'json, at "/$defs/x"', "strin"),
        ({"json": {"anyOf": [{"type": "null"}, {"pattern": "a(", "type": "string"}]}}, 'json, at "/anyOf/1"', "unclosed group"),
        ({"json": {"properties": {"a": {"$ref": "#/nope"}}}}, "json, at", "/nope"),
        ({"json": "[1]"}, 'json, at ""', "object or boolean"),
        ({"json": "false"}, 'json, at ""', "false"),
        ({"json": {"minimum": 3, "maximum": 2, "type": "integer"}}, 'json, at ""', "Unsatisfiable"),
        ({"json": {"type": "array", "uniqueItems": True}}, 'json, at ""', "uniqueItems"),
        ({"json_object": True, "whitespace_pattern": "a("}, "whitespace_pattern", ""),
    ],
    ids=str,
)
def test_a_fault_is_named_with_its_place(form: dict[str, Any], where: str, what: str) -> None:
    message = fault_of(**form)
    assert message.startswith(f"StructuredOutputs.{where}"), message
    assert what in message
    assert "\n" not in message


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    assert "nested" in fault_of(json=schema)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "choice": ["a"]},
        {"json_object": False},
        {"regex": ""},
        {"regex": 3},
        {"choice": []},
        {"choice": "ab"},
        {"choice": ["a", ""]},
        {"choice": ["a", 1]},
        {"grammar": "\ud800"},
        {"json": 3},
        {"json": '{"type": NaN}'},
        {"json": {"const": float("nan")}},
        {"json": {"const": object()}},
        {"json": {"title": "\udfff"}},
        {"json_object": 1},
        {"json_object": "yes"},
        {"regex": "a", "whitespace_pattern": " "},
        {"regex": "a", "disable_any_whitespace": True},
        {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
        {"json_object": True, "disable_any_whitespace": None},
        {"regex": "a", "reasoning_end": [-1]},
        {"regex": "a", "reasoning_end": "</think>"},
    ],
    ids=lambda fields: re.sub(" at 0x[0-9a-f]+", "", repr(fields)),
)
def test_fields_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Rejected, match=r"^StructuredOutputs"):
        StructuredOutputs(**fields)


def test_json_that_is_no_json_is_refused_with_line_and_column() -> None:
    with pytest.raises(Rejected, match="line 2, column 3"):
        StructuredOutputs(json='{"type":\n  oops}')


def test_a_schema_is_kept_as_text_that_nobody_can_change() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    form = StructuredOutputs(json=schema)
    schema["type"] = "array"
    assert form.json == '{"type": "object", "properties": {"b": {}, "a": {}}}'
    assert form == StructuredOutputs(json=str(form.json))
    assert hash(form) == hash(StructuredOutputs(json=str(form.json)))


def test_a_form_is_compiled_once_and_with_any_marker() -> None:
    compiler = GrammarCompiler(tiny_tokenizer(), EOS)
    first = compiler.compile(StructuredOutputs(regex="ab"))
    assert compiler.compile(StructuredOutputs(regex="ab")) is first
    assert compiler.compile(StructuredOutputs(regex="ab", reasoning_end=(3,))) is first
    assert compiler.compile(StructuredOutputs(regex="abc")) is not first
    compiler.close()


def test_the_oldest_grammars_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_GRAMMARS", 3)
    compiler = GrammarCompiler(tiny_tokenizer(), EOS)
    first = compiler.compile(StructuredOutputs(regex="a"))
    wait([compiler.compile(StructuredOutputs(regex=f"b{{{i}}}")) for i in range(1, 4)])
    assert compiler.compile(StructuredOutputs(regex="a")) is not first
    compiler.close()


def test_whoever_asks_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(tiny_tokenizer(), EOS)
    gate = threading.Event()
    original = GrammarCompiler._grammar

    def slow(self: GrammarCompiler, source: str, form: StructuredOutputs) -> Any:
        if form.regex == "aa":
            assert gate.wait(60)
        return original(self, source, form)

    monkeypatch.setattr(GrammarCompiler, "_grammar", slow)
    held = compiler.compile(StructuredOutputs(regex="aa"))
    assert compiler.compile(StructuredOutputs(regex="b")).result(60) is not None
    assert not held.done()
    gate.set()
    assert held.result(60) is not None
    compiler.close()


def test_without_llguidance_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r'pip install "deepinfer-reference\[structured\]"'):
        tiny_compiler().compile(StructuredOutputs(regex="a"))
