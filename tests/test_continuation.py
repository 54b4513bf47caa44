"""A token's result does not depend on how it got there: whole, in chunks, token by token, packed, or after rejected drafts.

Every run starts from a poisoned cache and is compared with one forward of the whole sequence, alone, over a clean cache.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.model.cache import CacheSizes, ModelCache
from deepinfer.model.draft import Proposal
from deepinfer.model.transformer import Transformer
from tests.golden import CASES, PRECISIONS, Session, observing, poison, recorded, replay, shared_model
from tests.tolerances import difference, tolerance

WITH_DRAFTS = ("smooth_full", "select_full", "bf16_full")
MOST_ROWS = 6  # rows of a verify step: one token and up to five drafts
LONGEST = 53  # all that is recorded of the shortest case: several windows, more entries than an index keeps, a ragged block

Chunk = tuple[int, int]  # (sequence, rows)


class Whole(NamedTuple):
    """One forward of a whole sequence."""

    logits: Tensor
    choices: dict[str, Tensor]
    main_hidden: Tensor | None


@cache
def tokens_of(case: str, sequence: int) -> Tensor:
    """Recorded token ids, whose choices have margins that float32 does not reach wherever they are cut; then random ones."""
    recording = recorded(case, "float32")
    batch = sequence % recording["input_ids"].shape[0]
    random = torch.randint(0, 320, (400,), generator=torch.Generator().manual_seed(sequence))
    return torch.cat((recording["input_ids"][batch], recording["decode.input_ids"][batch], random))


def kept_choices(captured: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in captured.items() if name.endswith(("router_idx", "index_topk"))}


@cache
def whole_forward(case: str, precision: str, batch_invariant: bool, sequence: int, length: int) -> Whole:
    model = shared_model(case, precision, batch_invariant)
    session = Session(model, 1, length, block_size=64)
    with observing(model) as captured:
        step = session.step([(tokens_of(case, sequence)[:length], 0)])
    return Whole(step.logits, kept_choices(captured), step.hidden.main_hidden)


@torch.no_grad()
def drafts_of_whole(model: Transformer, whole: Whole, positions: Iterable[int]) -> list[Proposal]:
    """Drafts after each of the ascending positions, from the features of the whole forward."""
    assert whole.main_hidden is not None
    session, proposals, start = Session(model, 1, len(whole.logits), block_size=64), [], 0
    for position in positions:
        rows = session.rows([([0] * (position + 1 - start), start)])
        model.observe_draft(whole.main_hidden[start : position + 1], rows, session.cache)
        proposals.append(session.propose(whole.logits[position].argmax(keepdim=True), torch.tensor([position])))
        start = position + 1
    return proposals


def remembered(memory: ModelCache, session: Session, sequence: int, length: int) -> dict[str, Tensor]:
    """What the cache holds of the first `length` tokens of a sequence, wherever it lies."""
    slot, window = sequence + 1, session.model.config.attention.window_size
    latest = torch.arange(max(0, length - window), length)
    held = {f"ring {i}": ring[slot, latest % memory.ring_rows] for i, ring in enumerate(memory.rings)}
    table = torch.tensor(session.tables[sequence])
    for layer, pool in memory.pools.items():
        per_block = session.block_size // pool.ratio
        ids = torch.arange(length // pool.ratio)
        address = table[ids // per_block] * per_block + ids % per_block
        held |= {f"entries {layer}": pool.entries[address], f"index keys {layer}": pool.index_keys[address]}
    if length % 2:
        held |= {f"pending {i}": group[slot, length // 2 % memory.pending_rows] for i, group in memory.pending.items()}
    if session.model.config.engram.layer_ids:
        latest = torch.arange(max(0, length - session.model.config.engram.max_ngram_size + 1), length)
        held["history"] = memory.history[slot, latest % memory.history_rows]
    return held


def padded(ids: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=-1)


class Checked:
    """A session whose every row is compared with the whole forward of its sequence."""

    def __init__(
        self,
        case: str,
        precision: str,
        lengths: Sequence[int],
        *,
        batch_invariant: bool,
        block_size: int = 4,
        max_backtrack: int = 0,
        order_seed: int = 0,
    ) -> None:
        self.case, self.lengths, self.is_bitwise = case, lengths, batch_invariant
        self.model = shared_model(case, precision, batch_invariant)
        self.wholes = [whole_forward(case, precision, batch_invariant, i, length) for i, length in enumerate(lengths)]
        reach = max(lengths) + max_backtrack
        blocks = len(lengths) * -(-reach // block_size)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(order_seed)).tolist()
        self.session = Session(self.model, len(lengths), reach, block_size=block_size, max_backtrack=max_backtrack, order=order)
        poison(self.session.cache)
        self.done = [0] * len(lengths)
        self.allowed = tolerance("continuation", "batch invariant" if batch_invariant else "float32")

    def compare(self, name: str, observed: Tensor, expected: Tensor) -> None:
        if self.is_bitwise:
            assert observed.dtype == expected.dtype
        found = difference(name, observed, expected, self.allowed)
        assert found.is_allowed, str(found)

    def run(self, chunks: Sequence[Chunk], accepted: Sequence[int] | None = None) -> None:
        """One step; of each chunk the first `accepted` rows hold the sequence's own tokens, the rest others."""
        accepted = [rows for _, rows in chunks] if accepted is None else accepted
        fed = []
        for (sequence, rows), keep in zip(chunks, accepted, strict=True):
            start = self.done[sequence]
            ids = tokens_of(self.case, sequence)[start : start + rows].clone()
            ids[keep:] = (ids[keep:] + 101) % self.model.config.vocab_size
            fed.append((ids, start))
        with observing(self.model) as captured:
            step = self.session.step(fed, [sequence for sequence, _ in chunks])
        row = 0
        for (sequence, rows), keep in zip(chunks, accepted, strict=True):
            whole, start, kept = self.wholes[sequence], self.done[sequence], slice(row, row + keep)
            own = slice(start, start + keep)
            where = f"sequence {sequence}, positions {start}..{start + keep - 1}"
            # Choices first: where they differ, logits only follow.
            for name, choice in kept_choices(captured).items():
                width = max(choice.shape[1], whole.choices[name].shape[1])
                assert torch.equal(padded(choice[kept], width), padded(whole.choices[name][own], width)), f"{where}: {name}"
            self.compare(f"{where}: logits", step.logits[kept], whole.logits[own])
            self.done[sequence] += keep
            row += rows

    def check_memory(self) -> None:
        """What is remembered of each finished sequence is what the whole forward left."""
        for sequence, length in enumerate(self.lengths):
            assert self.done[sequence] == length
            alone = Session(self.model, 1, length, block_size=64)
            alone.step([(tokens_of(self.case, sequence)[:length], 0)])
            expected = remembered(alone.cache, alone, 0, length)
            for name, value in remembered(self.session.cache, self.session, sequence, length).items():
                self.compare(f"sequence {sequence}: {name}", value, expected[name])

    def check_drafts(self, sequences: Sequence[int]) -> None:
        """Drafts after the latest token of each of the sequences are what the whole forward's features give."""
        positions = [self.done[i] - 1 for i in sequences]
        following = torch.stack([self.wholes[i].logits[p].argmax() for i, p in zip(sequences, positions, strict=True)])
        proposal = self.session.propose(following, torch.tensor(positions), sequences)
        for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
            (expected,) = drafts_of_whole(self.model, self.wholes[sequence], [position])
            assert torch.equal(proposal.token_ids[row], expected.token_ids[0]), f"drafts of {sequence} at {position}"
            for name in ("logits", "confidence"):
                self.compare(f"draft {name} of {sequence} at {position}", getattr(proposal, name)[row], getattr(expected, name)[0])


