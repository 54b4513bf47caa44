"""Masters to a published checkpoint and back."""

import json
from pathlib import Path

import pytest
import torch

from deepinfer.checkpoint.load import load_model
from deepinfer.model.transformer import Transformer
from deepinfer.ops.quantize import round_fp4_ue8m0
from deepinfer.ops.rotate import rotate_last
from deepinfer.tokenizer import Tokenizer
from deepinfer.training.export import export
from deepinfer.training.masters import decoded_parameters, masters_from_checkpoint
from deepinfer.training.pretrain import compressed_ids
from deepinfer.training.qat import MasterMatrix, set_rounding
from deepinfer.training.whole_sequence import WholeSequence, feed_forward, window_rows
from tests.training.micro import micro_config, micro_model

VOCAB_SIZE = 320
GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "smooth_full"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Path]:
    """Masters with rounding on, in bfloat16, and the folder they were exported to."""
    data, folder = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("checkpoint")
    (data / "tokenizer.json").write_bytes((GOLDEN / "tokenizer.json").read_bytes())
    (data / "tokenizer_config.json").write_text(json.dumps({}))
    size = len(compressed_ids(Tokenizer.from_folder(data)))
    model = micro_model(torch.bfloat16, config=micro_config(VOCAB_SIZE, size))
    export(model, data, folder, max_shard_bytes=200_000)
    model.token_window.token_map = load_model(folder, "float32", "cpu").token_window.token_map
    set_rounding(model, True)
    return model, folder


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(6, VOCAB_SIZE, (2, 61), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def test_native_inference_computes_what_was_trained(exported: tuple[Transformer, Path], ids: torch.Tensor) -> None:
    model, folder = exported
    native = load_model(folder, "native", "cpu")
    expected = native(ids)

    def error() -> float:
        actual = model.logits(WholeSequence(model)(ids).final).view_as(expected)
        return float((actual - expected).square().mean().sqrt() / expected.std())

    # Sums round elsewhere in bfloat16, which flips roundings and routes: far from exact, but nearer than without rounding.
    rounded = error()
    set_rounding(model, False)
    plain = error()
    set_rounding(model, True)
    assert rounded < 0.75 * plain


@torch.no_grad()
def test_each_rounding_point_is_that_of_native_inference(exported: tuple[Transformer, Path]) -> None:
    model, folder = exported
    native = load_model(folder, "native", "cpu")
    x = torch.randn(61, model.config.dim, generator=torch.Generator().manual_seed(7)).bfloat16()
    positions = torch.arange(61)
    for trained, served in zip(model.layers, native.layers, strict=True):
        rotation = native.rope(positions).table(served.attn.ratio).query
        exact = {"atol": 0, "rtol": 0}
        torch.testing.assert_close(trained.attn_norm(x), served.attn_norm(x), **exact)
        latent, q = served.attn.queries(x, rotation)
        torch.testing.assert_close(trained.attn.queries(x, rotation)[1], q, atol=0.02, rtol=0.02)
        torch.testing.assert_close(window_rows(trained.attn, x, rotation), served.attn.window_rows(x, rotation), atol=0.2, rtol=0.1)
        expected, actual = served.ffn(x), feed_forward(trained.ffn, x)[0]
        assert (actual.float() - expected.float()).square().mean().sqrt() < 0.02 * expected.float().std()
        if served.attn.indexer is not None:
            reading = WholeSequence(model)
            index_q, _ = reading.index_queries(trained.attn.indexer, x, latent, rotation)
            ix = served.attn.indexer
            raw = rotate_last(ix.wq_b(latent).unflatten(1, (ix.config.n_heads, ix.config.head_dim)), rotation)
            same = (index_q == round_fp4_ue8m0(raw)).float().mean()
            assert same > 0.98


@torch.no_grad()
def test_decoded_masters_are_fixed_points(exported: tuple[Transformer, Path]) -> None:
    _, folder = exported
    stored = load_model(folder, "native", "cpu")
    again = masters_from_checkpoint(folder, torch.float32, "cpu")
    encoded = decoded_parameters(stored)
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(parameter.detach(), encoded[name], atol=0, rtol=0, msg=name)
    for matrix in again.modules():
        if isinstance(matrix, MasterMatrix):
            torch.testing.assert_close(matrix.values(torch.float32), matrix.weight, atol=0, rtol=0)


@torch.no_grad()
def test_float32_inference_equals_the_decoded_masters(exported: tuple[Transformer, Path], ids: torch.Tensor) -> None:
    _, folder = exported
    masters = masters_from_checkpoint(folder, torch.float32, "cpu")
    set_rounding(masters, False)
    expected = load_model(folder, "float32", "cpu")(ids)
    actual = masters.logits(WholeSequence(masters)(ids).final).view_as(expected)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
