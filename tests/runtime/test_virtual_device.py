"""The virtual clock: streams in order, events between them, and a loop whose steps take as long as the arithmetic says."""

import pytest

from deepinfer.runtime.device import COMPUTE, COPY
from deepinfer.runtime.loop import StepLoop
from deepinfer.runtime.virtual_device import VirtualDevice
from deepinfer.sampling_params import SamplingParams
from tests.runtime.harness import Harness, make_request, reference

PROMPT = (24, 35, 46, 57, 68)  # twenty tokens come before one that ends the text


def forward() -> None:
    pass


def copy() -> None:
    pass


def test_a_launch_waits_for_the_host_its_stream_and_its_events() -> None:
    device = VirtualDevice({"forward": 5.0, "copy": 1.0}, {"schedule": 2.0})
    with device.span("schedule"):
        pass
    device.launch(COMPUTE, forward)
    device.launch(COMPUTE, forward)
    device.wait(COPY, device.record(COMPUTE))
    device.launch(COPY, copy)
    assert device.now_ms == 2.0
    device.synchronize(device.record(COPY))
    assert device.now_ms == 13.0
    spans = [(span.lane, span.start_ms, span.end_ms) for span in device.spans()]
    assert spans == [("host", 0.0, 2.0), (COMPUTE, 2.0, 7.0), (COMPUTE, 7.0, 12.0), (COPY, 12.0, 13.0)]


@pytest.mark.parametrize(("depth", "forward_ms", "step_ms"), [(0, 8.0, 13.0), (1, 8.0, 9.0), (0, 2.0, 7.0), (1, 2.0, 4.0)])
def test_a_step_takes_the_sum_in_the_plain_loop_and_the_larger_part_in_the_overlapped_one(
    depth: int, forward_ms: float, step_ms: float
) -> None:
    """Host 4 ms: 1 schedule, 1 submit, 1 apply, 1 callbacks. Device: forward and 1 ms sampler; the copy takes no time."""
    device = VirtualDevice(
        {"forward": forward_ms, "sampler": 1.0}, {"schedule": 1.0, "submit": 1.0, "apply": 1.0, "callbacks": 1.0}
    )
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=0)
    harness = Harness(device, depth=depth)
    harness.loop = StepLoop(harness.scheduler, harness.worker, depth, harness._on_events, device.span)
    sequence = harness.add(make_request("0", PROMPT, params))
    for _ in range(8):
        harness.step()
    start = device.now_ms
    for _ in range(5):
        harness.step()
    assert (device.now_ms - start) / 5 == step_ms
    harness.run()
    assert sequence.output_token_ids == reference(PROMPT, params)[0]
