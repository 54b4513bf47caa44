"""Output in the shapes that other builds write: read, aligned, compared; malformed files are refused with file and line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.checkpoint.safetensors_file import write_safetensors
from deepinfer.errors import CheckpointError, ConfigError, RecordingError
from deepinfer.golden import Recording, Report, compare
from deepinfer.golden.align import read_outputs
from deepinfer.golden.observe import DEFAULT_PATTERNS
from deepinfer.golden.other_build import our_name, read_jsonl
from deepinfer.golden.token_differences import PositionDifference
from deepinfer.golden.tolerances import BY_PRECISION, Tolerances, bounds
from deepinfer.sampling_params import SamplingParams
from tests.golden_tool.recordings import PROMPT, SHORT, clean_model, record_tiny

FIVE = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("golden")
    return record_tiny(folder, None, [PROMPT, SHORT], patterns=DEFAULT_PATTERNS, sampling_params=FIVE)


def rows_of(golden: Recording, index: int) -> tuple[list[int], list[int], torch.Tensor]:
    """Prompt, tokens, and log probabilities at the generated tokens."""
    output = golden.output(index)
    assert output.prompt_token_ids is not None
    assert output.predictions is not None
    assert output.predictions.logits is not None
    logprobs = torch.log_softmax(output.predictions.logits, dim=-1)[len(output.prompt_token_ids) - 1 :]
    return output.prompt_token_ids, output.token_ids, logprobs


def plain(prompt: list[int], tokens: list[int], logprobs: torch.Tensor) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": [float(logprobs[i, t]) for i, t in enumerate(tokens)]}


def vllm(prompt: list[int], tokens: list[int], logprobs: torch.Tensor) -> dict[str, Any]:
    rows = []
    for i, token in enumerate(tokens):
        ids = [token, *logprobs[i].topk(3).indices.tolist()]
        rows.append({str(t): {"logprob": float(logprobs[i, t]), "rank": 1, "decoded_token": "x"} for t in ids})
    return {"prompt": "", "prompt_token_ids": prompt, "outputs": [{"index": 0, "token_ids": tokens, "logprobs": rows}]}


def sglang(prompt: list[int], tokens: list[int], logprobs: torch.Tensor) -> dict[str, Any]:
    chosen = [[float(logprobs[i, t]), t, None] for i, t in enumerate(tokens)]
    top = [[[float(row[t]), t, "x"] for t in row.topk(3).indices.tolist()] for row in logprobs]
    meta = {
        "prompt_tokens": len(prompt),
        "input_token_logprobs": [[None, prompt[0], None], *([-1.0, t, None] for t in prompt[1:])],
        "output_token_logprobs": chosen,
        "output_top_logprobs": top,
    }
    return {"text": "", "output_ids": tokens, "meta_info": meta}


@pytest.mark.parametrize("shape", [plain, vllm, sglang])
def test_the_names_of_other_builds_are_understood(shape: Callable[..., dict[str, Any]], golden: Recording, tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    # Another order: prompts are found by their ids.
    file.write_text("".join(json.dumps(shape(*rows_of(golden, i))) + "\n\n" for i in (1, 0)))
    report = compare(golden, file, model=clean_model())
    assert report.exit_code == 0, str(report)
    assert [p.index for p in report.prompts] == [1, 0]
    for prompt in report.prompts:
        assert [p.position for p in prompt.positions] == list(range(prompt.num_prompt_tokens - 1, prompt.num_prompt_tokens + 4))
        assert prompt.max_logprob_difference < 1e-5


def test_lines_without_a_prompt_belong_to_the_prompts_in_order(golden: Recording, tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    lines = [{"token_ids": tokens} for _, tokens, _ in (rows_of(golden, 0), rows_of(golden, 1))]
    file.write_text("\n".join(map(json.dumps, lines)))
    report = compare(golden, file, model=clean_model())
    assert report.exit_code == 0
    assert [p.positions for p in report.prompts] == [[], []]
    file.write_text(json.dumps(lines[1]))
    one = compare(golden, file, model=clean_model(), first_prompt=1)
    assert (one.prompts[0].index, one.exit_code) == (1, 1)
    assert "VERDICT: differs; 1 of 2 prompts compared" in str(one)
    assert one.to_dict()["missing"].startswith("1 of 2 prompts compared")
    allowed = compare(golden, file, model=clean_model(), first_prompt=1, allow_missing=True)
    assert allowed.exit_code == 0
    assert "VERDICT: equal within tolerance; 1 of 2 prompts compared" in str(allowed)


def test_a_flipped_token_does_not_end_the_comparison(golden: Recording, tmp_path: Path) -> None:
    """Their second token is our least probable one: an error there, and everything behind it still compared."""
    prompt, tokens, logprobs = rows_of(golden, 1)
    wrong = int(logprobs[1].argmin())
    forced = [tokens[0], wrong]
    with torch.no_grad():
        for _ in range(4):
            forced.append(int(clean_model()(torch.tensor([*prompt, *forced]))[-1].argmax()))
        after = torch.log_softmax(clean_model()(torch.tensor([*prompt, *forced]))[len(prompt) - 1 : -1], dim=-1)
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps(plain(prompt, forced, after)))
    report = compare(golden, file, model=clean_model())
    assert report.exit_code == 1
    found = report.prompts[0]
    assert len(found.positions) == 6
    assert found.max_logprob_difference < 1e-4
    assert len(found.divergences) == 1
    first = found.first_divergence
    assert first is not None
    assert (first.index, first.position, first.theirs, first.ours, first.kind) == (1, len(prompt) + 1, wrong, tokens[1], "error")
    assert first.gap == pytest.approx(float(logprobs[1].max() - logprobs[1].min()), abs=1e-4)
    top2 = logprobs[1].topk(2).values
    assert first.top2_gap == pytest.approx(float(top2[0] - top2[1]), abs=1e-4)
    # Without the model it ends there.
    alone = compare(golden, file)
    assert alone.exit_code == 1
    assert len(alone.prompts[0].positions) == 2


def test_a_close_second_choice_is_a_tie(golden: Recording, tmp_path: Path) -> None:
    prompt, tokens, logprobs = rows_of(golden, 1)
    gaps = logprobs.topk(2, dim=-1)
    place = int((gaps.values[:, 0] - gaps.values[:, 1]).argmin())
    gap = float(gaps.values[place, 0] - gaps.values[place, 1])
    swapped = [*tokens[:place], int(gaps.indices[place, 1])]
    while len(swapped) < len(tokens):
        swapped.append(int(clean_model()(torch.tensor([*prompt, *swapped]))[-1].argmax()))
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps({"prompt_token_ids": prompt, "token_ids": swapped}))
    for threshold, code in ((1.01 * gap, 0), (0.99 * gap, 1)):
        limits = replace(BY_PRECISION["float32"], token_gap=threshold)
        report = compare(golden, file, model=clean_model(), tolerances=limits, allow_missing=True)
        assert report.exit_code == code
        assert report.prompts[0].divergences[0].kind == ("tie" if code == 0 else "error")


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("has_model", [False, True])
def test_an_output_that_is_cut_short_differs(count: int, has_model: bool, golden: Recording, tmp_path: Path) -> None:
    prompt, tokens, logprobs = rows_of(golden, 1)
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps(plain(prompt, tokens[:count], logprobs)))
    report = compare(golden, file, model=clean_model() if has_model else None)
    message = f"ended after {count} of 5 tokens"
    assert report.exit_code == 1
    assert message in str(report)
    assert report.prompts[0].problems == [message]
    assert report.to_dict()["prompts"][0]["problems"] == [message]


@pytest.mark.parametrize("has_model", [False, True])
def test_an_output_that_goes_on_differs(has_model: bool, golden: Recording, tmp_path: Path) -> None:
    """Behind `max_tokens`, although every token is the one that we would have drawn."""
    prompt, tokens, _ = rows_of(golden, 1)
    longer = [*tokens]
    for _ in range(2):
        longer.append(int(clean_model()(torch.tensor([*prompt, *longer]))[-1].argmax()))
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps({"prompt_token_ids": prompt, "token_ids": longer}))
    report = compare(golden, file, model=clean_model() if has_model else None, allow_missing=True)
    assert report.exit_code == 1
    assert report.prompts[0].went_on_after == 5
    assert "went on after 5 tokens, where it should have ended" in str(report)


def test_a_stop_token_may_end_an_output_early(tmp_path: Path) -> None:
    """A recording whose third token is made a stop token by hand: what ends there has ended."""
    tokens = record_tiny(tmp_path, None, [SHORT], patterns=[], sampling_params=FIVE).output(0).token_ids
    manifest = json.loads((tmp_path / "golden.json").read_text())
    manifest["sampling"]["stop_token_ids"] = [tokens[2]]
    (tmp_path / "golden.json").write_text(json.dumps(manifest))
    file = tmp_path / "other.jsonl"
    first_stop = tokens.index(tokens[2]) + 1
    for count in (first_stop, 4, 5):
        file.write_text(json.dumps({"prompt_token_ids": SHORT, "token_ids": tokens[:count]}))
        report = compare(tmp_path, file, model=clean_model())
        assert report.exit_code == (count > first_stop)
        assert report.prompts[0].went_on_after == (first_stop if count > first_stop else None)


def test_wrong_log_probabilities_are_noticed(golden: Recording, tmp_path: Path) -> None:
    prompt, tokens, logprobs = rows_of(golden, 1)
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps(vllm(prompt, tokens, torch.log_softmax(2 * logprobs, dim=-1))))
    found = compare(golden, file, model=clean_model())
    assert found.exit_code == 1
    assert found.prompts[0].max_kl > 1e-3
    assert found.prompts[0].last_bit_difference is not None
    assert found.prompts[0].last_bit_difference < 1e-2


def test_defaults_are_widened_and_say_so_but_what_was_asked_for_is_not(
    golden: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is made to look as if last bits moved it far; predictions a little off then pass by default only."""
    prompt, tokens, logprobs = rows_of(golden, 1)
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps(vllm(prompt, tokens, logprobs + 0.01)))
    far = [PositionDifference(position=0, kl=1.0, max_logprob_difference=0.1)]
    monkeypatch.setattr("deepinfer.golden.comparison._last_bit_differences", lambda *args: far)

    def compared(asked: dict[str, float] | Tolerances | None) -> Report:
        return compare(golden, file, model=clean_model(), tolerances=asked, allow_missing=True)

    by_default = compared(None)
    assert by_default.exit_code == 0
    assert by_default.prompts[0].widened_from == {"logprob": 1e-3, "token_gap": 1e-3}
    assert "logprob 0.001 widened to 0.25, token_gap 0.001 widened to 0.1" in str(by_default)
    for asked in ({"logprob": 1e-3}, {"logprob": 2e-3, "token_gap": 1.0}, replace(BY_PRECISION["float32"], logprob=2e-3)):
        report = compared(asked)
        assert report.exit_code == 1
        assert " widened to " not in str(report)
    assert compared({"logprob": 0.011}).exit_code == 0

    changed = [*tokens[:4], (tokens[4] + 1) % 250]
    file.write_text(json.dumps({"prompt_token_ids": prompt, "token_ids": changed}))
    far[0] = replace(far[0], max_logprob_difference=100.0)
    assert compared(None).exit_code == 0
    assert compared({"token_gap": 1e-3}).exit_code == 1
    assert compared({"logprob": 1e-3}).prompts[0].widened_from == {"token_gap": 1e-3}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-3, "1", True])
