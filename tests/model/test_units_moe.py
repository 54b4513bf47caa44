from dataclasses import replace

import pytest
import torch
from torch import nn

from deepinfer.config_json import load_config
from deepinfer.model.moe import Experts, SharedExpert
from deepinfer.model.numerics import Numerics, precision_named, reference_ops
from deepinfer.model.plain_forms import combine
from deepinfer.model.router import Router
from tests.golden import GOLDEN, recorded_unit
from tests.tolerances import check_close

CONFIG = replace(load_config(GOLDEN / "swa_tiny"), quantized=False)


def numerics(*, static_shapes: bool = False) -> Numerics:
    return Numerics(precision=precision_named("float32"), ops=reference_ops(static_shapes=static_shapes))


@pytest.mark.golden
def test_router_chooses_and_weighs_as_recorded() -> None:
    unit = recorded_unit("router")
    topk, scale = unit["topk_scale"].tolist()
    moe = replace(CONFIG.moe, n_routed_experts=16, n_activated_experts=int(topk), route_scale=scale)
    router = Router(64, moe, numerics())
    router.weight, router.bias = (nn.Parameter(unit[name], requires_grad=False) for name in ("w", "bias"))
    weights, ids = router(unit["x"])
    assert torch.equal(ids, unit["idx"].long())
    check_close(weights, unit["weights"], "router", "float32")


def test_weights_sum_to_the_scale_unless_one_expert_is_chosen() -> None:
    x = torch.randn(9, 64)
    for topk in (1, 2, 4):
        router = Router(64, replace(CONFIG.moe, n_routed_experts=4, n_activated_experts=topk, route_scale=2.5), numerics())
        router.weight = nn.Parameter(torch.randn(4, 64), requires_grad=False)
        router.bias = nn.Parameter(torch.zeros(4), requires_grad=False)
        weights, ids = router(x)
        if topk > 1:
            torch.testing.assert_close(weights.sum(dim=1), torch.full((9,), 2.5))
        else:
            raw = nn.functional.softplus(x @ router.weight.T).sqrt()
            torch.testing.assert_close(weights, 2.5 * raw.gather(1, ids))


@pytest.mark.golden
@pytest.mark.parametrize("static_shapes", [False, True])
def test_routed_and_shared_experts_give_the_recorded_values(static_shapes: bool) -> None:
    unit = recorded_unit("expert")
    moe = replace(CONFIG.moe, swiglu_limit=float(unit["limit"]), n_routed_experts=1, n_activated_experts=1, inter_dim=32)
    how = numerics(static_shapes=static_shapes)
    shared, routed = SharedExpert(CONFIG, moe, how), Experts(CONFIG, moe, how)
    for name in ("w1", "w2", "w3"):
        shared.get_submodule(name).weight = nn.Parameter(unit[name], requires_grad=False)
        routed.get_submodule(name).weight = nn.Parameter(unit[name][None], requires_grad=False)
    ids = torch.zeros(unit["x"].shape[0], 1, dtype=torch.int64)
    check_close(routed(unit["x"], unit["route_w"], ids).squeeze(1), unit["y"], "expert", "float32")
    check_close(shared(unit["x"]), unit["y_unweighted"], "expert", "float32")


def test_outputs_are_summed_in_ascending_expert_id_whatever_their_rank() -> None:
    # 1 + 2^-24 + 2^-24 depends on the order: from the left both small terms are lost.
    outputs, ids = torch.tensor([[[1.0], [2.0**-24], [2.0**-24]]]), torch.tensor([[0, 1, 2]])
    assert float(combine(outputs, ids)) == 1.0
    for order in ([2, 1, 0], [1, 2, 0], [1, 0, 2]):
        assert float(combine(outputs[:, order], ids[:, order])) == 1.0
    assert float(combine(outputs, ids.flip(1))) > 1.0


@pytest.mark.golden
@pytest.mark.parametrize("precision", ["float32", "native"])
def test_experts_held_in_parts_add_up_to_all_of_them(precision: str) -> None:
    """A process that holds some experts gives zeros for the others, so the sum over processes is the whole."""
    config = load_config(GOLDEN / "select_full")
    how = Numerics(precision=precision_named(precision), ops=reference_ops())
    whole = Experts(config, config.moe, how)
    for matrix in (whole.w1, whole.w2, whole.w3):
        matrix.weight.random_(-128, 128)
        matrix.scale.view(torch.uint8).random_(118, 122)
    x = torch.randn(6, config.dim).to(how.precision.activation_dtype)
    ids, weights = torch.stack([torch.randperm(8)[:2] for _ in range(6)]), torch.rand(6, 2)
    parts = []
    for held in ((0, 3, 5), (1, 2, 4, 6, 7)):
        part = Experts(config, config.moe, how, held)
        for name in ("w1", "w2", "w3"):
            for kind in ("weight", "scale"):
                stored = getattr(whole.get_submodule(name), kind)
                chosen = stored.view(torch.uint8)[list(held)].view(stored.dtype)
                setattr(part.get_submodule(name), kind, nn.Parameter(chosen, requires_grad=False))
        parts.append(part(x, weights, ids))
    assert torch.equal(parts[0] + parts[1], whole(x, weights, ids))
