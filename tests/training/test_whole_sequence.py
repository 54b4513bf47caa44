"""The training reading against `Transformer`, on the same masters."""

import pytest
import torch

from deepinfer.model.transformer import Transformer
from deepinfer.training.draft_forward import DraftReading
from deepinfer.training.whole_sequence import Ablation, Record, WholeSequence
from tests.training.micro import micro_model


@pytest.fixture(scope="module")
def model() -> Transformer:
    return micro_model()


def tokens(count: int, length: int) -> torch.Tensor:
    return torch.randint(6, 320, (count, length), generator=torch.Generator().manual_seed(count * 1000 + length))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 61])
@torch.no_grad()
def test_logits_equal_the_inference_reading(model: Transformer, length: int) -> None:
    ids = tokens(2, length)
    expected = model(ids)
    output = WholeSequence(model)(ids)
    torch.testing.assert_close(model.logits(output.final).view_as(expected), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_features_equal_the_inference_reading(model: Transformer) -> None:
    ids = tokens(2, 61)
    rows, cache = model.whole_sequences(ids)
    expected = model.forward_rows(rows, cache).main_hidden
    torch.testing.assert_close(WholeSequence(model)(ids).main_hidden, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "ablation", [Ablation(entries="none"), Ablation(entries="all"), Ablation(engram=False), Ablation(all_streams=False)]
)
@torch.no_grad()
def test_every_ablation_matters(model: Transformer, ablation: Ablation) -> None:
    ids = tokens(1, 61)
    reading = WholeSequence(model)
    assert (reading(ids).final - reading(ids, ablation).final).abs().max() > 1e-3


def test_index_loss_moves_indexers_only() -> None:
    model = micro_model()
    record = Record(index_rows=torch.tensor([0, 1, 17, 40, 60]))
    WholeSequence(model)(tokens(2, 61), record=record)
    torch.stack(record.index_losses).sum().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert moved
    assert all(".indexer." in name for name in moved)
    assert len(record.index_losses) == len(model.config.index_source_layers)


@torch.no_grad()
def test_drafts_equal_the_inference_reading(model: Transformer) -> None:
    ids, anchors = tokens(2, 40), torch.tensor([0, 3, 7, 20, 35])
    backbone = WholeSequence(model)
    main_hidden = backbone(ids).main_hidden
    assert main_hidden is not None
    output = DraftReading(backbone)(ids, main_hidden, anchors)
    plain = output.plain_logits.unflatten(0, (2, -1))
    for k, anchor in enumerate(anchors.tolist()):
        rows, cache = model.whole_sequences(ids[:, : anchor + 1])
        hidden = model.forward_rows(rows, cache)
        assert hidden.main_hidden is not None
        model.observe_draft(hidden.main_hidden, rows, cache)
        slots, positions = torch.tensor([1, 2]), torch.tensor([anchor, anchor])
        proposal = model.propose_draft(ids[:, anchor + 1], positions, slots, cache)
        previous = torch.cat((ids[:, anchor + 1 : anchor + 2], proposal.token_ids[:, :-1]), dim=1)
        head = model.mtp[-1].markov_head
        bias = head.head(head.embed(previous).flatten(0, 1)).view(2, previous.shape[1], -1)
        torch.testing.assert_close(plain[:, k] + bias, proposal.logits, atol=1e-4, rtol=1e-4)
