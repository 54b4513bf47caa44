"""How many tokens the shortest text of a grammar takes: a lower bound, so that what cannot fit is refused and nothing else.

Two bounds, of which the larger counts. *Search*: all texts of one token, of two, and so on, until one is accepted, which makes the
bound exact, or until there are too many texts to follow. A text counts once, whatever the tokens it was spelled with. *Size*: no
token is longer than the longest one; how many bytes the shortest text has at least is read off a schema, or asked of the automaton
of a pattern. The bound for free text in a schema is loose: it knows how long strings must be, not how they are spelled.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from deepinfer.structured.grammar import Grammar, mask_bytes, unpack_mask

MAX_TEXTS = 2000  # followed in one search: a few milliseconds for a small vocabulary, a tenth of a second for a large one
UNBOUNDED = 1 << 40  # more than any limit: no text at all

_LENGTH_OF_TYPE = {"null": 4, "boolean": 4, "string": 2, "array": 2, "object": 2, "integer": 1, "number": 1}


def fewest_tokens_by_search(grammar: Grammar, spelled: Callable[[int], bytes]) -> int:
    """Every way to go on from every text, token by token. `spelled` gives a token's bytes, apart for control tokens."""
    frontier: dict[bytes, Any] = {b"": grammar.at_start()}
    seen = {b""}
    count = followed = 0
    while frontier:
        if any(matcher.is_accepting() for matcher in frontier.values()):
            return count
        longer: dict[bytes, Any] = {}
        for text, matcher in frontier.items():
            legal = _legal_tokens(grammar, matcher)
            followed += len(legal)
            if followed > MAX_TEXTS:
                return count + 1
            for token in legal:
                grown = text + spelled(token)
                if grown not in seen:
                    seen.add(grown)
                    after = matcher.deep_copy()
                    if after.consume_token(token):
                        longer[grown] = after
        frontier = longer
        count += 1
    return UNBOUNDED


def _legal_tokens(grammar: Grammar, matcher: Any) -> list[int]:
    mask = np.empty(mask_bytes(grammar.vocab_size), dtype=np.uint8)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if matcher.is_error():
        return []
    legal: list[int] = np.flatnonzero(unpack_mask(mask, grammar.vocab_size)).tolist()
    return [token for token in legal if token != grammar.eos_token_id]


def fewest_characters(fits: Callable[[int], bool]) -> int:
    """Characters of the shortest text, for one that exists, by asking whether there is one of at most so many."""
    high = 1
    while not fits(high) and high < UNBOUNDED:
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high if high > 1 else 0


def fewest_bytes_of_schema(schema: Any, root: Any = None, depth: int = 8) -> int:
    """Bytes that every instance of a JSON Schema has at least, without white space. What is not understood counts as 1.

    `depth` bounds the references that are followed.
    """
    root = schema if root is None else root
    if not isinstance(schema, dict):
        return 1
    bounds = [1]

    def inner(child: Any) -> int:
        return fewest_bytes_of_schema(child, root, depth)

    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and depth > 0:
        bounds.append(fewest_bytes_of_schema(_resolve(root, reference), root, depth - 1))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            bounds.append(min(map(inner, schema[key]), default=1))
    if isinstance(schema.get("allOf"), list):
        bounds.extend(map(inner, schema["allOf"]))
    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]
    by_type = [_fewest_bytes_of_type(name, schema, inner) for name in types]
    return max(*bounds, min(by_type, default=1))


def _fewest_bytes_of_type(name: Any, schema: dict[str, Any], inner: Callable[[Any], int]) -> int:
    def count(key: str) -> int:
        value = schema.get(key)
        return value if isinstance(value, int) and value > 0 else 0

    shortest = _LENGTH_OF_TYPE.get(name, 1) if isinstance(name, str) else 1
    if name == "string":
        return shortest + count("minLength")
    if name == "array":
        number = count("minItems")
        first = schema.get("prefixItems")
        first = first[:number] if isinstance(first, list) else []
        items = sum(map(inner, first)) + inner(schema.get("items")) * (number - len(first))
        return shortest + items + max(number - 1, 0)
    if name == "object" and isinstance(required := schema.get("required"), list):
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        # Quotes and colon; a key is counted in characters, of which each has at least one byte.
        members = [3 + len(key) + inner(properties.get(key)) for key in set(required) if isinstance(key, str)]
        return shortest + sum(members) + max(len(members) - 1, 0)
    return shortest


def _resolve(root: Any, reference: str) -> Any:
    found = root
    for part in reference[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, dict) else None
    return found
