"""`deepinfer new-tiny`: a miniature checkpoint with random weights, made without a download."""

import argparse
from pathlib import Path

NAME = "new-tiny"
HELP = "write a tiny checkpoint with random weights, to try the other commands with"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="where to write it: a folder that is empty or does not exist")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    from deepinfer.checkpoint.write import random_tensors, save_checkpoint
    from deepinfer.errors import CheckpointError
    from deepinfer.presets import byte_tokenizer_json, tiny_config

    folder = Path(args.folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder}: exists already and is not an empty folder; nothing was written")
    config = tiny_config()
    save_checkpoint(folder, config, random_tensors(config, args.seed), byte_tokenizer_json(config.vocab_size))
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(
        f"{folder}: DeepSeek-V4.1-Flash in miniature, {config.n_layers} layers and {config.draft.n_layers} draft blocks, "
        f"{size / 1e6:.1f} MB.\n"
        "Its weights are RANDOM: it shows that everything runs, and the text it generates is noise."
    )
    return 0
