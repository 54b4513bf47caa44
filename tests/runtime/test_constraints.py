"""What may be drawn depends on confirmed tokens and the drafts before a row, and on nothing else."""

import numpy as np
import pytest
import torch

from deepinfer.runtime import loop as loop_module
from deepinfer.runtime.constraints import SamplerInputs
from deepinfer.runtime.fuzz_device import FuzzDevice
from deepinfer.runtime.plan import SchedulerOutputs
from deepinfer.runtime.sequence import Sequence
from deepinfer.sampling_params import SamplingParams
from tests.runtime.harness import Harness, make_request, tiny_model

VOCAB = tiny_model().config.vocab_size


@pytest.mark.parametrize("depth", [0, 1])
def test_masks_are_built_from_the_confirmed_tokens_right_before_their_sampler(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that allows one token, computed from the whole history, gives the text that the history dictates."""

    def successor(history: list[int]) -> int:
        return 3 + (sum(history) * 7 + len(history)) % 300

    def build(plan: SchedulerOutputs, sequences: list[Sequence]) -> SamplerInputs:
        rows = [s.token_ids for s, p in zip(sequences, plan.sequences, strict=True) if p.is_sampling]
        allowed = torch.zeros(len(rows), VOCAB, dtype=torch.bool)
        for row, history in enumerate(rows):
            allowed[row, successor(history)] = True
        packed = np.packbits(allowed.numpy(), axis=1, bitorder="little")
        return SamplerInputs(allowed=torch.from_numpy(packed))

    monkeypatch.setattr(loop_module, "build_sampler_inputs", build)
    harness = Harness(FuzzDevice(depth), depth=depth, num_blocks=14, budget=9, max_num_seqs=3)
    for index, length in enumerate((3, 11, 6, 14)):
        prompt = [5 + index + i for i in range(length)]
        harness.add(make_request(str(index), prompt, SamplingParams(max_tokens=15, temperature=1.0, seed=index)))
    for _ in range(12):
        harness.step()
    harness.scheduler._preempt(harness.scheduler.running[0])
    harness.run()
    assert harness.scheduler.counters.preemptions > 0
    for sequence in harness.sequences:
        expected = list(sequence.request.prompt_token_ids)
        for _ in range(15):
            expected.append(successor(expected))
        assert sequence.token_ids == expected
