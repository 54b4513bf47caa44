"""Structured output from outside: what is asked for comes out, the same text in every engine; and what is refused, and where."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, Phase, given, seed, settings

from deepinfer import LLMEngine, RequestOutput, SamplingParams, StructuredOutputs
from deepinfer.config import EngramConfig, ModelConfig
from deepinfer.engine_config import EngineConfig
from deepinfer.model.numerics import reference_ops
from deepinfer.model.transformer import Transformer
from deepinfer.presets import byte_tokenizer_json, random_model, tiny_config
from deepinfer.runtime.worker import Worker
from deepinfer.tokenizer import Tokenizer
from tests.runtime.foresight import tokens_ahead
from tests.structured.random_forms import FORMS_OF_KIND, RandomForm

PROMPT = "answer: "
MAX_TOKENS = 160


@cache
def small_config() -> ModelConfig:
    """Two layers, one of them with compressed entries, and drafts of five; the byte tokenizer."""
    tiny = tiny_config()
    return replace(
        tiny,
        n_layers=2,
        compress_ratios=(0, 2, 0),
        kv_source_layers=(1,),
        index_source_layers=(1,),
        indexer=replace(tiny.indexer, candidate_source_layer=-1),
        engram=EngramConfig(),
        moe=replace(tiny.moe, n_routed_experts=1, n_activated_experts=1),
        draft=replace(tiny.draft, n_layers=1, target_layer_ids=(1,), n_routed_experts=1, n_activated_experts=1),
    )


@cache
def model() -> Transformer:
    return random_model(small_config(), precision="float32", device="cpu", ops=reference_ops(batch_invariant=True))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(byte_tokenizer_json(small_config().vocab_size)))


def open_engine(**settings: Any) -> LLMEngine:
    fields = {"max_num_seqs": 8, "num_blocks": 400, "block_size": 4, "max_model_len": 400, "batch_invariant": True} | settings
    return LLMEngine(model(), tokenizer(), EngineConfig(precision="float32", **fields))


# In the small pool one request could just run to its limit alone.
ENGINES = {
    f"k={k}, depth {depth}, {num_blocks} blocks": {"num_speculative_tokens": k, "async_scheduling": depth, "num_blocks": num_blocks}
    for k in (0, 5)
    for depth in (0, 1)
    for num_blocks in (400, 45)
}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, LLMEngine]]:
    opened = {name: open_engine(**fields) for name, fields in ENGINES.items()}
    yield opened
    for engine in opened.values():
        engine.close()


@pytest.fixture(scope="module")
def engine(engines: dict[str, LLMEngine]) -> LLMEngine:
    return engines["k=5, depth 1, 400 blocks"]


def answers(engine: LLMEngine, forms: list[StructuredOutputs], **fields: Any) -> list[RequestOutput]:
    fields = {"max_tokens": MAX_TOKENS, "temperature": 1.0} | fields
    params = [SamplingParams(structured_outputs=form, seed=index, **fields) for index, form in enumerate(forms)]
    return engine.generate([PROMPT] * len(forms), params, use_tqdm=False)


def drawn(kind: str, count: int) -> list[RandomForm]:
    """The first `count` examples that hypothesis draws."""
    found: list[RandomForm] = []

    @seed(0)
    @settings(max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(FORMS_OF_KIND[kind])
    def collect(form: RandomForm) -> None:
        found.append(form)

    collect()
    return found


def check_in_every_engine(engines: dict[str, LLMEngine], forms: list[RandomForm], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [form for form, _ in forms]
    first = answers(engines["k=0, depth 0, 400 blocks"], wanted)
    for output, (form, check) in zip(first, forms, strict=True):
        completion = output.outputs[0]
        assert completion.finish_reason == "stop", (form, completion.text)
        assert completion.text == tokenizer().decode(completion.token_ids)
        check(completion.text)
    known = {output.outputs[0].seed: output.prompt_token_ids + output.outputs[0].token_ids for output in first}
    monkeypatch.setattr(Worker, "_propose", tokens_ahead(known))
    for name, engine in engines.items():
        for output, expected in zip(answers(engine, wanted), first, strict=True):
            assert output.outputs == expected.outputs, name


@pytest.mark.parametrize("kind", FORMS_OF_KIND)
def test_every_engine_gives_the_same_text_of_the_form(
    kind: str, engines: dict[str, LLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_in_every_engine(engines, drawn(kind, 15), monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", FORMS_OF_KIND)
def test_every_engine_gives_the_same_text_of_200_forms(
    kind: str, engines: dict[str, LLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_in_every_engine(engines, drawn(kind, 200), monkeypatch)


def test_the_engines_did_preempt_and_did_accept_drafts(engines: dict[str, LLMEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    check_in_every_engine(engines, drawn("json", 8), monkeypatch)
    for name, engine in engines.items():
        stats = engine.stats()
        assert ("45 blocks" in name) == (stats.preemptions > 0), (name, stats)
        assert ("k=5" in name) == (stats.accepted_tokens > 20), (name, stats)
