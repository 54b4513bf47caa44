"""The replay measurements on a tiny model: their own claims about rows, exactness and savings hold."""

import json
from pathlib import Path

import pytest

from deepinfer.bench.replay_drift import Piece, depths, held_out_pieces, measure_drift
from deepinfer.bench.replay_trace import TraceShape, measure_trace
from deepinfer.bench.replay_work import CASES, PrefillWork, prefill_work
from deepinfer.checkpoint.write import random_tensors, save_checkpoint
from deepinfer.cli import main
from deepinfer.errors import ConfigError
from deepinfer.presets import byte_tokenizer_json, tiny_config
from deepinfer.tokenizer import Tokenizer
from tests.golden import shared_model

CASE = "bf16_full"  # windows of 12 rows in four layers, one of them behind the last source


def test_drift_ends_at_the_depth_of_the_windows() -> None:
    model = shared_model(CASE, "float32", True)
    recovery, truncation = depths(model)
    assert (recovery, truncation) == (44, 11)
    pieces = [Piece(tuple(3 + (17 * i * i + salt) % 300 for i in range(80)), 60, 19) for salt in (0, 1)]
    drifts = {(d.what, d.rows): d for d in measure_drift(model, pieces, [0, 3, recovery - 1, truncation - 1])}
    assert drifts["full", 0].tokens == 2 * 19
    for what, depth in (("recovery", recovery), ("truncation", truncation)):
        assert drifts[what, depth].max_dlogprob == 0
        assert drifts[what, depth].bits_per_byte == drifts["full", 0].bits_per_byte
        assert drifts[what, depth - 1].max_dlogprob > 0
        assert drifts[what, 0].mean_dlogprob > drifts[what, depth - 1].mean_dlogprob


def test_held_out_pieces_are_the_beginnings_of_modules_nothing_was_trained_on(golden_tokenizer: Tokenizer) -> None:
    pieces = held_out_pieces(golden_tokenizer, 3, 50, 20)
    assert {len(piece.token_ids) for piece in pieces} == {70}
    assert all(19 <= piece.num_bytes <= 19 * 20 for piece in pieces)
    with pytest.raises(ConfigError, match="held-out modules"):
        held_out_pieces(golden_tokenizer, 1000, 50, 20)


@pytest.fixture(scope="module")
def work() -> dict[str, PrefillWork]:
    return {case.name: prefill_work(shared_model(CASE, "float32", False), case, 116, new_tokens=20) for case in CASES}


def test_work_falls_as_rows_do(work: dict[str, PrefillWork]) -> None:
    rows = {name: (row.cached, row.rows, row.decoder_rows) for name, row in work.items()}
    assert rows == {
        "full": (0, 116, 116),
        "exact, truncated": (0, 116, 12),
        "bounded, truncated": (0, 116, 24),
        "exact, snapshot": (64, 52, 12),
        "exact, replayed": (64, 96, 12),
        "bounded, replayed": (64, 64, 24),
    }
    assert work["full"].gflop > work["exact, truncated"].gflop > work["exact, snapshot"].gflop


def test_a_length_that_fails_does_not_lose_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, path, config = tmp_path / "tiny", tmp_path / "work.json", tiny_config()
    save_checkpoint(folder, config, random_tensors(config, 0), byte_tokenizer_json(config.vocab_size))
    command = ["bench", "replay", "-m", str(folder), "--precision", "float32", "--parts", "work", "--device", "cpu"]
    assert main([*command, "--tokens", "100", "160", "9999", "--json", str(path)]) == 1
    written = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["tokens"], row["mode"], row["kernels"]) for row in written["rows"]] == [(160, c.name, "plain") for c in CASES]
    assert [failed["what"] for failed in written["failed"]] == [f"{n} tokens, {c.name}" for n in (100, 9999) for c in CASES]
    assert "from 128 to 1023" in written["failed"][0]["reason"]
    assert "exact, replayed" in capsys.readouterr().out


def test_a_slice_has_no_drift_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "replay", "-m", "flash_slice:6:8", "--parts", "drift", "--device", "cpu"]) != 0
    assert "needs a trained model" in capsys.readouterr().err


def test_a_chat_finds_its_past() -> None:
    shape = TraceShape(conversations=2, turns=2, system=20, question=7, answer=3)
    figures = {row.mode: row for row in measure_trace(shared_model(CASE, "float32", True), shape)}
    assert figures["full, no cache"].hit_rate == 0
    # Each second turn starts where the first has ended: 29 of 37 tokens, and 27 tokens before.
    assert figures["exact"].hit_rate == pytest.approx(29 / (27 + 37))
    assert figures["exact"].same_text == "4/4"
    assert figures["exact"].rows < figures["full, no cache"].rows
