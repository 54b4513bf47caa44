"""Every notebook runs from top to bottom on a CPU; they are numbered, stored without outputs, and end in assertions."""

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CELL_LIMIT_S = 200


def execute(notebook: Any) -> None:
    """Run all cells in a fresh kernel of this very Python, in the notebooks' folder. Raises CellExecutionError."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    client = NotebookClient(notebook, timeout=CELL_LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}})
    client.execute(env=environment)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path: Path) -> None:
    execute(nbformat.read(path, as_version=4))


def test_a_false_statement_fails() -> None:
    cells = [nbformat.v4.new_code_cell("import deepinfer"), nbformat.v4.new_code_cell("assert 1 == 2")]
    with pytest.raises(CellExecutionError, match="AssertionError"):
        execute(nbformat.v4.new_notebook(cells=cells))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_is_stored_without_outputs_and_with_stable_cell_ids(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    for cell in notebook["cells"]:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", cell["id"]), "ids are words, so that a changed cell keeps its own"
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_asks_a_question_and_ends_in_assertions(path: Path) -> None:
    first, *_, last = json.loads(path.read_text(encoding="utf-8"))["cells"]
    number = path.stem.split("_")[0]
    assert "".join(first["source"]).startswith(f"# {number} · ")
    assert "**Question:**" in "".join(first["source"])
    assert last["cell_type"] == "code"
    statements = ast.walk(ast.parse("".join(last["source"])))
    assert any(isinstance(node, ast.Assert) for node in statements)


def test_the_numbering_has_no_gap() -> None:
    assert [path.stem.split("_")[0] for path in NOTEBOOKS] == [f"{i:02d}" for i in range(1, len(NOTEBOOKS) + 1)]


def test_the_readme_lists_them_in_order_and_names_no_other() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[`(\w+\.ipynb)`\]\(notebooks/\1\) \|", readme, re.MULTILINE)
    assert listed == [path.name for path in NOTEBOOKS]


def map_of_mechanisms(readme: str) -> list[str]:
    """The rows of every table whose last column is the notebook."""
    found, inside = [], False
    for line in readme.splitlines():
        if inside and line.startswith("| "):
            found.append(line)
        inside = line.startswith("| mechanism |") or (inside and line.startswith("|"))
    return found


def test_the_maps_of_mechanisms_name_notebooks_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| ([^|]+) \|$", "\n".join(map_of_mechanisms(readme)), re.MULTILINE)
    assert len(rows) > 20
    assert all(re.fullmatch(r"–|\d\d(, \d\d)*", row) for row in rows), rows
    shown = set(re.findall(r"\d\d", " ".join(rows)))
    assert shown == {path.stem.split("_")[0] for path in NOTEBOOKS}
