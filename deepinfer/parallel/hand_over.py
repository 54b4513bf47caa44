"""Prefill here, decode there: a request's state leaves one engine after its first token and goes on in another.

Everything that the model remembers of a sequence travels (see `deepinfer.model.cache`), in position order and free of slots,
blocks and ring sizes, so the two engines may have other sizes. A `RequestState` holds host tensors and can be pickled.
"""

from collections import deque
from dataclasses import dataclass, replace

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.errors import Rejected
from deepinfer.model.cache import EntryPool, ModelCache
from deepinfer.model.transformer import Transformer
from deepinfer.outputs import FinishReason
from deepinfer.runtime.plan import SequenceResult, TokenLogprobs
from deepinfer.runtime.request import Request
from deepinfer.runtime.scheduler import Scheduler, SequenceEvent
from deepinfer.runtime.sequence import Sequence, Status
from deepinfer.runtime.worker import Worker
from deepinfer.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CacheState:
    """What the model remembers of `length` tokens.

    Attributes:
        rings: latest rows of each layer's window, then of each draft block's; oldest first, at most a window of them.
        entries, index_keys: of each KV source, in entry order.
        pending: of each ratio-2 source, the group that the next token completes; zeros if none is open.
        history: latest compressed token ids, oldest first.
        has_drafts: whether the draft blocks' rings were written.
    """

    length: int
    rings: list[Float[Tensor, "r Dh"]]
    entries: dict[int, Float[Tensor, "C Dh"]]
    index_keys: dict[int, Float[Tensor, "C Di"]]
    pending: dict[int, Float[Tensor, "2 Dh"]]
    history: Int[Tensor, " h"]
    has_drafts: bool

    @property
    def num_bytes(self) -> int:
        """What travels, without Python's own."""
        tensors = [*self.rings, *self.entries.values(), *self.index_keys.values(), *self.pending.values(), self.history]
        return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RequestState:
    """A request after its prompt: its first token, and the cache unless that token ended it.

    Attributes:
        model: what must be equal on both sides: the model's sizes and the precision.
    """

    request: Request
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    cache: CacheState | None
    model: str


def model_identity(model: Transformer) -> str:
    """Sizes and precision: states travel only between equal models."""
    return repr((model.config, model.numerics.precision))


def first_token_only(request: Request) -> Request:
    """The request as a prefill engine runs it."""
    return replace(request, max_new_tokens=1)


def state_for(request: Request, state: RequestState) -> RequestState:
    """What `first_token_only(request)` gave, as the state of the request itself."""
    if state.finish_reason == "stop" or request.max_new_tokens == 1:
        return replace(state, request=request, cache=None)
    return replace(state, request=request, finish_reason=None)


def start_sequence(state: RequestState, seq_id: int, tokenizer: Tokenizer) -> Sequence:
    """The running state of a request after its first token, without memory yet."""
    sequence = Sequence.open(state.request, 0, seq_id, tokenizer)
    sequence.token_ids.append(state.token_id)
    if state.cache is None:
        sequence.status = Status.FINISHED
        sequence.finish_reason, sequence.stop_reason = state.finish_reason, state.stop_reason
    if sequence.stop_strings is not None:
        by_string = isinstance(state.stop_reason, str)
        # The text of a stop token counts only where it is shown.
        if by_string or state.finish_reason != "stop" or state.request.params.include_stop_str_in_output:
            sequence.stop_strings.push(state.token_id, may_stop=by_string)
    return sequence


def first_event(state: RequestState, sequence: Sequence) -> SequenceEvent:
    """What the first token would have told the user."""
    return SequenceEvent(sequence, SequenceResult((state.token_id,), None if state.logprobs is None else (state.logprobs,)))


def latest(length: int, count: int, ring_rows: int) -> Int[Tensor, " r"]:
    """Ring rows of the last `count` positions below `length`, oldest first."""
    return torch.arange(max(length - count, 0), length, device="cpu") % ring_rows


