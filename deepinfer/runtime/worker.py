"""Runs steps on the device: forward, then sampler, then the copy of the result to the host.

Every launch goes through `Device`; the worker never waits for one. The forward of step N + 1 reads what the sampler of step N
wrote, on the device, so it can be submitted before the host has seen step N's tokens.
"""

from collections.abc import Callable

import torch

from deepinfer.model.cache import CacheSizes
from deepinfer.model.transformer import Transformer
from deepinfer.runtime.device import COMPUTE, COPY, Device
from deepinfer.runtime.plan import SchedulerOutputs, StepResult
from deepinfer.runtime.sampler import draw, stage_sampling, to_result
from deepinfer.runtime.step_state import POISON, DeviceOutputs, WorkerStepState, build_rows, stage_metadata

WorkerCallback = Callable[[WorkerStepState], None]


class Worker:
    """Owns the model, its cache and the device; single writer of all of them."""

    def __init__(self, model: Transformer, sizes: CacheSizes, device: Device) -> None:
        self.model, self.sizes, self.device = model, sizes, device
        self.cache = model.new_cache(sizes)

    def submit_forward(self, plan: SchedulerOutputs, previous: WorkerStepState | None) -> WorkerStepState:
        """Launch the forward of a step. `previous` is the step before it, whose results need not be on the host yet."""
        device = self.device.torch_device
        metadata = stage_metadata(plan, self.sizes.block_size).to(device)
        sampling = stage_sampling(plan, self.model.config.vocab_size).to(device)
        groups = len(plan.sequences)
        outputs = DeviceOutputs(
            sampled=torch.full((groups,), POISON, device=device),
            next_start=torch.full((groups,), POISON, device=device),
            final=torch.empty(
                (metadata.sample_rows.shape[0], self.model.config.dim),
                dtype=self.model.numerics.precision.activation_dtype,
                device=device,
            ),
        )
        before = None if previous is None else previous.outputs

        @torch.inference_mode()
        def forward() -> None:
            rows, starts = build_rows(metadata, before)
            outputs.next_start.copy_(starts + metadata.q_lens)
            hidden = self.model.forward_rows(rows, self.cache)
            outputs.final.copy_(hidden.final[metadata.sample_rows])

        reads = ["weights"] if before is None else ["weights", before]
        self.device.launch(COMPUTE, forward, reads=reads, writes=[outputs, "cache"])
        forward_done = self.device.record(COMPUTE)
        return WorkerStepState(plan=plan, metadata=metadata, sampling=sampling, outputs=outputs, forward_done=forward_done)

    def submit_sampler(self, state: WorkerStepState) -> None:
        """Launch the sampler of a step and the copy of what it draws. Fills the step's box."""

        @torch.inference_mode()
        def sampler() -> None:
            state.box.sampler = draw(self.model.logits(state.outputs.final), state.sampling)
            state.outputs.sampled[state.metadata.sample_groups] = state.box.sampler.token_ids

        @torch.inference_mode()
        def copy() -> None:
            assert state.box.sampler is not None
            state.box.sampler = state.box.sampler.to_host()

        self.device.launch(COMPUTE, sampler, reads=["weights"], writes=[state.outputs])
        self.device.wait(COPY, self.device.record(COMPUTE))
        self.device.launch(COPY, copy, reads=[state.outputs], writes=[])
        state.box.copied = self.device.record(COPY)

    def result(self, state: WorkerStepState) -> StepResult:
        """The host's view of a step whose copy event has passed."""
        assert state.box.copied is not None
        assert state.box.copied.query(), "read before its event"
        assert state.box.sampler is not None
        if state.box.result is None:
            state.box.result = to_result(state.plan, state.box.sampler)
        return state.box.result
