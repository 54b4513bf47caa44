"""Writing a checkpoint folder in the published format, and random tensors to fill one with.

Both go tensor by tensor, so that memory stays bounded at published widths too. Source: specification section 12.
"""

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from deepinfer.checkpoint.checksums import write_checksums
from deepinfer.checkpoint.load import check_folder
from deepinfer.checkpoint.safetensors_file import INDEX_NAME, SINGLE_NAME, write_safetensors
from deepinfer.checkpoint.tensor_map import TensorSpec, stored_specs
from deepinfer.config import ModelConfig
from deepinfer.config_json import config_to_json, load_config
from deepinfer.dims import Float, Shaped, Tensor
from deepinfer.errors import CheckpointError
from deepinfer.ops.quantize import FLOAT8_E4M3_MAX

MAX_SHARD_BYTES = 4 * 2**30
CONFIG_NAME = "config.json"
# What an older checkpoint may have left in the folder.
OWN_FILES = re.compile(r"model.*\.safetensors(\.index\.json)?|tokenizer(_config)?\.json|sha256\.json")


def save_checkpoint(
    folder: Path | str,
    config: ModelConfig,
    tensors: Mapping[str, Shaped[Tensor, "..."]] | Iterable[tuple[str, Shaped[Tensor, "..."]]],
    tokenizer_json: str,
    tokenizer_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint folder: one safetensors file, or shards and an index if there is more than `max_shard_bytes`.

    Everything is written aside, passes the checks that loading makes, and only then takes its place; a checkpoint that was there
    is replaced. An interruption leaves the old checkpoint, the new one, or a folder without `config.json`, never a mixture.

    Args:
        tensors: published names, stored dtypes. Pairs are consumed as they come; a shard of them is held at a time.

    Raises: CheckpointError, ConfigError, TokenizerError if the parts do not belong together or cannot be written.
    """
    folder = Path(folder)
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=folder, prefix=".writing-"))
        try:
            _write_tensors(aside, pairs, max_shard_bytes)
            (aside / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
            if tokenizer_config is not None:
                _write_json(aside / "tokenizer_config.json", tokenizer_config)
            _write_json(aside / CONFIG_NAME, config_to_json(config))
            write_checksums(aside)
            check_folder(aside, load_config(aside), list(stored_specs(config)), complete=True)
            _put_in_place(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror})") from error


def _write_tensors(folder: Path, pairs: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    shards: list[list[str]] = []
    total = 0
    for shard in _shards(pairs, max_shard_bytes):
        write_safetensors(folder / f"shard-{len(shards)}", shard)
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE_NAME)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"shard-{i}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(pairs: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Runs of tensors of at most `max_bytes` together (or one larger tensor); at least one run, even if it is empty."""
    shard: dict[str, Tensor] = {}
    held, seen = 0, set()
    for name, tensor in pairs:
        if name in seen:
            raise CheckpointError(f"tensor {name!r} was given twice")
        if shard and held + tensor.nbytes > max_bytes:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor
        held += tensor.nbytes
        seen.add(name)
    yield shard


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _put_in_place(aside: Path, folder: Path) -> None:
    """Move the files of `aside` to `folder`. No folder with a config.json is ever half old and half new."""
    (folder / CONFIG_NAME).unlink(missing_ok=True)
    new = {path.name for path in aside.iterdir()}
    for name in sorted(new - {CONFIG_NAME}):
        os.replace(aside / name, folder / name)
    for path in list(folder.iterdir()):
        if OWN_FILES.fullmatch(path.name) and path.name not in new:
            path.unlink()
    os.replace(aside / CONFIG_NAME, folder / CONFIG_NAME)


# Random tensors. FP8 codes are drawn with a fixed spread and FP4 codes uniformly; the scales give the values their size.
FP8_CODE_STD = 96.0
FP4_CODE_STD = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
ENGRAM_ROW_STD = 0.25
NORM_SPREAD = 0.1
E8M0_BIAS = 127


def random_tensors(
    config: ModelConfig, seed: int, device: torch.device | str = "cpu", expert_ids: tuple[int, ...] | None = None
) -> Iterator[tuple[str, Shaped[Tensor, "..."]]]:
    """Name and value of every tensor of a checkpoint, in its stored format, sized so that activations are of order 1.

    Each tensor depends on the seed and its name alone (and on the kind of device), so that any part of a model, such as the
    backbone experts `expert_ids`, is the same as in the whole.
    """
    specs = {spec.name: spec for spec in stored_specs(config, expert_ids)}
    for name, spec in specs.items():
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest) >> 1)
        yield name, _random_tensor(spec, specs, config, generator)


