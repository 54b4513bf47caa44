"""Where a model is: a folder, or the name of a preset that ships with the package."""

import logging
from pathlib import Path

from deepinfer.errors import CheckpointError

logger = logging.getLogger(__name__)
PRESET_FOLDER = Path(__file__).parent.parent / "data"


def preset_names() -> list[str]:
    """Names of the checkpoints in the package."""
    return sorted(path.parent.name for path in PRESET_FOLDER.glob("*/config.json"))


def locate_checkpoint(path_or_preset: Path | str) -> Path:
    """The checkpoint folder. A preset's bare name is the preset, also where a folder is called the same: `./mini` is the folder.

    Raises: CheckpointError if it is neither.
    """
    if not isinstance(path_or_preset, str | Path):
        raise CheckpointError(f"model: expected a folder or the name of a preset, got {type(path_or_preset).__name__}")
    path = Path(path_or_preset)
    if isinstance(path_or_preset, str) and path_or_preset in preset_names():
        if path.is_dir():
            logger.warning("%s: the preset, not the folder of that name here; ./%s is the folder", path, path)
        return PRESET_FOLDER / path
    if path.is_dir():
        return path
    raise CheckpointError(f"{path_or_preset}: no such folder, and the presets are {', '.join(preset_names()) or 'none'}")
