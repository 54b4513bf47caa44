"""`deepinfer generate`: prompts in from everywhere, text or JSON lines out, and one line for everything that is wrong."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from deepinfer import LLMEngine, RequestOutput, SamplingParams
from deepinfer.cli import main
from deepinfer.errors import NothingToDraw
from tests.golden import GOLDEN

MODEL = GOLDEN / "swa_tiny"
COMMON = ("--max-tokens", "6", "--device", "cpu", "--precision", "float32")
TEXT = "def area(r):"


class Result(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def outputs(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.split("\n") if line]


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in this process."""

    def run_command(*arguments: Any, stdin: str = "", model: Any = MODEL) -> Result:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        try:
            status = main(["generate", "-m", str(model), *COMMON, *map(str, arguments)])
        except SystemExit as error:
            status = int(error.code or 0)
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return run_command


def expected(*prompts: Any, **params: Any) -> list[RequestOutput]:
    with LLMEngine.from_pretrained(MODEL, precision="float32", device="cpu") as engine:
        return engine.generate(list(prompts), SamplingParams(**{"temperature": 0, "max_tokens": 6} | params), use_tqdm=False)


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


def test_a_prompt_on_the_command_line_streams_what_generate_gives(run: Run) -> None:
    result = run(TEXT)
    assert (result.status, result.out) == (0, text_of(expected(TEXT)[0]) + "\n")
    (line,) = result.err.splitlines()
    assert "+ 6 new tokens" in line
    assert "length, precision float32, seed " in line


def test_sampled_text_is_reproduced_by_its_seed(run: Run) -> None:
    options = ("--temperature", 1.2, "--top-p", 0.9, "--top-k", 100, "--min-p", 0.01)
    first = run(TEXT, *options)
    seed = int(first.err.rstrip("]\n").split()[-1])
    again = run(TEXT, *options, "--seed", seed)
    assert again.out == first.out
    (output,) = expected(TEXT, temperature=1.2, top_p=0.9, top_k=100, min_p=0.01, seed=seed)
    assert again.out == text_of(output) + "\n"
    assert run(TEXT, *options, "--seed", seed + 1).out != first.out


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_a_prompt_may_come_from_standard_input(run: Run, arguments: tuple[str, ...]) -> None:
    prompt = "line one\nline two\n"
    assert run(*arguments, stdin=prompt).out == text_of(expected(prompt)[0]) + "\n"


