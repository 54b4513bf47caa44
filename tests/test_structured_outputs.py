"""Structured output from outside: what is asked for comes out, the same text in every engine; and what is refused, and where."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, Phase, given, seed, settings

from deepinfer import LLMEngine, RequestOutput, SamplingParams, StructuredOutputs
from deepinfer.engine_config import EngineConfig
from deepinfer.model.numerics import reference_ops
from deepinfer.model.transformer import Transformer
from deepinfer.presets import byte_tokenizer_json, random_model, tiny_config
from deepinfer.tokenizer import Tokenizer
from tests.structured.random_forms import FORMS_OF_KIND, RandomForm

PROMPT = "answer: "
MAX_TOKENS = 300


@cache
def model() -> Transformer:
    return random_model(tiny_config(), precision="float32", device="cpu", ops=reference_ops(batch_invariant=True))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(byte_tokenizer_json(tiny_config().vocab_size)))


def open_engine(**settings: Any) -> LLMEngine:
    fields = {"max_num_seqs": 4, "num_blocks": 120, "block_size": 4, "max_model_len": 400, "batch_invariant": True} | settings
    return LLMEngine(model(), tokenizer(), EngineConfig(precision="float32", **fields))


ROOMY, TIGHT = {"num_blocks": 400}, {"num_blocks": 90}
ENGINES = {
    f"k={k}, depth {depth}, {name}": {"num_speculative_tokens": k, "async_scheduling": depth} | blocks
    for k in (0, 5)
    for depth in (0, 1)
    for name, blocks in (("roomy", ROOMY), ("tight", TIGHT))
}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, LLMEngine]]:
    opened = {name: open_engine(**fields) for name, fields in ENGINES.items()}
    yield opened
    for engine in opened.values():
        engine.close()


@pytest.fixture(scope="module")
def engine(engines: dict[str, LLMEngine]) -> LLMEngine:
    return engines["k=5, depth 1, roomy"]


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


def check_in_every_engine(engines: dict[str, LLMEngine], forms: list[RandomForm]) -> None:
    texts = {}
    for name, engine in engines.items():
        outputs = answers(engine, [form for form, _ in forms])
        texts[name] = [output.outputs[0].token_ids for output in outputs]
        for output, (form, check) in zip(outputs, forms, strict=True):
            completion = output.outputs[0]
            assert completion.finish_reason == "stop", (name, form, completion.text)
            assert completion.text == tokenizer().decode(completion.token_ids)
            check(completion.text)
    assert all(ids == texts["k=0, depth 0, roomy"] for ids in texts.values())


@pytest.mark.parametrize("kind", FORMS_OF_KIND)
def test_every_engine_gives_the_same_text_of_the_form(kind: str, engines: dict[str, LLMEngine]) -> None:
    check_in_every_engine(engines, drawn(kind, 15))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", FORMS_OF_KIND)
def test_every_engine_gives_the_same_text_of_200_forms(kind: str, engines: dict[str, LLMEngine]) -> None:
    check_in_every_engine(engines, drawn(kind, 200))


def test_the_engines_did_preempt_and_did_accept_drafts(engines: dict[str, LLMEngine]) -> None:
    check_in_every_engine(engines, drawn("json", 8))
    for name, engine in engines.items():
        assert ("tight" in name) == (engine.stats().preemptions > 0), name
        assert ("k=5" in name) == (engine.stats().accepted_tokens > 0), name
