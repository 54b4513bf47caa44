"""What form an answer must have; field names are vLLM's. What the form means is compiled by `deepinfer.structured`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import Rejected

KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Between two JSON tokens. Unbounded white space is legal JSON too, and what a model may fall into until its length ends it.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputs:
    """The text of an answer must match; exactly one of the first five fields is given.

    Attributes:
        json: a JSON Schema, as a dictionary or as JSON text.
        regex: a regular expression that the whole text matches, in the syntax of Rust's `regex` (no look-around, no
            back-references; `\\d` and `\\w` are Unicode classes).
        choice: the text is one of these strings.
        grammar: a context-free grammar in the Lark variant of llguidance (rule `start`) or in GBNF (rule `root`, `::=`).
        json_object: True: any JSON object.
        disable_any_whitespace: JSON without white space between its tokens.
        whitespace_pattern: a regular expression for one run of white space between JSON tokens; None is at most 20 characters.
        reasoning_end: token ids that end the model's reasoning, such as that of `</think>`. The form applies to what comes after
            them, from the very next token on; before, every token but end-of-sequence may be drawn. Empty: it applies at once.

    Raises: Rejected with the place of the fault.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    reasoning_end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None and getattr(self, kind) is not False]
        if len(given) != 1:
            raise Rejected(f"StructuredOutputs: expected exactly one of {', '.join(KINDS)}; got {', '.join(given) or 'none'}")
        for name in ("choice", "reasoning_end"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.json is not None:
            # As text it can be a key, and nobody else can change it.
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.choice is not None:
            if not isinstance(self.choice, tuple):
                raise Rejected(f"StructuredOutputs.choice: expected a list of strings, got {type(self.choice).__name__}")
            if not self.choice:
                raise Rejected("StructuredOutputs.choice: expected at least one string, got an empty list")
            for index, text in enumerate(self.choice):
                _check_text(f"choice[{index}]", text)
        for name, kinds in (("json_object", bool | None), ("disable_any_whitespace", bool)):
            if not isinstance(getattr(self, name), kinds):
                raise Rejected(f"StructuredOutputs.{name}: expected True or False, got {type(getattr(self, name)).__name__}")
        is_json = self.json is not None or self.json_object
        if (self.whitespace_pattern is not None or self.disable_any_whitespace) and not is_json:
            raise Rejected("StructuredOutputs.whitespace_pattern and disable_any_whitespace: only for json and json_object")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise Rejected("StructuredOutputs.whitespace_pattern: contradicts disable_any_whitespace")
        marker = self.reasoning_end
        if not isinstance(marker, tuple) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in marker):
            raise Rejected("StructuredOutputs.reasoning_end: expected a list of token ids")

    @property
    def kind(self) -> str:
        """Which of the five fields is given."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def schema(self) -> Any:
        """The JSON Schema as a value; that of any object for `json_object`."""
        return {"type": "object"} if self.json_object else json.loads(str(self.json))


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        found = "an empty string" if text == "" else type(text).__name__
        raise Rejected(f"StructuredOutputs.{name}: expected a string that is not empty, got {found}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Rejected(f"StructuredOutputs.{name}: character {error.start} is a lone surrogate, which is no text") from None


def _schema_text(schema: object) -> str:
    """A schema as JSON text, its keys in their order: properties are written in that order."""
    if not isinstance(schema, str | Mapping):
        raise Rejected(f"StructuredOutputs.json: expected a dictionary or JSON text, got {type(schema).__name__}")
    try:
        value = json.loads(schema, parse_constant=_no_constant) if isinstance(schema, str) else schema
        text = json.dumps(dict(value) if isinstance(value, Mapping) else value, ensure_ascii=False, allow_nan=False)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Rejected(f"StructuredOutputs.json: not JSON at {where}: {error.msg}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise Rejected(f"StructuredOutputs.json: not JSON: {error}") from None
    _check_text("json", text)
    return text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
