import json
import sys
import time
from email.message import Message
from pathlib import Path

import pytest

from deepinfer.errors import ConfigError
from deepinfer.training import corpus
from deepinfer.training.corpus import CopyGuard, Document, HeldOut, Source

HELD_OUT = HeldOut(frozenset({"kept"}), frozenset({"heapq", "json"}))


def lines(prefix: str, count: int) -> str:
    """Lines that are long enough to count as a file's own."""
    names = (chr(97 + i % 26) * (1 + i // 26) for i in range(count))
    return "".join(f"{prefix}_value_of_the_line = compute({prefix}, {name})\n" for name in names)


FILES = {
    "stdlib": {
        "heapq.py": lines("heap", 40),
        "json/decoder.py": lines("decoder", 40),
        "test/test_heapq.py": lines("testing", 40),
        "test/test_json/test_decode.py": lines("testing_json", 40),
        "test/test_os.py": lines("testing_os", 40),
        "os.py": lines("os", 40),
        "heap.py": lines("another", 40),
    },
    "kept": {"kept/core.py": lines("kept", 30), "kept/json.py": lines("kept_json", 30)},
    "other": {
        "other/own.py": lines("own", 50),
        "other/json.py": lines("own_json", 50),
        "other/same.py": lines("own", 50),
        "other/copied.py": lines("heap", 40),
        "other/partly.py": lines("heap", 16) + lines("mine", 24),
        "other/barely.py": lines("heap", 8) + lines("mine", 40),
        "other/swallowed.py": lines("big", 2000) + lines("decoder", 20),
    },
}


def install(root: Path) -> list[Source]:
    for package, files in FILES.items():
        for path, text in files.items():
            file = root / package / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return [
        Source(name=name, version="1.0", licence="MIT", root=root / name, paths=tuple(sorted(files)))
        for name, files in sorted(FILES.items())
    ]


@pytest.fixture
def sources(tmp_path: Path) -> list[Source]:
    return install(tmp_path / "installed")


def reasons(manifest: dict) -> dict[str, str]:
    return {f"{entry['package']}:{entry['path']}": entry["reason"] for entry in manifest["dropped"]}


def test_two_collections_are_the_same_bytes(tmp_path: Path, sources: list[Source]) -> None:
    corpus.collect_corpus(tmp_path / "a", HELD_OUT, sources)
    corpus.collect_corpus(tmp_path / "b", HELD_OUT, sources[::-1])
    first, second = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in "ab")
    assert first["train"] == second["train"]
    assert first["held_out"] == second["held_out"]
    corpus.collect_corpus(tmp_path / "c", HELD_OUT, install(tmp_path / "elsewhere"))
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "c" / "manifest.json").read_bytes()


def test_what_is_held_out_is_never_trained_on(tmp_path: Path, sources: list[Source]) -> None:
    manifest = corpus.collect_corpus(tmp_path, HELD_OUT, sources)
    held = [entry["path"] for entry in manifest["held_out"]]
    assert held == ["kept/core.py", "kept/json.py", "heapq.py", "json/decoder.py"]
    train = [f"{entry['package']}:{entry['path']}" for entry in manifest["train"]]
    # A package may have a module of the same name, and the test of another module may stay.
    assert train == [
        "other:other/barely.py",
        "other:other/json.py",
        "other:other/own.py",
        "stdlib:heap.py",
        "stdlib:os.py",
        "stdlib:test/test_os.py",
    ]
    assert reasons(manifest)["stdlib:test/test_heapq.py"] == "test of a held-out module"
    assert reasons(manifest)["stdlib:test/test_json/test_decode.py"] == "test of a held-out module"


def test_copies_of_held_out_files_are_dropped_and_listed(tmp_path: Path, sources: list[Source]) -> None:
    dropped = reasons(corpus.collect_corpus(tmp_path, HELD_OUT, sources))
    assert dropped["other:other/copied.py"] == "duplicate"
    assert dropped["other:other/partly.py"] == "near copy of a held-out file"
    # Hardly any of its own lines, but half of a held-out file's.
    assert dropped["other:other/swallowed.py"] == "near copy of a held-out file"
    assert dropped["other:other/same.py"] == "duplicate"


def test_short_lines_and_short_held_out_files_accuse_nobody() -> None:
    short = "import os\nimport sys\n"
    tiny = "from __future__ import annotations\n"
    guard = CopyGuard([Document("kept", "a.py", short + lines("kept", 30), ""), Document("kept", "b.py", tiny, "")])
    assert not guard.is_copy(short)
    assert not guard.is_copy(tiny + lines("own", 10))
    assert guard.is_copy(tiny)


def test_the_manifest_names_packages_with_version_licence_and_digest(tmp_path: Path, sources: list[Source]) -> None:
    manifest = corpus.collect_corpus(tmp_path, HELD_OUT, sources)
    (kept,) = (entry for entry in manifest["held_out_packages"] if entry["name"] == "kept")
    text = FILES["kept"]["kept/core.py"] + FILES["kept"]["kept/json.py"]
    assert kept == {"name": "kept", "version": "1.0", "licence": "MIT", "files": 2, "bytes": len(text)} | {
        "sha256": corpus.sha256(text)
    }
    assert sum(entry["bytes"] for entry in manifest["packages"]) == sum(entry["bytes"] for entry in manifest["train"])


