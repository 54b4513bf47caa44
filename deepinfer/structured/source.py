"""A `StructuredOutputs` as grammar text for llguidance, in its Lark variant. No rule is compiled here."""

import json
from typing import Any

from deepinfer.errors import MissingExtra, Rejected
from deepinfer.structured_outputs import WHITESPACE, StructuredOutputs

# Without it a stretch that only one text can fill is also pinned to one spelling in tokens, and a mask would depend on more than
# the text so far. Behind the rules, so that the lines of a user's grammar keep their numbers.
EVERY_SPELLING = '\n%llguidance {"no_forcing": true}\n'


def llguidance() -> Any:
    """The engine of grammars. Raises MissingExtra."""
    try:
        import llguidance
    except ImportError:
        raise MissingExtra('structured output needs llguidance: pip install "deepinfer-reference[structured]"') from None
    return llguidance


def grammar_source(form: StructuredOutputs) -> str:
    """The grammar whose rule `start` is the form. Raises Rejected for a GBNF grammar that cannot be read."""
    if form.choice is not None:
        # By code point: no character has a meaning.
        texts = ("".join(f"\\x{{{ord(character):X}}}" for character in text) for text in form.choice)
        return f"start: /{'|'.join(texts)}/{EVERY_SPELLING}"
    if form.regex is not None:
        return f"start: /{lark_regex(form.regex)}/{EVERY_SPELLING}"
    if form.grammar is not None:
        return (_from_gbnf(form.grammar) if is_gbnf(form.grammar) else form.grammar) + EVERY_SPELLING
    return f"start: %json {json.dumps(guided_schema(form))}{EVERY_SPELLING}"


def guided_schema(form: StructuredOutputs) -> Any:
    """The JSON Schema with what llguidance is told about white space; a schema that says so itself has its way."""
    schema = form.schema
    if not isinstance(schema, dict):
        return schema
    guidance: dict[str, Any] = {"whitespace_pattern": form.whitespace_pattern or WHITESPACE}
    if form.disable_any_whitespace:
        guidance = {"whitespace_flexible": False}
    own = schema.get("x-guidance")
    return schema | {"x-guidance": guidance | own if isinstance(own, dict) else guidance}


def lark_regex(pattern: str) -> str:
    """A pattern as it stands between the slashes of a Lark regular expression."""
    return "".join(lark_regex_pieces(pattern))


def lark_regex_pieces(pattern: str) -> list[str]:
    """What each character of a pattern becomes."""
    pieces, is_escaped = [], False
    for character in pattern:
        # A backslash in front stays in front.
        piece = {"\n": "n" if is_escaped else "\\n", "/": "/" if is_escaped else "\\/"}.get(character, character)
        is_escaped = character == "\\" and not is_escaped
        pieces.append(piece)
    return pieces


def place(text: str, index: int) -> str:
    """Line and column, from 1, of a character."""
    before = text[:index]
    return f"line {before.count(chr(10)) + 1}, column {index - before.rfind(chr(10))}"


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is written with `::=`, as llama.cpp's are."""
    from llguidance.gbnf_to_lark import is_lark_syntax

    return "::=" in grammar and not is_lark_syntax(grammar)


def _from_gbnf(grammar: str) -> str:
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except GbnfToLarkError as error:
        message = str(error).split(" at line ")[0]
        raise Rejected(f"StructuredOutputs.grammar, {place(grammar, error.pos.pos)}: {message}") from None
    # An unknown rule is a plain Exception, and deep nesting a RecursionError.
    except Exception as error:
        raise Rejected(f"StructuredOutputs.grammar: {error}") from None
