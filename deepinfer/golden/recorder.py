"""Recording golden outputs: the plain reading of every prompt, written down with what made it."""

import json
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from tqdm.auto import tqdm

from deepinfer.checkpoint.load import load_model
from deepinfer.checkpoint.locate import locate_checkpoint
from deepinfer.dims import Float, Shaped, Tensor
from deepinfer.errors import CapacityError, ConfigError, Rejected
from deepinfer.golden.observe import DEFAULT_PATTERNS, check_patterns, similar_names, unmatched
from deepinfer.golden.reading import CHUNK_TOKENS, Reading, check_lengths, read_sequences
from deepinfer.golden.recording import (
    MANIFEST_NAME,
    Manifest,
    Recording,
    check_prompts,
    config_digest,
    versions,
    weights_digest,
)
from deepinfer.golden.row_sizes import RowSize, row_sizes
from deepinfer.model.numerics import reference_ops
from deepinfer.model.transformer import Transformer
from deepinfer.ops.select import topk_stable
from deepinfer.prompts import Prompt, to_token_ids
from deepinfer.sampling_params import SamplingParams, changed_fields, shown
from deepinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
MAX_BYTES = 4_000_000_000
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
# What the plain reading honours; a record of it says nothing of other fields.
DRAWING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
)
# What a plain reading honours; `n` has a message of its own.
HONOURED = ("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos", "max_tokens", "logprobs")
# Stored narrower than torch computes them; every value fits.
STORED_AS = {torch.int64: torch.int32, torch.bool: torch.uint8}


@dataclass(frozen=True, slots=True)
class Size:
    """How much a recording will take at most: every sequence as long as it may get."""

    total_bytes: int
    bytes_by_name: dict[str, int]

    def __str__(self) -> str:
        largest = sorted(self.bytes_by_name.items(), key=lambda item: -item[1])[:3]
        shares = ", ".join(f"{name} {size_text(size)}" for name, size in largest)
        return f"at most {size_text(self.total_bytes)}, most of it {shares}"


def size_text(count: int) -> str:
    """A number of bytes as text, in the unit that leaves digits in front of the point."""
    if count < 1000:
        return f"{count} bytes"
    return f"{count / 1e3:,.1f} KB" if count < 1_000_000 else f"{count / 1e6:,.1f} MB"


def record(
    model: Transformer | Path | str,
    prompts: Sequence[Prompt],
    folder: Path | str,
    *,
    precision: str = "native",
    device: str | None = None,
    batch_invariant: bool = False,
    sampling_params: SamplingParams | None = GREEDY,
    top_logprobs: int | None = None,
    patterns: Sequence[str] = DEFAULT_PATTERNS,
    batch_size: int = 1,
    chunk_tokens: int = CHUNK_TOKENS,
    max_bytes: int = MAX_BYTES,
    tokenizer: Tokenizer | None = None,
    use_tqdm: bool = False,
) -> Recording:
    """Record golden outputs of a model; goes on where an earlier call with the same facts was stopped.

    Args:
        model: a checkpoint folder or preset, or a loaded model (`precision`, `device` and `batch_invariant` are then its own).
        prompts: texts need a tokenizer, which a folder brings along.
        sampling_params: how tokens are drawn, by default 32 greedy ones; None reads the prompts as whole sequences only.
        top_logprobs: keep this many log probabilities for each row instead of all logits.
        patterns: which tensors to keep; see `deepinfer.golden.observe`. Each but the default ones must fit a tensor of this model.
        batch_size: prompts that share every forward.
        chunk_tokens: prompt tokens of a sequence in one forward.
        max_bytes: refuse to begin if more than this might be written.

    Raises: CapacityError, ConfigError (patterns), RecordingError (the folder holds another recording), Rejected, PromptTooLong,
        StepError (not finite).
    """
    path, loaded, tokenizer = _load(model, precision, device, batch_invariant, tokenizer)
    params = sampling_params
    max_tokens = _check_options(params, top_logprobs, batch_size, chunk_tokens, loaded.config.vocab_size)
    manifest = _manifest(loaded, path, prompts, tokenizer, params, top_logprobs, check_patterns(patterns), chunk_tokens, batch_size)
    lengths = [len(prompt["prompt_token_ids"]) for prompt in manifest.prompts]
    check_lengths(loaded.config, [length + max_tokens for length in lengths])
    sizes = row_sizes(loaded, manifest.patterns, max(lengths) + max_tokens)
    _check_each_matches(loaded, manifest.patterns, sizes)
    manifest.tensors.update({name: str(size.dtype).removeprefix("torch.") for name, size in sizes.items()})
    size = recording_size(sizes, lengths, max_tokens, loaded.config.vocab_size, top_logprobs)
    if size.total_bytes > max_bytes:
        raise CapacityError(f"{folder}: {size}; the limit is {size_text(max_bytes)}: choose fewer tensors or prompts, or raise it")
    logger.info("%s: %s", folder, size)
    recording = _open_or_begin(Path(folder), manifest)
    missing = [index for index in range(len(recording)) if index not in recording.recorded]
    with tqdm(total=len(recording), initial=len(recording) - len(missing), unit="prompt", disable=not use_tqdm) as progress:
        for start in range(0, len(missing), batch_size):
            group = missing[start : start + batch_size]
            readings = read_sequences(
                loaded,
                [manifest.prompts[index]["prompt_token_ids"] for index in group],
                params=params,
                seed=manifest.seed,
                patterns=manifest.patterns,
                chunk_tokens=chunk_tokens,
                indices=group,
            )
            for index, reading in zip(group, readings, strict=True):
                recording.save_prompt(index, stored_form(reading, top_logprobs))
                progress.update()
    return recording


