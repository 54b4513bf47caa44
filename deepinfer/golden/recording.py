"""A recording on disk: `golden.json` says what made it, `prompt-0000.safetensors` and so on hold what came out.

Each prompt is one file that appears under its name when it is complete, so an interrupted recording is a shorter recording. A file
holds `token_ids` (generated), `logprobs` (of the token that follows each row, where one does), the predictions - `logits`, or
`top_ids` and `top_logprobs` - and the observed tensors by name; `golden.json` lists the tensors in execution order.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepinfer.checkpoint.safetensors_file import as_bytes, read_header, write_safetensors
from deepinfer.config import ModelConfig
from deepinfer.dims import Shaped, Tensor
from deepinfer.errors import RecordingError, Rejected
from deepinfer.golden.build_output import BuildOutput, Predictions
from deepinfer.model.numerics import PRECISIONS
from deepinfer.model.transformer import Transformer
from deepinfer.sampling_params import SamplingParams

MANIFEST_NAME = "golden.json"
FORMAT, VERSION = "deepinfer golden outputs", 1
OWN_NAMES = ("token_ids", "logprobs", "logits", "top_ids", "top_logprobs")
# Facts that may differ between two runs that fill one recording.
CIRCUMSTANCES = ("made_by", "model_path", "batch_size", "tensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What made a recording.

    Attributes:
        made_by: versions of the package and of torch, and the device.
        model_path: where the model was loaded from, if it was.
        config: the model's configuration, for a reader's eyes; `config_digest` is what counts.
        sampling: fields of `SamplingParams`; None: the prompts were read as whole sequences and nothing was generated.
        top_logprobs: how many log probabilities a row has; None: all logits.
        tensors: name -> dtype, in execution order.
        prompts: `prompt_token_ids` of each, and its text if it was one.
    """

    made_by: dict[str, str]
    model_path: str | None
    config: dict[str, Any]
    config_digest: str
    weights_digest: str
    precision: str
    batch_invariant: bool
    sampling: dict[str, Any] | None
    seed: int
    top_logprobs: int | None
    patterns: list[str]
    chunk_tokens: int
    batch_size: int
    tensors: dict[str, str]
    prompts: list[dict[str, Any]]

    def params(self) -> SamplingParams | None:
        """How tokens were drawn."""
        return None if self.sampling is None else SamplingParams(**self.sampling)


def config_digest(config: ModelConfig) -> str:
    """SHA-256 of the configuration's fields."""
    return hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode()).hexdigest()


