"""Structured output from outside: what is asked for comes out, the same text in every engine; and what is refused, and where."""

import asyncio
import gc
import json
import threading
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
from deepinfer.errors import EngineClosed, Rejected, StepError
from deepinfer.model.numerics import reference_ops
from deepinfer.model.transformer import Transformer
from deepinfer.presets import byte_tokenizer_json, control_token_id, random_model, tiny_config
from deepinfer.runtime.step_sampler import StepSampler
from deepinfer.structured.compiler import GrammarCompiler
from deepinfer.structured.grammar import Grammar, GrammarState
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
    fields |= {"adaptive_verification": False}
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
    monkeypatch.setattr(StepSampler, "propose", tokens_ahead(known))
    for name, engine in engines.items():
        for output, expected in zip(answers(engine, wanted), first, strict=True):
            # How many drafts were accepted is each engine's own.
            assert [replace(c, accepted_per_step=None) for c in output.outputs] == expected.outputs, name


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


# ---- the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "a(b"}, r"prompt 1: StructuredOutputs.regex, line 1, column 2: unclosed group"),
        ({"json": {"type": "strin"}}, r'prompt 1: StructuredOutputs.json, at ""'),
        ({"choice": ["a" * 99]}, r"structured_outputs of prompt 1: .* at least 99 tokens, .* leave 16"),
        ({"regex": "[a-z]{99}"}, r"structured_outputs of prompt 1: .* leave 16"),
        ({"json": {"type": "string", "minLength": 999}}, r"structured_outputs of prompt 1: .* leave 16"),
        ({"regex": "a{10}", "reasoning_end": [5] * 7}, r"structured_outputs of prompt 1: .* at least 17 tokens"),
        ({"regex": "a", "reasoning_end": [10**6]}, r"reasoning_end of prompt 1"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_before_anything_starts(form: dict[str, Any], message: str, engine: LLMEngine) -> None:
    before = engine.stats()
    good, bad = SamplingParams(), SamplingParams(structured_outputs=form)
    with pytest.raises(Rejected, match=message):
        engine.generate([PROMPT, PROMPT], [good, bad], use_tqdm=False)
    assert engine.stats().steps == before.steps


@pytest.mark.parametrize(
    "field",
    [{"ignore_eos": True}, {"min_tokens": 1}, {"bad_words": ["a"]}, {"allowed_token_ids": [5]}, {"forced_token_ids": [5]}],
    ids=lambda field: next(iter(field)),
)
def test_fields_that_could_leave_nothing_to_draw_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(Rejected, match=f"structured_outputs = .* does not go with {next(iter(field))}"):
        SamplingParams(structured_outputs={"regex": "a*"}, **field)


@pytest.mark.parametrize("form", [{"regexp": "a"}, {"regex": "a", "json_object": True}, [], "json", {1: 2}], ids=repr)
def test_parameters_refuse_what_is_no_form(form: Any) -> None:
    with pytest.raises(Rejected, match=r"SamplingParams\.structured_outputs"):
        SamplingParams(structured_outputs=form)


def test_stop_strings_end_the_text_complete_or_not(engine: LLMEngine) -> None:
    (output,) = answers(engine, [StructuredOutputs(regex="ab{3}c{9}")], stop="bc")
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("abb", "bc")


def test_every_completion_has_a_place_of_its_own(engine: LLMEngine) -> None:
    form = StructuredOutputs(regex="[a-z]{6}")
    (output,) = answers(engine, [form], n=5, logprobs=0)
    texts = [completion.text for completion in output.outputs]
    assert len(set(texts)) == 5
    assert all(len(text) == 6 and text.isalpha() for text in texts)
    assert all(len(completion.logprobs or []) == 6 for completion in output.outputs)


def test_the_answer_behind_the_reasoning_has_the_form(engine: LLMEngine) -> None:
    end = control_token_id("</think>", small_config().vocab_size)
    form = StructuredOutputs(json={"enum": ["yes", "no"]}, reasoning_end=(end,))
    (output,) = answers(engine, [form], logit_bias={end: 4.0})
    thought, answer = output.outputs[0].text.split("</think>", 1)
    assert thought
    assert json.loads(answer) in ("yes", "no")


def test_a_request_whose_grammar_is_not_ready_lets_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    original = GrammarCompiler._grammar

    def slow(self: GrammarCompiler, source: str, form: StructuredOutputs) -> Grammar:
        assert form.regex != "slow" or gate.wait(60)
        return original(self, source, form)

    monkeypatch.setattr(GrammarCompiler, "_grammar", slow)

    async def both(engine: LLMEngine) -> tuple[str, str]:
        held = asyncio.create_task(engine.agenerate(PROMPT, SamplingParams(structured_outputs={"regex": "slow"})))
        given_up = asyncio.create_task(engine.agenerate(PROMPT, SamplingParams(structured_outputs={"regex": "slow"})))
        first = await engine.agenerate(PROMPT, SamplingParams(structured_outputs={"regex": "fast"}))
        assert not held.done()
        given_up.cancel()  # leaves the compilation to the other
        gate.set()
        return first.outputs[0].text, (await held).outputs[0].text

    with open_engine() as engine:
        assert asyncio.run(both(engine)) == ("fast", "slow")


def test_an_illegal_token_ends_its_request_and_no_other(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a mask had let one through."""
    original = GrammarState.write_masks

    def leaky(self: GrammarState, rows: Any, draft_ids: Any) -> None:
        original(self, rows, draft_ids)
        if self.grammar is bad:
            rows[:] = ~rows

    bad_form, good_form = StructuredOutputs(regex="a{7}"), StructuredOutputs(regex="b{7}")
    bad = engine._requests.grammars.compile(bad_form).result()
    monkeypatch.setattr(GrammarState, "write_masks", leaky)

    async def both() -> list[Any]:
        params = [SamplingParams(structured_outputs=form) for form in (bad_form, good_form)]
        return await asyncio.gather(*(engine.agenerate(PROMPT, p) for p in params), return_exceptions=True)

    failed, served = asyncio.run(both())
    assert isinstance(failed, StepError)
    assert "the grammar does not allow it" in str(failed)
    assert served.outputs[0].text == "bbbbbbb"


def test_a_malformed_form_is_refused_to_a_coroutine_and_nothing_is_left_unsaid(
    engine: LLMEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Rejected, match=r"prompt 0: StructuredOutputs\.regex, line 1"):
        asyncio.run(engine.agenerate(PROMPT, SamplingParams(structured_outputs={"regex": "[b"})))
    gc.collect()
    assert caplog.records == []


def test_closing_ends_those_who_wait_for_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    original = GrammarCompiler._grammar

    def slow(self: GrammarCompiler, source: str, form: StructuredOutputs) -> Grammar:
        assert gate.wait(60)
        return original(self, source, form)

    monkeypatch.setattr(GrammarCompiler, "_grammar", slow)
    forms = [SamplingParams(structured_outputs={"regex": text}) for text in ("a", "b", "c")]  # one more than there are threads

    async def ask(engine: LLMEngine) -> list[Any]:
        tasks = [asyncio.create_task(engine.agenerate(PROMPT, params)) for params in forms]
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with open_engine() as engine:
        assert all(isinstance(error, EngineClosed) for error in asyncio.run(ask(engine)))
    with pytest.raises(EngineClosed):
        asyncio.run(engine.agenerate(PROMPT, forms[0]))