def _random_tensor(spec: TensorSpec, specs: Mapping[str, TensorSpec], config: ModelConfig, generator: torch.Generator) -> Tensor:
    name = spec.name
    if spec.dtype == torch.float8_e8m0fnu:
        weight = specs[name.removesuffix("scale") + "weight"]
        is_fp4 = weight.dtype == torch.int8
        in_features = weight.shape[1] * (2 if is_fp4 else 1)
        std = ENGRAM_ROW_STD if ".engram.embed." in name else in_features**-0.5
        return _random_scales(spec.shape, std / (FP4_CODE_STD if is_fp4 else FP8_CODE_STD), generator)
    if spec.dtype == torch.int8:
        return _random_bytes(spec.shape, generator)
    if spec.dtype == torch.float8_e4m3fn:
        codes = _normal(spec.shape, torch.bfloat16, generator).mul_(FP8_CODE_STD)
        return codes.clamp_(-FLOAT8_E4M3_MAX, FLOAT8_E4M3_MAX).to(torch.float8_e4m3fn)
    for pattern, fill in FILLS:
        if re.search(pattern, name):
            return fill(_normal(spec.shape, spec.dtype, generator), config)
    raise AssertionError(f"no rule for {name}")


def _spread(mean: float, std: float) -> Callable[[Tensor, ModelConfig], Tensor]:
    return lambda z, config: z.mul_(std).add_(mean)


def _by_width(z: Float[Tensor, "N K"], config: ModelConfig) -> Float[Tensor, "N K"]:
    return z.mul_(z.shape[-1] ** -0.5)


def _stream_base(z: Float[Tensor, " rows"], config: ModelConfig) -> Float[Tensor, " rows"]:
    """Biases of a hyper-connection: collapse and spread near the mean of the streams, each stream mostly kept."""
    m = config.hyper_connection.mult
    z.mul_(NORM_SPREAD)
    z[:m] -= math.log(m - 1) if m > 1 else 0.0
    z[2 * m :] += 2 * torch.eye(m, device=z.device).flatten()
    return z


# First match wins. Each rule turns standard normal draws into the tensor's values.
FILLS: tuple[tuple[str, Callable[[Tensor, ModelConfig], Tensor]], ...] = (
    (r"norm\.weight$|\.[qk]_weight$", _spread(1.0, NORM_SPREAD)),
    (r"\.hc_(attn|ffn)_base$", _stream_base),
    (r"\.hc_(attn|ffn)_scale$", _spread(0.5, 0.5 * NORM_SPREAD)),
    (r"\.attn_sink$", _spread(0.0, 0.5)),
    (r"\.gate\.bias(_vl)?$", _spread(0.0, 0.01)),
    (r"(^|\.)embed\.weight$", _spread(0.0, 1.0)),
    (r"\.weight$|\.hc_(attn|ffn)_fn$", _by_width),
)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=generator.device).normal_(generator=generator)


def _random_bytes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform bytes, eight at a draw."""
    count = math.prod(shape)
    words = torch.empty(-(-count // 8), dtype=torch.int64, device=generator.device).random_(-(2**63), None, generator=generator)
    return words.view(torch.int8)[:count].view(shape)


def _random_scales(shape: tuple[int, ...], rms: float, generator: torch.Generator) -> Tensor:
    """Powers of two just below and just above `rms`, mixed so that their root mean square is `rms`."""
    exponent = math.floor(math.log2(rms))
    share_above = ((rms / 2.0**exponent) ** 2 - 1) / 3
    above = torch.rand(shape, generator=generator, device=generator.device) < share_above
    return (above.to(torch.uint8) + (exponent + E8M0_BIAS)).view(torch.float8_e8m0fnu)
