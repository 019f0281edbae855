"""Triton helpers shared by the kernels: rounding, E4M3 by hand, code words, zero codes."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


@triton.constexpr_function
def of_target(asm):
    """A difference of BF16 needs compute capability 9. Below, a product with -1 is added, as exact;
    on 9.0 that took a register more, and 69 instructions a step of decode_spans.py in place of 67.
    """
    if cuda_capability_geq(9):
        return asm
    product = ".reg .b32 c; mov.b32 c, 0xBF80BF80; fma.rn.bf16x2 a, b, c, a;"
    return asm.replace("sub.rn.bf16x2 a, a, b;", product)


@triton.jit
def round_half_up(x):
    """floor(x + 0.5), the rounding of every quantizer here (the interpreter has no rint)."""
    return tl.floor(x + 0.5)


@triton.jit
def safe_divide(x, y):
    """x / y correctly rounded, 0 where y is not positive."""
    return tl.where(y > 0, tl.div_rn(x, tl.where(y > 0, y, 1.0)), 0.0)


@triton.jit
def round_to_bf16(x):
    """float32 -> float32 that BF16 holds, ties to even; by bits, for the interpreter."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_byte(x):
    """float32 x >= 0 -> the byte of float8_e4m3fn(x), saturating at 448, ties to even.

    By hand because the interpreter's cast differs from torch's by up to 4 and overflows to 320.
    Normal numbers keep the top 3 mantissa bits of the float; below 2^-6 the step is 2^-9, which
    is the spacing of float32 around 1.5 * 2^14. 960 = (127 - 7) << 3 moves the exponent bias.
    """
    x = tl.minimum(x, 448.0)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    steps = ((x + 24576.0) - 24576.0) * 512.0
    return tl.where(x < 0.015625, steps.to(tl.int32), normal)


@triton.jit
def e4m3_value(byte):
    """int32 byte of a non-negative float8_e4m3fn -> float32."""
    normal = ((byte + 960) << 20).to(tl.float32, bitcast=True)
    return tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)


@triton.jit
def pack_bits(codes, ROWS: tl.constexpr, PER_ROW: tl.constexpr, BITS: tl.constexpr = 2):
    """int32 codes, ROWS * PER_ROW of them -> int32 [ROWS], BITS each, first one lowest."""
    shifts = BITS * tl.arange(0, PER_ROW)
    return tl.sum(tl.reshape(codes, (ROWS, PER_ROW)) << shifts[None, :], axis=1)


