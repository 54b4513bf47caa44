"""Triton kernels beside their plain twins, in triton's interpreter. Needs triton to be installed, no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.interpreted import CASES, DTYPES

pytest.importorskip("triton", reason="triton is not installed")
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_agrees_with_its_plain_twin(case: str, dtype: str) -> None:
    name, env = f"{case}-{dtype}", os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.ops.interpreted", name], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"{name} agrees" in result.stdout
