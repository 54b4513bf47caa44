"""Collect the Python sources that are already installed and split them into a training and a held-out part.

The text itself is stored nowhere: `manifest.json` lists every file with its sha256, and `read_documents` reads the
installed files again and refuses any that changed since. Sources are the standard library of the running interpreter
and those packages of `ALLOWED` that are installed and whose own metadata states only permissive licences.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from deepinfer.errors import ConfigError

STDLIB = "stdlib"
MANIFEST = "manifest.json"
MANIFEST_KEYS = {"inputs", "python", "packages", "held_out_packages", "unused", "train", "held_out", "dropped"}
HELD_OUT_FILE = Path(__file__).with_name("held_out.json")

# What the dependencies of this package bring along, over their recent versions. Left out for MPL-2.0, which asks for
# more than a notice: certifi, hypothesis, pathspec, tqdm. Left out as mostly copies of others: pip.
_NAMES = """
    anyio click einops filelock fsspec h11 httpcore httpcore2 httpx httpx2 huggingface-hub idna iniconfig jaxtyping
    jinja2 markdown-it-py markupsafe mdurl mpmath mypy mypy-extensions networkx numpy packaging pluggy pygments pytest
    pytest-timeout pyyaml rich safetensors setuptools shellingham sniffio sortedcontainers sympy tokenizers torch
    truststore typer typing-extensions wadler-lindig"""
ALLOWED = tuple(_NAMES.split())
# SPDX names in lower case. Each of these licences asks for no more than the notices that NOTICES.md keeps.
_LICENCES = """
    0bsd apache-2.0 bsd-2-clause bsd-3-clause bsl-1.0 cc0-1.0 isc llvm-exception mit mit-0 psf-2.0 python-2.0 unlicense
    zlib"""
PERMISSIVE = frozenset(_LICENCES.split())
# Older metadata states a licence in words.
LEGACY_NAMES = {
    "3-clause bsd": "bsd-3-clause",
    "apache": "apache-2.0",
    "apache 2.0": "apache-2.0",
    "apache software": "apache-2.0",
    "bsd": "bsd-3-clause",
    "isc (iscl)": "isc",
    "python software foundation": "psf-2.0",
    "psf": "psf-2.0",
}

# Folders whose files another project wrote (and that project's licence covers), or that no source of ours installs.
FOREIGN_FOLDERS = re.compile(r"(^|/)([^/]*vendor[^/]*|third_party|site-packages|dist-packages|__pycache__)/")
MAX_FILE_BYTES = 200_000
MAX_MEAN_LINE = 200
MAX_DIGIT_SHARE = 0.4
# A file in which more lines than this hold only literals is a table: codec maps, word lists, recorded results.
MAX_LITERAL_SHARE = 0.6
_LITERAL = r"""[\s\[\](){},:+-]*+(?:[rbuRBU]{0,2}(?:"[^"]*+"|'[^']*+')|\d[\w.]*+)"""
# Possessive throughout: the same digits can be cut in many ways, and trying them all takes for ever.
LITERAL_LINE = re.compile(rf"(?:{_LITERAL})++[\s\[\](){{}},:]*+(?:#.*)?")

# A longer line says something of its own; a file may share this part of such lines with the held-out files.
TRIVIAL_LINE = 20
MAX_SHARED = 0.3
# A held-out file with fewer lines of its own is nobody's to copy: its imports alone would accuse every file.
MIN_LINES_TO_COPY = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An installed package: where its files are, and what its metadata says about it."""

    name: str
    version: str
    licence: str
    root: Path
    paths: tuple[str, ...]  # relative to root, sorted, with "/"


@dataclass(frozen=True, slots=True)
class Document:
    """One file; `text` has only its line endings changed, and `sha256` is of that text."""

    package: str
    path: str
    text: str
    sha256: str


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def is_permissive(expression: str) -> bool:
    """Whether every licence in an SPDX expression is permissive; OR is read like AND, so nothing has to be chosen."""
    name = " ".join(re.sub(r"\b(the|licen[cs]e|version)\b|,", " ", expression.lower()).split())
    words = re.findall(r"[^\s()]+", LEGACY_NAMES.get(name, name))
    licences = [word for word in words if word not in ("and", "or", "with")]
    return bool(licences) and PERMISSIVE.issuperset(licences)


def check_licence(name: str, metadata: importlib.metadata.PackageMetadata) -> str:
    """Returns: all the licences that the metadata states, joined.

    Raises: ConfigError if it states none, or any that is not permissive.
    """
    stated = [text for field in ("License-Expression", "License") for text in metadata.get_all(field) or []]
    stated += [line.split(" :: ")[-1] for line in metadata.get_all("Classifier") or [] if line.startswith("License")]
    # The old `License` field may hold a licence's whole text, which names none.
    licences = [text for text in stated if len(text) < 200 and text not in ("OSI Approved", "DFSG approved")]
    refused = [licence for licence in licences if not is_permissive(licence)]
    if refused or not licences:
        what = ", ".join(refused) or "no licence"
        raise ConfigError(f"{name} states {what}: only permissive sources are collected. Take it off ALLOWED.")
    return "; ".join(dict.fromkeys(licences))


def stdlib_source() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    own = tuple(path for path in paths if not FOREIGN_FOLDERS.search(path))
    return Source(name=STDLIB, version=platform.python_version(), licence="PSF-2.0", root=root, paths=own)


def find_sources(allowed: Iterable[str] = ALLOWED) -> tuple[list[Source], dict[str, str]]:
    """Returns: the standard library and the installed packages, by name; and name -> why the others are not used."""
    sources, unused = [stdlib_source()], {}
    for name in allowed:
        try:
            found = importlib.metadata.distribution(name)
            licence = check_licence(name, found.metadata)
        except (importlib.metadata.PackageNotFoundError, ConfigError) as error:
            unused[name] = str(error)
            continue
        paths = sorted(path.as_posix() for path in found.files or () if path.suffix == ".py" and ".." not in path.parts)
        own = tuple(path for path in paths if not FOREIGN_FOLDERS.search(path))
        root = Path(str(found.locate_file("")))
        sources.append(Source(name=name, version=found.version, licence=licence, root=root, paths=own))
    return sorted(sources, key=lambda source: source.name), unused


def read_text(path: Path) -> str | None:
    """The file with its line endings normalised, or None if it is missing or not UTF-8."""
    try:
        return path.read_bytes().decode().replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError):
        return None


def reason_to_skip(text: str | None) -> str | None:
    """Why nothing is to be learned from this text, or None."""
    if text is None:
        return "missing or not UTF-8"
    if not text.strip():
        return "empty"
    if len(text.encode()) > MAX_FILE_BYTES:
        return "too large"
    lines = [line for line in text.split("\n") if line.strip()]
    digits = sum(character.isdigit() for character in text)
    if len(text) / len(lines) > MAX_MEAN_LINE or digits / len(text) > MAX_DIGIT_SHARE:
        return "generated"
    literal = sum(LITERAL_LINE.fullmatch(line) is not None for line in lines)
    return "table" if literal / len(lines) > MAX_LITERAL_SHARE else None


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What no stage may train on, as `held_out.json` names it."""

    packages: frozenset[str]
    modules: frozenset[str]  # of the standard library

    @classmethod
    def read(cls, path: Path = HELD_OUT_FILE) -> "HeldOut":
        try:
            named = json.loads(path.read_text())
            return cls(frozenset(named["packages"]), frozenset(named["modules"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path} must name `packages` and `modules` as lists: {error!r}") from error

    def has(self, package: str, path: str) -> bool:
        module = path.split("/")[0].removesuffix(".py")
        return package in self.packages or (package == STDLIB and module in self.modules)

    def has_test(self, package: str, path: str) -> bool:
        """Whether this is the standard library's own test of a held-out module; it spells out what the module does."""
        folder, _, name = path.partition("/")
        module = name.split("/")[0].removesuffix(".py").removeprefix("test_")
        return package == STDLIB and folder == "test" and module in self.modules


class CopyGuard:
    """Recognises files that share too many of their own lines with held-out files, or too many of a held-out file's."""

    def __init__(self, held_out: Iterable[Document]) -> None:
        self._owners: dict[str, list[str]] = defaultdict(list)
        self._sizes: dict[str, int] = {}
        for document in held_out:
            lines = self.own_lines(document.text)
            self._sizes[document.path] = len(lines)
            for line in lines:
                self._owners[line].append(document.path)

    @staticmethod
    def own_lines(text: str) -> set[str]:
        return {line for line in map(str.strip, text.split("\n")) if len(line) > TRIVIAL_LINE}

    def is_copy(self, text: str) -> bool:
        lines = self.own_lines(text)
        shared = lines & self._owners.keys()
        taken = Counter(path for line in shared for path in self._owners[line])
        large = [path for path in taken if self._sizes[path] >= MIN_LINES_TO_COPY]
        swallows_one = any(taken[path] > MAX_SHARED * self._sizes[path] for path in large)
        return swallows_one or len(shared) > MAX_SHARED * len(lines)


Dropped = list[dict[str, str]]


def split_documents(sources: list[Source], held_out: HeldOut) -> tuple[list[Document], list[Document], Dropped]:
    """Returns: training documents, held-out documents, and every file that is in neither with the reason."""
    files = [(source, path) for source in sources for path in source.paths]
    # Held-out files first: a text that exists twice is then held out and not trained on.
    files.sort(key=lambda file: (not held_out.has(file[0].name, file[1]), file[0].name, file[1]))
    train: list[Document] = []
    held: list[Document] = []
    dropped: Dropped = []
    seen: set[str] = set()
    guard: CopyGuard | None = None
    for source, path in tqdm(files, desc="collect", unit="file", disable=None):
        text = read_text(source.root / path)
        document = Document(source.name, path, text or "", sha256(text or ""))
        reason = reason_to_skip(text) or ("duplicate" if document.sha256 in seen else None)
        is_held = held_out.has(source.name, path)
        if not is_held:
            guard = guard or CopyGuard(held)
            if held_out.has_test(source.name, path):
                reason = "test of a held-out module"
            elif reason is None and guard.is_copy(document.text):
                reason = "near copy of a held-out file"
        if reason:
            dropped.append({"package": source.name, "path": path, "reason": reason})
            continue
        seen.add(document.sha256)
        (held if is_held else train).append(document)
    return train, held, dropped


def _file_entry(document: Document) -> dict[str, Any]:
    size = len(document.text.encode())
    return {"package": document.package, "path": document.path, "bytes": size, "sha256": document.sha256}


def _package_entries(sources: list[Source], documents: list[Document]) -> list[dict[str, Any]]:
    entries = []
    for source in sources:
        texts = [document.text for document in documents if document.package == source.name]
        entry = {"name": source.name, "version": source.version, "licence": source.licence, "files": len(texts)}
        text = "".join(texts)
        entries.append(entry | {"bytes": len(text.encode()), "sha256": sha256(text)})
    return [entry for entry in entries if entry["files"]]


def collect_corpus(out: Path, held_out: HeldOut | None = None, sources: list[Source] | None = None) -> dict[str, Any]:
    """Write `out/manifest.json`, or return the one that is there if it was made from the same inputs.

    Raises: ConfigError if either part of the corpus is empty.
    """
    held_out = held_out or HeldOut.read()
    sources, unused = (sources, {}) if sources is not None else find_sources()
    # All that decides the corpus short of reading the files; the rules count through the bytes of this file.
    versions = [(source.name, source.version, source.licence, source.paths) for source in sources]
    names = sorted(held_out.packages), sorted(held_out.modules)
    inputs = sha256(json.dumps([Path(__file__).read_text(), names, versions]))
    try:
        manifest = read_manifest(out)
        if manifest["inputs"] == inputs:
            return manifest
    except ConfigError:
        pass  # missing or damaged: written anew below
    train, held, dropped = split_documents(sources, held_out)
    if not train or not held:
        raise ConfigError(f"{len(train)} training and {len(held)} held-out files were found; both parts are needed.")
    manifest = {
        "inputs": inputs,
        "python": platform.python_version(),
        "packages": _package_entries(sources, train),
        "held_out_packages": _package_entries(sources, held),
        "unused": unused,
        "train": [_file_entry(document) for document in train],
        "held_out": [_file_entry(document) for document in held],
        "dropped": dropped,
    }
    out.mkdir(parents=True, exist_ok=True)
    # Written beside and renamed, so that an interrupted run leaves no half manifest.
    partial = out / (MANIFEST + ".partial")
    partial.write_text(json.dumps(manifest, indent=1))
    os.replace(partial, out / MANIFEST)
    return manifest


def read_manifest(out: Path) -> dict[str, Any]:
    path = out / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        missing = MANIFEST_KEYS - manifest.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is no manifest ({error}); write one with deepinfer.training.corpus") from error
    if missing:
        raise ConfigError(f"{path} lacks {sorted(missing)}; write it again with deepinfer.training.corpus")
    return manifest


def corpus_digest(manifest: dict[str, Any]) -> str:
    """A digest of the texts of both parts, whatever interpreter they were found under."""
    return sha256(json.dumps([manifest["train"], manifest["held_out"]]))


def read_documents(
    manifest: dict[str, Any], part: Literal["train", "held_out"], sources: list[Source] | None = None
) -> Iterator[Document]:
    """Read one part from the installed files, in the manifest's order: by package, then path.

    Raises: ConfigError if a file is gone or differs from when the manifest was written.
    """
    roots = {source.name: source.root for source in sources or find_sources()[0]}
    for entry in manifest[part]:
        package, path = entry["package"], entry["path"]
        text = read_text(roots[package] / path) if package in roots else None
        if text is None or sha256(text) != entry["sha256"]:
            raise ConfigError(f"{package}: {path} is not the file of the manifest any more. Collect the corpus again.")
        yield Document(package, path, text, entry["sha256"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for manifest.json")
    manifest = collect_corpus(parser.parse_args().out)
    for part, key in (("training", "packages"), ("held out", "held_out_packages")):
        total = sum(entry["bytes"] for entry in manifest[key])
        print(f"{part}: {sum(entry['files'] for entry in manifest[key])} files, {total / 1e6:.2f} MB")
        for entry in sorted(manifest[key], key=lambda entry: -entry["bytes"]):
            print("  {name} {version} ({licence}): {files} files, {bytes} bytes".format(**entry))
    for reason, count in Counter(entry["reason"] for entry in manifest["dropped"]).most_common():
        print(f"dropped, {reason}: {count} files")
    for name, reason in manifest["unused"].items():
        print(f"unused: {name}: {reason}")


if __name__ == "__main__":
    main()