class Schedule(NamedTuple):
    """How several sequences are fed: steps of chunks, in packing order."""

    lengths: list[int]
    steps: list[list[Chunk]]
    block_size: int
    order_seed: int


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=3))
    left, steps = dict(enumerate(lengths)), []
    while left:
        members = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        # Single tokens, groups of two and their halves, about a window, and whatever is left.
        sizes = [draw(st.sampled_from([1, 2, 3, 7, 8, 15, 17, LONGEST])) for _ in members]
        steps.append([(sequence, min(size, left[sequence])) for sequence, size in zip(members, sizes, strict=True)])
        for sequence, size in steps[-1]:
            left[sequence] -= size
            if not left[sequence]:
                del left[sequence]
    return Schedule(lengths, steps, draw(st.sampled_from([4, 64])), draw(st.integers(0, 99)))


class Verified(NamedTuple):
    """How several sequences are verified: steps of (sequence, rows, accepted rows)."""

    lengths: list[int]
    steps: list[list[tuple[int, int, int]]]
    block_size: int


@st.composite
def verifications(draw: st.DrawFn) -> Verified:
    lengths = draw(st.lists(st.integers(2, 40), min_size=1, max_size=2))
    left, steps = dict(enumerate(lengths)), []
    while left:
        members = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        step = []
        for sequence in members:
            rows = draw(st.integers(1, MOST_ROWS))
            accepted = draw(st.integers(1, min(rows, left[sequence])))
            step.append((sequence, rows, accepted))
            left[sequence] -= accepted
            if not left[sequence]:
                del left[sequence]
        steps.append(step)
    return Verified(lengths, steps, draw(st.sampled_from([4, 64])))


def check_schedule(case: str, precision: str, schedule: Schedule, *, batch_invariant: bool) -> None:
    checked = Checked(
        case,
        precision,
        schedule.lengths,
        batch_invariant=batch_invariant,
        block_size=schedule.block_size,
        order_seed=schedule.order_seed,
    )
    for step in schedule.steps:
        checked.run(step)
    checked.check_memory()
    if batch_invariant and checked.model.config.draft.n_layers:
        checked.check_drafts(range(len(schedule.lengths)))


