"""Output of other builds: JSON lines with vLLM's or SGLang's names, or safetensors with a name map.

A JSON line has the prompt's and the generated token ids and, if wanted, log probabilities of the generated tokens:

| build | prompt | tokens | log probabilities |
|---|---|---|---|
| plain | `prompt_token_ids` | `token_ids` | `logprobs`: for each token a number, or a map of token id to number |
| vLLM | `prompt_token_ids` | `outputs[0].token_ids` | `outputs[0].logprobs`: maps of token id to `{"logprob": ...}` |
| SGLang | `input_ids`, or `meta_info.input_token_logprobs` | `output_ids` | `meta_info.output_token_logprobs` and `output_top_logprobs`: `[logprob, token id, text]` |

Without prompt ids line n belongs to prompt n.
"""  # noqa: E501

import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from deepinfer.checkpoint.safetensors_file import read_header
from deepinfer.dims import Tensor
from deepinfer.errors import RecordingError
from deepinfer.golden.build_output import BuildOutput, Predictions
from deepinfer.golden.recording import OWN_NAMES, read_tensors, stored_predictions

TOKEN_NAMES = ("token_ids", "output_ids")
PROMPT_NAMES = ("prompt_token_ids", "input_ids")


def read_jsonl(path: Path) -> list[BuildOutput]:
    """Outputs of a JSON-lines file; empty lines are skipped. Raises: RecordingError, naming file and line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read ({error.strerror})") from error
    outputs = [_parse_line(f"{path}, line {n}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not outputs:
        raise RecordingError(f"{path}: holds no output")
    return outputs


def _parse_line(where: str, line: bytes) -> BuildOutput:
    try:
        data = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise RecordingError(f"{where}: expected an object, got {type(data).__name__}")
    meta = data.get("meta_info") or {}
    completion = data
    if "outputs" in data:
        completions = data["outputs"]
        if not isinstance(completions, list) or len(completions) != 1 or not isinstance(completions[0], dict):
            raise RecordingError(f"{where}: expected one completion in 'outputs'")
        completion = completions[0]
    tokens = _ids(where, completion, TOKEN_NAMES)
    if tokens is None:
        raise RecordingError(f"{where}: expected one of {', '.join(TOKEN_NAMES)}; got {', '.join(map(str, data)) or 'nothing'}")
    prompt = _ids(where, data, PROMPT_NAMES)
    if not isinstance(meta, dict):
        raise RecordingError(f"{where}: meta_info: expected an object")
    if prompt is None and meta.get("input_token_logprobs"):
        prompt = [_triple(where, "input_token_logprobs", entry)[1] for entry in meta["input_token_logprobs"]]
    rows = _logprobs(where, completion, meta, tokens)
    # The length of an unknown prompt is filled in when it is found.
    predictions = None if rows is None else Predictions.reported(-1 if prompt is None else len(prompt) - 1, rows)
    return BuildOutput(where=where, prompt_token_ids=prompt, token_ids=tokens, predictions=predictions)


def _ids(where: str, data: Mapping[str, Any], names: tuple[str, ...]) -> list[int] | None:
    for name in names:
        value = data.get(name)
        if value is None:
            continue
        if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
            raise RecordingError(f"{where}: {name}: expected a list of token ids")
        return value
    return None


def _logprobs(
    where: str, completion: Mapping[str, Any], meta: Mapping[str, Any], tokens: list[int]
) -> list[dict[int, float]] | None:
    """Reported log probabilities of each generated token."""
    name, rows = "logprobs", completion.get("logprobs")
    if rows is None and meta.get("output_token_logprobs") is not None:
        name, rows = "meta_info.output_token_logprobs", _merged(where, meta)
    if rows is None:
        return None
    if not isinstance(rows, list) or len(rows) != len(tokens):
        count = len(rows) if isinstance(rows, list) else type(rows).__name__
        raise RecordingError(f"{where}: {name}: expected one entry for each of {len(tokens)} tokens, got {count}")
    return [_row(f"{where}: {name}[{i}]", row, token) for i, (row, token) in enumerate(zip(rows, tokens, strict=True))]


def _row(where: str, row: Any, token: int) -> dict[int, float]:
    if isinstance(row, int | float) and not isinstance(row, bool):
        return {token: float(row)}
    if not isinstance(row, dict) or not row:
        raise RecordingError(f"{where}: expected a number, or a map of token id to log probability")
    result = {}
    for key, value in row.items():
        number = value.get("logprob") if isinstance(value, dict) else value
        if not str(key).isdecimal() or isinstance(number, bool) or not isinstance(number, int | float):
            raise RecordingError(f"{where}: expected token id -> log probability, got {str(key)[:20]!r}: {str(value)[:40]}")
        result[int(key)] = float(number)
    return result


def _merged(where: str, meta: Mapping[str, Any]) -> Any:
    """SGLang's chosen and most probable tokens as one map for each token."""
    chosen, top = meta["output_token_logprobs"], meta.get("output_top_logprobs") or []
    if not isinstance(chosen, list) or not isinstance(top, list):
        raise RecordingError(f"{where}: meta_info: expected lists of [logprob, token id, text]")
    rows = []
    for i, entry in enumerate(chosen):
        listed = [entry, *((top[i] if i < len(top) else None) or [])]
        triples = [_triple(where, f"output_token_logprobs[{i}]", e) for e in listed]
        rows.append({token: logprob for logprob, token in triples})
    return rows


