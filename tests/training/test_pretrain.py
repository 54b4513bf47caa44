"""A few steps of each training stage on the CPU."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.model.transformer import Transformer
from deepinfer.training.data import Windows
from deepinfer.training.distill import Distillation
from deepinfer.training.optimizer import Optimizers, orthogonalized, schedule
from deepinfer.training.pretrain import Pretraining, balance_routers
from deepinfer.training.qat import set_rounding
from deepinfer.training.run import TrainingRun
from tests.training.micro import micro_model

LENGTH, BATCH = 32, 4


def windows() -> Windows:
    """Counting up by one, from anywhere: a pattern that a few steps can find."""
    ids = torch.arange(4000) % 97 + 6
    return Windows(ids, BATCH, LENGTH, seed=0)


def pretraining(out: Path, steps: int) -> tuple[TrainingRun, Pretraining]:
    model = micro_model()
    optimizers = Optimizers(((n, p) for n, p in model.named_parameters() if not n.startswith("mtp.")), lr=1e-2)
    run = TrainingRun("pretrain", out, model, optimizers, steps, rounded_share=0.25)
    return run, Pretraining(model, windows(), seed=0, fast=False)


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "pretrain.jsonl").read_text().splitlines()]


def test_the_loss_falls_through_the_rounded_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.training.run.LOG_EVERY", 4)
    run, stage = pretraining(tmp_path, steps=16)
    assert run.loop(lambda step: stage.step(run, step))
    assert run.is_rounded
    seen = losses(tmp_path)
    assert seen[-1] < seen[0] - 0.5


def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    run, stage = pretraining(tmp_path / "whole", steps=6)
    run.loop(lambda step: stage.step(run, step))

    broken, stage = pretraining(tmp_path / "broken", steps=6)
    assert not broken.loop(lambda step: stage.step(broken, step), stop_after_s=0.0)
    again, stage = pretraining(tmp_path / "broken", steps=6)
    again.resume()
    assert again.step == 1
    assert again.loop(lambda step: stage.step(again, step))
    for (name, expected), (_, actual) in zip(run.model.named_parameters(), again.model.named_parameters(), strict=True):
        torch.testing.assert_close(actual, expected, atol=0, rtol=0, msg=name)


def test_a_state_of_another_architecture_is_refused(tmp_path: Path) -> None:
    run, _ = pretraining(tmp_path, steps=1)
    run.save()
    state = torch.load(run.path, weights_only=True)
    state["config"]["text_config"]["vocab_size"] += 1
    torch.save(state, run.path)
    with pytest.raises(ConfigError, match="another architecture"):
        run.resume()


def test_time_sets_the_number_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.training.run.FIRST_TIMED_STEP", 2)
    monkeypatch.setattr("deepinfer.training.run.LAST_TIMED_STEP", 4)
    run, stage = pretraining(tmp_path, steps=1)
    run.steps, run.minutes = None, 0.02
    assert run.loop(lambda step: stage.step(run, step))
    assert run.steps is not None
    assert run.steps >= 5


def distillation(model: Transformer) -> Distillation:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("mtp.") and not name.endswith("gate.bias"))
    set_rounding(model, True)
    return Distillation(model, windows(), seed=0, fast=False)


def test_distillation_lowers_its_loss_and_moves_drafts_only(tmp_path: Path) -> None:
    model = micro_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stage = distillation(model)
    run = TrainingRun("distill", tmp_path, model, Optimizers(model.named_parameters(), lr=1e-2), 8)
    first = stage.gradients(0)[0].draft.item()
    model.zero_grad(set_to_none=True)
    run.loop(lambda step: stage.step(run, step))
    assert stage.gradients(0)[0].draft.item() < first
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all(name.startswith("mtp.") for name in moved)
    shutil.rmtree(tmp_path)


def test_biases_follow_the_load() -> None:
    model = micro_model()
    bias = model.layers[0].ffn.gate.bias
    before = bias.clone()
    balance_routers(model, {0: torch.tensor([8.0, 0, 4, 4, 4, 4, 4, 4])}, speed=0.5)
    assert (bias - before).tolist() == pytest.approx([-0.5, 0.5, 0, 0, 0, 0, 0, 0])


def test_every_window_of_an_epoch_is_another() -> None:
    data = windows()
    steps = data.per_epoch // BATCH
    starts = torch.cat([data.at(step)[:, 0] * 0 + data._starts[step * BATCH : (step + 1) * BATCH] for step in range(steps)])
    assert starts.unique().numel() == steps * BATCH
    torch.testing.assert_close(windows().at(3), data.at(3), atol=0, rtol=0)


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    x = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalized(x))
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_the_schedule_rises_and_falls() -> None:
    assert schedule(0.0) < schedule(0.01) < schedule(0.02) == pytest.approx(1.0)
    assert schedule(1.0) == pytest.approx(0.02)
