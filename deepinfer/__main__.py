"""`python -m deepinfer` is the command `deepinfer`."""

import sys

from deepinfer.cli import main

sys.exit(main())
