"""How much memory the pool of cache blocks may be sized from."""

from pathlib import Path

import pytest
import torch

from deepinfer.runtime import device
from deepinfer.runtime.device import free_memory_bytes


@pytest.mark.parametrize(("limit", "expected"), [("5000000", 4_000_000), ("max", 8_000_000 * 1024), ("500000", 0)])
def test_a_container_limits_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: int) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable:    8000000 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    monkeypatch.setattr(device, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    assert free_memory_bytes(torch.device("cpu")) == expected
