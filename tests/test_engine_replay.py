"""`LLMEngine` with stored prefixes, from outside: the same text, and outputs that say what was taken from where."""

from typing import Any

import pytest

from deepinfer import LLMEngine, RequestOutput, SamplingParams
from deepinfer.engine_config import EngineConfig
from deepinfer.errors import ConfigError
from tests.golden import GOLDEN

PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=6, ignore_eos=True, logprobs=0)
TURNS = [[3 + 11 * i % 300 for i in range(30)], [7, 8, 9, 10, 11], [300, 20, 21]]


def load(**settings: Any) -> LLMEngine:
    fixed = {"precision": "native", "device": "cpu", "batch_invariant": True, "block_size": 4, "num_blocks": 80, "max_num_seqs": 4}
    return LLMEngine.from_pretrained(GOLDEN / "bf16_full", **fixed | settings)


def converse(engine: LLMEngine) -> list[RequestOutput]:
    """Every turn sends all that was said before."""
    outputs, said = [], list[int]()
    for turn in TURNS:
        (output,) = engine.generate([said + turn], PARAMS, use_tqdm=False)
        outputs.append(output)
        said += turn + output.outputs[0].token_ids
    return outputs


def facts(outputs: list[RequestOutput]) -> list[Any]:
    return [(c.token_ids, c.cumulative_logprob) for output in outputs for c in output.outputs]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_conversation_goes_on_where_it_stopped(depth: int, drafts: int) -> None:
    with load() as engine:
        expected = converse(engine)
        assert [output.num_cached_tokens for output in expected] == [0, 0, 0]
        assert expected[0].outputs[0].replay_mode == "full"
    settings = {"async_scheduling": depth, "num_speculative_tokens": drafts, "adaptive_verification": False}
    with load(enable_prefix_caching=True, replay="exact", **settings) as engine:
        outputs = converse(engine)
        assert facts(outputs) == facts(expected)
        # All that was said but the last token, which was drawn and never fed.
        cached = [output.num_cached_tokens for output in outputs]
        assert cached == [0, 35, 46]
        assert {output.outputs[0].replay_mode for output in outputs} == {"exact"}
        assert engine.stats().cached_tokens == sum(cached)
        assert engine.stats().free_blocks == engine.stats().usable_blocks


def test_bounded_says_so_and_how_much_ran_again() -> None:
    with load(enable_prefix_caching=True, replay="bounded") as engine:
        outputs = converse(engine)
    # An odd end is entered a row earlier; one window of 12 rows runs again.
    assert [output.num_cached_tokens for output in outputs] == [0, 34, 46]
    assert [output.metrics.num_replayed_tokens for output in outputs if output.metrics] == [0, 12, 12]
    assert {output.outputs[0].replay_mode for output in outputs} == {"bounded"}


@pytest.mark.parametrize("settings", [{"replay": "exact"}, {"enable_prefix_caching": True}], ids=str)
def test_what_takes_nothing_from_a_cache_changes_no_bit(settings: dict[str, Any]) -> None:
    with load() as engine:
        expected = converse(engine)
    with load(**settings) as engine:
        outputs = converse(engine)
    assert facts(outputs) == facts(expected)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]


def test_completions_of_one_prompt_and_prompts_alike_share_what_is_stored() -> None:
    prompts, params = [TURNS[0] + [salt] for salt in range(3, 9)], SamplingParams(n=2, seed=5, max_tokens=4, logprobs=0)
    with load() as engine:
        expected = engine.generate(prompts, params, use_tqdm=False)
    with load(enable_prefix_caching=True, replay="exact", num_blocks=40) as engine:
        outputs = engine.generate(prompts, params, use_tqdm=False)
        assert facts(outputs) == facts(expected)
        assert outputs[-1].num_cached_tokens == 28
        again = engine.generate(prompts[:1], params, use_tqdm=False)
    assert facts(again) == facts(expected[:1])


@pytest.mark.parametrize(
    ("field", "value"),
    [("replay", "almost"), ("num_ring_snapshots", -1), ("num_ring_snapshots", True), ("enable_prefix_caching", 1)],
)
def test_settings_that_mean_nothing_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})
