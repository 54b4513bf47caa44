"""Rows of figures, printed as they come and written as JSON after each: a measurement that is cut short leaves what it has."""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from deepinfer.bench.ceilings import Ceilings
from deepinfer.errors import CapacityError, ConfigError

LEAST_WIDTH = 8


def check_writable(path: Path | None, option: str) -> None:
    """Raise ConfigError if a file cannot be written there; None is no file. Writes nothing."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder, expected a file")
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: the folder {folder} does not exist")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path}: may not be written")


class Report:
    """The table of one measurement.

    `limit_s` is how long new rows may begin: see `is_over`. Where several measurements share a report, `part` names the one that
    adds rows.
    """

    def __init__(self, what: str, ceilings: Ceilings | None, path: Path | None = None, limit_s: float | None = None) -> None:
        self.path, self.ceilings = path, ceilings
        self.part: str | None = None
        self.rows: list[dict[str, Any]] = []
        self._columns: list[str] = []
        self._end = math.inf if limit_s is None else time.monotonic() + limit_s
        self._head: dict[str, Any] = {
            "what": what,
            "command": " ".join(sys.argv),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        if ceilings is not None:
            self._head |= {name: getattr(ceilings, name) for name in Ceilings.__dataclass_fields__}
            print(
                f"{ceilings.device}: reads {ceilings.read_bytes_per_s / 1e9:.1f} GB/s, "
                f"multiplies {ceilings.bf16_flops_per_s / 1e12:.2f} TFLOP/s in bfloat16",
                flush=True,
            )
        self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()

    def is_over(self, next_row: str) -> bool:
        """Whether the time for new rows has run out; says which row is left out then."""
        if time.monotonic() < self._end:
            return False
        print(f"out of time: {next_row} is left out", flush=True)
        self._head.setdefault("left_out", []).append(next_row)
        return True

    def add(self, row: dict[str, Any]) -> None:
        """Print a row, with the names of the columns if they are new ones, and write the file again."""
        if self.part is not None:
            row = {"part": self.part} | row
        if list(row) != self._columns:
            self._columns = list(row)
            print("  ".join(name.rjust(self._width(name)) for name in row))
        print("  ".join(_cell(value).rjust(self._width(name)) for name, value in row.items()), flush=True)
        self.rows.append(row)
        self._write()

    def failed(self, what: str, error: Exception) -> None:
        """Note what could not be measured and why; the other rows go on."""
        text = str(error).strip()
        reason = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
        print(f"{what}: failed, {reason}", flush=True)
        self._head.setdefault("failed", []).append({"what": what, "reason": reason})
        self._write()

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Note what the engine or the device refuses inside, out of memory among it, as `failed` does."""
        try:
            yield
        # Out of memory is a RuntimeError.
        except (RuntimeError, CapacityError, ConfigError) as error:
            self.failed(what, error)

    @property
    def has_failures(self) -> bool:
        return bool(self._head.get("failed"))

    @staticmethod
    def _width(name: str) -> int:
        return max(len(name), LEAST_WIDTH)

    def _write(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps(self._head | {"rows": self.rows}, indent=1) + "\n", encoding="utf-8")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.2f}" if abs(value) >= 10 else f"{value:.4f}"
    return "–" if value is None else str(value)
