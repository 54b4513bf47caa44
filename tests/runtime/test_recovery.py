"""A sequence that starts from what others left gives what it would have given alone, bit for bit, in `exact`."""

from itertools import product

import pytest
import torch

from deepinfer.outputs import ReplayMode
from deepinfer.runtime.device import InlineDevice
from deepinfer.runtime.fuzz_device import FuzzDevice
from deepinfer.runtime.sequence import Sequence
from deepinfer.sampling_params import SamplingParams
from tests.runtime.harness import BLOCK_SIZE, Harness, make_request, reference, tiny_model

WINDOW = 12  # of the tiny model
NEW = 6
PARAMS = SamplingParams(max_tokens=NEW, temperature=0.8, seed=5, logprobs=0, ignore_eos=True)


def some_tokens(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(3 + (13 * i * i + 7 * i + 29 * salt) % 310 for i in range(length))


def open_harness(replay: ReplayMode = "exact", seed: int | None = None, **settings: object) -> Harness:
    device = InlineDevice() if seed is None else FuzzDevice(seed, eagerness=0.4)
    return Harness(device, **{"depth": 1, "num_blocks": 120, "replay": replay, "prefix_caching": True} | settings)  # type: ignore[arg-type]


def run(harness: Harness, prompt: tuple[int, ...], params: SamplingParams = PARAMS) -> Sequence:
    sequence = harness.add(make_request(str(len(harness.sequences)), prompt, params))
    harness.run()
    return sequence


def assert_as_alone(harness: Harness, sequence: Sequence) -> None:
    expected = reference(sequence.request.prompt_token_ids, sequence.request.params)
    assert (sequence.output_token_ids, harness.logprobs[sequence.seq_id]) == expected


def leave_prefix(harness: Harness, length: int) -> tuple[int, ...]:
    """Run a request whose memory ends after `length` tokens, and return those."""
    new = min(length, NEW)
    params = SamplingParams(max_tokens=new, temperature=0.8, seed=5, logprobs=0)
    donor = run(harness, some_tokens(length - new + 1), params)
    assert_as_alone(harness, donor)
    return tuple(donor.token_ids[:-1])


# Around the window, every place in a block and in a ratio-2 group.
LENGTHS = [1, 2, 3, 4, 5, WINDOW - 1, WINDOW, WINDOW + 1, *range(2 * WINDOW, 2 * WINDOW + BLOCK_SIZE + 1), 49]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_hit_of_any_length_changes_no_bit(length: int, drafts: int) -> None:
    harness = open_harness(num_speculative_tokens=drafts)
    prefix = leave_prefix(harness, length)
    assert len(prefix) == length
    follower = run(harness, prefix + some_tokens(5, salt=1))
    assert follower.num_cached_tokens == length
    assert follower.num_replayed_tokens == 0
    assert_as_alone(harness, follower)
