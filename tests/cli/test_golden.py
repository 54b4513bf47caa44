"""`deepinfer golden`: the two commands, their exit status and their messages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepinfer.golden.recorder
from deepinfer.checkpoint.write import random_tensors, save_checkpoint
from deepinfer.cli import main
from deepinfer.presets import byte_tokenizer_json, tiny_config

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints: `clean`, `faulty` with one changed norm, `broken` with weights that are not finite."""
    folder, config = tmp_path_factory.mktemp("models"), tiny_config()
    for name in ("clean", "faulty", "broken"):
        tensors = []
        for key, value in random_tensors(config, 0):
            if key == "layers.6.ffn_norm.weight" and name != "clean":
                value = value * 2 if name == "faulty" else torch.full_like(value, float("nan"))
            tensors.append((key, value))
        save_checkpoint(folder / name, config, tensors, byte_tokenizer_json(config.vocab_size))
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: Any) -> tuple[int, str, str]:
        status = main(["golden", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("import os, sys\n\nclass A:\n")
    return file


def record(run: Run, model: Path, prompts: Path, folder: Path, *options: Any) -> tuple[int, str, str]:
    common = ("--precision", "float32", "--device", "cpu", "--max-tokens", 2, "--ignore-eos")
    return run("record", model, "--prompts", prompts, "-o", folder, *common, *options)


def test_record_and_compare(models: Path, prompts: Path, tmp_path: Path, run: Run) -> None:
    status, out, err = record(run, models / "clean", prompts, tmp_path / "golden", "-t", "**")
    assert status == 0
    assert "at most" in err.splitlines()[0]
    assert out.startswith(f"{tmp_path / 'golden'}: 2 prompts, ")
    assert record(run, models / "faulty", prompts, tmp_path / "faulty", "-t", "**")[0] == 0

    status, out, _ = run("compare", tmp_path / "golden", tmp_path / "golden", "--device", "cpu")
    assert status == 0
    assert out.endswith("VERDICT: equal within tolerance\n")

    report, page = tmp_path / "report.json", tmp_path / "report.html"
    status, out, _ = run("compare", tmp_path / "golden", tmp_path / "faulty", "--device", "cpu", "--json", report, "--html", page)
    assert status == 1
    assert "FIRST OUTSIDE ITS TOLERANCE, in execution order: layers.6.ffn_norm (layers.6.ffn_norm)" in out
    assert json.loads(report.read_text())["module"] == "layers.6.ffn_norm"
    assert page.read_text().startswith("<!doctype html>")

    status, out, _ = run(
        *("compare", tmp_path / "golden", tmp_path / "faulty", "--device", "cpu", "--json", "-"),
        *("--tensor-tolerance", 10, "--logprob-tolerance", 100, "--token-gap", 100),
    )
    assert status == 0
    assert json.loads(out)["verdict"] == "equal within tolerance"


def test_prompts_alone(models: Path, prompts: Path, tmp_path: Path, run: Run) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt_token_ids": [5, 6, 7]}\n"ab"\n')
    options = ("-t", "", "--max-tokens", 0, "--top-logprobs", 3, "--batch-size", 2)
    assert record(run, models / "clean", lines, tmp_path / "golden", *options)[0] == 0
    data = json.loads((tmp_path / "golden" / "golden.json").read_text())
    assert data["sampling"] is None
    assert data["tensors"] == {}
    assert [p["prompt_token_ids"][:3] for p in data["prompts"]] == [[5, 6, 7], [67, 68]]
    assert run("compare", tmp_path / "golden", tmp_path / "golden", "--device", "cpu")[0] == 0


def test_unusable_input_gives_status_2_and_one_message(models: Path, prompts: Path, tmp_path: Path, run: Run) -> None:
    def refused(message: str, *arguments: Any) -> None:
        status, out, err = run(*arguments)
        assert (status, out) == (2, "")
        assert message in err
        assert err.count("deepinfer: error: ") == 1

    golden = tmp_path / "golden"
    assert record(run, models / "clean", prompts, golden, "-t", "")[0] == 0
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"token_ids": [3]}\n{"token_ids": }\n')
    refused(f"{bad}, line 2: not valid JSON", "compare", golden, bad, "--device", "cpu")
    for option, name in (("--token-gap", "token_gap"), ("--logprob-tolerance", "logprob"), ("--tensor-tolerance", "tensor")):
        refused(f"tolerance {name} = nan: expected a finite", "compare", golden, golden, "--device", "cpu", option, "nan")
    refused("there is no golden.json in it", "compare", tmp_path, bad)
    refused("not the model that was recorded: its weights", "compare", golden, golden, "--device", "cpu", "-m", models / "faulty")
    refused("cannot be loaded", "compare", golden, golden, "-m", tmp_path / "absent")
    refused("cannot be read as JSON", "compare", golden, golden, "--name-map", bad)
    refused("cannot be read", "record", models / "clean", "--prompts", tmp_path / "absent", "-o", tmp_path / "x")
    record_it = ("record", models / "clean", "--prompts", prompts, "-o", tmp_path / "x", "--device", "cpu")
    refused("the limit is 10 bytes", *record_it, "--max-bytes", 10)
    refused("the limit is 2.5 KB", *record_it, "--max-bytes", 2500)
    for value in ("nan", "inf", "-1"):
        refused("expected a finite number of bytes, at least 0", *record_it, "--max-bytes", value)
    refused("differs in", "record", models / "faulty", "--prompts", prompts, "-o", golden, "--device", "cpu")
    refused(
        "is not finite, and so are not the logits",
        "record",
        models / "broken",
        "--prompts",
        prompts,
        "-o",
        tmp_path / "nan",
        "--device",
        "cpu",
    )
    (golden / "golden.json").write_text("{}")
    refused("expected format", "compare", golden, golden)


def test_ctrl_c_gives_status_130_and_leaves_what_is_done(
    models: Path, prompts: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = deepinfer.golden.recorder.read_sequences

    def interrupted(*args: Any, indices: list[int], **options: Any) -> Any:
        if indices == [1]:
            raise KeyboardInterrupt
        return read(*args, indices=indices, **options)

    monkeypatch.setattr("deepinfer.golden.recorder.read_sequences", interrupted)
    status, _, err = record(run, models / "clean", prompts, tmp_path / "golden", "-t", "")
    assert status == 130
    assert "interrupted" in err
    monkeypatch.undo()
    with_itself = ("compare", tmp_path / "golden", tmp_path / "golden", "--device", "cpu")
    status, out, _ = run(*with_itself)
    assert status == 1
    assert "1 of 2 prompts compared" in out
    status, out, _ = run(*with_itself, "--allow-missing")
    assert status == 0
    assert "1 of 2 prompts compared" in out
    assert record(run, models / "clean", prompts, tmp_path / "golden", "-t", "")[0] == 0
