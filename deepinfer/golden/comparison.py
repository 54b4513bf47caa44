"""Comparing another build with a recording: `compare` decides what is run, the records of `report` hold what was found.

Our model reads the tokens that the other build produced (teacher forcing), so that one flipped token does not end the comparison.
Predictions come from a reading of its own; tensors from one that is anchored to the other build's tensors (see `anchor`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tqdm.auto import tqdm

from deepinfer.checkpoint.load import load_model
from deepinfer.dims import Float, Shaped, Tensor
from deepinfer.errors import DeepInferError, RecordingError
from deepinfer.golden.align import align, read_outputs, safetensors_files
from deepinfer.golden.anchor import Anchors
from deepinfer.golden.build_output import BuildOutput, Predictions
from deepinfer.golden.disturb import disturbing
from deepinfer.golden.other_build import check_name_map, unused_entries
from deepinfer.golden.reading import Reading, read_sequences, stop_token_ids
from deepinfer.golden.recording import MANIFEST_NAME, Manifest, Recording, config_digest, weights_digest
from deepinfer.golden.report import PromptReport, Report
from deepinfer.golden.tensor_differences import TensorDifference, compare_tensors
from deepinfer.golden.token_differences import PositionDifference, compare_predictions, compare_tokens
from deepinfer.golden.tolerances import Tolerances, choose_tolerances
from deepinfer.model.numerics import reference_ops
from deepinfer.model.transformer import Transformer

# Two right builds can be this many times farther apart than one build is from itself with other last bits; on `mini` the largest
# differences of log probabilities were 0.4 to 1.3 times as large, in `tiny_config()` up to twice.
LAST_BIT_FACTOR = 2.5
MEAN_KL_FACTOR = 5.0
# What choices are judged by, besides the names that the other build recorded.
JUDGES = ("layers.*.attn.indexer.scores", "**.ffn.gate.scores", "mtp.logits")


def compare(
    golden: Recording | Path | str,
    other: Recording | Path | str,
    *,
    model: Transformer | Path | str | None = None,
    device: str | None = None,
    name_map: Mapping[str, str] | None = None,
    first_prompt: int = 0,
    tolerances: Tolerances | Mapping[str, float] | None = None,
    allow_missing: bool = False,
    use_tqdm: bool = False,
) -> Report:
    """Compare what another build computed with a recording.

    Args:
        golden: our recording.
        other: another recording, or output of another build; see `deepinfer.golden.other_build` for the formats.
        model: the model that was recorded; by default it is loaded from where it was. If that is not known, the recording alone is
            compared, as far as the tokens are the same.
        name_map: their tensor names to ours, for safetensors of another build.
        first_prompt: which prompt the first output belongs to that does not say so.
        tolerances: instead of those of the recording's precision, all or some by name (`{"token_gap": 0.1}`); used as they are,
            where those of the precision are widened by how far the model itself carries a last bit.
        allow_missing: whether prompts that only one side has leave the verdict to the others; by default they make it "differs".

    Raises: RecordingError, CheckpointError, ConfigError (tolerances), and what loading the model raises: the input cannot be used.
    """
    golden = golden if isinstance(golden, Recording) else Recording.open(golden)
    check_name_map("name_map", dict(name_map or {}))
    limits, asked = choose_tolerances(golden.manifest.precision, tolerances)
    place = other.folder if isinstance(other, Recording) else Path(other)
    pairs = align(golden, read_outputs(place, name_map or {}), first_prompt)
    if not pairs:
        raise RecordingError(f"{place}: holds no complete prompt")
    loaded = _model_of(golden.manifest, model, device)
    theirs = Recording.open(place).manifest if (place / MANIFEST_NAME).is_file() else None
    prompts = []
    for index, output in tqdm(pairs, unit="prompt", disable=not use_tqdm):
        drawn_alike = _drawn_alike(golden.manifest, theirs)
        prompts.append(_compare_prompt(golden, index, output, loaded, limits, asked, drawn_alike=drawn_alike))
    return Report(
        golden=str(golden.folder),
        other=str(place),
        precision=golden.manifest.precision,
        basis="the recording alone" if loaded is None else "our model, reading the other build's tokens",
        notes=_notes(golden, theirs, loaded, unused_entries(safetensors_files(place), name_map or {})),
        prompts=prompts,
        num_prompts=len(golden),
        allow_missing=allow_missing,
    )


def _model_of(manifest: Manifest, model: Transformer | Path | str | None, device: str | None) -> Transformer | None:
    """The model that was recorded. Raises: RecordingError if the one at hand is another."""
    if model is None:
        model = manifest.model_path
    if model is None:
        return None
    if not isinstance(model, Transformer):
        ops = reference_ops(batch_invariant=manifest.batch_invariant)
        try:
            model = load_model(model, manifest.precision, device, ops=ops)
        except DeepInferError as error:
            raise RecordingError(f"the recorded model cannot be loaded; say where it is with `model` (--model): {error}") from error
    found = (config_digest(model.config), weights_digest(model), model.numerics.precision.name)
    for what, ours, theirs in zip(
        ("configuration", "weights", "precision"),
        found,
        (manifest.config_digest, manifest.weights_digest, manifest.precision),
        strict=True,
    ):
        if ours != theirs:
            raise RecordingError(
                f"this is not the model that was recorded: its {what} has {ours[:16]}, the recording {theirs[:16]}"
            )
    return model


def _drawn_alike(golden: Manifest, theirs: Manifest | None) -> bool:
    """Whether the same logits would have led to the same tokens: greedy on both sides, or drawn with the same noise."""
    if golden.sampling is None:
        return False
    if theirs is None:
        return golden.sampling["temperature"] == 0
    return (golden.sampling, golden.seed) == (theirs.sampling, theirs.seed)


def _notes(golden: Recording, theirs: Manifest | None, model: Transformer | None, unused: Sequence[str]) -> list[str]:
    notes = [f"the name map has entries that fit no tensor: {', '.join(map(repr, unused))}"] if unused else []
    if model is None:
        notes.append("without a model, comparison ends at the first token that differs, and tensors show inherited differences too")
    if theirs is None:
        return notes
    for what, ours, other in (
        ("configuration", golden.manifest.config_digest, theirs.config_digest),
        ("weights", golden.manifest.weights_digest, theirs.weights_digest),
        ("precision", golden.manifest.precision, theirs.precision),
        ("sampling", str(golden.manifest.sampling), str(theirs.sampling)),
    ):
        if ours != other:
            notes.append(f"the two recordings have another {what}")
    return notes


def _compare_prompt(
    golden: Recording,
    index: int,
    output: BuildOutput,
    model: Transformer | None,
    limits: Tolerances,
    asked: Collection[str],
    *,
    drawn_alike: bool,
) -> PromptReport:
    manifest, recorded = golden.manifest, golden.output(index)
    prompt = output.prompt_token_ids
    assert prompt is not None
    logits, tokens = _our_logits(recorded, output, model, manifest)
    positions = [] if output.predictions is None else compare_predictions(logits, output.predictions)
    params = manifest.params() if drawn_alike else None
    divergences = compare_tokens(logits, len(prompt), tokens, params, manifest.seed, limits.token_gap) if drawn_alike else []
    report = PromptReport(
        index=index,
        where=output.where,
        num_prompt_tokens=len(prompt),
        num_tokens=len(tokens),
        ended_after=_ended_after(recorded, output, manifest),
        went_on_after=_went_on_after(recorded, output, manifest),
        num_recorded_tokens=len(recorded.token_ids),
        positions=positions,
        logprob_tolerance=limits.logprob,
        token_gap=limits.token_gap,
        divergences=divergences,
        tensors=_tensors(recorded, output, model, manifest, limits, asked),
    )
    is_beyond = {
        "logprob": not report.max_logprob_difference <= limits.logprob,
        "token_gap": any(d.kind == "error" for d in divergences),
    }
    if model is None or not any(is_beyond[name] for name in is_beyond if name not in asked):
        return report
    # Before it is called a difference, see how far the model itself carries a last bit.
    moved = _last_bit_differences(model, prompt, tokens, logits, limits, manifest.chunk_tokens)
    return _widened(report, limits, asked, moved)


def _widened(report: PromptReport, limits: Tolerances, asked: Collection[str], moved: Sequence[PositionDifference]) -> PromptReport:
    """The same findings, judged by tolerances that nobody asked for as wide as the model's own movement makes them."""
    largest = max((p.max_logprob_difference for p in moved), default=0.0)
    mean_kl = sum(p.kl for p in moved) / max(len(moved), 1)
    needed = {"logprob": LAST_BIT_FACTOR * largest, "token_gap": largest}
    own = {name: getattr(limits, name) for name in needed}
    wide = {name: own[name] if name in asked else max(own[name], needed[name]) for name in needed}
    return replace(
        report,
        last_bit_difference=largest,
        logprob_tolerance=wide["logprob"],
        token_gap=wide["token_gap"],
        widened_from={name: own[name] for name in needed if wide[name] > own[name]},
        mean_kl_tolerance=None if "logprob" in asked else max(limits.logprob**2, MEAN_KL_FACTOR * mean_kl),
        divergences=[replace(d, kind="tie" if d.gap <= wide["token_gap"] else "error") for d in report.divergences],
    )


