"""`python -m deepinfer.cli` is the command `deepinfer`."""

import sys

from deepinfer.cli import main

sys.exit(main())
