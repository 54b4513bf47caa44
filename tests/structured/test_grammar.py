"""Masks against enumeration: exactly the tokens from which the form can still be reached, wherever the state stands."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from deepinfer.errors import GrammarError
from deepinfer.structured.grammar import Grammar
from deepinfer.structured_outputs import StructuredOutputs
from tests.structured.tiny import EOS, TEXTS, Form, forms, legal, spellings, tiny_compiler, tiny_tokenizer, token_id

THINK_END = (token_id("c"), token_id("ab"))


def grammar_of(pattern: str) -> Grammar:
    return tiny_compiler().compile(StructuredOutputs(regex=pattern)).result()


def ids_in(mask: NDArray[np.bool_]) -> set[int]:
    return set(np.flatnonzero(mask).tolist())


def check_against_enumeration(form: Form) -> None:
    pattern, strings = form
    if strings == {""}:
        return
    grammar = grammar_of(pattern)
    for text, ids in spellings(strings, 150):
        state = grammar.start()
        state.advance(ids)
        assert ids_in(state.masks()[0]) == legal(strings, text), (pattern, text)
        assert state.is_accepting == (text in strings)
        assert state.is_complete == (legal(strings, text) == {EOS})


@given(forms())
@settings(max_examples=40)
def test_masks_are_exactly_the_tokens_that_enumeration_finds(form: Form) -> None:
    check_against_enumeration(form)


@pytest.mark.slow
@given(forms())
@settings(max_examples=1000)
def test_masks_are_exactly_the_tokens_that_enumeration_finds_in_many_forms(form: Form) -> None:
    check_against_enumeration(form)


@given(forms())
@settings(max_examples=60)
def test_no_string_takes_fewer_tokens_than_the_bound_and_a_small_form_meets_it(form: Form) -> None:
    pattern, strings = form
    fewest = next(len(ids) for text, ids in spellings(strings, 10**6) if text in strings)
    assert grammar_of(pattern).fewest_tokens == fewest


@given(forms())
@settings(max_examples=40)
def test_looking_ahead_along_drafts_gives_later_masks_and_leaves_no_trace(form: Form) -> None:
    pattern, strings = form
    rng = random.Random(len(pattern))
    grammar = grammar_of(pattern)
    for _, ids in spellings(strings, 30):
        looking, plain = grammar.start(), grammar.start()
        committed = ids[: len(ids) // 2]
        looking.advance(committed)
        plain.advance(committed)
        drafts = [*ids[len(committed) :], *rng.choices(range(len(tiny_tokenizer())), k=3)]
        rows = looking.masks(drafts)
        assert (looking.masks() == plain.masks()).all()
        for count, draft in enumerate(drafts):
            assert (rows[count] == plain.masks()[0]).all()
            if draft == EOS or not rows[count][draft]:
                assert rows[count + 1 :].all()
                break
            plain.advance([draft])


def test_end_of_sequence_is_legal_only_where_the_text_may_end() -> None:
    state = grammar_of("ab?").start()
    assert ids_in(state.masks()[0]) == {token_id("a"), token_id("ab")}
    state.advance([token_id("a")])
    assert ids_in(state.masks()[0]) == {EOS, token_id("b")}
    state.advance([EOS])
    assert state.is_complete


def test_a_control_token_is_never_the_text_that_it_looks_like() -> None:
    state = grammar_of("<think>|.{1,9}").start()
    control = tiny_tokenizer().backend.token_to_id("<think>")
    assert ids_in(state.masks()[0]) == {token_id(text) for text in TEXTS}
    with pytest.raises(GrammarError):
        state.advance([control])


def test_an_illegal_committed_token_is_an_error() -> None:
    state = grammar_of("ab").start()
    state.advance([token_id("a")])
    with pytest.raises(GrammarError, match=f"token {token_id('c')} was committed"):
        state.advance([token_id("c")])


def test_states_of_one_grammar_do_not_share_their_place() -> None:
    grammar = grammar_of("a(b|c)a")
    first, second = grammar.start(), grammar.start()
    first.advance([token_id("a")])
    assert ids_in(first.masks()[0]) == {token_id("b"), token_id("c"), token_id("ca")}
    assert ids_in(second.masks()[0]) == {token_id("a"), token_id("ab")}


def test_the_form_applies_from_the_token_behind_the_marker_on() -> None:
    state = grammar_of("bb").start(THINK_END)
    free = set(range(len(tiny_tokenizer()))) - {EOS}
    for token in (token_id("a"), token_id("c"), token_id("c")):
        state.advance([token])
        assert state.is_reasoning
        assert ids_in(state.masks()[0]) == free
    state.advance([token_id("ab")])
    assert not state.is_reasoning
    assert ids_in(state.masks()[0]) == {token_id("b")}


@pytest.mark.parametrize("committed", range(4))
def test_the_marker_is_found_within_an_accepted_run(committed: int) -> None:
    run = [token_id("a"), *THINK_END, token_id("b"), token_id("b")]
    state = grammar_of("bb").start(THINK_END)
    state.advance(run[:committed])
    rows = state.masks(run[committed:])
    legal_after = [set(range(len(tiny_tokenizer()))) - {EOS}] * 3 + [{token_id("b")}] * 2 + [{EOS}]
    assert [ids_in(row) for row in rows] == legal_after[committed:]
    state.advance(run[committed:])
    assert state.is_complete