def check_verification(case: str, precision: str, verified: Verified, *, batch_invariant: bool) -> None:
    checked = Checked(
        case,
        precision,
        verified.lengths,
        batch_invariant=batch_invariant,
        block_size=verified.block_size,
        max_backtrack=MOST_ROWS - 1,
    )
    for step in verified.steps:
        checked.run([(sequence, rows) for sequence, rows, _ in step], [accepted for *_, accepted in step])
        if batch_invariant and checked.model.config.draft.n_layers:
            checked.check_drafts([sequence for sequence, *_ in step])
    checked.check_memory()


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=8)
@given(schedule=schedules())
def test_chunks_and_company_do_not_matter_in_float32(case: str, schedule: Schedule) -> None:
    check_schedule(case, "float32", schedule, batch_invariant=False)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=5)
@given(schedule=schedules())
def test_chunks_and_company_do_not_change_a_bit_in_batch_invariant_arithmetic(
    case: str, precision: str, schedule: Schedule
) -> None:
    check_schedule(case, precision, schedule, batch_invariant=True)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
def test_token_by_token_does_not_change_a_bit_in_batch_invariant_arithmetic(case: str, precision: str) -> None:
    length = 27
    check_schedule(case, precision, Schedule([length], [[(0, 1)]] * length, 4, 1), batch_invariant=True)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_long_chunks_do_not_change_a_bit_in_batch_invariant_arithmetic(precision: str) -> None:
    """More rows than are attended or scored at once, more entries than a tile of the index, several blocks of both sizes."""
    steps = [[(1, 70), (0, 140)], [(0, 1)], [(0, 129), (1, 1)], [(1, 64), (0, 1)], [(0, 19)]]
    check_schedule("select_full", precision, Schedule([290, 135], steps, 64, 5), batch_invariant=True)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=6)
@given(verified=verifications())
def test_rejected_rows_leave_no_trace_in_float32(case: str, verified: Verified) -> None:
    check_verification(case, "float32", verified, batch_invariant=False)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=3)
@given(verified=verifications())
@example(verified=Verified([21], [[(0, MOST_ROWS, 1)]] * 21, 4))
def test_rejected_rows_do_not_change_a_bit_in_batch_invariant_arithmetic(case: str, precision: str, verified: Verified) -> None:
    check_verification(case, precision, verified, batch_invariant=True)


def shorten(memory: ModelCache, kind: str, missing: int) -> None:
    """Take away the last rows of one kind of memory."""
    layers = len(memory.rings) - 3
    if kind == "backbone rings":
        memory.layers[:layers] = [layer._replace(ring=layer.ring[:, :-missing]) for layer in memory.layers[:layers]]
    elif kind == "draft rings":
        memory.layers[layers:] = [layer._replace(ring=layer.ring[:, :-missing]) for layer in memory.layers[layers:]]
    elif kind == "pending groups":
        for index, groups in memory.pending.items():
            memory.layers[index] = memory.layers[index]._replace(pending=groups[:, :-missing])
    else:
        memory.history = memory.history[:, :-missing]


# A step reads its own rows directly, so that the backbone's rings could do with one row less.
@pytest.mark.parametrize(
    ("kind", "missing"), [("backbone rings", 2), ("draft rings", 1), ("pending groups", 1), ("n-gram history", 1)]
)
def test_every_row_that_is_kept_for_rejections_is_needed(kind: str, missing: int) -> None:
    checked = Checked("select_full", "float32", [30], batch_invariant=True, max_backtrack=MOST_ROWS - 1)
    shorten(checked.session.cache, kind, missing)
    with pytest.raises(AssertionError, match="draft" if kind == "draft rings" else "positions"):  # noqa: PT012
        for _ in range(30):
            checked.run([(0, MOST_ROWS)], [1])
            checked.check_drafts([0])


@pytest.mark.parametrize("case", CASES)
def test_what_a_cache_held_before_is_never_seen(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN and impossible ids, on the recorded path and in plain arithmetic."""
    recording, model = recorded(case, "float32"), shared_model(case, "float32")
    clean, new_cache = replay(model, recording), model.new_cache

    def poisoned(sizes: CacheSizes) -> ModelCache:
        memory = new_cache(sizes)
        poison(memory)
        return memory

    monkeypatch.setattr(model, "new_cache", poisoned)
    dirty = replay(model, recording)
    for name, value in clean.items():
        assert torch.equal(dirty[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=60)
@given(schedule=schedules(), verified=verifications())
def test_many_schedules_do_not_change_a_bit_in_batch_invariant_arithmetic(
    case: str, precision: str, schedule: Schedule, verified: Verified
) -> None:
    check_schedule(case, precision, schedule, batch_invariant=True)
    check_verification(case, precision, verified, batch_invariant=True)
