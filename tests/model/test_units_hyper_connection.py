from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepinfer.config_json import load_config
from deepinfer.model.hyper_connection import HyperConnection, Mixes, collapse, first_stream, spread
from deepinfer.model.numerics import Numerics, precision_named, reference_ops
from tests.golden import GOLDEN, check_bits, recorded_unit
from tests.tolerances import check_close

CONFIG = load_config(GOLDEN / "swa_tiny")  # 4 streams of 64 channels, as in the units


def connection(unit: dict[str, Tensor], matmul: Callable[..., Tensor] | None = None) -> HyperConnection:
    ops = reference_ops()
    if matmul is not None:
        ops = replace(ops, matmul=matmul)
    made = HyperConnection(CONFIG, Numerics(precision=precision_named("float32"), ops=ops))
    for name in ("base", "scale"):
        setattr(made, name, nn.Parameter(unit[name], requires_grad=False))
    made.fn = nn.Parameter(unit.get("fn", torch.zeros(24, 256)), requires_grad=False)
    return made


@pytest.mark.golden
def test_coefficients_of_recorded_mixes_are_the_recorded_ones() -> None:
    unit = recorded_unit("sinkhorn")

    def recorded_mixes(*_: Any) -> Tensor:
        return unit["mixes"]

    # Streams of ones have a root mean square of exactly 1.
    mixes = connection(unit, recorded_mixes)(torch.ones(9, 4, 64))
    check_bits(mixes.comb, unit["comb"], "sinkhorn")
    for part in ("pre", "post"):
        check_close(getattr(mixes, part), unit[part], "coefficient", "native", part)


@pytest.mark.golden
def test_streams_are_mixed_as_recorded() -> None:
    unit = recorded_unit("hc")
    streams, sub = unit["x"].flatten(0, 1), unit["sub"].flatten(0, 1)
    mixes = connection(unit)(streams)
    for part in ("pre", "post", "comb"):
        check_close(getattr(mixes, part), unit[part].flatten(0, 1), "hyper-connection", "float32", part)
    check_close(collapse(streams, mixes.pre), unit["pre_out"].flatten(0, 1), "hyper-connection", "float32", "pre_out")
    check_close(spread(sub, streams, mixes), unit["post_out"].flatten(0, 1), "hyper-connection", "float32", "post_out")


def test_matrix_is_read_from_stream_to_stream() -> None:
    """Stream 0 moves to stream 1: `comb[from, to]`, not the other way round."""
    streams, comb = torch.tensor([[[1.0], [10.0]]]), torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])
    mixes = Mixes(torch.zeros(1, 2), torch.tensor([[2.0, 3.0]]), comb)
    assert spread(torch.tensor([[100.0]]), streams, mixes).flatten().tolist() == [200.0, 301.0]


def test_first_sublayer_reads_stream_0() -> None:
    streams = torch.randn(5, 4, 64)
    assert torch.equal(collapse(streams, first_stream(streams)), streams[:, 0])
