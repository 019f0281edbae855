"""The decoding warps of kernels.flash_hopper: packed tokens into shared memory, tile after tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

# Triton 3.6 and those after it name these differently. The first: all threads of the partition.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_SHARED = gl.shared_memory_descriptor
_retyped = _SHARED.reinterpret if hasattr(_SHARED, "reinterpret") else _SHARED._reinterpret

# Two channels at once, as in kernels.flash: codes into the mantissas of 128.0, less 128 + zero,
# times the scale, plus the centroid; exact up to the multiply-add. The odd one's code lies two bits
# higher, so its zero counts four times and its scale a quarter: that saves parting them.
_LEVELS_ASM = gl.constexpr("""
{
    .reg .b32 a;
    lop3.b32 a, $1, 0x000C0003, 0x43004300, 0xEA;
    sub.rn.bf16x2 a, a, $2;
    fma.rn.bf16x2 $0, a, $3, $4;
}
""")
_TWO_SCALES_ASM = gl.constexpr("""
{
    .reg .f32 a;
    mul.f32 a, $1, 0f3E800000;
    cvt.rn.bf16x2.f32 $0, a, $1;
}
""")
# Two signed bytes, 128 added to each, in the last bits of 2^23: no conversions, those are slow.
_TWO_BYTES_ASM = gl.constexpr("""
{
    .reg .b32 a, b;
    .reg .f32 x, y;
    prmt.b32 a, $1, 0x4B000000, 0x7440;
    prmt.b32 b, $1, 0x4B000000, 0x7441;
    mov.b32 x, a;
    mov.b32 y, b;
    sub.rn.f32 x, x, 0f4B000080;
    sub.rn.f32 y, y, 0f4B000080;
    mul.rn.f32 x, x, $2;
    mul.rn.f32 y, y, $2;
    cvt.rn.bf16x2.f32 $0, y, x;
}
""")


# A row of the table: these, then keys and values from K_SIDE and V_SIDE on: codes, ids, centroids,
# scales, secondary scales, zeros, number of centroids.
ROW = gl.constexpr(23)
START, STOP, TOKENS, FIRST_CORRECTED, CHUNK, CHUNKS = (gl.constexpr(n) for n in range(6))
COEFFICIENTS, ROW_SCALES, BASIS, K_SIDE, V_SIDE = (gl.constexpr(n) for n in (6, 7, 8, 9, 16))


@gluon.jit
def _lane_0(value):
    """What is the same in all threads, said so that it needs no register of each."""
    return gl.inline_asm_elementwise(
        asm="shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", constraints="=r,r", args=[value],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def small(row, PLACE: gl.constexpr):
    """A number of the row that has 32 bits."""
    return _lane_0(gl.load(row + PLACE).to(gl.int32))


@gluon.jit
def address(row, PLACE: gl.constexpr, TYPE: gl.constexpr):
    """An address of the row, as a pointer; a multiple of 16 where loads are wide."""
    value = gl.load(row + PLACE)
    high, low = _lane_0((value >> 32).to(gl.int32)), _lane_0(value.to(gl.int32))
    value = (high.to(gl.int64) << 32) | (low.to(gl.int64) & 0xFFFFFFFF)
    pointer = value.to(gl.pointer_type(TYPE))
    if PLACE == K_SIDE + 2 or PLACE == V_SIDE + 2 or PLACE == COEFFICIENTS:
        pointer = gl.multiple_of(pointer, 16)
    return pointer


@gluon.jit
def _head_side(row, head, D: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr,
               FIRST: gl.constexpr):  # fmt: skip
    """Pointers of the head's keys or values, whose numbers begin at FIRST, and the step of their
    scales."""
    tokens = small(row, TOKENS).to(gl.int64)
    at = head * tokens
    codes_ptr = address(row, FIRST, gl.int32) + at * (D // 16)
    ids_ptr = address(row, FIRST + 1, gl.uint8) + at
    centroids_ptr = address(row, FIRST + 2, gl.int32)
    centroids_ptr += head * small(row, FIRST + 6) * (D // 2)
    scales_ptr = address(row, FIRST + 3, gl.uint8) + at * (D // GROUP)
    step, zeros_ptr = 1.0, ids_ptr
    if KIND == 2:
        place = head * small(row, CHUNKS) + small(row, CHUNK)
        step = gl.load(address(row, FIRST + 4, gl.float16) + place).to(gl.float32) / 255.0
        zeros_ptr = address(row, FIRST + 5, gl.uint8) + head * ((tokens * (D // GROUP) + 3) // 4)
    return codes_ptr, ids_ptr, centroids_ptr, scales_ptr, zeros_ptr, step


@gluon.jit
def _apart(loaded):
    """Bytes, each in a register of its own: packing them would wait for the loads."""
    return gl.inline_asm_elementwise(
        asm="mov.b32 $0, $1;", constraints="=r,r", args=[loaded.to(gl.int32)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _words(
    side, begin, newest, D: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr,
    CLAMPED: gl.constexpr,
):  # fmt: skip
    """Ids and code words of BLOCK_N tokens from begin on. side: pointers of the head, and the step
    of scales.

    CLAMPED: newest is loaded again beyond it. Rows are added last: a constant apart.
    """
    pairs: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, pairs))
    if CLAMPED:
        row = gl.minimum(row, newest - begin)
    unit = gl.arange(0, D // 16, layout=gl.SliceLayout(0, pairs))[None, :]
    first = begin.to(gl.int64)
    ids = _apart(gl.load(side[1] + first + row))
    return ids, gl.load(side[0] + first * (D // 16) + unit + row[:, None] * (D // 16))


@gluon.jit
def _scales(
    side, begin, start, newest, D: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr, CLAMPED: gl.constexpr,
):  # fmt: skip
    """Scale and zero bytes of the same tokens, whole tiles from start."""
    pairs: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    groups: gl.constexpr = D // GROUP
    row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, pairs))[:, None]
    if CLAMPED:
        row = gl.minimum(row, newest - begin)
    group = gl.arange(0, D // 16, layout=gl.SliceLayout(0, pairs))[None, :] * 16 // GROUP
    first = begin.to(gl.int64)
    scales = _apart(gl.load(side[3] + first * groups + group + row * groups))
    zeros = scales
    if KIND == 2:
        # Eight tokens' zeros are whole bytes, so only the rest of a row number decides the shift.
        flat = (row & 7) * groups + group + (start * groups & 3)
        place = flat // 4 + (row >> 3) * (2 * groups)  # row may be negative: no //
        zeros = _apart(gl.load(side[4] + (first * groups >> 2) + place))
    return scales, zeros


@gluon.jit
def _means(ids, side, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Centroids of tokens, two channels a word: int32 [BLOCK_N, D / 16, 8]."""
    pairs: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    unit = gl.arange(0, D // 16, layout=gl.SliceLayout(0, pairs))[None, :]
    pair = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    places = (ids * (D // 2))[:, None] + unit * 8
    means_ptr = side[2] + (places[:, :, None] + pair[None, None, :])
    # 64 KB of them are read again and again, the rest once: qvg 7.34 ms for 7.44 of 28,080 tokens.
    return gl.load(means_ptr, eviction_policy="evict_last")


@gluon.jit
def _decoded(
    words, bytes_, means, step, start,
    D: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr, BLOCK_N: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Decoded tokens, two channels a word: int32 [BLOCK_N, D / 2]. Those beyond the segment's end
    get whatever is finite."""
    scales, zeros = bytes_
    pairs: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    groups: gl.constexpr = D // GROUP
    unit = gl.arange(0, D // 16, layout=gl.SliceLayout(0, pairs))[None, :]
    pair = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    if KIND == 1:
        scale = ((scales + 960) << 20).to(gl.float32, bitcast=True)
        scale = gl.where(scales < 8, scales.to(gl.float32) * 0.001953125, scale)
        zero = gl.full([BLOCK_N, D // 16], 0x43044301, gl.int32, pairs)
    else:
        # A byte in the last bits of 2^23, less that: no conversion, those are as dear as exp2.
        # One multiply-add, and exact up to its rounding.
        scale = (scales | 0x4B000000).to(gl.float32, bitcast=True)
        scale = gl.fma(scale, step, -8388608.0 * step)
        row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, pairs))[:, None]
        flat = (row & 7) * groups + unit * 16 // GROUP + (start * groups & 3)
        zero = ((zeros >> (flat % 4 * 2)) & 3) * 0x40001 + 0x43004300
    scale = gl.inline_asm_elementwise(
        asm=_TWO_SCALES_ASM, constraints="=r,r", args=[scale], dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip
    twice = gl.inline_asm_elementwise(
        asm="prmt.b32 $0, $1, 0, $2;", constraints="=r,r,r",
        args=[words[:, :, None], pair // 4 * 0x2222 + 0x1010],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    values = gl.inline_asm_elementwise(
        asm=_LEVELS_ASM, constraints="=r,r,r,r,r",
        args=[twice >> (pair % 4 * 4), zero[:, :, None], scale[:, :, None], means],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(values, [BLOCK_N, D // 2])


@gluon.jit
def _coefficients(decoding, begin, RANK: gl.constexpr, BLOCK_N: gl.constexpr):
    """A tile's row scales and coefficients, four a word, those of 16 directions and of the rest."""
    _, _, stop, first_corrected, coefficients_ptr, row_scales_ptr = decoding
    layout: gl.constexpr = gl.BlockedLayout([1, 2, 2], [16, 2, 1], [4, 1, 1], [2, 1, 0])
    words: gl.constexpr = gl.SliceLayout(2, layout)
    row = gl.minimum(begin + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, words)), stop - 1)
    row -= first_corrected
    row_scales = gl.load(row_scales_ptr + gl.maximum(row, 0))
    row_scales = _apart(row_scales.to(gl.uint16, bitcast=True))
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, words))[None, :]
    places = coefficients_ptr + (row[:, None] * (RANK // 4) + four)
    there = (row >= 0)[:, None]
    one = gl.load(places, mask=there & (four < RANK // 4), other=0)
    two = one
    if RANK > 16:
        two = gl.load(places + 4, mask=there & (four < RANK // 4 - 4), other=0)
    return row_scales, one, two


@gluon.jit
def _turning(row_scales, words, BLOCK_N: gl.constexpr):
    """Coefficients x row scale in 16 directions, two a word: int32 [BLOCK_N, 8]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2, 2], [16, 2, 1], [4, 1, 1], [2, 1, 0])
    pair = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    values = gl.inline_asm_elementwise(
        asm=_TWO_BYTES_ASM, constraints="=r,r,r",
        args=[(words ^ -0x7F7F7F80)[:, :, None] >> (pair * 16),
              row_scales.to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)[:, None, None]],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(values, [BLOCK_N, 8])


@gluon.jit
def _handed_over(full):
    """What all of the warpgroup stored is there for the tensor cores.

    The fence waits for loads too, so what comes next is loaded after this.
    """
    fence_async_shared()
    barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def _store_coefficients(held, c_words, stage, RANK: gl.constexpr, BLOCK_N: gl.constexpr):
    """What _coefficients gave goes into the stage's tiles of 16 directions."""
    halves: gl.constexpr = (RANK + 15) // 16
    row_scales, one, two = held
    c_words.index(stage * halves).store(_turning(row_scales, one, BLOCK_N))
    if RANK > 16:
        c_words.index(stage * 2 + 1).store(_turning(row_scales, two, BLOCK_N))


@gluon.jit
def _side_step(
    tile, before, begin, given, given_2, ids_ahead, means, held, c_words, tile_words, full, empty,
    decoding, side,
    D: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, RANK: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Decodes a tile, number `tile` of the segment's; returns centroids of the next, and the bytes
    and the coefficients of the one after that, which are loaded while the next is decoded."""
    tiles, start, stop, _, _, _ = decoding
    stage = (before + tile) % STAGES
    mbarrier.wait(empty.index(stage), ((before + tile) // STAGES & 1) ^ 1)
    if RANK > 0:
        _store_coefficients(held, c_words, stage, RANK, BLOCK_N)
    values = _decoded(given[1], given_2, means, side[5], start, D, GROUP, KIND, BLOCK_N, LAYOUT)
    tile_words.index(stage).store(values)
    _handed_over(full.index(stage))
    means = _means(ids_ahead, side, D, LAYOUT)
    if tile + 2 < tiles:
        then = begin - 2 * BLOCK_N
        given = _words(side, then, stop - 1, D, BLOCK_N, LAYOUT, False)
        given_2 = _scales(side, then, start, stop - 1, D, GROUP, KIND, BLOCK_N, LAYOUT, False)
        if RANK > 0:
            held = _coefficients(decoding, then, RANK, BLOCK_N)
    return means, given, given_2, held


@gluon.jit
def produce(
    shared, table_ptr, n_rows, head, D: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    RANK: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Decodes all tiles of keys or of values, whose numbers in a row begin at FIRST. Only the first
    of a segment, its last, may lack tokens.

    Two tiles a turn, so that what is loaded ahead is not copied: a copy would wait for it.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [8, 4, 1], [2, 2, 1], [2, 1, 0])
    _, _, k_smem, v_smem, c_smem, k_full, k_empty, v_full, v_empty = shared
    tile_smem, full, empty = k_smem, k_full, k_empty
    if FIRST == V_SIDE:
        tile_smem, full, empty = v_smem, v_full, v_empty
    of_words: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    tile_words = _retyped(tile_smem, gl.int32, [STAGES, BLOCK_N, D // 2], of_words)
    c_words = tile_words
    if RANK > 0:
        c_words = _retyped(c_smem, gl.int32, [STAGES * ((RANK + 15) // 16), BLOCK_N, 8],
                           gl.NVMMASharedLayout(32, 32))  # fmt: skip
    before = 0
    for number in range(n_rows):
        row = table_ptr + number * ROW
        start, stop = small(row, START), small(row, STOP)
        tiles = (stop - start + BLOCK_N - 1) // BLOCK_N
        side = _head_side(row, head, D, GROUP, KIND, FIRST)
        first_corrected, coefficients_ptr, row_scales_ptr = 0, 0, 0
        if RANK > 0:
            first_corrected = small(row, FIRST_CORRECTED)
            corrected = head * (small(row, TOKENS) - first_corrected)
            coefficients_ptr = address(row, COEFFICIENTS, gl.int32) + corrected * (RANK // 4)
            row_scales_ptr = address(row, ROW_SCALES, gl.float16) + corrected
        decoding = (tiles, start, stop, first_corrected, coefficients_ptr, row_scales_ptr)
        begin = start + (tiles - 1) * BLOCK_N
        after = gl.maximum(begin - BLOCK_N, start)
        one = _words(side, begin, stop - 1, D, BLOCK_N, layout, True)
        one_2 = _scales(side, begin, start, stop - 1, D, GROUP, KIND, BLOCK_N, layout, True)
        two = _words(side, after, stop - 1, D, BLOCK_N, layout, True)
        two_2 = _scales(side, after, start, stop - 1, D, GROUP, KIND, BLOCK_N, layout, True)
        held, held_2 = 0, 0
        if RANK > 0:
            held = _coefficients(decoding, begin, RANK, BLOCK_N)
            held_2 = _coefficients(decoding, after, RANK, BLOCK_N)
        means = _means(one[0], side, D, layout)
        for tile in range(0, tiles, 2):
            means, one, one_2, held = _side_step(
                tile, before, begin, one, one_2, two[0], means, held, c_words, tile_words, full,
                empty, decoding, side, D, KIND, GROUP, RANK, BLOCK_N, STAGES, layout,
            )  # fmt: skip
            if tile + 1 < tiles:
                means, two, two_2, held_2 = _side_step(
                    tile + 1, before, begin - BLOCK_N, two, two_2, one[0], means, held_2, c_words,
                    tile_words, full, empty, decoding, side, D, KIND, GROUP, RANK, BLOCK_N,
                    STAGES, layout,
                )  # fmt: skip
            begin -= 2 * BLOCK_N
        before += tiles