def _ended_after(recorded: BuildOutput, output: BuildOutput, manifest: Manifest) -> int | None:
    """Where an output ends that is shorter than the recorded one, and not because of a stop token."""
    params, tokens = manifest.params(), output.token_ids
    if params is None or len(tokens) >= len(recorded.token_ids):
        return None
    is_stopped = bool(tokens) and tokens[-1] in stop_token_ids(params, manifest.config["eos_token_id"])
    return None if is_stopped else len(tokens)


def _went_on_after(recorded: BuildOutput, output: BuildOutput, manifest: Manifest) -> int | None:
    """Where an output should have ended that goes on: at a stop token, at `max_tokens`, or where the same recorded one ended."""
    params, tokens = manifest.params(), output.token_ids
    if params is None:
        return None
    stops, count = stop_token_ids(params, manifest.config["eos_token_id"]), len(recorded.token_ids)
    ends = [place for place, token in enumerate(tokens, start=1) if token in stops and place >= params.min_tokens]
    ends += [count] if tokens[:count] == recorded.token_ids else []
    ends += [] if params.max_tokens is None else [params.max_tokens]
    end = min(ends, default=len(tokens))
    return end if len(tokens) > end else None


def _our_logits(
    recorded: BuildOutput, output: BuildOutput, model: Transformer | None, manifest: Manifest
) -> tuple[Float[Tensor, "R V"], list[int]]:
    """Our logits behind the other build's tokens, and the tokens that they can be compared with."""
    assert recorded.predictions is not None
    is_whole = recorded.predictions.logits is not None
    if recorded.token_ids == output.token_ids and is_whole:
        assert recorded.predictions.logits is not None
        return recorded.predictions.logits, output.token_ids
    if model is not None:
        return _read(model, output, manifest).logits, output.token_ids
    if not is_whole:
        raise RecordingError(f"{recorded.where}: holds the most probable tokens only; comparing them needs the model (--model)")
    assert recorded.predictions.logits is not None
    count = _num_shared(recorded.token_ids, output.token_ids)
    rows = len(recorded.prompt_token_ids or ()) + count
    return recorded.predictions.logits[:rows], output.token_ids[: min(count + 1, len(recorded.token_ids))]


