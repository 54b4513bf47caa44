"""Each mechanism of the overlapped loop is needed: taken out, a seeded set of runs no longer equals the reference."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from deepinfer.runtime import scheduler as scheduler_module
from deepinfer.runtime import worker as worker_module
from deepinfer.runtime.device import InlineDevice
from deepinfer.runtime.fuzz_device import FuzzDevice
from deepinfer.runtime.release import DeferredRelease
from deepinfer.runtime.row_layout import Layout, build_rows
from deepinfer.runtime.sequence import Sequence, Ticket
from deepinfer.runtime.sequence_memory import SequenceMemory
from deepinfer.runtime.step_state import DeviceOutputs, SequenceMetadata
from deepinfer.sampling_params import SamplingParams
from tests.runtime.harness import Harness, make_request, reference

REQUESTS = [
    (
        tuple(3 + (11 * i + 3 * length) % 310 for i in range(length)),
        SamplingParams(max_tokens=12, temperature=t, seed=length, logprobs=0),
    )
    for length, t in ((5, 0.0), (13, 1.0), (9, 0.0), (22, 0.8), (2, 0.0), (17, 1.0))
]


def failures(seeds: range = range(4)) -> list[str]:
    """What goes wrong when the requests run in the overlapped loop on a tight pool with forced preemptions."""
    found = []
    for seed in seeds:
        device = FuzzDevice(seed, eagerness=0.4)
        harness = Harness(device, depth=1, num_blocks=15, budget=10, max_num_seqs=3)
        try:
            for index, (prompt, params) in enumerate(REQUESTS):
                harness.add(make_request(str(index), prompt, params))
            for count in range(400):
                if not harness.step():
                    break
                if count % 7 == 6 and harness.scheduler.running:
                    harness.scheduler._preempt(harness.scheduler.running[-1])
            else:
                found.append("did not finish")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        for sequence, (prompt, params) in zip(harness.sequences, REQUESTS, strict=True):
            if (sequence.output_token_ids, harness.logprobs[sequence.seq_id]) != reference(prompt, params):
                found.append(f"request {sequence.seq_id} differs")
    return found


def no_event_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FuzzDevice, "wait", lambda self, stream, event: self._open(stream))


def no_deferred_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def defer(self: DeferredRelease, fence: int, blocks: tuple[int, ...], slot: int | None) -> None:
        if self.on_return is not None:
            self.on_return(blocks, slot)
        self._blocks.give_back(blocks)
        self._slots.give_back([] if slot is None else [slot])

    monkeypatch.setattr(DeferredRelease, "defer", defer)


def no_remap(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(meta: SequenceMetadata, previous: DeviceOutputs | None) -> Layout:
        layout = build_rows(meta, previous)
        return layout._replace(rows=replace(layout.rows, token_ids=build_rows(meta, None).rows.token_ids))

    monkeypatch.setattr(worker_module, "build_rows", without)


def remap_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_place(meta: SequenceMetadata, previous: DeviceOutputs | None) -> Layout:
        if previous is not None:
            place = torch.arange(meta.remap.shape[0]).clamp(max=previous.sampled.shape[0] - 1)
            meta = replace(meta, remap=place.where(meta.remap >= 0, meta.remap))
        return build_rows(meta, previous)

    monkeypatch.setattr(worker_module, "build_rows", by_place)


def no_length_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(meta: SequenceMetadata, previous: DeviceOutputs | None) -> Layout:
        layout = build_rows(meta, previous)
        starts, rows = meta.starts.clamp(min=0), layout.rows
        return layout._replace(rows=replace(rows, positions=starts[rows.seq_ids] + rows.offsets), starts=starts)

    monkeypatch.setattr(worker_module, "build_rows", without)


def no_epoch_check(monkeypatch: pytest.MonkeyPatch) -> None:
    class AnyEpoch(int):
        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = int.__hash__

    def blind(step_seq: int, epoch: int, q_cap: int, n_drafts: int, is_sampling: bool) -> Ticket:
        return Ticket(step_seq, AnyEpoch(epoch), q_cap, n_drafts, is_sampling)

    monkeypatch.setattr(scheduler_module, "Ticket", blind)


def no_capacity_for_rows_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: SequenceMemory, sequence: Sequence, end: int) -> int:
        return self.limits.blocks_for(end - sequence.total_inflight_tokens) - len(sequence.blocks)

    monkeypatch.setattr(SequenceMemory, "missing_blocks", missing)


MUTATIONS: list[Callable[[pytest.MonkeyPatch], None]] = [
    no_event_wait,
    no_deferred_release,
    no_remap,
    remap_by_place,
    no_length_correction,
    no_epoch_check,
    no_capacity_for_rows_in_flight,
]


def test_the_overlapped_loop_equals_the_reference() -> None:
    assert failures() == []


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_taking_a_mechanism_out_is_noticed(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for prompt, params in REQUESTS:
        reference(prompt, params)  # before the mutation
    mutation(monkeypatch)
    assert failures(), "nothing failed without it"


def test_the_plain_loop_needs_none_of_it() -> None:
    harness = Harness(InlineDevice(), depth=0)
    for index, (prompt, params) in enumerate(REQUESTS):
        harness.add(make_request(str(index), prompt, params))
    harness.run()
    for sequence, (prompt, params) in zip(harness.sequences, REQUESTS, strict=True):
        assert (sequence.output_token_ids, harness.logprobs[sequence.seq_id]) == reference(prompt, params)