def _load(
    model: Transformer | Path | str, precision: str, device: str | None, batch_invariant: bool, tokenizer: Tokenizer | None
) -> tuple[str | None, Transformer, Tokenizer | None]:
    if isinstance(model, Transformer):
        return None, model, tokenizer
    loaded = load_model(model, precision, device, ops=reference_ops(batch_invariant=batch_invariant))
    return str(model), loaded, tokenizer or Tokenizer.from_folder(locate_checkpoint(model))


def _check_options(
    params: SamplingParams | None, top_logprobs: int | None, batch_size: int, chunk_tokens: int, vocab_size: int
) -> int:
    """Returns: the most tokens that a prompt gets."""
    if params is not None and params.n != 1:
        raise Rejected(f"n = {params.n}: a recording holds one completion of each prompt; repeat the prompt with other seeds")
    others = [f.name for f in fields(SamplingParams) if f.name not in HONOURED]
    ignored = [name for name in others if params is not None and getattr(params, name) != getattr(GREEDY, name)]
    if ignored:
        raise Rejected(f"{', '.join(ignored)}: a plain reading does not have it; recorded are {', '.join(HONOURED)}")
    if params is not None and params.max_tokens is None:
        raise Rejected("max_tokens = None: a recording needs a bound, because its size is announced before it runs")
    if params is not None and (other := [n for n in changed_fields(params) if n not in (*DRAWING_FIELDS, "logprobs", "n")]):
        raise Rejected(f"{other[0]} = {shown(getattr(params, other[0]))}: the plain reading of a recording does not honour it")
    if top_logprobs is not None and not 1 <= top_logprobs <= vocab_size:
        raise Rejected(f"top_logprobs = {top_logprobs}: expected 1 to {vocab_size}, or None for all logits")
    if batch_size < 1 or chunk_tokens < 1:
        raise Rejected(f"batch_size = {batch_size}, chunk_tokens = {chunk_tokens}: both must be at least 1")
    return 0 if params is None else params.max_tokens or 0


def _check_each_matches(model: Transformer, patterns: Sequence[str], names: Collection[str]) -> None:
    """Raises: ConfigError for a pattern that fits no tensor. The default ones serve models without Engram or drafts too."""
    absent = [pattern for pattern in unmatched(patterns, names) if pattern not in DEFAULT_PATTERNS]
    if absent:
        existing = similar_names(absent[0], list(row_sizes(model, ("**",), 1)))
        raise ConfigError(
            f"pattern {absent[0]!r}: no tensor of this model has such a name; there are, for example, {', '.join(existing)}"
        )