def test_a_valid_manifest_stays(tmp_path: Path, sources: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = corpus.collect_corpus(tmp_path, HELD_OUT, sources)
    file = tmp_path / "manifest.json"
    before = file.read_bytes()
    file.write_bytes(before[:100])
    assert corpus.collect_corpus(tmp_path, HELD_OUT, sources) == manifest
    assert file.read_bytes() == before
    monkeypatch.setattr(corpus, "split_documents", None)
    assert corpus.collect_corpus(tmp_path, HELD_OUT, sources) == manifest


def test_documents_are_read_back_until_a_file_changes(tmp_path: Path, sources: list[Source]) -> None:
    manifest = corpus.collect_corpus(tmp_path / "out", HELD_OUT, sources)
    documents = list(corpus.read_documents(manifest, "held_out", sources))
    assert [document.text for document in documents][2] == FILES["stdlib"]["heapq.py"]
    (sources[-1].root / "heapq.py").write_text("changed = True\n")
    with pytest.raises(ConfigError, match=r"heapq.py is not the file of the manifest"):
        list(corpus.read_documents(manifest, "held_out", sources))


@pytest.mark.parametrize("content", [None, "", "[]", '{"train": []}'])
def test_what_is_no_manifest_says_how_to_write_one(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=r"deepinfer\.training\.corpus"):
        corpus.read_manifest(tmp_path)


def test_an_empty_part_is_an_error(tmp_path: Path, sources: list[Source]) -> None:
    with pytest.raises(ConfigError, match="0 held-out"):
        corpus.collect_corpus(tmp_path, HeldOut(frozenset(), frozenset({"absent"})), sources)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "missing or not UTF-8"),
        (" \n\n", "empty"),
        ("x = 1\n" * 40_000, "too large"),
        ("x = '" + "a" * 500 + "'\n", "generated"),
        ("x = [\n" + "    'a', 123456789012,\n" * 20 + "]\n", "generated"),
        ("WORDS = [\n" + "    'abs', \"all\",  # built in\n" * 20 + "]\n", "table"),
        ("codes = {\n" + "    0x0041: 'a', 'b': -1.5,\n" * 20 + "}\n", "table"),
        ("# a remark\n" * 20 + "def f(x):\n    return x + 1\n", None),
    ],
)
def test_files_that_teach_nothing_are_skipped(text: str | None, reason: str | None) -> None:
    assert corpus.reason_to_skip(text) == reason


def test_a_long_line_of_digits_is_judged_at_once() -> None:
    start = time.perf_counter()
    corpus.reason_to_skip("x = 'abcdefgh'\n" * 1000 + "12345678 " * 20 + "x = y\n")
    assert corpus.LITERAL_LINE.fullmatch("1" * 5000 + " = x") is None
    assert time.perf_counter() - start < 1


def test_only_line_endings_change(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes("é\r\n\tb \rc\n\n".encode())
    assert corpus.read_text(tmp_path / "a.py") == "é\n\tb \nc\n\n"
    (tmp_path / "b.py").write_bytes(b"\xe9")
    assert corpus.read_text(tmp_path / "b.py") is None
    assert corpus.read_text(tmp_path / "c.py") is None


WHOLE_TEXT = "Permission is hereby granted " * 20


def metadata(**fields: str) -> Message:
    message = Message()
    for name, value in fields.items():
        message[name.replace("_", "-")] = value
    return message


@pytest.mark.parametrize(
    "fields",
    [
        {"License_Expression": "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0"},
        {"License_Expression": "(Apache-2.0 OR BSD-2-Clause) AND Apache-2.0 WITH LLVM-exception"},
        {"License": "BSD", "Classifier": "License :: OSI Approved :: BSD License"},
        {"License": "Apache License, Version 2.0"},
        {"License": "MIT License\n" + WHOLE_TEXT, "Classifier": "License :: OSI Approved :: MIT License"},
        {"License": "PSF", "Classifier": "License :: DFSG approved"},
    ],
)
def test_permissive_licences_are_accepted(fields: dict[str, str]) -> None:
    assert corpus.check_licence("package", metadata(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"Classifier": "License :: OSI Approved"},
        {"License": WHOLE_TEXT},
        {"License_Expression": "MPL-2.0 AND MIT"},
        {"License_Expression": "MIT OR GPL-2.0-only"},
        {"License": "MIT", "Classifier": "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"},
        {"Classifier": "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)"},
        {"License": "MIT-like, see LICENSE"},
    ],
)
def test_other_and_missing_licences_are_refused(fields: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="only permissive"):
        corpus.check_licence("package", metadata(**fields))


def test_installed_packages_are_found_or_excused() -> None:
    sources, unused = corpus.find_sources(["numpy", "hypothesis", "no-such-package"])
    assert [source.name for source in sources] == ["numpy", "stdlib"]
    assert "MPL-2.0" in unused["hypothesis"]
    assert "no-such-package" in unused
    paths = {source.name: source.paths for source in sources}
    assert "numpy/__init__.py" in paths["numpy"]
    assert not any("site-packages" in path or "vendor" in path for path in paths["stdlib"])
    held_out = HeldOut.read()
    named = {path.split("/")[0].removesuffix(".py") for path in paths["stdlib"] if held_out.has("stdlib", path)}
    assert named == held_out.modules


@pytest.mark.parametrize("content", ["", "[]", '{"packages": []}', '{"packages": 1, "modules": []}'])
def test_a_damaged_list_of_what_is_held_out_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "held_out.json").write_text(content)
    with pytest.raises(ConfigError, match="must name"):
        HeldOut.read(tmp_path / "held_out.json")


def test_the_command_explains_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["corpus", "--help"])
    with pytest.raises(SystemExit):
        corpus.main()
    assert "--out DIR" in capsys.readouterr().out
