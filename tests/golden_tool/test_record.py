"""Recordings: complete, bounded, announced, resumable, and refused where they would be worthless."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import deepinfer.golden.recorder
from deepinfer.checkpoint.write import random_tensors, save_checkpoint
from deepinfer.errors import CapacityError, ConfigError, DeepInferError, PromptTooLong, RecordingError, Rejected, StepError
from deepinfer.golden import Recording, record
from deepinfer.golden.reading import Reading
from deepinfer.golden.recorder import size_text
from deepinfer.model.numerics import PRECISIONS
from deepinfer.presets import byte_tokenizer_json, tiny_config
from deepinfer.sampling_params import SamplingParams
from tests.golden_tool.recordings import ALL, PROMPT, SHORT, TWO_TOKENS, clean_model, fresh_model, record_tiny


def test_a_prompt_file_holds_everything(tmp_path: Path) -> None:
    recording = Recording.open(record_tiny(tmp_path).folder)
    output = recording.output(0)
    assert output.prompt_token_ids == PROMPT
    assert output.predictions is not None
    logits = output.predictions.logits
    assert logits is not None
    assert logits.shape == (len(PROMPT) + 1, tiny_config().vocab_size)
    assert output.token_ids == logits[len(PROMPT) - 1 :].argmax(dim=-1).tolist()
    assert list(output.tensors) == list(recording.manifest.tensors)
    whole = clean_model()(torch.tensor([*PROMPT, output.token_ids[0]]))
    assert torch.allclose(logits, whole, atol=1e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_manifest_says_what_made_it(precision: str, tmp_path: Path) -> None:
    manifest = record_tiny(tmp_path, clean_model(precision), [SHORT], patterns=["embed"]).manifest
    data = json.loads((tmp_path / "golden.json").read_text())
    assert data["precision"] == precision
    assert data["tensors"] == {"embed": "bfloat16"}
    assert data["made_by"]["torch"] == torch.__version__
    assert data["sampling"]["temperature"] == 0
    assert data["config"]["dim"] == 64
    # Stored weights are the same in every precision.
    other = "float32" if precision != "float32" else "native"
    again = record_tiny(tmp_path / "again", clean_model(other), [SHORT], patterns=["embed"]).manifest
    assert (manifest.config_digest, manifest.weights_digest) == (again.config_digest, again.weights_digest)


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    model = fresh_model()
    before = record_tiny(tmp_path / "a", model, [SHORT], patterns=[]).manifest.weights_digest
    model.layers[3].ffn.gate.bias.data[2] += 1e-3
    assert record_tiny(tmp_path / "b", model, [SHORT], patterns=[]).manifest.weights_digest != before


def test_the_announced_size_is_the_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="deepinfer.golden.recorder"):
        recording = record_tiny(tmp_path, None, [PROMPT, SHORT], batch_size=2)
    text = caplog.messages[0]
    assert "at most" in text
    number, unit = text.split("at most ")[1].split(",")[0].split()
    announced = float(number) * {"KB": 1e-3, "MB": 1.0}[unit]
    # Headers come on top; lists of entries are as long as the longest prompt needs.
    written = sum(recording.path_of(i).stat().st_size for i in range(2)) / 1e6
    assert announced == pytest.approx(written, rel=0.15)
    with pytest.raises(CapacityError, match=r"the limit is 100\.0 KB"):
        record_tiny(tmp_path / "large", max_bytes=100_000)
    assert not (tmp_path / "large").exists()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 KB"), (999_900, "999.9 KB"), (1_000_000, "1.0 MB"), (4 * 10**9, "4,000.0 MB")],
)
def test_sizes_are_shown_in_a_unit_that_fits(count: int, text: str) -> None:
    assert size_text(count) == text


def test_fewer_log_probabilities_instead_of_logits(tmp_path: Path) -> None:
    whole = record_tiny(tmp_path / "a", None, [SHORT], patterns=[]).output(0).predictions
    few = record_tiny(tmp_path / "b", None, [SHORT], patterns=[], top_logprobs=3).output(0).predictions
    assert whole is not None
    assert few is not None
    assert whole.logits is not None
    assert few.logits is None
    assert few.logprobs is not None
    values, ids = torch.log_softmax(whole.logits, dim=-1).topk(3, dim=-1)
    assert torch.equal(few.logprobs, values)
    assert torch.equal(few.token_ids, ids)


def test_drawn_tokens_follow_the_seed(tmp_path: Path) -> None:
    def tokens(name: str, seed: int) -> list[int]:
        params = SamplingParams(max_tokens=6, temperature=1.0, top_p=0.9, seed=seed, ignore_eos=True)
        return record_tiny(tmp_path / name, None, [SHORT], patterns=[], sampling_params=params).output(0).token_ids

    first = tokens("a", 1)
    assert first == tokens("b", 1)
    assert first != tokens("c", 2)


def test_prompts_alone_are_read_as_whole_sequences(tmp_path: Path) -> None:
    recording = record_tiny(tmp_path, None, [SHORT], patterns=["norm"], sampling_params=None)
    output = recording.output(0)
    assert recording.manifest.sampling is None
    assert output.token_ids == []
    assert output.tensors["norm"].shape[0] == len(SHORT)


def interrupt_after(count: int, patch: pytest.MonkeyPatch) -> list[int]:
    """Let reading end in Ctrl-C after some prompts. Returns: a list that fills with the prompts that were read."""
    read, done = deepinfer.golden.recorder.read_sequences, list[int]()

    def reading(*args: Any, **options: Any) -> list[Reading]:
        if len(done) == count:
            raise KeyboardInterrupt
        done.extend(options["indices"])
        return read(*args, **options)

    patch.setattr(deepinfer.golden.recorder, "read_sequences", reading)
    return done


def test_an_interrupted_recording_is_usable_and_goes_on(tmp_path: Path) -> None:
    prompts = [SHORT, SHORT[1:], SHORT[2:]]
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            record_tiny(tmp_path, None, prompts, patterns=[])
    assert Recording.open(tmp_path).recorded == [0, 1]
    assert not list(tmp_path.glob("*.partial"))
    before = (tmp_path / "prompt-0001.safetensors").stat().st_mtime_ns
    with pytest.MonkeyPatch.context() as patch:
        done = interrupt_after(9, patch)
        assert record_tiny(tmp_path, None, prompts, patterns=[]).recorded == [0, 1, 2]
    assert done == [2]
    assert (tmp_path / "prompt-0001.safetensors").stat().st_mtime_ns == before


def test_a_file_that_is_not_complete_does_not_get_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(path: Path, tensors: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("deepinfer.golden.recording.write_safetensors", stopped)
    with pytest.raises(KeyboardInterrupt):
        record_tiny(tmp_path, None, [SHORT], patterns=[])
    assert [path.name for path in tmp_path.iterdir()] == ["golden.json"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"prompts": [SHORT[1:]]}, "prompts"),
        ({"patterns": ["embed"]}, "patterns"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"sampling_params": SamplingParams(max_tokens=3, temperature=0)}, "sampling"),
        ({"model": clean_model("native")}, "precision"),
    ],
)
def test_another_run_does_not_go_on_with_it(change: dict[str, Any], what: str, tmp_path: Path) -> None:
    record_tiny(tmp_path, None, [SHORT], patterns=[])
    with pytest.raises(RecordingError, match=f"holds another recording, which differs in .*{what}"):
        record_tiny(tmp_path, **({"prompts": [SHORT], "patterns": []} | change))


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(Rejected, match="neither empty nor a recording; nothing was written"):
        record_tiny(tmp_path, None, [SHORT])


def test_logits_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = fresh_model()
    expert = model.layers[4].ffn.shared_experts.w2
    expert.expanded[0, 0] = float("nan")
    with pytest.raises(StepError, match="prompt 0, position 0: the logits are not finite"):
        record_tiny(tmp_path / "a", model, [SHORT], patterns=[])
    with pytest.raises(StepError, match=r"position 0: layers\.4\.ffn\.shared_experts\.w2 is not finite"):
        record_tiny(tmp_path / "b", model, [SHORT], patterns=ALL)
    assert Recording.open(tmp_path / "a").recorded == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sampling_params": SamplingParams(n=2)}, Rejected, "holds one completion"),
        ({"sampling_params": SamplingParams(max_tokens=None)}, Rejected, "needs a bound"),
        ({"sampling_params": SamplingParams(min_tokens=2)}, Rejected, "min_tokens"),
        ({"sampling_params": SamplingParams(presence_penalty=0.5)}, Rejected, "presence_penalty: a plain reading does not have it"),
        ({"sampling_params": SamplingParams(max_tokens=1000)}, PromptTooLong, "the model takes 1024"),
        ({"top_logprobs": 0}, Rejected, "top_logprobs = 0"),
        ({"batch_size": 0}, Rejected, "at least 1"),
        ({"patterns": "layers.*"}, ConfigError, "list of names"),
        (
            {"patterns": ["embed", "layer.3.ffn"]},
            ConfigError,
            r"pattern 'layer\.3\.ffn': no tensor of this model has such a name; there are, for example, layers\.3\.ffn, ",
        ),
        ({"patterns": ["?"]}, ConfigError, r"pattern '\?': .* for example, rope\.0\.query, "),
        ({"prompts": []}, RecordingError, "at least one prompt"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_anything_is_written(
    options: dict[str, Any], error: type[DeepInferError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        record_tiny(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_texts_need_a_tokenizer_and_a_folder_brings_one(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="prompt 0 is a text"):
        record(clean_model(), ["abc"], tmp_path / "new")
    config = tiny_config()
    save_checkpoint(tmp_path / "model", config, random_tensors(config, 0), byte_tokenizer_json(config.vocab_size))
    recording = record(tmp_path / "model", ["abc"], tmp_path / "new", device="cpu", sampling_params=TWO_TOKENS, patterns=[])
    assert recording.manifest.prompts == [{"prompt_token_ids": [67, 68, 69], "text": "abc"}]
    assert recording.manifest.model_path == str(tmp_path / "model")
