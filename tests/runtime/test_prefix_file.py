"""Prefixes that another process takes in; files that are refused, and what happens then."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLMEngine, PrefixFileError, RequestOutput, SamplingParams
from deepinfer.errors import ConfigError
from tests.golden import GOLDEN

PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=0)
PROMPT = [3 + 7 * i % 300 for i in range(43)]
LONGER = [*PROMPT, 5, 6, 7]


def load(case: str = "bf16_full", **settings: Any) -> LLMEngine:
    fixed = {"precision": "float32", "device": "cpu", "batch_invariant": True, "block_size": 4, "num_blocks": 40, "max_num_seqs": 4}
    return LLMEngine.from_pretrained(GOLDEN / case, **fixed | {"enable_prefix_caching": True, "replay": "exact"} | settings)


def complete(engine: LLMEngine, prompt: list[int]) -> RequestOutput:
    (output,) = engine.generate([prompt], PARAMS, use_tqdm=False)
    return output


def facts(output: RequestOutput) -> tuple[list[int], float | None]:
    return output.outputs[0].token_ids, output.outputs[0].cumulative_logprob


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[list[int], float | None]]:
    """A file, and what the longer prompt gives without it."""
    path = tmp_path_factory.mktemp("prefixes") / "prefixes.safetensors"
    with load() as engine:
        expected = facts(complete(engine, LONGER))
    with load() as engine:
        complete(engine, PROMPT)
        assert engine.save_prefix_cache(path) == 44  # 43 and 4 new tokens have entries: 11 full blocks
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    return path, expected


Saved = tuple[Path, tuple[list[int], float | None]]


def test_another_engine_starts_where_the_first_left_off(saved: Saved) -> None:
    path, expected = saved
    with load() as engine:
        assert engine.load_prefix_cache(path) == 44
        output = complete(engine, LONGER)
        assert output.num_cached_tokens == 40  # the last block edge of the first prompt has rings
        assert facts(output) == expected
        assert engine.stats().cached_tokens == 40
        # What is there is not taken in twice.
        assert engine.load_prefix_cache(path) == 0


def test_as_much_is_taken_in_as_fits(saved: Saved) -> None:
    path, expected = saved
    with load(num_blocks=13) as engine:
        assert engine.load_prefix_cache(path) == 44
    with load(num_blocks=6, max_model_len=24) as engine:
        assert engine.load_prefix_cache(path) == 24
    with load(num_blocks=13) as engine:
        engine.load_prefix_cache(path)
        assert facts(complete(engine, LONGER)) == expected


def cut(content: bytes) -> bytes:
    return content[:-100]


def flip(content: bytes) -> bytes:
    return content[:-5000] + bytes([content[-5000] ^ 1]) + content[-4999:]


def change_version(content: bytes) -> bytes:
    return content.replace(b'{"version": 1', b'{"version": 9')


def no_manifest(content: bytes) -> bytes:
    return content.replace(b'"manifest"', b'"nanifest"')


def no_file(content: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [cut, flip, change_version, no_manifest, no_file], ids=lambda f: f.__name__)
def test_a_damaged_file_is_refused_and_the_prompt_computed(damage: Callable[[bytes], bytes], saved: Saved, tmp_path: Path) -> None:
    path, expected = saved
    content = path.read_bytes()
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(damage(content))
    assert damaged.read_bytes() != content
    with load() as engine:
        with pytest.raises(PrefixFileError, match=r"damaged\.safetensors"):
            engine.load_prefix_cache(damaged)
        output = complete(engine, LONGER)
        assert output.num_cached_tokens == 0
        assert facts(output) == expected


@pytest.mark.parametrize(
    "settings", [{"case": "select_full"}, {"precision": "float32_kv"}, {"block_size": 8}, {"batch_invariant": False}], ids=str
)
def test_a_file_of_another_model_or_setting_is_refused(settings: dict[str, Any], saved: Saved) -> None:
    with load(**settings) as engine, pytest.raises(PrefixFileError, match="of another model"):
        engine.load_prefix_cache(saved[0])


def test_rings_of_another_shape_are_refused(saved: Saved) -> None:
    with load(num_speculative_tokens=2) as engine, pytest.raises(PrefixFileError, match=r"slots\.0: expected"):
        engine.load_prefix_cache(saved[0])


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with load() as engine, pytest.raises(PrefixFileError, match="cannot be written"):
        engine.save_prefix_cache(tmp_path / "absent" / "file")


def test_without_caching_there_is_nothing_to_write(tmp_path: Path) -> None:
    with load(enable_prefix_caching=False) as engine:
        for call in (engine.save_prefix_cache, engine.load_prefix_cache):
            with pytest.raises(ConfigError, match="enable_prefix_caching"):
                call(tmp_path / "file")
