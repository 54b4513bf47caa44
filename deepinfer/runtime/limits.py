"""The sizes that a scheduler plans within. No torch."""

from dataclasses import dataclass

from deepinfer.errors import CapacityError
from deepinfer.runtime.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """Sizes the scheduler plans within; slots and blocks include the trash ones."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_speculative_tokens: int = 0  # most drafts verified for a sequence in a step
    num_ring_snapshots: int = 0  # slots beyond those of running sequences

    @property
    def num_slots(self) -> int:
        return self.max_num_seqs + self.num_ring_snapshots + 1

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def check_fits(self, request: Request, name: str) -> None:
        """Raise `CapacityError`, naming the sizes, if the cache is too small for the request even when it runs alone."""
        prompt, new = len(request.prompt_token_ids), request.max_new_tokens
        # The last token is never fed, so it takes no place; drafts in flight and in the next step may take some and be rejected.
        needed, usable = self.blocks_for(prompt + new - 1 + 2 * self.num_speculative_tokens), self.num_blocks - 1
        if needed > usable:
            raise CapacityError(
                f"{name}: a prompt of {prompt} tokens and {new} new ones need {needed} cache blocks of "
                f"{self.block_size} tokens, the cache has {usable}; raise num_blocks or lower max_tokens"
            )
