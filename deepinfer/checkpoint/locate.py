"""Where a model is: a folder, or the name of a preset that ships with the package."""

from pathlib import Path

from deepinfer.errors import CheckpointError

PRESET_FOLDER = Path(__file__).parent.parent / "data"


def preset_names() -> list[str]:
    """Names of the checkpoints in the package."""
    return sorted(path.parent.name for path in PRESET_FOLDER.glob("*/config.json"))


def locate_checkpoint(path_or_preset: Path | str) -> Path:
    """The checkpoint folder. A folder of that name in the working directory wins over a preset.

    Raises: CheckpointError if it is neither.
    """
    if not isinstance(path_or_preset, str | Path):
        raise CheckpointError(f"model: expected a folder or the name of a preset, got {type(path_or_preset).__name__}")
    path = Path(path_or_preset)
    if path.is_dir():
        return path
    if str(path_or_preset) in preset_names():
        return PRESET_FOLDER / path
    raise CheckpointError(f"{path_or_preset}: no such folder, and the presets are {', '.join(preset_names()) or 'none'}")
