"""Putting outputs of another build beside the prompts of a recording that they belong to."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deepinfer.errors import RecordingError
from deepinfer.golden.build_output import BuildOutput
from deepinfer.golden.other_build import read_jsonl, read_safetensors
from deepinfer.golden.recording import MANIFEST_NAME, Recording


def read_outputs(other: Path, name_map: Mapping[str, str]) -> list[BuildOutput]:
    """Whatever another build wrote: a recording, JSON lines, one safetensors file, or a folder with one for each prompt.

    Raises: RecordingError, CorruptFile.
    """
    if (other / MANIFEST_NAME).is_file():
        recording = Recording.open(other)
        return [recording.output(index) for index in recording.recorded]
    if files := safetensors_files(other):
        return [read_safetensors(file, name_map) for file in files]
    if other.is_dir():
        raise RecordingError(f"{other}: neither {MANIFEST_NAME} nor a safetensors file is in it")
    if not other.is_file():
        raise RecordingError(f"{other}: no such file or folder")
    return read_jsonl(other)


def safetensors_files(other: Path) -> list[Path]:
    """The files of a build that writes one for each prompt; none of a recording and of JSON lines."""
    if other.is_dir():
        return [] if (other / MANIFEST_NAME).is_file() else sorted(other.glob("*.safetensors"))
    return [other] if other.is_file() and other.suffix == ".safetensors" else []


def align(golden: Recording, outputs: Sequence[BuildOutput], first_prompt: int = 0) -> list[tuple[int, BuildOutput]]:
    """Pairs of prompt number and output: by the prompt's token ids, or by order where the output does not say.

    Outputs come back complete: with their prompt, their tokens (the golden ones if the output does not say) and the place of their
    predictions.
    Raises: RecordingError for an output that belongs to no recorded prompt, or whose sizes fit nothing.
    """
    prompts = [p["prompt_token_ids"] for p in golden.manifest.prompts]
    pairs = []
    free = list(golden.recorded)
    for number, output in enumerate(outputs):
        if output.prompt_token_ids is None:
            index = first_prompt + number
            if index not in free:
                raise RecordingError(f"{output.where}: belongs to prompt {index}, which is not in {golden.folder}")
        else:
            index = next((i for i in free if prompts[i] == output.prompt_token_ids), -1)
            if index < 0:
                start = str(output.prompt_token_ids[:8])[1:-1]
                raise RecordingError(f"{output.where}: no recorded prompt has these token ids ({start}, ...): see {golden.folder}")
        free.remove(index)
        pairs.append((index, _completed(golden, index, output)))
    return pairs


def _completed(golden: Recording, index: int, output: BuildOutput) -> BuildOutput:
    prompt = golden.manifest.prompts[index]["prompt_token_ids"]
    tokens = output.token_ids
    if not output.has_token_ids and (output.tensors or output.predictions is not None):
        tokens = golden.output(index).token_ids
    outside = [i for i in tokens if i >= golden.manifest.config["vocab_size"]]
    if outside:
        raise RecordingError(f"{output.where}: token id {outside[0]} is outside the vocabulary")
    rows = len(prompt) + max(len(tokens) - 1, 0)
    predictions = output.predictions
    if predictions is not None and predictions.first < 0:
        places = {rows: 0, len(tokens): len(prompt) - 1}
        if len(predictions) not in places:
            raise RecordingError(
                f"{output.where}: {len(predictions)} rows of predictions; expected {rows} (every position) or {len(tokens)} "
                "(generated tokens)"
            )
        predictions = replace(predictions, first=places[len(predictions)])
    if predictions is not None and predictions.logits is not None:
        width, expected = predictions.logits.shape[-1], golden.manifest.config["vocab_size"]
        if predictions.logits.dim() != 2 or width != expected:
            raise RecordingError(f"{output.where}: logits {tuple(predictions.logits.shape)}; expected {expected} columns")
    for name, value in output.tensors.items():
        expected_rows = len(tokens) if _is_proposal(name) else rows
        if value.dim() == 0 or value.shape[0] != expected_rows:
            raise RecordingError(f"{output.where}: {name} {tuple(value.shape)}: expected {expected_rows} rows")
    return replace(output, prompt_token_ids=prompt, token_ids=tokens, predictions=predictions)


def _is_proposal(name: str) -> bool:
    """Whether a tensor has one row for each proposal instead of each position."""
    return name.startswith("mtp.") and not name.endswith(".features") and ".main_" not in name
