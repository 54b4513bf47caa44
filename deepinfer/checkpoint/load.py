"""Loading a model: check everything, then allocate and fill one parameter after the other.

Peak memory is the model plus one tensor (none on CPU): tensor data is read straight into the parameters.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm

from deepinfer.checkpoint.checksums import check_checksums
from deepinfer.checkpoint.locate import locate_checkpoint
from deepinfer.checkpoint.safetensors_file import DTYPE_NAMES, StoredTensor, open_checkpoint
from deepinfer.checkpoint.tensor_map import TensorSpec, is_ignored, meta_model, tensor_specs
from deepinfer.config import ModelConfig
from deepinfer.config_json import load_config
from deepinfer.dims import Int, Tensor
from deepinfer.errors import CapacityError, ConfigError, TensorMismatch
from deepinfer.model.engram import EngramTable
from deepinfer.model.linear import StoredMatrix
from deepinfer.model.numerics import Numerics, Ops, precision_named, reference_ops
from deepinfer.model.packed_weights import Agree, alone, pack_model
from deepinfer.model.transformer import Transformer
from deepinfer.ops.ngram_hash import hash_primes
from deepinfer.token_map import build_token_map
from deepinfer.tokenizer import Tokenizer

ENGRAM_PLACES = ("device", "host", "mapped")
# A model whose decoded weights fit in this many bytes keeps them decoded: decoding at each use would dominate a small model.
EXPAND_LIMIT_BYTES = 2 * 2**30


def load_model(
    path: Path | str,
    precision: str = "native",
    device: torch.device | str | None = None,
    *,
    ops: Ops | None = None,
    layers: int | None = None,
    expert_ids: Sequence[int] | None = None,
    engram: str = "device",
    published_index_keys: bool = False,
    use_tqdm: bool = False,
    agree: Agree = alone,
) -> Transformer:
    """Load a checkpoint folder in the published format, or a preset that ships with the package.

    Args:
        precision: a name in `deepinfer.model.numerics.PRECISIONS`.
        layers: keep only the first `layers` backbone blocks (and no draft blocks), for looking at a part of a large model.
        expert_ids: routed backbone experts to hold; only their bytes are read.
        engram: where the Engram tables live: with the model, in host memory, or mapped from the file.
        agree: see `pack_model`.

    Raises:
        ConfigError, CheckpointError, TokenizerError: see the message; nothing large has been allocated by then.
    """
    folder = locate_checkpoint(path)
    config = load_config(folder)
    if engram not in ENGRAM_PLACES:
        raise ConfigError(f"engram = {engram!r}: expected one of {ENGRAM_PLACES}")
    if layers is not None:
        config = first_layers(config, layers)
    numerics = Numerics(precision=precision_named(precision), ops=ops or reference_ops(), published_index_keys=published_index_keys)
    if expert_ids is not None:
        expert_ids = tuple(expert_ids)
        outside = [i for i in expert_ids if not 0 <= i < config.moe.n_routed_experts]
        if outside or len(set(expert_ids)) != len(expert_ids):
            raise ConfigError(f"expert_ids: {outside or 'repeated ids'}; expected distinct ids below {config.moe.n_routed_experts}")
    model = meta_model(config, numerics, expert_ids)
    specs = list(tensor_specs(model))
    # A part of a model leaves tensors over by intent.
    stored, token_map = check_folder(folder, config, specs, complete=layers is None and expert_ids is None)

    target = torch.device(device) if device is not None else default_device()
    total = sum(stored[spec.name].nbytes for spec in specs)
    with refuse_what_does_not_fit(f"{folder}: its {total / 2**30:.1f} GiB of tensors", target):
        fill_parameters(model, specs, stored, target, engram, use_tqdm)
    return finish_model(model, token_map, target, agree)


def check_folder(
    folder: Path, config: ModelConfig, specs: list[TensorSpec], complete: bool
) -> tuple[dict[str, StoredTensor], Int[Tensor, " V"] | None]:
    """Everything that can be wrong with a folder, found by its headers and its tokenizer.

    Returns: the stored tensors, and the Engram token map if the model has an Engram.
    Raises: CheckpointError, TokenizerError, ConfigError.
    """
    check_engram_tables(config)
    stored = open_checkpoint(folder)
    check_tensors(folder, specs, stored, complete)
    check_checksums(folder)
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.check_against(config)
    return stored, build_token_map(tokenizer, config) if config.engram.layer_ids else None


def check_engram_tables(config: ModelConfig) -> None:
    """Raise ConfigError unless each Engram table has as many rows as its hash can address: the sum of its moduli."""
    e = config.engram
    if not e.layer_ids:
        return
    sums = tuple(sum(primes) for primes in hash_primes(e.layer_ids, e.max_ngram_size, e.n_heads, e.vocab_size))
    if sums != e.num_embeddings:
        raise ConfigError(
            f"engram_num_embeddings = {list(e.num_embeddings)}: the moduli that engram_vocab_size {e.vocab_size}, "
            f"engram_n_heads {e.n_heads} and engram_max_ngram_size {e.max_ngram_size} lead to add up to {list(sums)}"
        )


def finish_model(
    model: Transformer, token_map: Int[Tensor, " V"] | None, device: torch.device, agree: Agree = alone
) -> Transformer:
    """What is left when the parameters are there: the buffers, the token map, packed or decoded weights. Mutates `model`."""
    move_buffers(model, device)
    if token_map is not None:
        model.token_window.token_map = token_map.to(device)
    for module in model.modules():
        if isinstance(module, StoredMatrix | EngramTable):
            module.keep_scale_bytes()
    if model.numerics.ops.packs_weights:
        pack_model(model, agree=agree)
        if device.type == "cuda":
            # What packing worked in is of no size that anything else has.
            torch.cuda.empty_cache()
    else:
        expand_if_small(model, EXPAND_LIMIT_BYTES)
    return model.eval()


@contextmanager
def refuse_what_does_not_fit(what: str, device: torch.device) -> Iterator[None]:
    """Turn an allocation that fails inside into a CapacityError that begins with `what`."""
    try:
        yield
    except RuntimeError as error:
        # The CPU's allocator raises a plain RuntimeError.
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise CapacityError(f"{what} do not fit on {device}: {error}") from error
        raise


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found


def first_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The same model cut to its first backbone blocks, without draft blocks."""
    if not 1 <= layers <= config.n_layers:
        raise ConfigError(f"layers = {layers}: the model has {config.n_layers}")

    def below(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i for i in ids if i < layers)

    source, engram = config.indexer.candidate_source_layer, config.engram
    kept = below(engram.layer_ids)
    return replace(
        config,
        n_layers=layers,
        compress_ratios=config.compress_ratios[:layers],
        kv_source_layers=below(config.kv_source_layers),
        index_source_layers=below(config.index_source_layers),
        indexer=replace(config.indexer, candidate_source_layer=source if source < layers else -1),
        engram=replace(engram, layer_ids=kept, num_embeddings=engram.num_embeddings[: len(kept)]),
        draft=replace(config.draft, n_layers=0),
    )


