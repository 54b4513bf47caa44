"""What the sampler of a step needs to know of the tokens before its rows: staged when the step before has been applied.

`SamplingMetadata` holds what a request's parameters say at any time; it is staged with the forward, while the tokens of the step
before may still be unknown. What depends on tokens is staged here, in `pre_sampler_sync`, from confirmed tokens alone. Rows behind
drafts of the same step add those on the device. Nothing is built, copied or computed for what no request of the step uses.
"""

from dataclasses import dataclass

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.ops.select import NEG_INF
from deepinfer.runtime.grammar_masks import unpack
from deepinfer.runtime.plan import SchedulerOutputs
from deepinfer.runtime.sequence import Sequence
from deepinfer.runtime.staging import to_device


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplerInputs:
    """History-dependent inputs of one step's sampler, on the host or (after `to`) on the device.

    Attributes:
        allowed: tokens that each of the R rows with logits may draw, in the plan's order: the rows of every sequence that
            samples, its certain row first, then one behind each of its drafts. None if every row may draw every token. Packed:
            bit i of byte j is token 8 j + i.
    """

    allowed: Int[Tensor, "R W"] | None = None

    def to(self, device: torch.device) -> "SamplerInputs":
        """A copy on the device."""
        if self.allowed is None:
            return self
        (allowed,) = to_device([self.allowed], device)
        return SamplerInputs(allowed=allowed)

    def constrain(self, logits: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
        """The logits that tokens are drawn from; the given ones stay as they are, for log probabilities."""
        if self.allowed is not None:
            logits = logits.masked_fill(~unpack(self.allowed, logits.shape[1]), NEG_INF)
        return logits


UNCONSTRAINED = SamplerInputs()


def build_sampler_inputs(plan: SchedulerOutputs, sequences: list[Sequence]) -> SamplerInputs:
    """Inputs of a planned step whose predecessors have all been applied.

    `sequences` belong to the plan's row groups. Those that have ended or were preempted since (`epoch` differs) get whatever is
    cheapest: their rows are dropped.
    """
    return UNCONSTRAINED
