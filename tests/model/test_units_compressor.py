import pytest
import torch
from torch import nn

from deepinfer.config_json import load_config
from deepinfer.model.compressor import Compressor
from deepinfer.model.linear import Float32Linear
from deepinfer.model.numerics import Numerics, precision_named, reference_ops
from deepinfer.model.transformer import Transformer
from tests.golden import GOLDEN, Session, recorded_unit
from tests.tolerances import check_close

NUMERICS = Numerics(precision=precision_named("float32"), ops=reference_ops())


LAYERS = {2: 2, 1: 5}  # of `select_full`, by ratio


@pytest.fixture(scope="module")
def session() -> Session:
    """A cache of `select_full`, whose layers 2 and 5 have the units' sizes; its weights are not used."""
    with torch.device("meta"):
        model = Transformer(load_config(GOLDEN / "select_full"), NUMERICS)
    model.embed.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)  # decides the device
    return Session(model, 1, 16)


def recorded_compressor(ratio: int) -> Compressor:
    unit = recorded_unit(f"compressor_r{ratio}")
    made = Compressor(load_config(GOLDEN / "select_full"), LAYERS[ratio], NUMERICS)
    made.wkv.weight = nn.Parameter(unit["wkv"], requires_grad=False)
    made.norm.weight = nn.Parameter(unit["norm"], requires_grad=False)
    if ratio == 2:
        assert isinstance(made.wgate, Float32Linear)
        made.wgate.weight = nn.Parameter(unit["wgate"], requires_grad=False)
    return made


@pytest.mark.golden
@pytest.mark.parametrize(("ratio", "cuts"), [(2, [9, 1, 1, 1]), (2, [12]), (2, [1] * 12), (1, [6, 1, 1, 1]), (1, [9])])
def test_latents_are_the_recorded_ones_however_the_tokens_come(session: Session, ratio: int, cuts: list[int]) -> None:
    unit, compressor = recorded_unit(f"compressor_r{ratio}"), recorded_compressor(ratio)
    for tensor in session.cache.pending.values():
        tensor.fill_(float("nan"))
    memory = session.cache.layers[LAYERS[ratio]]
    latents, start = [], 0
    for size in cuts:
        rows = session.rows([([0] * size, start)])
        latents.append(compressor(unit["x"][0, start : start + size], rows, memory))
        start += size
    complete = torch.cat(latents)[ratio - 1 :: ratio]
    check_close(complete, unit["latent"][0], "compressor", "float32")