def weights_digest(model: Transformer) -> str:
    """SHA-256 of every parameter's name and stored bytes; the same on any device and in any precision."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        digest.update(as_bytes(parameter.detach().cpu().contiguous()))
    return digest.hexdigest()


def versions(model: Transformer) -> dict[str, str]:
    """The package, torch and the device."""
    try:
        package = metadata.version("deepinfer-reference")
    except metadata.PackageNotFoundError:
        package = "not installed"
    return {"deepinfer-reference": package, "torch": torch.__version__, "device": str(model.device)}


def write_atomically(path: Path, write: Any) -> None:
    """Let `write` fill a file beside `path` and give it its name when it is complete."""
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class Recording:
    """A folder with a manifest and the prompts that are recorded so far."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    @classmethod
    def open(cls, folder: Path | str) -> "Recording":
        """Read a recording. Raises: RecordingError if there is none, or its manifest cannot be understood."""
        folder = Path(folder)
        path = folder / MANIFEST_NAME
        if not path.is_file():
            raise RecordingError(f"{folder}: expected a recording, but there is no {MANIFEST_NAME} in it")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise RecordingError(f"{path}: cannot be read as JSON ({error})") from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT or data.pop("version", None) != VERSION:
            raise RecordingError(f"{path}: expected format {FORMAT!r}, version {VERSION}")
        names = {f.name for f in fields(Manifest)}
        if set(data) != names:
            raise RecordingError(f"{path}: missing {sorted(names - set(data))}, unknown {sorted(set(data) - names)}")
        recording = cls(folder, Manifest(**data))
        recording._check()
        return recording

    def _check(self) -> None:
        m, where = self.manifest, self.folder / MANIFEST_NAME
        valid = isinstance(m.prompts, list) and isinstance(m.tensors, dict) and isinstance(m.config, dict)
        if not valid or not all(isinstance(p, dict) and _are_ids(p.get("prompt_token_ids")) for p in m.prompts):
            raise RecordingError(f"{where}: expected a list of prompts with their token ids")
        if m.precision not in PRECISIONS:
            raise RecordingError(f"{where}: precision {m.precision!r}: expected one of {', '.join(PRECISIONS)}")
        try:
            m.params()
        except (TypeError, Rejected) as error:
            raise RecordingError(f"{where}: sampling: {error}") from error

    def save_manifest(self) -> None:
        """Write `golden.json`."""
        data = {"format": FORMAT, "version": VERSION} | asdict(self.manifest)
        text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
        write_atomically(self.folder / MANIFEST_NAME, lambda path: path.write_text(text, encoding="utf-8"))

    def __len__(self) -> int:
        return len(self.manifest.prompts)

    def path_of(self, index: int) -> Path:
        """The file of one prompt."""
        return self.folder / f"prompt-{index:04d}.safetensors"

    @cached_property
    def recorded(self) -> list[int]:
        """Prompts that are complete."""
        return [index for index in range(len(self)) if self.path_of(index).is_file()]

    def save_prompt(self, index: int, tensors: Mapping[str, Shaped[Tensor, "..."]]) -> None:
        """Write one prompt's file."""
        write_atomically(self.path_of(index), lambda path: write_safetensors(path, tensors))
        self.__dict__.pop("recorded", None)

    def output(self, index: int) -> BuildOutput:
        """One prompt's tokens, predictions and tensors, the latter in execution order.

        Raises: RecordingError if the file lacks something or contradicts the manifest; CorruptFile if it is damaged.
        """
        path = self.path_of(index)
        stored = read_tensors(path)
        prompt = list(self.manifest.prompts[index]["prompt_token_ids"])
        if "token_ids" not in stored:
            raise RecordingError(f"{path}: holds no token_ids")
        tokens = stored["token_ids"].tolist()
        rows = len(prompt) + max(len(tokens) - 1, 0)
        predictions = stored_predictions(path, stored)
        if predictions is None or len(predictions) != rows:
            raise RecordingError(
                f"{path}: expected predictions of {rows} rows, got {0 if predictions is None else len(predictions)}"
            )
        tensors = {name: stored[name] for name in self.manifest.tensors if name in stored}
        wrong = [name for name, value in tensors.items() if value.dim() == 0 or value.shape[0] not in (rows, len(tokens))]
        if wrong:
            raise RecordingError(f"{path}: {wrong[0]} has {tuple(tensors[wrong[0]].shape)} for {rows} rows")
        return BuildOutput(where=str(path), prompt_token_ids=prompt, token_ids=tokens, predictions=predictions, tensors=tensors)

    def check_continues(self, other: Manifest) -> None:
        """Raises: RecordingError unless a run with these facts would go on with this recording."""
        ours, theirs = asdict(self.manifest), asdict(other)
        differing = [name for name in ours if name not in CIRCUMSTANCES and ours[name] != theirs[name]]
        if list(self.manifest.tensors) != list(other.tensors):
            differing.append("tensors")
        if differing:
            raise RecordingError(
                f"{self.folder}: holds another recording, which differs in {', '.join(differing)}; choose an empty folder"
            )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int and i >= 0 for i in value)


def read_tensors(path: Path) -> dict[str, Shaped[Tensor, "..."]]:
    """Every tensor of a safetensors file. Raises: CorruptFile, CheckpointError."""
    tensors = {}
    for name, stored in read_header(path).items():
        tensors[name] = stored.empty()
        stored.read_into(tensors[name])
    return tensors


def stored_predictions(path: Path, stored: Mapping[str, Shaped[Tensor, "..."]], first: int = 0) -> Predictions | None:
    """Logits, or log probabilities of the most probable tokens, as a recording names them."""
    if "logits" in stored:
        return Predictions(first, stored["logits"].float())
    if "top_ids" not in stored and "top_logprobs" not in stored:
        return None
    if {"top_ids", "top_logprobs"} - set(stored) or stored["top_ids"].shape != stored["top_logprobs"].shape:
        raise RecordingError(f"{path}: top_ids and top_logprobs belong together and have the same shape")
    return Predictions(first, None, stored["top_ids"].long(), stored["top_logprobs"].float())


def check_prompts(prompts: Sequence[Any]) -> None:
    """Raises: RecordingError for no prompt at all."""
    if not prompts:
        raise RecordingError("a recording needs at least one prompt")