@triton.jit
def store_codes(
    codes_ptr, codes, at, valid, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr = 2,
):  # fmt: skip
    """int32 codes [BLOCK_N, ..] of WIDTH channels as little-endian words, in rows of D channels.

    at: int64 row of each token; codes_ptr: where the channels begin in row 0.
    """
    words: tl.constexpr = WIDTH * BITS // 32
    packed = pack_bits(codes, BLOCK_N * words, 32 // BITS, BITS)
    place = at[:, None] * (D * BITS // 32) + tl.arange(0, words)[None, :]
    tl.store(codes_ptr + place, tl.reshape(packed, (BLOCK_N, words)), mask=valid[:, None])


@triton.jit
def residual_tile(
    x_ptr, x_stride_h, x_stride_n, ids_ptr, centroids_ptr, head, rows, n_tokens, K,
    D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x - mu[id] of one token block in float32 [BLOCK_N, D / GROUP, GROUP]; 0 beyond the end."""
    valid = rows < n_tokens
    channels = tl.arange(0, D // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    ids = tl.load(ids_ptr + head * n_tokens + rows, mask=valid, other=0).to(tl.int32)
    x = tl.load(
        (x_ptr + head * x_stride_h + rows * x_stride_n)[:, None, None] + channels[None, :, :],
        mask=valid[:, None, None], other=0.0,
    ).to(tl.float32)  # fmt: skip
    c = tl.load(
        centroids_ptr + head * K * D + ids[:, None, None] * D + channels[None, :, :],
        mask=valid[:, None, None], other=0.0,
    ).to(tl.float32)  # fmt: skip
    return x - c


@triton.jit
def as_operand(x, DOT_DTYPE: tl.constexpr):
    """A loaded tile as an operand of a dot, unchanged when it has that type already.

    Through float32 otherwise, because the interpreter cannot compute in BF16.
    """
    return x if x.dtype == DOT_DTYPE else x.to(tl.float32).to(DOT_DTYPE)


@triton.jit
def split_operand(x, DOT_DTYPE: tl.constexpr):
    """float32 x -> its leading part as DOT_DTYPE, and the float32 rest.

    Tensor cores multiply BF16 exactly and add in float32: two parts carry 16 bits of mantissa and
    three all 24, where TF32 keeps 10. With a float32 DOT_DTYPE (interpreter) the rest is 0.
    """
    part = x.to(DOT_DTYPE)
    return part, x - part.to(tl.float32)


# Loaders of a block of tokens: pointers are those of its first token, so that offsets inside a
# block are 32 bits whatever the length; rows counts from 0, valid says which are there.


@triton.jit
def code_words(codes_ptr, rows, valid, D: tl.constexpr, BITS: tl.constexpr = 2):
    """Codes, int32 [BLOCK_N, D * BITS / 32]: one word per 16 channels, or with 4 bits per 8."""
    words: tl.constexpr = D * BITS // 32
    place = rows[:, None] * words + tl.arange(0, words)[None, :]
    return tl.load(codes_ptr + place, mask=valid[:, None], other=0)


@triton.jit
def code_levels(codes_ptr, zero, rows, valid, D: tl.constexpr, BITS: tl.constexpr = 2):
    """Codes less a zero, float32 [BLOCK_N, words, channels of a word]; zero: float32 [.., words].

    A code is put into the last bits of 2^23, which then go with the zero: no conversion.
    """
    return word_levels(code_words(codes_ptr, rows, valid, D, BITS), zero, BITS)


@triton.jit
def word_levels(packed, zero, BITS: tl.constexpr = 2):
    """The same of words that are loaded."""
    shifts = BITS * tl.arange(0, 32 // BITS)
    codes = ((packed[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)) | 0x4B000000
    return codes.to(tl.float32, bitcast=True) - (zero + 8388608.0)[:, :, None]


@triton.jit
def channels_of(D: tl.constexpr, BITS: tl.constexpr = 2):
    """Channel numbers laid out like the codes, [1, D / 16, 16], or with 4 bits [1, D / 8, 8]."""
    wide: tl.constexpr = 32 // BITS
    return (tl.arange(0, D // wide)[:, None] * wide + tl.arange(0, wide)[None, :])[None, :, :]


@triton.jit
def store_values(
    out_ptr, stride_n, values, rows, valid, D: tl.constexpr, BITS: tl.constexpr = 2
):  # fmt: skip
    """Values laid out like the codes to the rows of out, in its type."""
    ptrs = out_ptr + rows[:, None, None] * stride_n + channels_of(D, BITS)
    tl.store(ptrs, values.to(out_ptr.dtype.element_ty), mask=valid[:, None, None])


@triton.jit
def centroid_rows(
    ids_ptr, centroids_ptr, rows, valid, D: tl.constexpr, STAGES: tl.constexpr = 1
):  # fmt: skip
    """Centroid of every token, bfloat16 [BLOCK_N, D / 16, 16]. centroids_ptr: of the head.

    ids_ptr: of the first token; a token has as many ids as there are stages.
    """
    ids = tl.load(ids_ptr + rows * STAGES, mask=valid, other=0).to(tl.int32)
    return tl.load(centroids_ptr + ids[:, None, None] * D + channels_of(D))


@triton.jit
def scale_bytes(
    scales_ptr, zeros_ptr, first, rows, valid, D: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
):  # fmt: skip
    """Scale code of every group, uint8 [BLOCK_N, D / GROUP], and with ZEROS the byte that its zero
    is in; else the scale code again. Pointers of the head; first: as below."""
    groups: tl.constexpr = D // GROUP
    place = rows[:, None] * groups + tl.arange(0, groups)[None, :]
    begin = tl.cast(first, tl.int64) * groups
    scales = tl.load(scales_ptr + begin + place, mask=valid[:, None], other=0)
    zeros = scales
    if ZEROS:
        flat = place + (begin % 4).to(tl.int32)
        zeros = tl.load(zeros_ptr + begin // 4 + flat // 4, mask=valid[:, None], other=0)
    return scales, zeros


@triton.jit
def of_words(x, D: tl.constexpr, GROUP: tl.constexpr):
    """[BLOCK_N, D / GROUP] -> [BLOCK_N, D / 16]: what a group has, of each of its words.

    So few elements are loaded by every thread that needs them; a byte for every word went through
    shared memory, behind two barriers of all warps for each tile.
    """
    n: tl.constexpr = x.shape[0]
    wide: tl.constexpr = GROUP // 16
    return tl.reshape(tl.broadcast_to(x[:, :, None], (n, D // GROUP, wide)), (n, D // 16))


@triton.jit
def affine_scales(scales, zeros, first, step, rows, D: tl.constexpr, GROUP: tl.constexpr):
    """Scale and zero of every group, float32 [BLOCK_N, D / GROUP], from what scale_bytes loaded.

    A block's zeros may begin inside a byte; first: the block's first token; step: secondary / 255,
    of every token or of all.
    """
    groups: tl.constexpr = D // GROUP
    begin = tl.cast(first, tl.int64) * groups
    flat = rows[:, None] * groups + tl.arange(0, groups)[None, :] + (begin % 4).to(tl.int32)
    zero = ((zeros.to(tl.int32) >> (2 * (flat % 4))) & 3).to(tl.float32)
    return scales.to(tl.float32) * step, zero
