"""What the package promises: its public names, its error tree, and which module may import which."""

import ast
import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deepinfer
from deepinfer import errors

PACKAGE = Path(deepinfer.__file__).parent

# A layer may import itself and the layers before it. `training` and `bench` stand above the engine.
LAYERS = ["errors", "config", "dims", "ops", "tokens", "chat", "model", "checkpoint", "runtime", "engine", "tools", "cli"]
LAYER_OF = {
    "errors": "errors",
    "config": "config",
    "config_json": "config",
    "visibility": "config",
    "engine_config": "runtime",
    "sampling_params": "config",
    "structured_outputs": "config",
    "sampling_checks": "engine",
    "outputs": "config",
    "dims": "dims",
    "ops": "ops",
    "tokenizer": "tokens",
    "detokenizer": "tokens",
    "token_map": "tokens",
    "prompts": "tokens",
    "chat": "chat",
    "structured": "tokens",
    "model": "model",
    "checkpoint": "checkpoint",
    "presets": "checkpoint",
    "inspect_checkpoint": "checkpoint",
    "runtime": "runtime",
    "parallel": "runtime",
    "backends": "runtime",
    "engine": "engine",
    "request_builder": "engine",
    "engine_thread": "engine",
    "training": "tools",
    "bench": "tools",
    "golden": "tools",
    "cli": "cli",
}
WITHOUT_TORCH = [
    "runtime/request",
    "runtime/stop_strings",
    "runtime/shared_prompt",
    "runtime/sequence",
    "runtime/plan",
    "runtime/ids",
    "runtime/scheduler",
    "runtime/next_rows",
    "runtime/admission",
    "runtime/sequence_memory",
    "runtime/limits",
    "runtime/counters",
    "runtime/ending",
    "runtime/release",
    "parallel/config",
    "parallel/voting",
    "parallel/placement",
    "config",
    "visibility",
]


def imports_of(path: Path) -> set[str]:
    """Modules of this package that a file imports, also under `if TYPE_CHECKING` and in functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("deepinfer."):
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("deepinfer.")}
    return found


def test_every_public_name_can_be_imported() -> None:
    assert sorted(deepinfer.__all__) == deepinfer.__all__
    for name in deepinfer.__all__:
        assert getattr(deepinfer, name).__name__ == name
    assert dir(deepinfer) == deepinfer.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        deepinfer.Missing  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, deepinfer.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_drawn_error_tree_is_the_real_one() -> None:
    drawing = re.search(r"```\n(.*?)```", errors.__doc__ or "", re.DOTALL)
    assert drawing is not None
    parents: list[str] = []
    drawn = {}
    for line in drawing.group(1).splitlines():
        name = re.sub(r"[^A-Za-z]", "", line)
        depth = (len(line) - len(name)) // 4
        parents[depth:] = [name]
        drawn[name] = parents[depth - 1] if depth else "Exception"
    real = {
        name: value.__bases__[0].__name__
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert drawn == real


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("one"),
        errors.PeerLost("rank 0: lost", 0, (1, 2)),
        errors.RecipeError("messages[1]", "no role"),
        errors.TensorMismatch("a folder", ["missing"], [], []),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_copied_and_pickled(error: errors.DeepInferError) -> None:
    for copied in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(copied) is type(error)
        assert (str(copied), vars(copied)) == (str(error), vars(error))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if first in ("__init__", "__main__"):
        return
    allowed = LAYERS[: LAYERS.index(LAYER_OF[first]) + 1]
    for module in imports_of(path):
        assert LAYER_OF[module.split(".")[1]] in allowed, f"{path.name} may not import {module}"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_scheduler_side_uses_no_torch(name: str) -> None:
    source = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
    assert not re.search(r"^\s*(import|from) torch\b", source, re.MULTILINE)


def test_the_readme_maps_every_module_and_names_only_tests_that_exist() -> None:
    readme = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
    missing = [p.name for p in PACKAGE.rglob("*.py") if not p.name.startswith("__") and p.name not in readme]
    assert missing == []
    tests = {p.name for p in Path(__file__).parent.rglob("test_*.py")}
    assert set(re.findall(r"test_\w+\.py", readme)) <= tests
