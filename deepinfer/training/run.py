"""What every training command does around its steps: resume, save, log, show progress, and fit the time given."""

import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from deepinfer.config_json import config_to_json
from deepinfer.errors import ConfigError
from deepinfer.model.transformer import Transformer
from deepinfer.training.optimizer import Optimizers

LOG_EVERY = 50
SAVE_EVERY_S = 60.0
# With a time limit the number of steps is set once, from the speed of the steps after those that compile.
FIRST_TIMED_STEP = 20
LAST_TIMED_STEP = 60
# How much slower rounded steps are.
ROUNDING_SLOWDOWN = 1.35


@dataclass(slots=True)
class TrainingRun:
    """One command's progress, kept in `out/<stage>.pt` (state) and `out/<stage>.jsonl` (log).

    `steps` may be left open with `minutes` given; it is then fixed after `LAST_TIMED_STEP` steps and kept in the state, so a
    resumed run ends where the first would have.
    """

    stage: str
    out: Path
    model: Transformer
    optimizers: Optimizers
    steps: int | None
    minutes: float | None = None
    rounded_share: float = 0.0  # of the steps, at the end, that run with rounding
    step: int = 0

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ConfigError("give the number of steps or the minutes")
        self.out.mkdir(parents=True, exist_ok=True)

    @property
    def path(self) -> Path:
        return self.out / f"{self.stage}.pt"

    @property
    def done(self) -> float:
        """Share of the steps that lie behind; small while their number is open."""
        return self.step / self.steps if self.steps else min(self.step / 3000, 0.02)

    @property
    def is_rounded(self) -> bool:
        return self.steps is not None and self.done >= 1 - self.rounded_share

    def resume(self) -> None:
        """Take up the state if there is one. Mutates model and optimisers."""
        if not self.path.exists():
            return
        state = torch.load(self.path, map_location=self.model.device, weights_only=True)
        if state["config"] != config_to_json(self.model.config):
            raise ConfigError(f"{self.path} is the state of another architecture; remove it or choose another folder")
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        self.step, self.steps = state["step"], state["steps"]

    def save(self) -> None:
        """Write the state aside, then move it into place."""
        state = {
            "config": config_to_json(self.model.config),
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "step": self.step,
            "steps": self.steps,
        }
        partial = self.path.with_name(self.path.name + ".partial")
        torch.save(state, partial)
        os.replace(partial, self.path)

    def loop(self, one_step: Callable[[int], dict[str, Any]], stop_after_s: float | None = None) -> bool:
        """Call `one_step(step)` until all steps are done, or `stop_after_s` has passed. True if all are done.

        `one_step` returns values to log; tensors are read only when they are logged.
        """
        begun = saved = time.monotonic()
        timed_from = 0.0
        with tqdm(initial=self.step, total=self.steps, desc=self.stage, unit="step", disable=None) as progress:
            while self.steps is None or self.step < self.steps:
                values = one_step(self.step)
                self.step += 1
                progress.update()
                if self.step == FIRST_TIMED_STEP or (self.steps is None and self.step == LAST_TIMED_STEP):
                    _wait(self.model.device)
                    if self.step == FIRST_TIMED_STEP:
                        timed_from = time.monotonic()
                    else:
                        self.steps = progress.total = self._steps_in_time(begun, timed_from)
                        progress.refresh()
                now = time.monotonic()
                if self.step % LOG_EVERY == 0 or self.step == self.steps:
                    shown = {key: round(float(value), 4) for key, value in values.items()}
                    progress.set_postfix(shown)
                    self._log(shown | {"step": self.step, "of": self.steps, "seconds": round(now - begun, 1)})
                    if not all(value == value for value in shown.values()):
                        raise ConfigError(f"{self.stage}: a loss is not a number at step {self.step}; lower the rate")
                if now - saved > SAVE_EVERY_S:
                    self.save()
                    saved = now
                if stop_after_s is not None and now - begun > stop_after_s:
                    break
        self.save()
        return self.step == self.steps

    def _steps_in_time(self, begun: float, timed_from: float) -> int:
        assert self.minutes is not None
        now = time.monotonic()
        step_s = (now - timed_from) / (LAST_TIMED_STEP - FIRST_TIMED_STEP)
        left = self.minutes * 60 - (now - begun)
        mean = step_s * (1 + self.rounded_share * (ROUNDING_SLOWDOWN - 1))
        return self.step + max(int(left / mean), 1)

    def _log(self, values: dict[str, Any]) -> None:
        with (self.out / f"{self.stage}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def first_step_compiled(step: Callable[[bool], Any], fast: bool) -> bool:
    """Try one step with compiled pieces; False, with a warning, if that fails and the plain pieces must do."""
    if not fast:
        return False
    try:
        step(True)
    # Compilers fail in many ways; none of them is a reason not to train.
    except Exception as error:
        warnings.warn(f"compiling failed, training goes on without it: {error!r}", stacklevel=2)
        return False
    return True


def prepare_device(device: torch.device) -> torch.dtype:
    """Arithmetic settings for training there; returns the activation dtype."""
    if device.type != "cuda":
        return torch.float32
    # Float32 products (streams' coefficients, router, head) may use TensorFloat-32: the gradient is noisier than that.
    torch.set_float32_matmul_precision("high")
    return torch.bfloat16


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
