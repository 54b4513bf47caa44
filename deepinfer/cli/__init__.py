"""The command `deepinfer`: arguments in, one call of the package, text out; every error of ours becomes one message.

A command is a module with `NAME`, `HELP`, `add_arguments(parser)` and `run(args) -> exit status`. What needs torch is imported
inside `run`, so that `--help` answers at once.

Exit status: 0 done, 1 a comparison found a difference, 2 wrong arguments or input, 130 interrupted, 141 the reader of the output
went away.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from deepinfer.cli import bench, chat, generate, golden, inspect, new_tiny
from deepinfer.errors import DeepInferError

COMMANDS: tuple[Any, ...] = (generate, chat, inspect, bench, golden, new_tiny)
INPUT_ERROR, INTERRUPTED, PIPE_CLOSED = 2, 130, 141


def build_parser() -> argparse.ArgumentParser:
    """The whole command line, one sub-command for each module of `COMMANDS`."""
    parser = argparse.ArgumentParser(prog="deepinfer", description="A reference inference engine for DeepSeek-V4.1-Flash.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    args = build_parser().parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
    except DeepInferError as error:
        print(f"deepinfer: error: {error}", file=sys.stderr)
        return INPUT_ERROR
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            # Python flushes standard output once more at exit; that must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return PIPE_CLOSED
        print(f"deepinfer: error: {error}", file=sys.stderr)
        return INPUT_ERROR
    except KeyboardInterrupt:
        print("deepinfer: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status