def check_tensors(where: Path, specs: list[TensorSpec], stored: dict[str, StoredTensor], complete: bool) -> None:
    """Compare what the model needs with what the files have. Raises `TensorMismatch` with everything that is wrong."""
    missing, mismatched = [], []
    for spec in specs:
        found = stored.get(spec.name)
        expected = (DTYPE_NAMES[spec.dtype], spec.shape)
        if found is None:
            missing.append(spec.name)
        elif (found.dtype, found.shape) != expected:
            mismatched.append(f"{spec.name}: expected {expected[0]} {list(expected[1])}, got {found.dtype} {list(found.shape)}")
    known = {spec.name for spec in specs}
    unexpected = [name for name in stored if name not in known and not is_ignored(name)] if complete else []
    if missing or unexpected or mismatched:
        raise TensorMismatch(str(where), missing, unexpected, mismatched)


def fill_parameters(
    model: nn.Module,
    specs: list[TensorSpec],
    stored: dict[str, StoredTensor],
    device: torch.device,
    engram: str,
    use_tqdm: bool,
) -> None:
    """Allocate each parameter on its device and read its tensors into it. Mutates `model`."""
    by_parameter: dict[str, list[TensorSpec]] = defaultdict(list)
    for spec in specs:
        if spec.parameter is not None:
            by_parameter[spec.parameter].append(spec)
    total = sum(stored[spec.name].nbytes for spec in specs)
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=not use_tqdm) as progress:
        for name, parts in by_parameter.items():
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            is_table = ".engram.embed." in name
            if is_table and engram == "mapped":
                value = stored[parts[0].name].mapped()
            else:
                place = torch.device("cpu") if is_table and engram == "host" else device
                value = _read_parameter(module.get_parameter(attribute), parts, stored, place)
            setattr(module, attribute, nn.Parameter(value, requires_grad=False))
            progress.update(sum(stored[spec.name].nbytes for spec in parts))


def _read_parameter(
    meta: nn.Parameter, parts: list[TensorSpec], stored: dict[str, StoredTensor], device: torch.device
) -> torch.Tensor:
    value = torch.empty(meta.shape, dtype=meta.dtype, device=device)
    for spec in parts:
        destination = value if spec.member is None else value[spec.member]
        if device.type == "cpu":
            stored[spec.name].read_into(destination)
        else:
            staging = torch.empty(destination.shape, dtype=meta.dtype)
            stored[spec.name].read_into(staging)
            destination.copy_(staging)
    return value


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move what is computed from the config (rotary frequencies, hash constants, the token map) to the device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def expand_if_small(model: Transformer, limit_bytes: int) -> None:
    """Keep decoded float32 values beside the stored ones if all of them together stay under the limit. Mutates `model`."""
    matrices = [module for module in model.modules() if isinstance(module, StoredMatrix)]
    members = sum(m.in_features * m.out_features * (m.weight.shape[0] if m.weight.dim() == 3 else 1) for m in matrices)
    if members * torch.float32.itemsize <= limit_bytes:
        for matrix in matrices:
            matrix.expand(torch.float32)
