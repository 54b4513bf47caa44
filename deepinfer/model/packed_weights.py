"""Repacking a loaded model for the Triton kernels, once and in place: a matrix is stored in one layout at a time.

`values()` of a packed matrix unpacks it, so every other reader goes on as before. A matrix that cannot be packed exactly stays
as it is, and the log says why.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from deepinfer.dims import Int, Shaped, Tensor, UInt8
from deepinfer.errors import ConfigError
from deepinfer.model.attention import Attention
from deepinfer.model.linear import Linear, StoredMatrix
from deepinfer.model.moe import Experts, SharedExpert
from deepinfer.model.transformer import Transformer
from deepinfer.ops.formats import BLOCK
from deepinfer.ops.triton_kernels.packing import (
    CHECKPOINT_ORDER,
    FP4_CHANNELS,
    FP4_ROWS,
    FP8_CHANNELS,
    FP8_ROWS,
    LARGEST_HIDDEN,
    OPERAND_ORDER,
    PackedMatrix,
    fp4_obstacle,
    fp8_obstacle,
    hidden_bound,
    interleave_rows,
    layout_for,
    pack_fp4,
    pack_fp8,
    pad_to_tiles,
    separate_rows,
    unpack_fp4,
    unpack_fp8,
)

EXPERTS_AT_ONCE = 16  # packing needs a few times their bytes beside them

# Why each stack of experts, by its name, cannot be packed, or None. `Agree` makes what holds everywhere of what holds here.
Obstacles = dict[str, str | None]
Agree = Callable[[Obstacles], Obstacles]

logger = logging.getLogger(__name__)


class PackedFP8(nn.Module):
    """A packed FP8 matrix, or a run of rows of one that shares its memory.

    Attributes:
        shape: rows and channels of the matrix; the packed one may have more, of zeros.
        bf16: packed for activations that stay bfloat16.
        arrivals: the kernel's counters, zero between its calls.
    """

    words: Tensor
    scales: Tensor
    exponents: Tensor
    arrivals: Tensor

    def __init__(self, packed: PackedMatrix, shape: tuple[int, int], bf16: bool = False) -> None:
        super().__init__()
        self.shape, self.bf16 = shape, bf16
        for name, tensor in packed._asdict().items():
            self.register_buffer(name, tensor, persistent=False)
        self.register_buffer("arrivals", torch.zeros_like(packed.words[:, 0, 0]), persistent=False)

    @property
    def padded_rows(self) -> int:
        return self.words.shape[0] * FP8_ROWS

    @property
    def padded_channels(self) -> int:
        return self.words.shape[1] * 64

    def tensors(self) -> PackedMatrix:
        return PackedMatrix(self.words, self.scales, self.exponents)

    def rows(self, start: int, end: int, shape: tuple[int, int]) -> "PackedFP8":
        """Packed rows `[start, end)`, both multiples of 64, in the same memory."""
        words, scales = self.words[start // 64 : end // 64], self.scales[start // 32 : end // 32]
        return PackedFP8(PackedMatrix(words, scales, self.exponents[start:end]), shape, self.bf16)

    def unpack(self, part: None = None) -> tuple[Shaped[Tensor, "N K"], UInt8[Tensor, "Nb Kb"]]:
        """Weight and scale bytes in the checkpoint's layout."""
        weight, scale = unpack_fp8(self.tensors(), self.bf16)
        n, k = self.shape
        return weight[:n, :k], scale[: -(-n // BLOCK), : -(-k // BLOCK)]


class PackedFP4(nn.Module):
    """A packed stack of FP4 matrices, or one of two whose rows are interleaved in it (`place` 0 and 1).

    Attributes:
        shape: rows and channels of a member; the packed one may have more, of zeros.
    """

    words: Tensor
    scales: Tensor
    exponents: Tensor

    def __init__(self, packed: PackedMatrix, shape: tuple[int, int], place: int | None = None) -> None:
        super().__init__()
        self.shape, self.place = shape, place
        for name, tensor in packed._asdict().items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def padded_channels(self) -> int:
        return self.words.shape[2] * FP4_CHANNELS

    def tensors(self) -> PackedMatrix:
        return PackedMatrix(self.words, self.scales, self.exponents)

    def unpack(self, part: int | Int[Tensor, " ids"] | None = None) -> tuple[Shaped[Tensor, "*s N half"], UInt8[Tensor, "*s N Kb"]]:
        """Weight and scale bytes in the checkpoint's layout, of the whole stack or of some members."""
        packed = self.tensors() if part is None else PackedMatrix(*(t[part] for t in self.tensors()))
        weight, scale = unpack_fp4(packed)
        if self.place is not None:
            weight, scale = separate_rows(weight)[self.place], separate_rows(scale)[self.place]
        n, k = self.shape
        return weight[..., :n, : k // 2], scale[..., :n, : -(-k // BLOCK)]


def alone(obstacles: Obstacles) -> Obstacles:
    """One process has nobody to agree with."""
    return obstacles


def pack_model(model: Transformer, layout: str | None = None, agree: Agree = alone) -> int:
    """Bring every matrix into the layout that the device's kernels read. Mutates `model`; returns how many parts were refused.

    Only `native` has kernels; in other precisions nothing changes and nothing counts.

    Args:
        layout: of `packing.LAYOUTS`; by default the one for the model's device. In the checkpoint's layout only wo_a is packed,
            whose activations are not quantised.
        agree: called once; of processes that hold different experts all or none may pack a layer's.

    Raises: ConfigError for experts that cannot be packed in batch-invariant arithmetic, with nothing packed yet.
    """
    if not model.numerics.precision.quantize_activations:
        return 0
    if layout is None:
        device = model.device
        layout = layout_for(torch.cuda.get_device_capability(device)) if device.type == "cuda" else OPERAND_ORDER
    in_place = layout == CHECKPOINT_ORDER
    obstacle = marking_obstacle if in_place else packing_obstacle
    obstacles = agree({name: obstacle(stack) for name, stack in model.named_modules() if isinstance(stack, Experts)})
    for name, reason in obstacles.items():
        if reason is not None and model.numerics.ops.batch_invariant:
            raise ConfigError(f"batch_invariant = True: {name} cannot be packed for the kernels, because {reason}")
    refused = 0
    for name, reason in _arrange(model, in_place, obstacles):
        if reason is not None:
            refused += 1
            logger.info("%s stays in its checkpoint layout: %s", name, reason)
    return refused


def _arrange(model: Transformer, in_place: bool, obstacles: Obstacles) -> Iterator[tuple[str, str | None]]:
    """Pack, or with `in_place` mark, each part of the model; its name, and why that could not be done, or None."""
    linears = mark_linears if in_place else pack_linears
    done: set[StoredMatrix] = set()
    # Containers come before what they contain, so that matrices of one input are packed together.
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            yield name, pack_linears([module.wo_a], module.config.o_groups)
            yield name, linears([module.wq_a, module.wkv])
            done |= {module.wo_a, module.wq_a, module.wkv}
        elif isinstance(module, SharedExpert):
            yield name, linears([module.w1, module.w3])
            done |= {module.w1, module.w3}
        elif isinstance(module, Experts):
            if obstacles[name] is None:
                (mark_experts if in_place else pack_experts)(module)
            yield name, obstacles[name]
        elif isinstance(module, Linear) and module not in done:
            yield name, linears([module])


def mark_linears(matrices: Sequence[StoredMatrix]) -> str | None:
    """Give FP8 matrices to the block-scaled kernel as they are. Returns: why not, or None."""
    quantized = [matrix for matrix in matrices if matrix.fmt == "fp8"]
    for matrix in quantized:
        if matrix.in_features % FP8_CHANNELS:
            return f"its {matrix.in_features} channels are not a multiple of {FP8_CHANNELS}"
    for matrix in quantized:
        matrix.block_scaled = True
    return None


def marking_obstacle(stack: Experts) -> str | None:
    """Why FP4 experts do not fill the block-scaled kernel's tiles, or None."""
    if not _is_packable(stack):
        return None
    d, f = stack.w1.in_features, stack.w1.out_features
    if d % FP4_ROWS or f % FP4_ROWS:
        return f"its sizes {d} and {f} are not multiples of {FP4_ROWS}"
    if stack.swiglu_limit <= 0:
        return "its kernels clamp, and swiglu_limit says not to"
    return None


def mark_experts(stack: Experts) -> None:
    """Give a stack of FP4 experts without a `marking_obstacle` to the block-scaled kernel; bf16 experts are left alone."""
    if _is_packable(stack):
        for matrix in (stack.w1, stack.w2, stack.w3):
            matrix.block_scaled = True


def _is_packable(stack: Experts) -> bool:
    return stack.w1.fmt == "fp4" and bool(stack.expert_ids)


def pack_linears(matrices: Sequence[StoredMatrix], groups: int = 0) -> str | None:
    """Pack FP8 matrices that share an input as one, each also a part of it; bf16 matrices are left alone.

    Args:
        groups: if not 0, the matrix is for `forward_groups`, whose activations are not rounded.
    Returns: why they cannot be packed, or None. Mutates the matrices unless there is a reason.
    """
    if any(matrix.fmt != "fp8" for matrix in matrices):
        return None
    bf16 = groups > 0
    if bf16 and matrices[0].out_features // groups % FP8_ROWS:
        return f"its groups have {matrices[0].out_features // groups} rows, not a multiple of {FP8_ROWS}"
    padded = [pad_to_tiles(m.weight, m.scale.view(torch.uint8), FP8_ROWS, FP8_CHANNELS) for m in matrices]
    for stored in padded:
        if reason := fp8_obstacle(*stored, bf16):
            return reason
    packed = [pack_fp8(*stored, bf16) for stored in padded]
    joined = PackedMatrix(*(torch.cat(tensors) for tensors in zip(*packed, strict=True)))
    whole = PackedFP8(joined, (sum(m.out_features for m in matrices), matrices[0].in_features), bf16)
    start = 0
    for matrix, (weight, _) in zip(matrices, padded, strict=True):
        end = start + weight.shape[0]
        shape = matrix.out_features, matrix.in_features
        matrix.hold(whole if len(matrices) == 1 else whole.rows(start, end, shape))
        matrix.joined = whole if len(matrices) > 1 else None
        start = end
    return None


def packing_obstacle(stack: Experts) -> str | None:
    """Why a stack of FP4 experts cannot be packed exactly, or None. It depends on the values of the experts that are held here."""
    if not _is_packable(stack):
        return None
    bound = hidden_bound(stack.swiglu_limit, stack.largest_weight)
    if bound > LARGEST_HIDDEN:
        return f"values between the products may reach {bound:g}, more than {LARGEST_HIDDEN:g}"
    for matrix in (stack.w1, stack.w3, stack.w2):
        for part in _parts_of(stack):
            if reason := fp4_obstacle(*_padded(matrix, part)):
                return reason
    return None


def pack_experts(stack: Experts) -> None:
    """Pack a stack of FP4 experts without a `packing_obstacle`, gate and up interleaved; bf16 experts are left alone.

    Mutates the stack.
    """
    if not _is_packable(stack):
        return
    inner, outer = (stack.w1.out_features, stack.w1.in_features), (stack.w2.out_features, stack.w2.in_features)
    up = _pack_parts((stack.w1, stack.w3), _parts_of(stack))
    stack.w1.hold(PackedFP4(up, inner, 0))
    stack.w3.hold(PackedFP4(up, inner, 1))
    stack.w2.hold(PackedFP4(_pack_parts((stack.w2,), _parts_of(stack)), outer))


def _parts_of(stack: Experts) -> list[slice]:
    return [slice(start, start + EXPERTS_AT_ONCE) for start in range(0, len(stack.expert_ids), EXPERTS_AT_ONCE)]


def _padded(matrix: StoredMatrix, part: slice) -> tuple[Shaped[Tensor, "s N half"], UInt8[Tensor, "s N Kb"]]:
    """Some members, with a multiple of the channels' tile in both directions: rows of one are channels of the next."""
    return pad_to_tiles(matrix.weight[part], matrix.scale.view(torch.uint8)[part], FP4_CHANNELS, FP4_CHANNELS)


def _pack_parts(matrices: tuple[StoredMatrix, ...], parts: list[slice]) -> PackedMatrix:
    """Some experts at a time, straight into their places."""
    result: PackedMatrix | None = None
    for part in parts:
        weights, scales = zip(*(_padded(matrix, part) for matrix in matrices), strict=True)
        if len(matrices) == 2:
            packed = pack_fp4(interleave_rows(*weights), interleave_rows(*scales))
        else:
            packed = pack_fp4(weights[0], scales[0])
        if result is None:
            count = matrices[0].weight.shape[0]
            if torch.cuda.is_initialized():
                # Else it would take a part of larger memory that was freed before, and the rest of that would be of no use.
                torch.cuda.empty_cache()
            result = PackedMatrix(*(t.new_empty(count, *t.shape[1:]) for t in packed))
        for place, tensor in zip(result, packed, strict=True):
            place[part] = tensor
    assert result is not None
    return result