def test_tolerances_that_bound_nothing_are_refused(value: Any, golden: Recording) -> None:
    with pytest.raises(ConfigError, match=r"tolerance token_gap = .*: expected a finite number, at least 0"):
        compare(golden, golden, model=clean_model(), tolerances={"token_gap": value})
    with pytest.raises(ConfigError, match="tolerance 'gap': expected one of tensor, row"):
        compare(golden, golden, model=clean_model(), tolerances={"gap": 1.0})


def test_a_bound_on_tensors_that_was_asked_for_holds_for_all() -> None:
    own = BY_PRECISION["native"]
    for name in ("layers.3.attn.entries", "layers.3.attn"):
        assert bounds(name, "native", replace(own, tensor=1e-9, row=2e-9), asked=("tensor", "row")) == (1e-9, 2e-9)
    assert bounds("layers.3.attn.entries", "native", own)[1] > own.row


def test_safetensors_with_a_name_map(golden: Recording, tmp_path: Path) -> None:
    output = golden.output(0)
    assert output.predictions is not None
    tensors = {f"model.layers.{i}.mlp.router.topk": output.tensors[f"layers.{i}.ffn.gate.ids"] for i in range(9)} | {
        "lm_head.out": output.predictions.logits[-5:],
        "tokens": torch.tensor(output.token_ids),
    }  # type: ignore[index]
    file = tmp_path / "other.safetensors"
    write_safetensors(file, tensors)
    names = {"model.layers.*.mlp.router.topk": "layers.*.ffn.gate.ids", "lm_head.out": "logits", "tokens": "token_ids"}
    report = compare(golden, file, model=clean_model(), name_map=names, allow_missing=True)
    assert report.exit_code == 0, str(report)
    assert not any("name map" in note for note in report.notes)
    assert set(report.jaccard) == {f"layers.{i}.ffn.gate.ids" for i in range(9)}
    assert len(report.prompts[0].positions) == 5

    ids = tensors["model.layers.4.mlp.router.topk"]
    worst = clean_model()(torch.tensor(PROMPT)).shape[0] // 2
    ids[worst] = (ids[worst] + 1) % 8
    write_safetensors(file, tensors)
    report = compare(golden, file, model=clean_model(), name_map=names, allow_missing=True)
    assert report.exit_code == 1
    assert report.first_outside is not None
    assert report.first_outside.name == "layers.4.ffn.gate.ids"
    assert report.first_outside.where == (worst,)
    assert report.jaccard["layers.4.ffn.gate.ids"] < 1
    # The second entry would fit what the first has taken.
    more = names | {"lm_head.*": "hidden.*", "model.layer.*.mlp": "layers.*.ffn"}
    report = compare(golden, file, model=clean_model(), name_map=more, allow_missing=True)
    assert "the name map has entries that fit no tensor: 'lm_head.*', 'model.layer.*.mlp'" in str(report)
    with pytest.raises(RecordingError, match=r"unknown tensor model\.layers\.0\.mlp\.router\.topk"):
        compare(golden, file, model=clean_model(), name_map={"lm_head.out": "logits", "tokens": "token_ids"})


