"""Device functions: packed words to tensor-core operands in registers, and the arithmetic of scales.

The plain twin of `fp8_tile` and `fp4_tile` is in the tests of `packing.py`, which reads the same words by the same rules.
Inline assembly is used where one instruction does what Triton would spell in many: `cvt` widens two e4m3 codes, `prmt` looks four
bytes up in a table of eight, `lop3` is any function of three words.
"""

import triton
import triton.language as tl

# Four e4m3 codes ($4) to float16, times the factor in both halves of $5.
FP8_TO_F16 = tl.constexpr(
    "{ .reg .b16 a,b; .reg .b32 x,y; mov.b32 {a,b},$4; cvt.rn.f16x2.e4m3x2 x,a; cvt.rn.f16x2.e4m3x2 y,b;"
    " mul.rn.f16x2 x,x,$5; mul.rn.f16x2 y,y,$5; mov.b32 {$0,$1},x; mov.b32 {$2,$3},y; }"
)
# The same to bfloat16. The code's bits are moved under the bfloat16 exponent, which gives the value times 2^-120.
FP8_TO_BF16 = tl.constexpr(
    "{ .reg .b32 x,y,s; prmt.b32 x,$4,0,0x1404; prmt.b32 y,$4,0,0x3424;"
    " and.b32 s,x,0x80008000; shr.u32 x,x,4; lop3.b32 x,x,0x07F007F0,s,0xEA;"
    " and.b32 s,y,0x80008000; shr.u32 y,y,4; lop3.b32 y,y,0x07F007F0,s,0xEA;"
    " mul.rn.bf16x2 x,x,$5; mul.rn.bf16x2 y,y,$5; mov.b32 {$0,$1},x; mov.b32 {$2,$3},y; }"
)
# Eight e2m1 codes ($8) to float16. Magnitudes select bytes of the table ($9, $10), already scaled; signs are or-ed in.
FP4_TO_F16 = tl.constexpr(
    "{ .reg .b32 t,p,q,z; and.b32 t,$8,0x77777777; prmt.b32 p,$9,$10,t; shr.u32 t,t,16; prmt.b32 q,$9,$10,t;"
    " lop3.b32 p,p,$8,0x80808080,0xF8; shl.b32 t,$8,4; lop3.b32 q,q,t,0x80808080,0xF8;"
    " prmt.b32 z,p,0,0x1404; mov.b32 {$0,$1},z; prmt.b32 z,p,0,0x3424; mov.b32 {$2,$3},z;"
    " prmt.b32 z,q,0,0x1404; mov.b32 {$4,$5},z; prmt.b32 z,q,0,0x3424; mov.b32 {$6,$7},z; }"
)
# High bytes of float16 0, .5, 1, 1.5 and 2, 3, 4, 6, all times 2^-13. Raising a byte by 4 doubles the value; zero stays zero.
FP4_TABLE_LOW = tl.constexpr(0x0A080400)
FP4_TABLE_HIGH = tl.constexpr(0x12100E0C)
FLOAT8_E4M3_MAX = tl.constexpr(448.0)
FP8_AMAX_FLOOR = tl.constexpr(1e-4)
EXPONENT_MASK = tl.constexpr(0x7F800000)


@triton.jit
def power_of_two(biased):
    """2^(biased - 127) for an int32 exponent from 1 to 254."""
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def is_finite(v):
    """Elementwise, for float32: false for NaN and infinities."""
    return (v.to(tl.int32, bitcast=True) & EXPONENT_MASK) != EXPONENT_MASK


@triton.jit
def channel_place(k, INSTRUCTION: tl.constexpr):
    """`packing.channel_places` for a tensor of channels."""
    if INSTRUCTION == 2:
        return (k & -128) | ((k & 28) << 2) | ((k & 96) >> 3) | (k & 3)
    else:
        return (k & -128) | ((k & 28) << 2) | ((k & 2) << 2) | ((k & 96) >> 4) | (k & 1)


