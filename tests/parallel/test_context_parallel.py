"""One prompt on 1, 2 and 4 ranks: balanced chunks, exact halos, and the bits of one rank."""

from typing import Any

import pytest
import torch

from deepinfer.errors import ShapeError
from deepinfer.model.rows import pack_rows
from deepinfer.model.transformer import Transformer
from deepinfer.parallel.config import ParallelConfig
from deepinfer.parallel.context_parallel import (
    LAST_SLOT,
    Chunk,
    causal_work,
    chunks_of,
    cut_prompt,
    halo,
    halo_sends,
    prefill_context,
)
from deepinfer.parallel.ranks import Ranks
from tests.parallel.spawn import run_ranks
from tests.parallel.test_expert_parallel import MODELS, load, tokens

BLOCK_SIZE = 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("align", [1, 2, 4])
def test_chunks_cover_the_prompt_and_begin_at_multiples(ranks: int, align: int) -> None:
    for length in range(1, 6 * 2 * ranks * align):
        if -(-length // align) < 2 * ranks:
            with pytest.raises(ShapeError, match=f"{ranks} ranks need at least {2 * ranks}"):
                cut_prompt(length, ranks, align)
            continue
        chunks = cut_prompt(length, ranks, align)
        assert len(chunks) == 2 * ranks
        assert [p for chunk in chunks for p in range(*chunk)] == list(range(length))
        assert all(chunk.start % align == 0 and chunk.end > chunk.start for chunk in chunks)
        sizes = [chunk.end - chunk.start for chunk in chunks]
        assert max(sizes) - min(sizes[:-1]) <= align
        assert sorted(c for r in range(ranks) for c in chunks_of(chunks, r)) == chunks


def test_ranks_have_equal_causal_work() -> None:
    for ranks in (2, 4, 8):
        for length in (64 * ranks, 1000, 4096 + 17):
            chunks = cut_prompt(length, ranks, 2)
            work = [sum(map(causal_work, chunks_of(chunks, rank))) for rank in range(ranks)]
            assert max(work) - min(work) <= causal_work(chunks[-1])
            assert max(work) / (sum(work) / ranks) < 1.05
            # Consecutive halves would not be: the last rank would have most of it.
            plain = [causal_work(Chunk(length * r // ranks, length * (r + 1) // ranks)) for r in range(ranks)]
            assert max(plain) / (sum(plain) / ranks) > 1.4


@pytest.mark.parametrize("reach", [1, 5, 30])
def test_every_halo_position_is_sent_once_by_its_owner(reach: int) -> None:
    for ranks in (1, 2, 3):
        for length in range(2 * ranks, 40):
            chunks = cut_prompt(length, ranks, 1)
            for target in range(ranks):
                for i, chunk in enumerate(chunks_of(chunks, target)):
                    sent = [p for source in range(ranks) for p in halo_sends(chunks, reach, source, target)[i]]
                    assert sorted(sent) == list(halo(chunk, reach))


@torch.inference_mode()
def compare_with_one_rank(rank: int, size: int) -> dict[str, Any]:
    """Logits of every position, and of tokens decoded afterwards, against a whole-sequence forward."""
    ranks = Ranks.open(ParallelConfig(ep_size=size, timeout_s=30), torch.device("cpu"))
    found: dict[str, Any] = {"prompt": [], "decode": []}
    for precision, folder in MODELS:
        model = load(precision, folder)
        # Even and odd lengths; chunks shorter and longer than the window.
        for length in (8 * size, 8 * size + 3, 61):
            ids = tokens(length, length + 3)
            whole = model(ids)
            result = prefill_context(model, ranks, ids[:length], block_size=BLOCK_SIZE, room=3)
            found["prompt"].append(torch.equal(model.logits(result.final), whole[result.positions]))
            if rank == 0:
                found["decode"].append(torch.equal(decode(model, result.cache, ids, length), whole[length:]))
    ranks.close()
    return found


def decode(model: Transformer, cache: Any, ids: torch.Tensor, length: int) -> torch.Tensor:
    """Feed what follows the prompt, token by token, from the state that the prompt left."""
    logits = []
    for position in range(length, ids.shape[0]):
        blocks = range(1, 1 + -(-ids.shape[0] // BLOCK_SIZE))
        rows = pack_rows([(ids[position : position + 1], position)], [LAST_SLOT], [blocks], BLOCK_SIZE)
        logits.append(model.logits(model.forward_rows(rows, cache).final))
    return torch.cat(logits)


@pytest.fixture(scope="module", params=[1, 2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda size: f"cp{size}")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(compare_with_one_rank, request.param)


def test_logits_of_every_position_are_those_of_one_rank(found: list[dict[str, Any]]) -> None:
    assert all(rank["prompt"] == [True] * 6 for rank in found)


def test_rank_0_can_go_on_decoding(found: list[dict[str, Any]]) -> None:
    assert found[0]["decode"] == [True] * 6
