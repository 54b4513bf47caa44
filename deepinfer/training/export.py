"""Write a trained state as a checkpoint in the published tensor names and formats."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from deepinfer.checkpoint.tensor_map import meta_model, stored_specs
from deepinfer.checkpoint.write import save_checkpoint
from deepinfer.dims import Float, Shaped, Tensor
from deepinfer.errors import ConfigError
from deepinfer.model.engram import EngramTable
from deepinfer.model.linear import StoredMatrix
from deepinfer.model.transformer import Transformer
from deepinfer.ops.formats import quantize_fp4, quantize_fp8, quantize_rows_fp8
from deepinfer.tokenizer import Tokenizer
from deepinfer.training.pretrain import build_model

SHARD_BYTES = 15 * 2**20


def stored_parameters(model: Transformer) -> dict[str, Shaped[Tensor, "..."]]:
    """Every parameter of the inference model, in its stored dtype, from the masters of `model`."""
    masters = {name: p.detach().cpu() for name, p in model.named_parameters()}
    target = meta_model(model.config)
    encoded: dict[str, Tensor] = {}
    for name, module in target.named_modules():
        if isinstance(module, StoredMatrix | EngramTable):
            weight, scale = encode(module, masters[f"{name}.weight"])
            encoded[f"{name}.weight"] = weight
            if scale is not None:
                encoded[f"{name}.scale"] = scale
    for name, parameter in target.named_parameters():
        if name not in encoded:
            encoded[name] = masters[name].to(parameter.dtype)
    return encoded


def encode(module: nn.Module, values: Float[Tensor, "..."]) -> tuple[Tensor, Tensor | None]:
    """Weight and scale of a matrix, stack or table in the format that `module` stores."""
    if isinstance(module, EngramTable):
        return quantize_rows_fp8(values)
    assert isinstance(module, StoredMatrix)
    if module.fmt == "fp4":
        return quantize_fp4(values)
    return quantize_fp8(values) if module.fmt == "fp8" else (values.bfloat16(), None)


def checkpoint_tensors(model: Transformer) -> Iterator[tuple[str, Shaped[Tensor, "..."]]]:
    """Published names and stored tensors. Image tokens, of which there are none, would be routed as text."""
    parameters = stored_parameters(model)
    for spec in stored_specs(model.config):
        source = spec.parameter or spec.name.removesuffix("_vl")
        value = parameters[source]
        yield spec.name, value if spec.member is None else value[spec.member].contiguous()


def export(model: Transformer, data: Path, folder: Path, max_shard_bytes: int = SHARD_BYTES) -> None:
    """Write `folder`; `data` holds the tokenizer's files, which go along."""
    settings = json.loads((data / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer = (data / "tokenizer.json").read_text(encoding="utf-8")
    save_checkpoint(folder, model.config, checkpoint_tensors(model), tokenizer, settings, max_shard_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with the tokenizer")
    parser.add_argument("--state", type=Path, required=True, metavar="FILE", help="distill.pt, or pretrain.pt to look at early")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="checkpoint folder to write")
    parser.add_argument("--shard-mib", type=float, default=SHARD_BYTES / 2**20, help="largest file (default 15)")
    options = parser.parse_args()
    model = build_model(Tokenizer.from_folder(options.data), torch.device("cpu"), torch.float32, seed=0)
    if not options.state.exists():
        raise ConfigError(f"{options.state}: no such state")
    model.load_state_dict(torch.load(options.state, map_location="cpu", weights_only=True)["model"])
    export(model, options.data, options.out, int(options.shard_mib * 2**20))
    total = sum(path.stat().st_size for path in options.out.iterdir())
    print(f"{options.out}: {total} bytes in {len(list(options.out.iterdir()))} files")


if __name__ == "__main__":
    main()
