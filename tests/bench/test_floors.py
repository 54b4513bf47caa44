"""Bytes and operations of a step, against numbers that were worked out from the published widths by hand."""

from dataclasses import replace

import pytest

from deepinfer.bench import floors
from deepinfer.bench.ceilings import Ceilings
from deepinfer.bench.floors import Work, cache_work, chunk_work, decode_work, draft_work, expected_active, prefill_work, total
from deepinfer.config import ModelConfig
from deepinfer.presets import flash_slice, tiny_config

EXPERT_BYTES = 3 * 5120 * 2304 * (1 / 2 + 1 / 32)
LAYERS = 8


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return flash_slice(LAYERS)


def test_one_row_reads_the_experts_that_it_chose(config: ModelConfig) -> None:
    parts = decode_work(config, sequences=1, context=1024)
    assert parts[floors.EXPERTS].bytes == pytest.approx(LAYERS * 6 * EXPERT_BYTES)
    assert parts[floors.EXPERTS].flops == pytest.approx(LAYERS * 6 * 2 * 3 * 5120 * 2304)


def test_observed_experts_replace_the_even_ones(config: ModelConfig) -> None:
    parts = decode_work(config, sequences=64, context=1024, active_experts=100.0)
    assert parts[floors.EXPERTS].bytes == pytest.approx(LAYERS * 100 * EXPERT_BYTES)
    # What is multiplied does not depend on which experts are shared.
    even = decode_work(config, sequences=64, context=1024)
    assert even[floors.EXPERTS].flops == parts[floors.EXPERTS].flops
    assert even[floors.EXPERTS].bytes == pytest.approx(LAYERS * 384 * (1 - (378 / 384) ** 64) * EXPERT_BYTES)


def test_even_routing() -> None:
    assert expected_active(384, 6, 1) == pytest.approx(6)
    assert expected_active(8, 8, 3) == 8
    assert expected_active(384, 6, 10**5) == pytest.approx(384)


def test_quantised_matrices_of_a_layer(config: ModelConfig) -> None:
    """Queries, keys, output and shared expert of each layer, two Engram projections, three indexers."""
    layer = 1792 * 5120 + 32768 * 1280 + 8192 * 4096 + 5120 * 8192 + 3 * 2304 * 5120
    values = LAYERS * layer + 2 * 25600 * 6144 + len(config.index_source_layers) * 4096 * 1280
    work = decode_work(config, sequences=3, context=1024)[floors.FP8]
    assert work.bytes == pytest.approx(values * (1 + 1 / 1024), rel=1e-3)
    assert work.flops == pytest.approx(2 * 3 * values)


def test_cache_rows_of_a_sequence(config: ModelConfig) -> None:
    works = cache_work(config, sequences=2, rows_each=1, context=2**20)
    listed = LAYERS * 128 + sum(512 for ratio in config.compress_ratios[:LAYERS] if ratio)
    assert works[floors.ATTEND].bytes == 2 * listed * 512 * 2
    assert works[floors.ATTEND].flops == 4 * 2 * listed * 64 * 512
    # The ratio-2 source sees half, the candidate source everything, sources above it its candidates only.
    later = sum(i > config.indexer.candidate_source_layer for i in config.index_source_layers)
    keys = 2**19 + 2**20 + later * 2048 * 8
    assert works[floors.INDEX].bytes == 2 * keys * 128 * 2


def test_short_contexts_read_what_there_is(config: ModelConfig) -> None:
    assert cache_work(config, sequences=1, rows_each=1, context=0)[floors.ATTEND].bytes == LAYERS * 512 * 2
    assert cache_work(config, sequences=1, rows_each=1, context=0)[floors.INDEX] == Work()


def test_drafts_add_rows_and_the_draft_blocks(config: ModelConfig) -> None:
    without, with_drafts = (decode_work(config, sequences=4, context=1024, drafts=k) for k in (0, 5))
    proposal = draft_work(config, sequences=4, rows=24)
    head = 129280 * 5120 * 2
    assert proposal[floors.BF16].bytes > head
    for name in floors.PARTS:
        assert with_drafts[name].bytes >= without[name].bytes
    assert with_drafts[floors.FP8].bytes == pytest.approx(without[floors.FP8].bytes + proposal[floors.FP8].bytes)


def test_a_prompt_multiplies_the_same_however_it_is_cut() -> None:
    config = replace(tiny_config(), max_seq_len=4096)
    whole, cut = (total(prefill_work(config, tokens=512, chunk=chunk)) for chunk in (512, 64))
    assert cut.flops == pytest.approx(whole.flops, rel=0.05)
    assert cut.bytes > 2 * whole.bytes


def test_the_chunks_of_a_prompt_are_the_prompt() -> None:
    config = tiny_config()
    parts = [total(chunk_work(config, start=start, end=end, tokens=100)) for start, end in ((0, 48), (48, 96), (96, 100))]
    found, expected = sum(parts, Work()), total(prefill_work(config, tokens=100, chunk=48))
    assert (found.bytes, found.flops) == pytest.approx((expected.bytes, expected.flops))


def test_a_floor_is_the_longer_of_reading_and_multiplying() -> None:
    ceilings = Ceilings("a machine", 1e9, 1e10)
    assert ceilings.floor_ms(1e9, 1e9) == pytest.approx(1e3)
    assert ceilings.floor_ms(1e6, 1e10) == pytest.approx(1e3)
