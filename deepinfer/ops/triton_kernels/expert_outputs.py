"""What stands behind the two products of an expert: the device function that narrow and wide tiles share."""

import triton
import triton.language as tl

from deepinfer.ops.triton_kernels.decode import channel_place, fp8_code, fp8_scale, power_of_two


@triton.jit
def store_outputs(
    acc,
    exponent,  # of the rows
    tile,
    row,
    place,
    is_token,
    pair,
    factor_ptr,
    y_ptr,
    weight_ptr,
    N,
    LIMIT: tl.constexpr,
    UP: tl.constexpr,
    TOPK: tl.constexpr,
    INSTRUCTION: tl.constexpr,
):
    """From float32 sums `[ROWS, TOKENS]` of the tokens at `place` in the pairs' order to what is stored."""
    ROWS: tl.constexpr = acc.shape[0]
    TOKENS: tl.constexpr = acc.shape[1]
    acc = acc * power_of_two(exponent)[:, None]
    if UP:
        acc = acc * tl.load(factor_ptr + pair // TOPK, mask=is_token, other=0.0)[None, :]
        gate, up = tl.split(tl.permute(tl.reshape(acc, (ROWS // 16, 2, 8, TOKENS)), (0, 2, 3, 1)))
        gate = tl.minimum(gate.to(tl.bfloat16).to(tl.float32), LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up.to(tl.bfloat16).to(tl.float32), -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        weight = tl.load(weight_ptr + pair, mask=is_token, other=0.0)
        hidden = (gate / (1.0 + tl.exp(-gate)) * up) * weight[None, None, :]
        hidden = tl.reshape(hidden.to(tl.bfloat16).to(tl.float32), (ROWS // 64, 32, TOKENS))
        scale = fp8_scale(tl.max(tl.abs(hidden), 1))
        operand = fp8_code(hidden, scale[:, None, :]) * power_of_two(scale + 8)[:, None, :]
        k = tile * (ROWS // 2) + tl.reshape(tl.arange(0, ROWS // 2), (ROWS // 64, 32, 1))
        target = y_ptr + tl.reshape(place, (1, 1, TOKENS)) * (N // 2) + channel_place(k, INSTRUCTION)
        tl.store(target, operand.to(tl.float16), mask=tl.reshape(is_token, (1, 1, TOKENS)))
    else:
        # 2^-8: the scale of what stands between.
        tl.store(y_ptr + pair[None, :] * N + row[:, None], (acc * 0.00390625).to(tl.bfloat16), mask=is_token[None, :])
