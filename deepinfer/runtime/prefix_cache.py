"""Which cache blocks hold the entries of which token prefix, and which slots the rings at its end. An index; no tensors.

A block is known by a digest chained over all tokens from the start of the sequence to the block's end, and over whatever else its
entries depend on (the root). A prefix that ends inside a block, or whose rings have been kept, has an `Ending` beside the chain.

The pools own the memory and decide what goes first (least recently used); here only names are kept, and dropped with the memory.
"""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from hashlib import blake2b

from deepinfer.runtime.host_tier import HostTier
from deepinfer.runtime.shared_ids import SharedIdPool

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Ending:
    """A known prefix: `num_blocks` full blocks, then `tokens` in a block that is not full.

    Attributes:
        digest: of its full blocks.
        block: holds the entries of `tokens`; None if there are none.
        slot: holds the rings, pending groups and history at its end; None if they were not kept.
    """

    digest: bytes
    num_blocks: int
    tokens: tuple[int, ...]
    block: int | None
    slot: int | None


@dataclass(frozen=True, slots=True)
class Match:
    """What is stored of a prompt.

    Attributes:
        blocks: full blocks from its start; None where a block is in host memory.
        ending: the longest ending among its prefixes, if there is any.
    """

    blocks: tuple[int | None, ...] = ()
    ending: Ending | None = None


class PrefixCache:
    """The index. Mutated by the scheduler alone; `blocks` and `slots` keep what is registered here until they need the room."""

    def __init__(
        self, root: bytes, block_size: int, blocks: SharedIdPool, slots: SharedIdPool, host: HostTier | None = None
    ) -> None:
        self.root, self.block_size, self.host = root, block_size, host or HostTier(0)
        # Told of a block that the device gives away and the place in host memory that shall take it in.
        self.on_offload: Callable[[int, int], None] = lambda block, place: None
        self._blocks, self._slots = blocks, slots
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._endings: dict[bytes, dict[tuple[int, ...], Ending]] = {}
        self._ending_of_block: dict[int, Ending] = {}
        self._ending_of_slot: dict[int, Ending] = {}
        blocks.on_evict = self._forget_block
        slots.on_evict = self._forget_slot

    def extend_digests(self, digests: list[bytes], token_ids: Tokens[int]) -> None:
        """Append the digests of the full blocks of `token_ids` that `digests` does not have yet. Mutates `digests`."""
        size = self.block_size
        for index in range(len(digests), len(token_ids) // size):
            parent = digests[-1] if digests else self.root
            tokens = array("q", token_ids[index * size : (index + 1) * size]).tobytes()
            digests.append(blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest())

    def match(self, digests: list[bytes], token_ids: Tokens[int], *, with_host: bool = True) -> Match:
        """The longest stored prefix of a prompt, at most all tokens but the last: one row has to run for the next token."""
        limit = len(token_ids) - 1
        blocks: list[int | None] = []
        best = self._ending_at(self.root, 0, token_ids, limit)
        for digest in digests[: limit // self.block_size]:
            block = self._block_of.get(digest)
            if block is None and (not with_host or self.host.find(digest) is None):
                break
            blocks.append(block)
            best = self._ending_at(digest, len(blocks), token_ids, limit) or best
        return Match(tuple(blocks), best)

    def _ending_at(self, digest: bytes, num_blocks: int, token_ids: Tokens[int], limit: int) -> Ending | None:
        start, best = num_blocks * self.block_size, None
        for tokens, ending in self._endings.get(digest, {}).items():
            end = start + len(tokens)
            if end <= limit and tuple(token_ids[start:end]) == tokens and (best is None or len(tokens) > len(best.tokens)):
                best = ending
        return best

    def add_blocks(self, digests: Tokens[bytes], blocks: Tokens[int]) -> None:
        """Register full blocks whose entries are computed; what is registered already stays."""
        for digest, block in zip(digests, blocks, strict=True):
            if digest not in self._block_of and block not in self._digest_of:
                self._block_of[digest], self._digest_of[block] = block, digest
                self._blocks.keep(block)

    def add_ending(self, ending: Ending) -> bool:
        """Register the end of a prefix. False if that end, or its memory, is registered already."""
        if self.has_ending(ending.digest, ending.tokens):
            return False
        if ending.block in self._ending_of_block or ending.block in self._digest_of or ending.slot in self._ending_of_slot:
            return False
        self._endings.setdefault(ending.digest, {})[ending.tokens] = ending
        if ending.block is not None:
            self._ending_of_block[ending.block] = ending
            self._blocks.keep(ending.block)
        if ending.slot is not None:
            self._ending_of_slot[ending.slot] = ending
            self._slots.keep(ending.slot)
        return True

    def has_ending(self, digest: bytes, tokens: tuple[int, ...]) -> bool:
        return tokens in self._endings.get(digest, {})

    @property
    def stored_blocks(self) -> dict[bytes, int]:
        """Digest to block of every full block that is registered, oldest registration first."""
        return dict(self._block_of)

    @property
    def stored_endings(self) -> list[Ending]:
        return [ending for of_digest in self._endings.values() for ending in of_digest.values()]

    def _forget_block(self, block: int) -> None:
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            place = self.host.store(digest)
            if place is not None:
                self.on_offload(block, place)
        ending = self._ending_of_block.get(block)
        if ending is not None:
            self._drop(ending)
            if ending.slot is not None:
                self._slots.forget(ending.slot)

    def _forget_slot(self, slot: int) -> None:
        ending = self._ending_of_slot.get(slot)
        if ending is not None:
            self._drop(ending)
            if ending.block is not None:
                self._blocks.forget(ending.block)

    def _drop(self, ending: Ending) -> None:
        """Take an ending out of the index; its memory is the caller's business."""
        of_digest = self._endings[ending.digest]
        del of_digest[ending.tokens]
        if not of_digest:
            del self._endings[ending.digest]
        if ending.block is not None:
            del self._ending_of_block[ending.block]
        if ending.slot is not None:
            del self._ending_of_slot[ending.slot]

    def check_integrity(self) -> None:
        """Both directions of the index agree."""
        assert {block: digest for digest, block in self._block_of.items()} == self._digest_of
        endings = self.stored_endings
        assert {e.block for e in endings if e.block is not None} == set(self._ending_of_block)
        assert {e.slot for e in endings if e.slot is not None} == set(self._ending_of_slot)