def test_a_folder_of_safetensors_is_one_prompt_a_file(golden: Recording, tmp_path: Path) -> None:
    for i in range(2):
        output = golden.output(i)
        assert output.predictions is not None
        assert output.predictions.logits is not None
        write_safetensors(tmp_path / f"{i}.safetensors", {"logits": output.predictions.logits})
    report = compare(golden, tmp_path, model=clean_model())
    assert report.exit_code == 0
    assert [p.index for p in report.prompts] == [0, 1]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.layers.7.attn.q", "layers.7.attn.query"),
        ("a.3.b.4.c", "3/4"),
        ("a.3.b.4.d", "a.3.b.4.d"),
        ("model.layers.7.x.attn.q", "model.layers.7.x.attn.q"),
        ("exact", "logits"),
    ],
)
def test_stars_of_a_name_map_stand_for_the_same_text(theirs: str, ours: str) -> None:
    assert our_name(theirs, {"model.layers.*.attn.q": "layers.*.attn.query", "a.*.b.*.c": "*/*", "exact": "logits"}) == ours


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected an object, got list"),
        ("{}", "expected one of token_ids, output_ids"),
        ('{"token_ids": "1 2"}', "token_ids: expected a list of token ids"),
        ('{"token_ids": [1, -2]}', "token_ids: expected a list of token ids"),
        ('{"token_ids": [1, 2], "logprobs": [-0.5]}', "logprobs: expected one entry for each of 2 tokens, got 1"),
        ('{"token_ids": [1], "logprobs": [{"a": 1}]}', "expected token id -> log probability, got 'a'"),
        ('{"token_ids": [1], "logprobs": [{"1": "x"}]}', "expected token id -> log probability, got '1': x"),
        ('{"token_ids": [1], "logprobs": [null]}', r"logprobs\[0\]: expected a number"),
        ('{"outputs": [], "prompt_token_ids": [1]}', "expected one completion"),
        ('{"output_ids": [1], "meta_info": {"output_token_logprobs": [[1]]}}', r"expected \[logprob, token id, text\]"),
        ('{"output_ids": [1], "meta_info": 3}', "meta_info: expected an object"),
        ("\udcff", "not valid JSON"),
    ],
)
def test_malformed_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    file.write_bytes(b'{"token_ids": [1]}\n\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(RecordingError, match=message) as caught:
        read_jsonl(file)
    assert str(caught.value).startswith(f"{file}, line 3: ")


def test_outputs_that_belong_nowhere_are_refused(golden: Recording, tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"

    def refused(data: dict[str, Any], message: str) -> None:
        file.write_text(json.dumps(data))
        with pytest.raises(RecordingError, match=message):
            compare(golden, file, model=clean_model())

    refused({"prompt_token_ids": [1, 2], "token_ids": [3]}, "no recorded prompt has these token ids")
    refused({"prompt_token_ids": SHORT, "token_ids": [10_000]}, "token id 10000 is outside the vocabulary")
    file.write_text("")
    with pytest.raises(RecordingError, match="holds no output"):
        read_outputs(file, {})
    with pytest.raises(RecordingError, match="no such file"):
        read_outputs(tmp_path / "absent", {})
    with pytest.raises(RecordingError, match=r"neither golden\.json nor a safetensors"):
        read_outputs(tmp_path, {})
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"x" * 30)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_outputs(bad, {})
    write_safetensors(bad, {"logits": torch.zeros(3, 277)})
    with pytest.raises(RecordingError, match="3 rows of predictions; expected 48"):
        compare(golden, bad, model=clean_model())
    write_safetensors(bad, {"layers.3": torch.zeros(48, 4, 63)})
    with pytest.raises(RecordingError, match=r"layers\.3 has shape"):
        compare(golden, bad)
