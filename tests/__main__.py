"""Every check of the project in one command: `python -m tests`. Stops at the first that fails."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHECKS = (
    ("lint", ["-m", "ruff", "check", "."]),
    ("format", ["-m", "ruff", "format", "--check", "."]),
    ("types", ["-m", "mypy"]),
    ("tests", ["-m", "pytest", "-n", "auto", "--dist", "loadfile", "-m", "not slow and not gpu and not multi_gpu"]),
)


def main() -> int:
    """Run the checks in order; the exit code of the first failing one, or 0."""
    for name, command in CHECKS:
        print(f"== {name}: python {' '.join(command)}", flush=True)
        code = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
        if code:
            print(f"== {name} failed", flush=True)
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
