"""Digests of a small checkpoint's files, so that damage and mixed-up files are noticed.

The published format has none: flipped bits in a weight file read as other weights, and a tokenizer of the same size as another
one. `save_checkpoint` therefore writes `sha256.json` beside checkpoints up to 1 GiB, and loading compares if it is there.
"""

import hashlib
import json
from pathlib import Path

from deepinfer.errors import CheckpointError, CorruptFile, TokenizerError

CHECKSUMS_NAME = "sha256.json"
TOKENIZER_NAME = "tokenizer.json"
LIMIT_BYTES = 2**30


def write_checksums(folder: Path) -> None:
    """Write the digests of weights and tokenizer, unless they are too large to read twice at each load.

    `config.json` is left out: changing it is a way to experiment.
    """
    files = sorted([*folder.glob("*.safetensors"), folder / TOKENIZER_NAME])
    if sum(path.stat().st_size for path in files) > LIMIT_BYTES:
        return
    digests = {path.name: _digest(path) for path in files}
    (folder / CHECKSUMS_NAME).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def check_checksums(folder: Path) -> None:
    """Compare the files with their digests; a folder without digests passes.

    Raises: TokenizerError for another tokenizer, CorruptFile for any other difference, CheckpointError for unreadable digests.
    """
    path = folder / CHECKSUMS_NAME
    if not path.is_file():
        return
    try:
        digests = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: expected a JSON object of file name to sha256 ({error})") from error
    for name, expected in digests.items():
        file = folder / Path(str(name)).name
        if not file.is_file() or _digest(file) == expected:
            continue  # what is absent is reported by whoever needs it
        if name == TOKENIZER_NAME:
            raise TokenizerError(f"{file}: not the tokenizer that this checkpoint was written with ({path} has another digest)")
        raise CorruptFile(f"{file}: damaged, or of another checkpoint: its sha256 is not the one in {path}")


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
