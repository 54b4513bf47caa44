"""What a prompt may be, and what is said about everything else."""

import dataclasses
from collections import UserString
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.config import ModelConfig
from deepinfer.config_json import load_config
from deepinfer.errors import Rejected
from deepinfer.prompts import to_token_ids
from deepinfer.tokenizer import Tokenizer
from tests.golden import GOLDEN

CONFIG = load_config(GOLDEN / "smooth_full")
VOCAB = CONFIG.vocab_size


def type_of(value: object) -> str:
    """What a test is called by; some of the values have no text."""
    return type(value).__name__


def ids_of(prompt: Any, tokenizer: Tokenizer, config: ModelConfig = CONFIG) -> list[int]:
    return to_token_ids(prompt, 3, tokenizer, config)[1]


def refusal(prompt: Any, tokenizer: Tokenizer, config: ModelConfig = CONFIG) -> str:
    with pytest.raises(Rejected, match=r"^prompt 3\b") as caught:
        to_token_ids(prompt, 3, tokenizer, config)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def test_text_becomes_its_tokens_and_is_kept(golden_tokenizer: Tokenizer) -> None:
    text = "def area(r):\n    return ü 😀"
    assert to_token_ids(text, 0, golden_tokenizer, CONFIG) == (text, golden_tokenizer.encode(text))


@pytest.mark.parametrize("ids", [[0], [5, 6, 7], (5, 6), range(4, 9), [VOCAB - 1]])
def test_token_ids_are_taken_as_they_are(ids: Any, golden_tokenizer: Tokenizer) -> None:
    for prompt in (ids, {"prompt_token_ids": ids}):
        assert to_token_ids(prompt, 0, golden_tokenizer, CONFIG) == (None, list(ids))


@pytest.mark.parametrize("prompt", ["", [], (), {"prompt_token_ids": []}])
def test_an_empty_prompt_is_refused(prompt: Any, golden_tokenizer: Tokenizer) -> None:
    assert "empty" in refusal(prompt, golden_tokenizer)


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31, 2**63, 10**5000, -(10**5000)], ids=type_of)
def test_ids_outside_the_vocabulary_are_refused(bad: int, golden_tokenizer: Tokenizer) -> None:
    assert f"outside the vocabulary [0, {VOCAB})" in refusal([5, bad, 6], golden_tokenizer)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        1.5,
        True,
        b"abc",
        bytearray(b"abc"),
        memoryview(b"abc"),
        {1, 2},
        iter([1, 2]),
        object(),
        UserString("abc"),
        torch.tensor([1, 2]),
        np.array([1, 2]),
        [1, "2"],
        [1, 2.0],
        [1, None],
        [1, True],
        [np.int64(1)],
        [[1, 2]],
        ["abc"],
        {"prompt_token_ids": None},
        {"prompt_token_ids": "abc"},
        {"prompt_token_ids": b"abc"},
        {"prompt_token_ids": [[1]]},
        {"prompt_token_ids": {"a": 1}},
    ],
    ids=lambda value: f"{type(value).__name__}-{str(value).split(' at 0x')[0][:30]}",
)
def test_what_is_neither_text_nor_token_ids_is_refused(prompt: Any, golden_tokenizer: Tokenizer) -> None:
    assert "expected a text or a list of token ids, got" in refusal(prompt, golden_tokenizer)


@pytest.mark.parametrize(
    "prompt",
    [
        {},
        {"prompt": "text"},
        {"prompt_token_ids": [1], "multi_modal_data": {"image": object()}},
        {"prompt_token_ids": [1], "images": []},
        {"prompt_token_ids": [1], 5: 6},
        {None: 1},
    ],
)
def test_a_dictionary_with_more_than_token_ids_is_refused_and_images_are_named(prompt: Any, golden_tokenizer: Tokenizer) -> None:
    message = refusal(prompt, golden_tokenizer)
    assert "'prompt_token_ids' alone" in message
    assert "images are not supported" in message


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "x" * 500 + "\udc80"])
def test_text_with_a_lone_surrogate_is_refused(text: str, golden_tokenizer: Tokenizer) -> None:
    message = refusal(text, golden_tokenizer)
    assert "lone surrogate" in message
    message.encode()


def test_an_image_token_is_refused_as_an_image(golden_tokenizer: Tokenizer) -> None:
    within = dataclasses.replace(CONFIG, image_token_id=17)
    assert "image" in refusal([5, 17], golden_tokenizer, within)
    assert ids_of([5, 18], golden_tokenizer, within) == [5, 18]
    assert CONFIG.image_token_id is not None
    assert CONFIG.image_token_id >= VOCAB
    assert "image" in refusal([5, CONFIG.image_token_id], golden_tokenizer)
    without = dataclasses.replace(CONFIG, image_token_id=None)
    assert ids_of([5, 17], golden_tokenizer, without) == [5, 17]


def test_an_image_token_written_as_text_is_refused(golden_tokenizer: Tokenizer) -> None:
    (token,) = golden_tokenizer.encode("x")
    assert "image" in refusal("a x", golden_tokenizer, dataclasses.replace(CONFIG, image_token_id=token))
