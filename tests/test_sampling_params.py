"""Every value that cannot be honoured is refused where it is given, by the name of its field."""

import dataclasses
import math
import random
import re
from typing import Any

import pytest

from deepinfer import SamplingParams
from deepinfer.errors import Rejected


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


HUGE = 10**5000  # more digits than Python prints, and beyond every float
STRANGE = ("1", b"1", [1], {}, 1j, object(), Unprintable(), math.nan, math.inf, -math.inf, HUGE, -HUGE, -2)
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
PENALTIES = ("presence_penalty", "frequency_penalty")
COUNTS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
MAY_BE_LARGE = {"max_tokens", "min_tokens", "logprobs", "prompt_logprobs"}  # the engine has limits of its own
FLAGS = (
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "return_hidden_states",
    "return_routed_experts",
)


def type_of(value: object) -> str:
    """What a test is called by; some of the values have no text."""
    return type(value).__name__


def refused(field: str, value: Any, **others: Any) -> str:
    with pytest.raises(Rejected, match=rf"^SamplingParams\.{field} = ") as caught:
        SamplingParams(**{field: value}, **others)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [*STRANGE, None, True, False, -0.01, -1e-300], ids=type_of)
def test_a_number_that_is_none_is_refused(field: str, value: Any) -> None:
    refused(field, value)


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [*STRANGE, True, False, 1.0, 0.5], ids=type_of)
def test_a_count_that_is_none_is_refused(field: str, value: Any) -> None:
    if value is HUGE and field in MAY_BE_LARGE:
        assert SamplingParams(**{"max_tokens": None, field: HUGE}).n == 1
    else:
        refused(field, value)


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize("value", [*STRANGE, None, 0, 1], ids=type_of)
def test_a_flag_that_is_no_bool_is_refused(field: str, value: Any) -> None:
    refused(field, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", None),
        ("n", 1025),
        ("temperature", 1e7),
        ("top_p", 0),
        ("top_p", 0.0),
        ("top_p", 1.0000001),
        ("min_p", 1.5),
        ("top_k", None),
        ("top_k", 2**31),
        ("top_k", 2**63),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", None),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("stop_token_ids", 1),
        ("stop_token_ids", "12"),
        ("stop_token_ids", {1, 2}),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [None]),
        ("stop_token_ids", [[1]]),
    ],
)
def test_a_value_out_of_its_range_is_refused(field: str, value: Any) -> None:
    refused(field, value)


def test_seeds_of_all_completions_can_be_handed_back() -> None:
    last = 2**63 - 1
    assert SamplingParams(seed=last).seed == last
    assert SamplingParams(seed=last - 1, n=2).seed == last - 1
    refused("seed", last, n=2)


@pytest.mark.parametrize("field", ["foo", "stop_strings", "best_of"])
def test_an_unknown_field_is_refused_by_its_name(field: str) -> None:
    with pytest.raises(TypeError, match=field):
        SamplingParams(**{field: 1})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1024, "temperature": 0, "top_p": 1, "min_p": 0, "top_k": -1, "seed": 0},
        {"temperature": 1e6, "top_p": 1e-300, "min_p": 1, "top_k": 2**31 - 1, "logprobs": 20},
        {"max_tokens": None, "min_tokens": 10**9, "stop_token_ids": (), "logprobs": 0},
        {"max_tokens": 5, "min_tokens": 5, "ignore_eos": True, "skip_special_tokens": False},
    ],
)
def test_the_edges_of_every_range_are_allowed(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    for name, value in fields.items():
        assert getattr(params, name) == value


def test_stop_token_ids_may_be_a_list_and_are_kept_as_their_own_copy() -> None:
    ids = [5, 6]
    params = SamplingParams(stop_token_ids=ids)
    ids.append(7)
    assert params.stop_token_ids == (5, 6)
    assert params == SamplingParams(stop_token_ids=(5, 6))


def test_parameters_cannot_be_changed_after_they_were_checked() -> None:
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = math.nan


def test_random_fields_are_honoured_or_refused_and_nothing_else() -> None:
    rng = random.Random(0)
    values = [*STRANGE, None, True, 0, 1, 3, 0.5, 1.0, 2**31, 2**63, (), (1,), [2], [-1], ["a"]]
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    refusals = []
    for _ in range(2000):
        chosen = {name: rng.choice(values) for name in rng.sample(names, rng.randint(1, 4))}
        try:
            SamplingParams(**chosen)
        except Rejected as error:
            refusals.append(str(error))
    assert 1000 < len(refusals) < 2000
    assert all(re.match(rf"SamplingParams\.({'|'.join(names)}) = ", message) for message in refusals)
