import pytest
import torch
from torch import Tensor

from deepinfer.ops.rotate import rope_frequencies, rotate_last, rotation, yarn_frequencies
from tests.golden import check_bits, published_numbers, recorded_unit

DIM = 64
YARN = {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_seq_len": 65536}


def frequencies(table: str) -> Tensor:
    return yarn_frequencies(DIM, 160000.0, **YARN) if table == "compress" else rope_frequencies(DIM, 10000.0)


@pytest.mark.golden
@pytest.mark.parametrize("table", ["window", "compress"])
def test_tables_have_the_recorded_bits(table: str) -> None:
    unit = recorded_unit("rope")
    cos, sin = rotation(unit["pos"], frequencies(table)).unbind(dim=-1)
    check_bits(cos, unit[f"{table}_cos"], "rotation")
    check_bits(sin, unit[f"{table}_sin"], "rotation")


@pytest.mark.golden
@pytest.mark.parametrize("inverse", [False, True])
def test_rotations_have_the_recorded_bits(inverse: bool) -> None:
    unit = recorded_unit("rope")
    turned = rotate_last(unit["x"][0], rotation(unit["pos"], frequencies("compress")), inverse=inverse)
    check_bits(turned, unit["compress_rot_inverse" if inverse else "compress_rot"][0], "rotation")


@pytest.mark.golden
@pytest.mark.parametrize(("table", "name"), [("window", "sliding_only_layers"), ("compress", "compressed_layers")])
def test_frequencies_are_the_published_ones(table: str, name: str) -> None:
    check_bits(frequencies(table), torch.tensor(published_numbers()["rope"][name]["inv_freq"]), "rotation")


def test_only_the_last_channels_turn_and_pairs_are_adjacent() -> None:
    x = torch.arange(1.0, 9.0)[None]
    quarter = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])  # the first pair by a quarter turn, the second not at all
    assert rotate_last(x, quarter)[0].tolist() == [1.0, 2.0, 3.0, 4.0, -6.0, 5.0, 7.0, 8.0]
    assert rotate_last(x, quarter, inverse=True)[0].tolist() == [1.0, 2.0, 3.0, 4.0, 6.0, -5.0, 7.0, 8.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_undone_by_its_inverse_and_keeps_the_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 96).to(dtype)
    rot = rotation(torch.tensor([0, 1, 127, 128, 70000]), frequencies("compress"))
    back = rotate_last(rotate_last(x, rot), rot, inverse=True)
    assert back.dtype == dtype
    torch.testing.assert_close(back, x, rtol=0, atol=1e-6 if dtype == torch.float32 else 4e-2)


def test_products_of_rotated_vectors_depend_on_the_distance_only() -> None:
    q, k = torch.randn(1, 64), torch.randn(1, 64)

    def score(at: int, other: int) -> Tensor:
        freqs = frequencies("window")
        return (rotate_last(q, rotation(torch.tensor([at]), freqs)) * rotate_last(k, rotation(torch.tensor([other]), freqs))).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), rtol=0, atol=1e-3)
