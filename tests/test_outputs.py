"""Outputs, parameters and engines show in one line what matters."""

import pytest

from deepinfer import CompletionOutput, LLMEngine, RequestOutput, SamplingParams
from tests.golden import GOLDEN

LONG = "word " * 1000


def output(**fields: object) -> RequestOutput:
    completion = CompletionOutput(index=0, text="a\nb", token_ids=[5, 6, 7], finish_reason="length")
    return RequestOutput(**{"request_id": "7", "prompt": "def", "prompt_token_ids": [1, 2], "outputs": [completion]} | fields)  # type: ignore[arg-type]


def test_outputs_show_text_counts_and_how_it_ended() -> None:
    shown = "CompletionOutput(0, 'a\\nb', 3 tokens, finish_reason='length')"
    assert repr(output().outputs[0]) == shown
    assert repr(output()) == f"RequestOutput('7', 'def', 2 prompt tokens -> {shown})"
    assert repr(output(prompt=None)) == f"RequestOutput('7', 2 prompt tokens -> {shown})"
    assert repr(output(outputs=[])) == "RequestOutput('7', 'def', 2 prompt tokens -> nothing)"
    assert repr(output(outputs=output().outputs * 3)) == f"RequestOutput('7', 'def', 2 prompt tokens -> {shown}, and 2 more)"
    assert repr(CompletionOutput(index=1, text="", token_ids=[])) == "CompletionOutput(1, '', 0 tokens, running)"


def test_long_texts_are_cut() -> None:
    long = CompletionOutput(index=0, text=LONG, token_ids=list(range(1000)))
    shown = repr(output(prompt=LONG, outputs=[long] * 50))
    assert "word ...'" in shown
    assert "\n" not in shown
    assert len(shown) < 300


def test_parameters_show_what_was_chosen() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    params = SamplingParams(temperature=0, max_tokens=None, stop_token_ids=(5,))
    assert repr(params) == "SamplingParams(temperature=0, stop_token_ids=(5,), max_tokens=None)"
    assert eval(repr(params)) == params
    assert len(repr(SamplingParams(stop_token_ids=tuple(range(1000))))) < 200


@pytest.mark.parametrize("closed", [False, True])
def test_an_engine_shows_its_model_and_limits(closed: bool) -> None:
    with LLMEngine.from_pretrained(GOLDEN / "swa_tiny", precision="float32", device="cpu", max_num_seqs=3) as engine:
        if closed:
            engine.close()
        shown = (
            "LLMEngine('swa_tiny', closed)" if closed else "LLMEngine('swa_tiny', float32, on cpu, up to 3 sequences of 128 tokens)"
        )
        assert repr(engine) == shown
