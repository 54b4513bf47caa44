"""Grammars compiled in the background, each once: the engine and other requests go on meanwhile."""

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any

from deepinfer.errors import Rejected
from deepinfer.structured.fault import describe_fault
from deepinfer.structured.grammar import Grammar
from deepinfer.structured.shortest import fewest_bytes_of_schema, fewest_characters, fewest_tokens_by_search
from deepinfer.structured.source import grammar_source, guided_schema, lark_regex, llguidance
from deepinfer.structured_outputs import StructuredOutputs
from deepinfer.tokenizer import Tokenizer

MAX_GRAMMARS = 256
NUM_THREADS = 2
LONGEST_PATTERN_ASKED = 1 << 16  # characters; a pattern whose shortest text is longer has at least this many


class GrammarCompiler:
    """Compiles forms for one tokenizer and keeps the newest `MAX_GRAMMARS`. Safe to use from several threads.

    Only ordinary tokens can be part of a text that has a form: a control token such as `<｜User｜>` is not the text it looks like.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer, self._eos = tokenizer, eos_token_id
        self._lock, self._building = threading.Lock(), threading.Lock()
        self._kept: OrderedDict[StructuredOutputs, Future[Grammar]] = OrderedDict()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="deepinfer-grammar")

    def compile(self, form: StructuredOutputs) -> "Future[Grammar]":
        """The grammar of a form, as soon as it is ready. The future is shared: do not cancel it.

        Raises: MissingExtra at once. The future raises Rejected for a form that is malformed or that no text has.
        """
        llguidance()
        # The same grammar serves answers with and without reasoning in front.
        key = replace(form, reasoning_end=())
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self._pool.submit(self._compile, key)
            self._kept.move_to_end(key)
            if len(self._kept) > MAX_GRAMMARS:
                self._kept.popitem(last=False)
            return self._kept[key]

    def close(self) -> None:
        """Let go of the threads; what has not been started is cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _vocabulary(self) -> Any:
        """llguidance's view of the tokenizer: the very bytes that the detokenizer joins."""
        library = llguidance()
        return library.LLTokenizer(library.TokenizerWrapper(_Vocabulary(self._tokenizer, self._eos)), eos_token=self._eos)

    @cached_property
    def _longest_token(self) -> int:
        tokens = set(range(len(self._tokenizer))) - self._tokenizer.added_ids
        return max(len(self._tokenizer.token_bytes(token)) for token in tokens)

    def _compile(self, form: StructuredOutputs) -> Grammar:
        try:
            grammar = self._grammar(grammar_source(form), form)
            return Grammar(grammar.at_start(), grammar.vocab_size, self._eos, self._fewest_tokens(form, grammar))
        except RecursionError:
            raise Rejected(f"StructuredOutputs.{form.kind}: nested too deeply") from None

    def _grammar(self, source: str, form: StructuredOutputs) -> Grammar:
        matcher = self._matcher(source)
        if matcher.is_error():
            raise Rejected(describe_fault(form, matcher.get_error(), self._check_schema))
        if _is_empty(matcher):
            raise Rejected(f"StructuredOutputs.{form.kind}: no text has this form")
        return Grammar(matcher, len(self._tokenizer), self._eos)

    def _matcher(self, source: str) -> Any:
        library = llguidance()
        with self._building:
            vocabulary = self._vocabulary
        return library.LLMatcher(vocabulary, library.LLMatcher.grammar_from_lark(source), log_level=0)

    def _check_schema(self, schema: Any) -> str:
        library = llguidance()
        return str(library.LLMatcher.validate_grammar(library.LLMatcher.grammar_from_json_schema(schema), self._vocabulary))

    def _fewest_tokens(self, form: StructuredOutputs, grammar: Grammar) -> int:
        fewest_bytes = 0
        if form.kind in ("json", "json_object"):
            fewest_bytes = fewest_bytes_of_schema(guided_schema(form))
        elif form.regex is not None:
            fewest_bytes = fewest_characters(lambda most: self._has_text_within(str(form.regex), most))
        # A rule that counts its tokens makes the same text of other tokens another state.
        counts_tokens = form.grammar is not None and "max_tokens" in form.grammar
        searched = 0 if counts_tokens else fewest_tokens_by_search(grammar, self._spelled)
        return max(searched, -(-fewest_bytes // self._longest_token))

    def _has_text_within(self, pattern: str, characters: int) -> bool:
        if characters > LONGEST_PATTERN_ASKED:
            return True
        both = f"start: TEXT\nTEXT: /{lark_regex(pattern)}/ & /(?s:.{{0,{characters}}})/"
        return not _is_empty(self._matcher(both))

    def _spelled(self, token: int) -> bytes:
        text = self._tokenizer.token_bytes(token)
        return text if token not in self._tokenizer.added_ids else b"\xff%d\xff" % token  # no text has the byte 0xFF


def _is_empty(matcher: Any) -> bool:
    """Whether no text leads to the end; llguidance notices when the first mask is wanted."""
    probe = matcher.deep_copy()
    probe.compute_bitmask()
    return bool(probe.is_error() or (probe.is_stopped() and not probe.is_accepting()))


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(len(tokenizer))]
        self.special_token_ids = sorted(tokenizer.added_ids | {eos_token_id})
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, split_special_tokens=True)