@triton.jit
def fp8_scale(amax):
    """Biased exponent of an activation block's scale: `ops.quantize.ue8m0_scale` of the floored amax."""
    bits = (tl.maximum(amax, FP8_AMAX_FLOOR) * (1.0 / FLOAT8_E4M3_MAX)).to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def fp8_code(v, scale):
    """`v` in units of its block's scale, rounded to e4m3, as float32. NaN stays NaN."""
    # Multiplying by the reciprocal of a power of two is the same division.
    units = v * power_of_two(254 - scale)
    low = tl.maximum(units, -FLOAT8_E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(low, FLOAT8_E4M3_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv).to(tl.float32)


@triton.jit
def fp8_tile(w, s, N16: tl.constexpr, V: tl.constexpr, BF16: tl.constexpr):
    """int32 words `[V*2*N16*32, 4]` (rows v, rr, n16, g, q) and scale words `[N16*32]` to a wgmma operand `[N16*16, 64*V]`."""
    w3 = tl.reshape(w, (V * 2, N16 * 32, 4))
    s3 = tl.reshape(s, (1, N16 * 32, 1))
    if BF16:
        e0, e1, e2, e3 = tl.inline_asm_elementwise(
            FP8_TO_BF16, "=h,=h,=h,=h,r,r", [w3, s3], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=1
        )
    else:
        e0, e1, e2, e3 = tl.inline_asm_elementwise(
            FP8_TO_F16, "=h,=h,=h,=h,r,r", [w3, s3], dtype=(tl.float16,) * 4, is_pure=True, pack=1
        )
    a = tl.join(tl.join(e0, e1), tl.join(e2, e3))
    a = tl.reshape(a, (V, 2, N16, 8, 4, 4, 2, 2))  # v rr n16 g q j i h
    a = tl.permute(a, (2, 1, 3, 0, 5, 7, 4, 6))  # n16 rr g | v j h q i
    return tl.reshape(a, (N16 * 16, 64 * V))


@triton.jit
def fp4_codes(w, raised):
    """Words of eight codes to float16 `[*w.shape, 2, 2, 2]` (i, h, jj), given what raises the exponent of the decoder's table."""
    e0, e1, e2, e3, e4, e5, e6, e7 = tl.inline_asm_elementwise(
        FP4_TO_F16,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
        [w, raised * 0x01010100 + FP4_TABLE_LOW, raised * 0x01010101 + FP4_TABLE_HIGH],
        dtype=(tl.float16,) * 8,
        is_pure=True,
        pack=1,
    )
    return tl.join(tl.join(tl.join(e0, e1), tl.join(e2, e3)), tl.join(tl.join(e4, e5), tl.join(e6, e7)))


@triton.jit
def fp4_tile(w, s, N16: tl.constexpr):
    """int32 words `[4*N16*32, 4]` (u, rr, n16, g, q), scales `[N16*32]` (bytes u, rr) to an mma.sync operand `[N16*16, 256]`."""
    raised = (tl.reshape(s, (1, N16 * 32, 1)) >> tl.reshape(tl.arange(0, 4) * 8, (4, 1, 1))) & 0xFF
    a = fp4_codes(tl.reshape(w, (4, N16 * 32, 4)), raised)
    a = tl.reshape(a, (2, 2, N16, 8, 4, 4, 2, 2, 2))  # u rr n16 g q j i h jj
    a = tl.permute(a, (2, 1, 3, 0, 5, 8, 4, 7, 6))  # n16 rr g | u j jj q h i
    return tl.reshape(a, (N16 * 16, 256))


@triton.jit
def fp4_run(w, s, N16: tl.constexpr):
    """int32 words `[2*N16*32, 4]` (rr, n16, g, q) of 128 channels, scales `[N16*32]` (byte rr) to a wgmma operand.

    The same words as for mma.sync; only the order of channels in the operand differs, as that of the activations does.
    """
    raised = (tl.reshape(s, (1, N16 * 32, 1)) >> tl.reshape(tl.arange(0, 2) * 8, (2, 1, 1))) & 0xFF
    a = fp4_codes(tl.reshape(w, (2, N16 * 32, 4)), raised)
    a = tl.reshape(a, (2, N16, 8, 4, 4, 2, 2, 2))  # rr n16 g q j i h jj
    a = tl.permute(a, (1, 0, 2, 4, 7, 6, 3, 5))  # n16 rr g | j jj h q i
    return tl.reshape(a, (N16 * 16, 128))


@triton.jit
def wait_for_product(acc):
    """A no-op on an accumulator that makes the compiler wait for wgmma before the next tile is decoded.

    Without it Triton 3.6 lets the decoder overwrite registers that a running wgmma still reads: wrong sums in about one run of
    ninety (triton-lang/triton issue 9433, mended by pull request 9514).
    """
    return tl.inline_asm_elementwise("// $0 $1", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