def test_a_file_is_one_prompt(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("line one\n\nline ü 😀\n", encoding="utf-8")
    assert run("--file", file).out == text_of(expected(file.read_text(encoding="utf-8"))[0]) + "\n"


def test_json_lines_in_are_json_lines_out_in_the_same_order(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"one two"\n\n{"prompt": "three"}\n[5, 6, 7]\n  \n{"prompt_token_ids": [8, 9]}\r\n')
    outputs = expected("one two", "three", [5, 6, 7], [8, 9])
    result = run("--jsonl", prompts)
    assert result.status == 0
    assert [output["outputs"][0]["text"] for output in result.outputs] == [text_of(output) for output in outputs]
    assert [output["prompt_token_ids"] for output in result.outputs] == [output.prompt_token_ids for output in outputs]
    assert [output["prompt"] for output in result.outputs] == ["one two", "three", None, None]
    assert all(output["finished"] and output["precision"] == "float32" for output in result.outputs)


def test_a_file_with_one_json_line_gives_one_json_line(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"one"')
    (output,) = run("--jsonl", prompts).outputs
    assert output["prompt"] == "one"


def test_several_completions_and_log_probabilities_come_as_json(run: Run) -> None:
    (output,) = run(TEXT, "-n", 3, "--temperature", 1, "--seed", 4, "--logprobs", 2, "--ignore-eos", "--min-tokens", 2).outputs
    (same,) = expected(TEXT, n=3, temperature=1, seed=4, logprobs=2, ignore_eos=True, min_tokens=2)
    for found, completion in zip(output["outputs"], same.outputs, strict=True):
        assert found["token_ids"] == completion.token_ids
        assert found["seed"] == completion.seed
        assert len(found["logprobs"]) == 6
        assert str(completion.token_ids[0]) in found["logprobs"][0]


def test_output_may_go_to_a_file(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    result = run(TEXT, "-o", target)
    assert (result.status, result.out) == (0, "")
    (line,) = target.read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["outputs"][0]["text"] == text_of(expected(TEXT)[0])


@pytest.mark.parametrize(
    "options",
    [
        ("--async-scheduling", "0"),
        ("--max-num-batched-tokens", "3"),
        ("--num-blocks", "1"),
        ("--max-num-seqs", "1", "--max-model-len", "40"),
        ("--batch-invariant",),
    ],
)
def test_settings_of_the_engine_do_not_change_the_text(run: Run, options: tuple[str, ...]) -> None:
    assert run(TEXT, *options).out == text_of(expected(TEXT)[0]) + "\n"


def refused(result: Result, *parts: str) -> None:
    """Exit status 2, nothing on standard output, and one message without a traceback that holds all parts."""
    assert (result.status, result.out) == (2, "")
    assert "Traceback" not in result.err
    message = result.err.splitlines()[-1]
    assert message.startswith("deepinfer")
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--temperature", "nan"), ("temperature", "nan")),
        (("--temperature", "-1"), ("temperature", "-1")),
        (("--top-p", "0"), ("top_p",)),
        (("--top-p", "inf"), ("top_p",)),
        (("--top-k", "99999999999"), ("top_k",)),
        (("--min-p", "2"), ("min_p",)),
        (("-n", "0"), ("SamplingParams.n",)),
        (("--max-tokens", "0"), ("max_tokens",)),
        (("--min-tokens", "7"), ("min_tokens", "max_tokens")),
        (("--logprobs", "21"), ("logprobs",)),
        (("--seed", "-1"), ("seed",)),
        (("--precision", "fp4"), ("precision 'fp4'", "native")),
        (("--device", "quux"), ("device", "quux")),
        (("--max-num-seqs", "0"), ("max_num_seqs",)),
        (("--num-blocks", "0"), ("num_blocks",)),
        (("--max-model-len", "1000000"), ("max_model_len", "128")),
        (("--max-model-len", "5"), ("prompt 0 has", "the longest sequence is 5")),
        (("--num-blocks", "1", "--max-tokens", "90"), ("cache blocks", "has 1")),
        (("--temperature", "warm"), ("--temperature", "warm")),
        (("--max-tokens", "1.5"), ("--max-tokens",)),
        (("--async-scheduling", "2"), ("--async-scheduling",)),
        (("--no-such-option",), ("--no-such-option",)),
    ],
)
def test_a_bad_option_is_refused(run: Run, options: tuple[str, ...], parts: tuple[str, ...]) -> None:
    refused(run("a prompt that has a few tokens", *options), *parts)


@pytest.mark.parametrize("place", ["no-such-model", "tests", "README.md", ""])
def test_a_model_that_is_none_is_refused(run: Run, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "README.md").write_text("no model")
    refused(run(TEXT, model=place))


def test_a_command_without_a_model_takes_the_default_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--max-tokens", "2", "--device", "cpu", TEXT]) == 0
    assert "+ 2 new tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{not json", ("not valid JSON",)),
        ("[" * 100_000, ("not valid JSON",)),
        ('"half', ("not valid JSON",)),
        ("\udcff", ("not valid JSON", "utf-8")),
        ("5", ("expected a text", "got 5")),
        ("null", ("expected a text", "got null")),
        ("true", ("expected a text", "got true")),
        ('{"prompt": 7}', ("expected a text",)),
    ],
    ids=lambda value: str(value)[:20].encode("ascii", "replace").decode() if isinstance(value, str) else "",
)
def test_a_bad_json_line_is_refused_by_its_number(run: Run, tmp_path: Path, line: str, parts: tuple[str, ...]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(f'"fine"\n\n"fine too"\n{line}\n"fine again"\n'.encode(errors="surrogateescape"))
    refused(run("--jsonl", prompts), "prompts.jsonl, line 4: ", *parts)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('""', ("prompt 1 is empty",)),
        ("[]", ("prompt 1 is empty",)),
        ("[1, true]", ("prompt 1",)),
        ("[[1]]", ("prompt 1",)),
        ("[320]", ("prompt 1", "outside the vocabulary")),
        ("[129264]", ("prompt 1", "images are not supported")),
        ('{"prompt": "a", "image": "b"}', ("line", "unknown key 'image' beside 'prompt'")),
        ('{"prompt": 5}', ("line", "as 'prompt', got int")),
        ('"\\ud800"', ("prompt 1", "lone surrogate")),
        (json.dumps([5] * 128), ("prompt 1 has 128 tokens", "128")),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_by_its_line_and_index(
    run: Run, tmp_path: Path, line: str, parts: tuple[str, ...]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'"fine"\n\n{line}\n')
    refused(run("--jsonl", prompts), "prompts.jsonl, line 3: ", *parts)


def test_empty_input_is_refused(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    refused(run(""), "prompt 0 is empty")
    refused(run(stdin=""), "prompt 0 is empty")
    refused(run("--file", empty), "prompt 0 is empty")
    empty.write_text("\n  \n")
    refused(run("--jsonl", empty), "holds no prompt")


def test_files_that_cannot_be_used_are_refused_by_name(run: Run, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"ab\xff\xfe")
    for option in ("--file", "--jsonl"):
        refused(run(option, tmp_path / "absent"), "absent", "cannot be read")
        refused(run(option, tmp_path), str(tmp_path), "cannot be read")
    refused(run("--file", binary), "binary", "not UTF-8", "byte 2")
    refused(run(TEXT, "-o", tmp_path), str(tmp_path), "cannot be written")
    refused(run(TEXT, "-o", tmp_path / "no" / "folder"), "cannot be written")
    refused(run(TEXT, "--file", binary), "not both")
    refused(run("--file", binary, "--jsonl", binary), "not allowed with")


def test_what_an_output_file_holds_stays_when_the_run_fails(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("dear results\n")
    refused(run(TEXT, "-o", target, "--temperature", "nan"))
    refused(run(TEXT, "-o", target, model="nowhere"))
    assert target.read_text() == "dear results\n"


def command(*arguments: str, stdin: str = "") -> Result:
    """Runs the command in a process of its own."""
    start = [sys.executable, "-c", "import sys; from deepinfer.cli import main; sys.exit(main())"]
    done = subprocess.run([*start, *arguments], input=stdin.encode(), capture_output=True, check=False, timeout=120)
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_the_command_works_in_a_process_of_its_own() -> None:
    good = command("generate", "-m", str(MODEL), *COMMON, stdin=TEXT)
    assert (good.status, good.out) == (0, text_of(expected(TEXT)[0]) + "\n")
    bad = command("generate", "-m", "nowhere", TEXT)
    refused(bad, "nowhere")
    assert len(bad.err.splitlines()) == 1


def test_help_names_every_option(run: Run) -> None:
    result = run("--help")
    assert result.status == 0
    for option in ("--jsonl", "--file", "--output", "--temperature", "--seed", "--logprobs", "--num-blocks", "--async-scheduling"):
        assert option in result.out


def test_a_text_that_the_model_length_ends_is_told_of(run: Run) -> None:
    short = ("--max-model-len", "20", "--ignore-eos")
    assert "--max-tokens" not in run(TEXT, *short).err
    for arguments in ((TEXT,), ("--json", TEXT)):
        result = run(*arguments, *short, "--max-tokens", "500")
        assert result.status == 0
        assert "of --max-tokens 500: prompt and output have at most 20 tokens" in result.err


def test_lines_beside_one_that_fails_are_written(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"a"\n\n"b"\n"c"\n')
    generate = LLMEngine.generate

    def fail_second(self: LLMEngine, prompts: Any, params: Any, **options: Any) -> Any:
        error = NothingToDraw("request 2: no token can be drawn")
        error.prompt_index, error.outputs = 1, list(generate(self, prompts, params, **options))
        raise error

    monkeypatch.setattr(LLMEngine, "generate", fail_second)
    result = run("--jsonl", path)
    assert result.status != 0
    assert [output["prompt"] for output in result.outputs] == ["a", "b", "c"]
    assert "prompts.jsonl, line 3: request 2: no token can be drawn" in result.err
