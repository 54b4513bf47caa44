import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer import cli
from deepinfer.checkpoint.load import load_model
from deepinfer.cli import main
from deepinfer.config_json import load_config
from deepinfer.presets import byte_tokenizer_json, tiny_config

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "tests" / "data" / "published"
SELECT_FULL = ROOT / "tests" / "data" / "golden" / "select_full"
RUN = [sys.executable, "-c", "import sys; from deepinfer.cli import main; sys.exit(main())"]


def test_inspect_prints_tables_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(PUBLISHED)]) == 0
    assert "551,880,835,184" in capsys.readouterr().out
    assert main(["inspect", str(PUBLISHED), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cache"][0]["per_token"] == 890


def test_new_tiny_writes_a_model_and_says_that_it_is_random(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tiny"
    assert main(["new-tiny", str(folder), "--seed", "5"]) == 0
    said = capsys.readouterr().out
    assert "RANDOM" in said
    assert "noise" in said
    assert load_config(folder) == tiny_config()
    load_model(folder, device="cpu")


def test_new_tiny_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    for path in (tmp_path, tmp_path / "mine"):
        assert main(["new-tiny", str(path)]) == 2
        assert "not an empty folder; nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], *([command.NAME] for command in cli.COMMANDS)):
        with pytest.raises(SystemExit) as caught:
            main([*arguments, "--help"])
        assert caught.value.code == 0
        assert "usage: deepinfer" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["inspect"], ["new-tiny", "x", "--seed", "y"]])
def test_wrong_arguments_give_exit_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: deepinfer" in capsys.readouterr().err


def set_keys(folder: Path, section: str | None = None, **keys: Any) -> None:
    data = json.loads((folder / "config.json").read_text())
    (data if section is None else data[section]).update(keys)
    (folder / "config.json").write_text(json.dumps(data))


def rewrite(path: Path, edit: Callable[[bytes], bytes]) -> None:
    path.write_bytes(edit(path.read_bytes()))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "V4": (lambda f: set_keys(f, model_type="deepseek_v4"), "model_type is 'deepseek_v4'"),
    "unknown key": (lambda f: set_keys(f, "text_config", n_group=8), "unknown keys: text_config.n_group"),
    "unsupported value": (lambda f: set_keys(f, "text_config", scoring_func="softmax"), "scoring_func = 'softmax'"),
    "truncated": (lambda f: rewrite(f / "model.safetensors", lambda data: data[:-100]), "truncated"),
    "garbage": (lambda f: rewrite(f / "model.safetensors", lambda data: data[:8] + b"\xff" * (len(data) - 8)), "not valid JSON"),
    "bad index": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "expected a JSON object with 'weight_map'"),
    "missing tensor": (
        lambda f: rewrite(f / "model.safetensors", lambda data: data.replace(b'"norm.weight"', b'"gone.weight"')),
        "norm.weight",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(SELECT_FULL / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("case", DAMAGES)
def test_bad_checkpoint_gives_one_message_and_exit_status_2(folder: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, message = DAMAGES[case]
    damage(folder)
    assert main(["inspect", str(folder)]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("deepinfer: error: ")
    assert streams.err.count("deepinfer: error: ") == 1
    assert message in streams.err
    assert str(folder) in streams.err


def test_process_reports_an_error_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run([*RUN, "inspect", str(tmp_path / "absent")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    (message,) = done.stderr.splitlines()
    assert message.startswith(f"deepinfer: error: {tmp_path / 'absent'}: no such folder")


def test_reader_that_goes_away_is_no_error() -> None:
    with subprocess.Popen([*RUN, "inspect", str(PUBLISHED)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_interruption_gives_exit_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.inspect, "run", interrupt)
    assert main(["inspect", str(PUBLISHED)]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_tiny_tokenizer_is_the_byte_tokenizer(tmp_path: Path) -> None:
    assert main(["new-tiny", str(tmp_path)]) == 0
    assert (tmp_path / "tokenizer.json").read_text(encoding="utf-8") == byte_tokenizer_json(tiny_config().vocab_size)
