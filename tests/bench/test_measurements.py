"""The measurements of a model on the smallest one: every row is there, adds up, and survives what can go wrong."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.bench import everything, model_holder
from deepinfer.bench.bench_model import bench_tokenizer, check_room, open_model, slice_config
from deepinfer.bench.ceilings import Ceilings
from deepinfer.bench.cold_start import as_text, from_text
from deepinfer.bench.compare import parse_settings
from deepinfer.bench.decode import observed_experts
from deepinfer.bench.floors import chunk_work, total
from deepinfer.bench.layer import operation_of
from deepinfer.bench.report import Report
from deepinfer.bench.roofline import draw_roofline, points_of
from deepinfer.bench.steady_decode import SteadyDecode
from deepinfer.cli import main
from deepinfer.engine_config import EngineConfig
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.model.transformer import Transformer
from deepinfer.presets import flash_slice, random_model, tiny_config

CEILINGS = Ceilings("a machine", 1e9, 1e10)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model(tiny_config(), precision="bfloat16", device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "tiny"
    assert main(["new-tiny", str(path)]) == 0
    return path


@pytest.fixture(autouse=True)
def _known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.bench.ceilings.measure_ceilings", lambda device: CEILINGS)


def bench(*arguments: object) -> int:
    return main(["bench", *map(str, arguments)])


def test_decode_behind_a_context_that_was_never_processed(model: Transformer) -> None:
    run = SteadyDecode(model, 2, 1, 2, context=300)
    run.warm_up(2)
    run.steps(2)
    assert run.tokens_per_step == 1
    assert [s.num_output_tokens for s in run.scheduler.running] == [6, 6]
    assert all(s.confirmed >= 300 + 6 for s in run.scheduler.running)
    wall, device, _ = run.times(2)
    assert 0 < device <= wall * 1.01
    assert run.median_ms == pytest.approx(wall)


def test_a_context_beyond_the_model_is_refused(model: Transformer) -> None:
    with pytest.raises(ConfigError, match="the model's longest sequence is 1024"):
        SteadyDecode(model, 1, 1, 2, context=1020)


@pytest.mark.parametrize("drafts", [0, 2])
def test_experts_are_counted_for_the_real_rows(model: Transformer, drafts: int) -> None:
    run = SteadyDecode(model, 3, 1, 2, context=40, num_drafts=drafts)
    run.warm_up(2)
    seen: list[torch.Tensor] = []
    hook = model.layers[0].get_submodule("ffn.gate").register_forward_hook(lambda _, args, out: seen.append(out.ids))
    found = observed_experts(run)
    hook.remove()
    assert found is not None
    assert 2 <= found <= 8
    assert seen[-1].shape[0] == 3 * (1 + drafts)
    # The batch goes on.
    asyncio.run(run.advance(2))


def test_decode_rows_have_floors_and_are_written_as_they_come(folder: Path, tmp_path: Path) -> None:
    path, picture = tmp_path / "rows.json", tmp_path / "roofline.png"
    options = ("--batch", 1, 2, "--context", 20, "--steps", 1, "--precision", "bfloat16", "--device", "cpu")
    assert bench("decode", "-m", folder, *options, "--depth", 0, 1, "--json", path, "--png", picture) == 0
    written = json.loads(path.read_text())
    assert [(r["batch"], r["depth"]) for r in written["rows"]] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for row in written["rows"]:
        assert row["floor_ms"] == pytest.approx(row["gigabytes"] * 1e3)
        assert row["ratio"] == pytest.approx(row["floor_ms"] / row["wall_ms"])
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["wall_ms"] * 1e3)
        assert row["routing"] == "observed"
    assert written["read_bytes_per_s"] == 1e9
    assert picture.stat().st_size > 1000


def check_operations(rows: list[dict[str, Any]]) -> None:
    """Operations add up to the row of all, and floors stand where bytes and products are known."""
    *operations, whole = rows
    assert whole["operation"] == "all"
    for name in ("us", "launches", "share"):
        assert sum(row[name] for row in operations) == pytest.approx(whole[name])
    for row in rows:
        assert (row["floor_us"] is None) == (row["gflop"] is None)
        if row["floor_us"] is not None:
            assert row["ratio"] == pytest.approx(row["floor_us"] / row["us"])
    assert whole["floor_us"] >= max(whole["megabytes"] * 1e3, whole["gflop"] * 1e2) * 0.999


def test_prefill_layer_and_comparison(folder: Path, tmp_path: Path) -> None:
    common = ("-m", folder, "--precision", "bfloat16", "--device", "cpu", "--json", tmp_path / "out.json")

    def rows() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())["rows"]
        return found

    assert bench("prefill", *common, "--tokens", 40, "--chunk", 16, 40) == 0
    assert [row["chunk"] for row in rows()] == [16, 40]
    assert bench("layer", *common, "--batch", 2, "--steps", 1, "--context", 20) == 0
    check_operations(rows())
    assert bench("layer", *common, "--prefill", 40, "--chunk", 16, "--steps", 2) == 0
    check_operations(rows())
    assert rows()[-1]["gflop"] == pytest.approx(total(chunk_work(tiny_config(), start=32, end=40, tokens=40)).flops / 1e9)
    assert bench("compare", *common, "--batch", 1, "--context", 20, "--steps", 1, "", "async_scheduling=0") == 0
    assert [row["settings"] for row in rows()] == ["(as given)", "async_scheduling=0"]


def test_both_loops_under_each_delay(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ("--batch", 2, "--context", 20, "--steps", 1, "--delay", 0, 30, "--precision", "bfloat16", "--device", "cpu")
    assert bench("overlap", "-m", folder, *options, "--json", path) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(r["depth"], r["host_delay_ms"]) for r in rows] == [(0, 0), (1, 0), (0, 30), (1, 30)]
    assert all(r["host_ms"] >= r["host_delay_ms"] for r in rows)


def test_everything_in_one_run_loads_the_model_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = tmp_path / "out.json", []
    sizes = {
        "BATCHES": (1, 2),
        "CONTEXT": 20,
        "LONG_CONTEXTS": (40, 5000),
        "DELAYS_MS": (0.0,),
        "PROMPTS": (150, 200, 5000),
        "CHUNKS": (120, 8192),
        "STEPS": 1,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(everything, name, value)
    monkeypatch.setattr(model_holder, "open_model", lambda *args: opened.append(args) or open_model(*args))
    assert bench("all", "-m", folder, "--precision", "bfloat16", "--device", "cpu", "--json", path) == 0
    rows = json.loads(path.read_text())["rows"]
    parts = list(dict.fromkeys(row["part"] for row in rows))
    assert parts == ["decode", "long context", "operations, batch 1", "overlap", "operations, prefill", "prefill", "work"]
    assert [(row["tokens"], row["chunk"]) for row in rows if row["part"] == "prefill"] == [(200, 120), (200, 200)]
    assert [row["context"] for row in rows if row["part"] == "long context"] == [40]
    assert {row["tokens"] for row in rows if row["part"] == "work"} == {150, 200}
    assert len(opened) == 1
    assert bench("all", "-m", folder, "--precision", "bfloat16", "--device", "cpu", "--json", path, "--time-limit", 0) == 0
    assert json.loads(path.read_text())["rows"] == []


def test_speculation_gives_equal_texts(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ("--batch", 1, "--drafts", 0, 2, "--adaptive", "--max-tokens", 3, "--precision", "bfloat16", "--device", "cpu")
    assert bench("speculation", "-m", folder, *options, "--json", path) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(r["drafts"], r["adaptive"], r["same_text"]) for r in rows] == [(0, False, 1), (2, False, 1), (2, True, 1)]
    assert rows[0]["gain"] == 1


def test_a_configuration_reaches_a_fresh_process() -> None:
    config = EngineConfig(precision="bfloat16", max_num_seqs=3, num_speculative_tokens=2, kernels="plain", block_size=32)
    assert from_text(as_text(config)) == config


@pytest.mark.slow
def test_a_cold_start_runs_in_processes_of_its_own(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert bench("compile", "-m", folder, "--device", "cpu", "--max-num-seqs", 1, "--json", path) == 0
    cold, warm = json.loads(path.read_text())["rows"]
    assert (cold["start"], warm["start"]) == ("cold", "warm")
    assert cold["recompiled"] == warm["recompiled"] == 0
    assert 0 < cold["first_token_s"] < cold["process_s"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("decode", "--batch", "0"), "'0': expected an integer of at least 1"),
        (("decode", "--batch", "many"), "'many': expected an integer of at least 1"),
        (("layer", "--prefill", "0"), "'0': expected an integer of at least 1"),
        (("prefill", "--chunk", "-1"), "'-1': expected an integer of at least 1"),
        (("speculation", "--drafts", "-1"), "expected an integer of at least 0"),
        (("overlap", "--batch", "0"), "expected an integer of at least 1"),
        (("decode", "--kernels", "fast"), "invalid choice: 'fast'"),
    ],
)
def test_bad_numbers_are_refused_with_one_sentence(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        bench(*arguments)
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("decode", "--json", "/no/such/folder/x.json"), "the folder /no/such/folder does not exist"),
        (("scheduler", "--json", "/"), "is a folder, expected a file"),
        (("decode", "--png", "/no/such/x.png"), "the folder /no/such does not exist"),
        (("timeline", "-o", "/no/such/x"), "the folder /no/such does not exist"),
        (("decode", "-m", "flash_slice:3"), "at least 6"),
        (("decode", "-m", "flash_slice:8:2"), "2 experts, but each token visits 6"),
        (("compare", "--device", "cpu", "", "colour=red"), "'colour=red': expected FIELD=VALUE with one of kernels"),
        (("layer", "--chunk", "16"), "--chunk: goes with --prefill"),
        (("layer", "--prefill", "40", "--drafts", "0"), "--drafts: is of a decode step"),
        (("decode", "--device", "cpu", "--kernels", "triton"), 'EngineConfig.kernels = "triton"'),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("decode", "--device", "cuda") == 2
    assert "this machine has no CUDA device" in capsys.readouterr().err


def test_too_little_memory_names_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.bench.bench_model.free_memory_bytes", lambda device: 2**30)
    with pytest.raises(CapacityError, match=r"flash_slice: the weights take 6\d\.\d GiB, 1\.0 GiB are free on cpu"):
        check_room("flash_slice", flash_slice(), torch.device("cpu"))


def test_a_report_keeps_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    report = Report("decode", CEILINGS, path, limit_s=0.0)
    report.add({"a": 1, "b": 2.5})
    assert json.loads(path.read_text())["rows"] == [{"a": 1, "b": 2.5}]
    assert report.is_over("the second row")
    report.failed("a third row", ValueError("no\nmore"))
    written = json.loads(path.read_text())
    assert written["left_out"] == ["the second row"]
    assert written["failed"] == [{"what": "a third row", "reason": "ValueError: no"}]
    assert report.has_failures
    assert "2.5000" in capsys.readouterr().out


def test_slices_by_name() -> None:
    assert slice_config("mini") is None
    assert slice_config("flash_slice") == flash_slice()
    cut = slice_config("flash_slice:6:16")
    assert cut is not None
    assert (cut.n_layers, cut.moe.n_routed_experts, cut.draft.n_routed_experts) == (6, 16, 16)
    bench_tokenizer("flash_slice:6:16", cut).check_against(cut)


def test_settings_of_a_comparison() -> None:
    found = parse_settings("batch_invariant=true,num_speculative_tokens=3,kernels=plain", EngineConfig(device="cpu"))
    assert found == EngineConfig(device="cpu", batch_invariant=True, num_speculative_tokens=3, kernels="plain")
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        parse_settings("num_speculative_tokens=-1", EngineConfig())


def test_kernels_by_operation() -> None:
    expected = {
        "fp4_experts_kernel": "experts",
        "fp8_linear_kernel_0d1d2d": "fp8 linears",
        "bf16_kernel": "bf16 linears",
        "norm_quantize_kernel": "quantise",
        "triton_poi_fused_add_3": "fused by the compiler",
        "void at::native::(anonymous)::elementwise": "other small kernels",
        "nvjet_hsh_128x64": "products of the library",
        "Memcpy DtoD (Device -> Device)": "copies",
    }
    assert {kernel: operation_of(kernel) for kernel in expected} == expected


def test_every_kernel_of_ours_has_an_operation() -> None:
    import re

    import deepinfer.ops.triton_kernels as kernels

    names = {
        name
        for path in Path(kernels.__path__[0]).glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(names) > 10
    assert not {name for name in names if operation_of(name) == "other small kernels"}


def test_a_picture_without_rows(tmp_path: Path) -> None:
    draw_roofline(points_of("decode", []), CEILINGS, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 1000