def _num_shared(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens agree before the first that does not."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def _read(
    model: Transformer, output: BuildOutput, manifest: Manifest, patterns: Sequence[str] = (), anchors: Anchors | None = None
) -> Reading:
    assert output.prompt_token_ids is not None
    return read_sequences(
        model,
        [output.prompt_token_ids],
        given=[output.token_ids],
        patterns=patterns,
        chunk_tokens=manifest.chunk_tokens,
        anchoring=anchors,
    )[0]


def _tensors(
    recorded: BuildOutput,
    output: BuildOutput,
    model: Transformer | None,
    manifest: Manifest,
    limits: Tolerances,
    asked: Collection[str],
) -> list[TensorDifference]:
    """Named tensors that both sides have."""
    if not output.tensors:
        return []
    ours: Mapping[str, Shaped[Tensor, "R ..."]]
    theirs: Mapping[str, Shaped[Tensor, "R ..."]] = output.tensors
    if model is not None:
        ours = _read(model, output, manifest, [*output.tensors, *JUDGES], Anchors(output.tensors)).tensors
        unknown = sorted(set(theirs) - set(ours))
        if unknown:
            raise RecordingError(f"{output.where}: unknown tensor {unknown[0]} ({len(unknown)} in all); a name map can rename it")
    else:
        ours = recorded.tensors
        if recorded.token_ids != output.token_ids:
            rows = len(recorded.prompt_token_ids or ()) + _num_shared(recorded.token_ids, output.token_ids)
            ours, theirs = ({name: value[:rows] for name, value in side.items()} for side in (ours, theirs))
            ours, theirs = _same_rows(ours, theirs)
    return compare_tensors(ours, theirs, manifest.precision, limits, output.where, is_anchored=model is not None, asked=asked)


def _same_rows(
    ours: Mapping[str, Shaped[Tensor, "R ..."]], theirs: Mapping[str, Shaped[Tensor, "R ..."]]
) -> tuple[Mapping[str, Shaped[Tensor, "R ..."]], Mapping[str, Shaped[Tensor, "R ..."]]]:
    """Both sides without the rows that only one of them has; proposals behind another token are left out."""
    shared = {name for name in ours if name in theirs and not name.startswith("mtp.")}
    rows = {name: min(ours[name].shape[0], theirs[name].shape[0]) for name in shared}
    return tuple({name: side[name][: rows[name]] for name in side if name in shared} for side in (ours, theirs))  # type: ignore[return-value]


def _last_bit_differences(
    model: Transformer, prompt: Sequence[int], tokens: Sequence[int], logits: Float[Tensor, "R V"], limits: Tolerances, chunk: int
) -> list[PositionDifference]:
    """How the model's own predictions move when last bits of the streams change behind every block."""
    whole = [*prompt, *tokens[:-1]]
    disturbed = read_sequences(model, [whole], chunk_tokens=chunk, anchoring=disturbing(limits.last_bit))[0]
    return compare_predictions(logits, Predictions(0, disturbed.logits))