def _triple(where: str, name: str, entry: Any) -> tuple[float, int]:
    valid = isinstance(entry, list) and len(entry) >= 2 and type(entry[1]) is int
    if not valid or not (entry[0] is None or isinstance(entry[0], int | float)):
        raise RecordingError(f"{where}: meta_info.{name}: expected [logprob, token id, text], got {str(entry)[:40]}")
    return (float("-inf") if entry[0] is None else float(entry[0])), entry[1]


def read_name_map(path: Path) -> dict[str, str]:
    """A JSON object: their name -> ours. A `*` stands for the same text on both sides. Raises: RecordingError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordingError(f"{path}: cannot be read as JSON ({error})") from error
    check_name_map(str(path), data)
    return dict(data)


def check_name_map(where: str, data: Any) -> None:
    """Raises: RecordingError unless it maps names to names with equally many `*`."""
    if not isinstance(data, dict) or not all(isinstance(v, str) for v in data.values()):
        raise RecordingError(f"{where}: expected an object of their tensor names to ours")
    uneven = [key for key, value in data.items() if key.count("*") != value.count("*")]
    if uneven:
        raise RecordingError(f"{where}: {uneven[0]!r} and {data[uneven[0]]!r} need equally many '*'")


def our_name(theirs: str, name_map: Mapping[str, str]) -> str:
    """The name under which we know a tensor: by the first entry that fits, or its own."""
    pattern, parts = _entry(theirs, name_map)
    if pattern is None:
        return theirs
    pieces = name_map[pattern].split("*")
    return pieces[0] + "".join(part + piece for part, piece in zip(parts, pieces[1:], strict=True))


def unused_entries(files: Iterable[Path], name_map: Mapping[str, str]) -> list[str]:
    """Entries of a name map by which no tensor of safetensors files is renamed."""
    used = {_entry(name, name_map)[0] for file in files for name in read_header(file)}
    return [pattern for pattern in name_map if pattern not in used]


def _entry(theirs: str, name_map: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """The first entry that fits a name, and what its `*` stand for; None if none does."""
    for pattern in name_map:
        parts = _wildcards(pattern.split("*"), theirs) if "*" in pattern else [] if pattern == theirs else None
        if parts is not None:
            return pattern, parts
    return None, []


def _wildcards(pieces: list[str], name: str) -> list[str] | None:
    """What the `*` between `pieces` stand for in `name`; each holds no dot."""
    if not fnmatchcase(name, "*".join(pieces)) or not name.startswith(pieces[0]):
        return None
    rest, found = name[len(pieces[0]) :], []
    for i, piece in enumerate(pieces[1:], start=1):
        end = rest.find(piece) if piece else len(rest)
        if i == len(pieces) - 1 and piece:
            end = len(rest) - len(piece)
        if end < 0 or "." in rest[:end] or rest[end : end + len(piece)] != piece:
            return None
        found.append(rest[:end])
        rest = rest[end + len(piece) :]
    return found if not rest else None


def read_safetensors(path: Path, name_map: Mapping[str, str]) -> BuildOutput:
    """The tensors of one prompt: any of `logits`, `token_ids`, `prompt_token_ids`, and named tensors.

    Raises: RecordingError, CorruptFile.
    """
    stored: dict[str, Tensor] = {}
    for name, value in read_tensors(path).items():
        ours = our_name(name, name_map)
        if ours in stored:
            raise RecordingError(f"{path}: two tensors are called {ours} by the name map, one of them {name}")
        stored[ours] = value
    ids = {}
    for name in ("token_ids", "prompt_token_ids"):
        if name in stored:
            value = stored.pop(name)
            if value.is_floating_point() or value.dim() != 1:
                raise RecordingError(f"{path}: {name}: expected a vector of token ids, got {value.dtype} {tuple(value.shape)}")
            ids[name] = value.tolist()
    predictions = stored_predictions(path, stored, first=-1)
    tensors = {name: value for name, value in stored.items() if name not in OWN_NAMES}
    return BuildOutput(
        where=str(path),
        prompt_token_ids=ids.get("prompt_token_ids"),
        token_ids=ids.get("token_ids", []),
        has_token_ids="token_ids" in ids,
        predictions=predictions,
        tensors=tensors,
    )
