"""How an engine runs a model: precision, device, and the sizes of its steps and caches."""

from dataclasses import dataclass, field
from typing import get_args

from deepinfer.errors import ConfigError
from deepinfer.model.numerics import precision_named
from deepinfer.outputs import ReplayMode
from deepinfer.parallel.config import ParallelConfig
from deepinfer.runtime.verify import VERIFICATIONS
from deepinfer.sampling_params import SEED_LIMIT, shown

LARGEST = 2**31 - 1
KERNELS = ("auto", "plain", "inductor", "triton")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of `LLMEngine.from_pretrained`.

    Attributes:
        precision: a name in `deepinfer.model.numerics.PRECISIONS`.
        device: None is the accelerator if there is one, else the CPU.
        max_num_seqs: most sequences in a step.
        max_num_batched_tokens: most rows in a step; longer prompts are prefilled in chunks.
        max_model_len: longest sequence, prompt and output together; None is the model's own limit, and no more than that.
        block_size: tokens in a cache block.
        num_blocks: cache blocks for all sequences together; None sizes the pool from free memory. A small pool forces preemption.
        async_scheduling: steps that the host runs ahead of the device: 0 is the plain loop, 1 overlaps.
        num_speculative_tokens: drafts that a step verifies for a sequence, at most the model's block size. The text is the
            target's own, as without drafts (to the bit with `batch_invariant`). 0 by default: the plain operations gain nothing
            from drafts on a CPU.
        spec_verification: "match": the target draws with its own noise and a draft stands iff it is the same token; "rejection":
            standard speculative sampling, the same distribution but not the same tokens (see `deepinfer.runtime.verify`).
        adaptive_verification: choose the number of drafts from measured step times and the confidence head, down to none where
            they do not pay; else every draft is verified. The choice follows the clock: under "rejection", or without
            `batch_invariant`, equal runs may then differ.
        batch_invariant: a row's bits do not depend on its company; see `deepinfer.model.numerics`.
        compile: run the model's layers through `torch.compile`; "auto" does so for `kernels` other than "plain".
        kernels: "triton" reads quantised weights with kernels of our own, "inductor" leaves them to the compiler, "plain" is the
            definition; "auto" is the fastest that the device has, on a CPU "plain" (see `deepinfer.backends`).
        cuda_graphs: capture decode steps as graphs; "auto" does so where the device can.
        enable_prefix_caching: keep the entries of finished and preempted sequences for those that begin alike.
        replay: "full" computes every token in every layer and takes nothing from the cache; "exact" saves work where the result
            stays the same (to the bit with `batch_invariant`); "bounded" saves more and is an approximation; see
            `deepinfer.runtime.replay`.
        num_ring_snapshots: window rings kept beside those of running sequences, for "exact"; None: as many as `max_num_seqs`.
        num_host_blocks: cache blocks in host memory that take in what the device gives away of stored prefixes.
        max_queued_requests: submissions beyond this many waiting ones block (async) until some have started.
        max_logprobs: most log probabilities beside the chosen token's that a request may ask for; -1 is no limit.
        parallel: ranks that share the work; one process by default.
        seed: seeds of requests that bring none derive from it.
    """

    precision: str = "native"
    device: str | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    block_size: int = 64
    num_blocks: int | None = None
    async_scheduling: int = 1
    num_speculative_tokens: int = 0
    spec_verification: str = "match"
    adaptive_verification: bool = True
    batch_invariant: bool = False
    compile: bool | str = "auto"
    kernels: str = "auto"
    cuda_graphs: bool | str = "auto"
    enable_prefix_caching: bool = False
    replay: ReplayMode = "full"
    num_ring_snapshots: int | None = None
    num_host_blocks: int = 0
    max_queued_requests: int = 100_000
    max_logprobs: int = 20
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        def require(name: str, condition: bool, rule: str) -> None:
            if not condition:
                raise ConfigError(f"EngineConfig.{name} = {shown(getattr(self, name))}: {rule}")

        def is_int(name: str, low: int, high: int = LARGEST) -> bool:
            value = getattr(self, name)
            return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

        precision, device = self.precision, self.device
        require("precision", isinstance(precision, str), "expected the name of a precision")
        precision_named(precision)
        require("device", device is None or isinstance(device, str), "expected None or the name of a torch device")
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_queued_requests"):
            require(name, is_int(name, 1), f"expected an integer from 1 to {LARGEST}")
        require("block_size", self.block_size % 2 == 0, "must be even: a ratio-2 group may not straddle blocks")
        for name, low in (("max_model_len", 2), ("num_blocks", 1)):
            valid = getattr(self, name) is None or is_int(name, low)
            require(name, valid, f"expected None or an integer from {low} to {LARGEST}")
        require("num_speculative_tokens", is_int("num_speculative_tokens", 0), "expected an integer of at least 0")
        valid = isinstance(self.async_scheduling, int) and self.async_scheduling in (0, 1)
        require("async_scheduling", valid, "expected 0 (plain loop) or 1 (one step ahead)")
        for name in ("compile", "cuda_graphs"):
            value = getattr(self, name)
            require(name, isinstance(value, bool) or value == "auto", 'expected True, False or "auto"')
        require("kernels", self.kernels in KERNELS, f"expected one of {', '.join(KERNELS)}")
        require("spec_verification", self.spec_verification in VERIFICATIONS, f"expected one of {', '.join(VERIFICATIONS)}")
        require("replay", self.replay in get_args(ReplayMode), f"expected one of {', '.join(get_args(ReplayMode))}")
        valid = self.num_ring_snapshots is None or is_int("num_ring_snapshots", 0)
        require("num_host_blocks", is_int("num_host_blocks", 0), f"expected an integer from 0 to {LARGEST}")
        require("num_ring_snapshots", valid, f"expected None or an integer from 0 to {LARGEST}")
        for name in ("adaptive_verification", "batch_invariant", "enable_prefix_caching"):
            require(name, isinstance(getattr(self, name), bool), "expected True or False")
        require("parallel", isinstance(self.parallel, ParallelConfig), "expected a ParallelConfig")
        require("max_logprobs", is_int("max_logprobs", -1), f"expected an integer from -1 (no limit) to {LARGEST}")
        require("seed", is_int("seed", 0, SEED_LIMIT - 1), "expected an integer from 0 to 2^63 - 1")
