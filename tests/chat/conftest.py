"""What the tests of chat share; building tables from the release's tokenizer takes a while."""

from collections.abc import Callable

import deepseek_recipe
import pytest

from deepinfer import Tokenizer
from deepinfer.chat.response_parser import library_tokenizer
from tests.chat.scripted import ScriptedEngine

Script = Callable[..., ScriptedEngine]


@pytest.fixture(scope="session")
def library(published_tokenizer: Tokenizer) -> deepseek_recipe.Tokenizer:
    return library_tokenizer(published_tokenizer.to_str())


@pytest.fixture(scope="session")
def _engine(published_tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(published_tokenizer)


@pytest.fixture
def script(_engine: ScriptedEngine) -> Script:
    """An engine that has been asked nothing and is about to give these answers: ids, or a text that ends by itself."""

    def start(*answers: list[int] | str) -> ScriptedEngine:
        _engine.answers, _engine.prompts = [_engine.ids(answer) for answer in answers], []
        return _engine

    return start
