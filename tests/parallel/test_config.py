"""ParallelConfig: what is refused, with the rule, and the public deployment's sizes as presets."""

from typing import Any

import pytest

from deepinfer import ConfigError, ParallelConfig
from deepinfer.parallel.config import TOPOLOGIES, Role, topology


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ep_size": 0}, "ep_size = 0: expected an integer of at least 1"),
        ({"ep_size": True}, "ep_size = True"),
        ({"cp_size": 1.5}, "cp_size"),
        ({"role": "both"}, "role = 'both': expected one of normal, prefill, decode"),
        ({"prefill_vote": "most"}, "all, any, all_or_any"),
        ({"prefill_interval_all": 9, "prefill_interval_any": 3}, "may not fire before 9"),
        ({"eplb_window": 11, "eplb_period": 10}, "at most eplb_period, 10"),
        ({"num_redundant_experts": -1}, "num_redundant_experts = -1"),
        ({"timeout_s": float("inf")}, "timeout_s"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**settings)


def test_the_defaults_are_one_process_with_the_published_window_and_period() -> None:
    config = ParallelConfig()
    assert (config.ep_size, config.cp_size, config.role) == (1, 1, Role.NORMAL)
    assert (config.eplb_window, config.eplb_period) == (1000, 10_000)
    assert ParallelConfig(role="decode").role == Role.DECODE
    assert ParallelConfig(eplb_period=0).eplb_period == 0


def test_presets_fit_the_published_model() -> None:
    for config in TOPOLOGIES.values():
        slots = config.slots_per_rank(384) * config.ep_size
        assert slots == 384 + config.num_redundant_experts
    assert topology("decode_ep128").slots_per_rank(384) == 4
    assert {c.ep_size for c in TOPOLOGIES.values() if c.role == Role.PREFILL} == {2, 4, 8}
    with pytest.raises(ConfigError, match="expected one of prefill_ep2"):
        topology("ep3")


def test_experts_must_divide_among_ranks() -> None:
    with pytest.raises(ConfigError, match="10 slots, which 3 ranks cannot hold"):
        ParallelConfig(ep_size=3, num_redundant_experts=2).slots_per_rank(8)
