"""Golden outputs: record what the reference computes, and compare another build with it.

`record` writes a folder, `compare` returns a `Report`; the tensors that can be named are listed in `deepinfer.golden.observe`.
Models are observed from outside, and nothing but the command line imports this package.
"""

from deepinfer.golden.comparison import compare
from deepinfer.golden.recorder import record
from deepinfer.golden.recording import Recording
from deepinfer.golden.report import Report

__all__ = ["Recording", "Report", "compare", "record"]