def _manifest(
    model: Transformer,
    path: str | None,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer | None,
    params: SamplingParams | None,
    top_logprobs: int | None,
    patterns: tuple[str, ...],
    chunk_tokens: int,
    batch_size: int,
) -> Manifest:
    check_prompts(prompts)
    tokenised = []
    for index, prompt in enumerate(prompts):
        if tokenizer is None and isinstance(prompt, str):
            raise Rejected(f"prompt {index} is a text: give `tokenizer` with a loaded model, or token ids")
        text, ids = to_token_ids(prompt, index, tokenizer, model.config)  # type: ignore[arg-type]
        tokenised.append({"prompt_token_ids": ids} | ({} if text is None else {"text": text}))
    sampling = None if params is None else {name: getattr(params, name) for name in DRAWING_FIELDS}
    if sampling is not None:
        sampling["stop_token_ids"] = list(sampling["stop_token_ids"])
    return Manifest(
        made_by=versions(model),
        model_path=path,
        config=json.loads(json.dumps(asdict(model.config))),
        config_digest=config_digest(model.config),
        weights_digest=weights_digest(model),
        precision=model.numerics.precision.name,
        batch_invariant=model.numerics.ops.batch_invariant,
        sampling=sampling,
        seed=0 if params is None else params.seed or 0,
        top_logprobs=top_logprobs,
        patterns=list(patterns),
        chunk_tokens=chunk_tokens,
        batch_size=batch_size,
        tensors={},
        prompts=tokenised,
    )


def recording_size(
    sizes: dict[str, RowSize], lengths: Sequence[int], max_tokens: int, vocab_size: int, top_logprobs: int | None
) -> Size:
    """The size of what `stored_form` writes for sequences of these prompt lengths that all reach `max_tokens`."""
    rows = sum(length + max(max_tokens - 1, 0) for length in lengths)
    proposals = max_tokens * len(lengths)
    prediction = (
        {"logits": vocab_size * 4} if top_logprobs is None else {"top_ids": 4 * top_logprobs, "top_logprobs": 4 * top_logprobs}
    )
    by_name = {name: rows * size for name, size in prediction.items()}
    by_name["logprobs"] = 4 * (rows + len(lengths))
    by_name["token_ids"] = 4 * proposals
    for name, size in sizes.items():
        itemsize = STORED_AS.get(size.dtype, size.dtype).itemsize
        by_name[name] = math.prod(size.shape) * itemsize * (proposals if size.is_proposal else rows)
    return Size(sum(by_name.values()), by_name)


def _open_or_begin(folder: Path, manifest: Manifest) -> Recording:
    if (folder / MANIFEST_NAME).is_file():
        recording = Recording.open(folder)
        recording.check_continues(manifest)
        return recording
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise Rejected(f"{folder}: exists, but is neither empty nor a recording; nothing was written")
    folder.mkdir(parents=True, exist_ok=True)
    recording = Recording(folder, manifest)
    recording.save_manifest()
    return recording


def stored_form(reading: Reading, top_logprobs: int | None) -> dict[str, Shaped[Tensor, "..."]]:
    """What one prompt's file holds."""
    stored = {name: value.to(STORED_AS.get(value.dtype, value.dtype)) for name, value in reading.tensors.items()}
    stored["token_ids"] = torch.tensor(reading.token_ids, dtype=torch.int32)
    logprobs = torch.log_softmax(reading.logits, dim=-1)
    following = torch.tensor([*reading.prompt_token_ids[1:], *reading.token_ids])
    stored["logprobs"] = _chosen(logprobs, following)
    if top_logprobs is None:
        return stored | {"logits": reading.logits}
    values, ids = topk_stable(logprobs, top_logprobs)
    return stored | {"top_ids": ids.to(torch.int32), "top_logprobs": values}


def _chosen(logprobs: Float[Tensor, "R V"], following: Tensor) -> Float[Tensor, " R"]:
    """Log probability of the token that follows each row; the last row of a prompt without continuation has none."""
    count = min(len(following), logprobs.shape[0])
    return logprobs[:count].gather(1, following[:count, None]).squeeze(1)