def entry_addresses(pool: EntryPool, blocks: tuple[int, ...], block_size: int, length: int) -> Int[Tensor, " C"]:
    """Pool rows of the entries that `length` tokens have completed."""
    ids = torch.arange(length // pool.ratio, device="cpu")
    per_block = block_size // pool.ratio
    return torch.tensor(blocks, dtype=torch.int64, device="cpu")[ids // per_block] * per_block + ids % per_block


def export_cache(worker: Worker, sequence: Sequence) -> CacheState:
    """Copy a sequence's memory while it still owns it. Waits for the device."""
    assert sequence.slot is not None
    place = (sequence.slot, sequence.blocks, worker.sizes.block_size)
    return read_cache(worker.model, worker.cache, *place, sequence.confirmed, worker.num_drafts > 0)


@torch.inference_mode()
def read_cache(
    model: Transformer, cache: ModelCache, slot: int, blocks: tuple[int, ...], block_size: int, length: int, has_drafts: bool
) -> CacheState:
    """Copy what a cache holds of the `length` tokens that stand in a slot and in these blocks. Waits for the device."""
    rows = latest(length, model.config.attention.window_size, cache.ring_rows)
    addresses = {layer: entry_addresses(pool, blocks, block_size, length) for layer, pool in cache.pools.items()}
    return CacheState(
        length=length,
        rings=[ring[slot].cpu()[rows] for ring in cache.rings],
        entries={layer: pool.entries[addresses[layer].to(pool.entries.device)].cpu() for layer, pool in cache.pools.items()},
        index_keys={layer: pool.index_keys[addresses[layer].to(pool.entries.device)].cpu() for layer, pool in cache.pools.items()},
        pending={layer: open_group(groups[slot].cpu(), length) for layer, groups in cache.pending.items()},
        history=cache.history[slot].cpu()[latest(length, history_needed(model), cache.history_rows)],
        has_drafts=has_drafts,
    )


def open_group(groups: Float[Tensor, "rows 2 Dh"], length: int) -> Float[Tensor, "2 Dh"]:
    """The group that token `length` completes; zeros if `length` is even, so that no stale one travels."""
    return groups[length // 2 % groups.shape[0]].clone() if length % 2 else torch.zeros_like(groups[0])


def history_needed(model: Transformer) -> int:
    """Tokens before a row that its n-grams reach back to."""
    return max(model.config.engram.max_ngram_size - 1, 1)


@torch.inference_mode()
def import_cache(worker: Worker, sequence: Sequence, state: CacheState) -> None:
    """Write a state into the memory that a sequence has been given. Mutates the worker's cache, in the order of its launches."""
    cache, length, slot = worker.cache, state.length, sequence.slot
    write_latest(cache, cache.rings, state.rings, slot, length)
    for layer, pool in cache.pools.items():
        where = entry_addresses(pool, sequence.blocks, worker.sizes.block_size, length).to(pool.entries.device)
        pool.entries[where] = state.entries[layer].to(pool.entries.device)
        pool.index_keys[where] = state.index_keys[layer].to(pool.entries.device)
    for layer, groups in cache.pending.items():
        groups[slot, length // 2 % groups.shape[1]] = state.pending[layer].to(groups.device)
    write_latest(cache, [cache.history], [state.history], slot, length)


def write_latest(cache: ModelCache, rings: list[Tensor], rows: list[Tensor], slot: int | None, length: int) -> None:
    """Place the rows of the latest positions where these rings expect them."""
    for ring, latest_rows in zip(rings, rows, strict=True):
        where = latest(length, latest_rows.shape[0], ring.shape[1]).to(ring.device)
        ring[slot, where] = latest_rows.to(ring.device)


def check_fits(state: RequestState, model: Transformer, num_drafts: int) -> None:
    """Raise Rejected unless this engine can continue the state."""
    if not isinstance(state, RequestState):
        raise Rejected(f"states: expected what LLMEngine.prefill returns, got {type(state).__name__}")
    if state.model != model_identity(model):
        raise Rejected(f"the state of request {state.request.request_id} comes from another model or precision")
    if num_drafts and state.cache is not None and not state.cache.has_drafts:
        raise Rejected(
            f"the state of request {state.request.request_id} comes from an engine without drafts, this one verifies {num_drafts}; "
            f"give both engines num_speculative_tokens"
        )


class Arrivals:
    """Sequences that come with their cache and wait for memory, first come, first served."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Sequence, CacheState]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, sequence: Sequence, state: CacheState) -> None:
        """Queue a sequence."""
        self._queue.append((sequence, state))

    def admit(self, scheduler: Scheduler, worker: Worker) -> int:
        """Let those in that fit, with their memory filled; returns how many."""
        count = 0
        while self._queue and scheduler.adopt(self._queue[0][0], self._queue[0][1].length):
            import_cache(worker, *self._queue.popleft())
            count += 1
        return count

    def drop(self, sequence: Sequence) -> bool:
        """Take a sequence out; whether it was here."""
        kept = deque(entry for entry in self._queue if entry[0] is not sequence)
        was_here = len(kept) < len(self._queue)
        self._queue = kept
        return was_here

    def clear(self) -> None:
        """Forget all of them."""
        self._queue.clear()


class Exports:
    """States of the sequences that end in a prefill engine, until they are taken."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._caches: dict[int, CacheState] = {}
        self._states: dict[str, RequestState] = {}

    def keep_cache(self, sequence: Sequence) -> None:
        """Copy the memory of a sequence that has just got its first token, and is about to lose it."""
        if sequence.finish_reason == "length":
            self._caches[sequence.seq_id] = export_cache(self._worker, sequence)

    def keep_states(self, events: list[SequenceEvent]) -> None:
        """Join the memory of finished sequences with their first token."""
        for sequence, result in ((event.sequence, event.result) for event in events):
            if sequence.finish_reason is not None:
                self._states[sequence.request.request_id] = RequestState(
                    request=sequence.request,
                    token_id=result.token_ids[0],
                    logprobs=result.logprobs[0] if result.logprobs else None,
                    finish_reason=sequence.finish_reason,
                    stop_reason=sequence.stop_reason,
                    cache=self._caches.pop(sequence.seq_id, None),
                    model=model_identity(self._worker.model),
                )

    def take(self, requests: list[Request]) -> list[RequestState]:
        """Hand over the states of requests: they are not kept. Raises Rejected if one was ended before its first token."""
        states = [self._states.pop(request.request_id, None) for request in requests]
        taken = [state_for(request, state) for request, state in zip(requests, states, strict=True) if state is not None]
        if len(taken) < len(requests):
            raise Rejected(f"{len(requests) - len(taken)} of {len(requests)} requests were ended before their first token")
        return taken
