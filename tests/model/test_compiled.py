"""What the compiled parts of a model must not do: copy the cache, or be compiled again for another number of rows."""

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from deepinfer.model.cache import look_back, store_latest
from deepinfer.model.compiled import INDUCTOR_OPTIONS
from deepinfer.model.rows import Rows, pack_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")

# In the name of a kernel: a copy back into an input, not a conversion.
COPY_BACK = re.compile(r"(?<!_to)_copy__")


def read_then_write(rows: Rows, own: Tensor, ring: Tensor, keys: Tensor) -> Tensor:
    window = look_back(rows, own, ring, keys)
    store_latest(rows, own, ring)
    return window.float().sum(dim=1)


@pytest.mark.parametrize("reorders", [False, True])
def test_a_ring_is_written_in_place(reorders: bool) -> None:
    """With reads moved behind the write the compiler would copy the ring twice; the test sees that it does."""
    torch.compiler.reset()
    chunks = [(torch.arange(5), 0), (torch.arange(4), 3)]
    rows = pack_rows(chunks, (1, 2), [(1, 2), (3, 4)], 64, torch.device("cpu"))
    own, ring = torch.randn(9, 8).bfloat16(), torch.randn(6, 16, 8).bfloat16()
    keys = (rows.positions[:, None] - torch.arange(8)).clamp(min=0)
    twin = ring.clone()
    expected = read_then_write(rows, own, twin, keys)
    options = {**INDUCTOR_OPTIONS, "reorder_for_locality": reorders}
    compiled = torch.compile(read_then_write, fullgraph=True, dynamic=True, options=options)
    observed, (code, *_) = run_and_get_code(compiled, rows, own, ring, keys)
    torch.testing.assert_close(observed, expected)
    assert torch.equal(ring, twin)
    assert bool(COPY_BACK.search(code)) == reorders
