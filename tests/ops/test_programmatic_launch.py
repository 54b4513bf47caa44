"""Kernels that start while the one before them drains: every program of each waits, whether it has work or not.

The end of such a kernel means the end of all before it only if each of its programs has waited. A grid whose programs all return
early would end at once, and the kernel behind it read what is still being written.
"""

import ast
from pathlib import Path

import pytest

import deepinfer

KERNELS = Path(deepinfer.__file__).parent / "ops" / "triton_kernels"
WAIT = "gdc_wait"


def waiting_functions(source: str) -> dict[str, ast.FunctionDef]:
    """Functions of a file that wait."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {fn.name: fn for fn in functions if any(isinstance(n, ast.Attribute) and n.attr == WAIT for n in ast.walk(fn))}


def early_returns(fn: ast.FunctionDef) -> list[int]:
    """Lines with a return in front of a wait."""
    waits = [node.lineno for node in ast.walk(fn) if isinstance(node, ast.Attribute) and node.attr == WAIT]
    return [node.lineno for node in ast.walk(fn) if isinstance(node, ast.Return) and node.lineno < max(waits)]


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.py")), ids=lambda path: path.stem)
def test_no_program_returns_before_it_has_waited(path: Path) -> None:
    for name, fn in waiting_functions(path.read_text(encoding="utf-8")).items():
        assert not early_returns(fn), f"{path.name}, {name}: returns in lines {early_returns(fn)} without having waited"


def test_kernels_that_wait_are_found() -> None:
    found = {name for path in KERNELS.glob("*.py") for name in waiting_functions(path.read_text(encoding="utf-8"))}
    assert {"fp4_experts_kernel", "fp8_linear_kernel", "prepare_kernel", "block_scaled_experts_kernel"} <= found


def test_a_return_before_the_wait_is_noticed() -> None:
    source = "def kernel(x):\n    if x < 0:\n        return\n    tl.extra.cuda.gdc_wait()\n"
    (fn,) = waiting_functions(source).values()
    assert early_returns(fn) == [3]
