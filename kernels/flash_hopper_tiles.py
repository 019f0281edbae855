"""The decoding warps of kernels.flash_hopper: packed tokens into shared memory, tile after tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

# Triton 3.6 and those after it name these differently. The first: all threads of the partition.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_SHARED = gl.shared_memory_descriptor
retyped = _SHARED.reinterpret if hasattr(_SHARED, "reinterpret") else _SHARED._reinterpret

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

D = gl.constexpr(128)
TILE = gl.constexpr(64)
# Half a tile is decoded at a time: 32 tokens x 8 code words x 8 pairs of channels; of a thread two
# tokens, a word and eight pairs.
HALF = gl.constexpr(32)
_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1, 8], [8, 4, 1], [2, 2, 1], [2, 1, 0]))
_OF_WORDS = gl.constexpr(gl.SliceLayout(2, _LAYOUT.value))
_OF_ROWS = gl.constexpr(gl.SliceLayout(1, _OF_WORDS.value))
_OF_UNITS = gl.constexpr(gl.SliceLayout(0, _OF_WORDS.value))
_OF_PAIRS = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(1, _LAYOUT.value)))


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
def _head_side(row, head, GROUP: gl.constexpr, KIND: gl.constexpr, FIRST: gl.constexpr):
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
def _rows(begin, FROM: gl.constexpr, newest, CLAMPED: gl.constexpr):
    """HALF tokens from begin + FROM on, less begin: a constant apart. CLAMPED: newest stands for
    those beyond it, so that they may be negative."""
    row = FROM + gl.arange(0, HALF, layout=_OF_ROWS)
    if CLAMPED:
        row = gl.minimum(row, newest - begin)
    return row


@gluon.jit
def _ids(side, begin, newest, CLAMPED: gl.constexpr):
    """Centroids' numbers of a tile from begin on, of each half. side: as _head_side gives it."""
    ids_ptr = side[1] + begin.to(gl.int64)
    one = _apart(gl.load(ids_ptr + _rows(begin, 0, newest, CLAMPED)))
    return one, _apart(gl.load(ids_ptr + _rows(begin, HALF, newest, CLAMPED)))


@gluon.jit
def _packed(
    side, begin, FROM: gl.constexpr, start, newest, GROUP: gl.constexpr, KIND: gl.constexpr,
    CLAMPED: gl.constexpr,
):  # fmt: skip
    """Code words, scale bytes and zero bytes of half a tile; whole tiles lie from start on."""
    groups: gl.constexpr = D // GROUP
    row = _rows(begin, FROM, newest, CLAMPED)[:, None]
    unit = gl.arange(0, D // 16, layout=_OF_UNITS)[None, :]
    first = begin.to(gl.int64)
    words = gl.load(side[0] + first * (D // 16) + unit + row * (D // 16))
    group = unit * 16 // GROUP
    scales = _apart(gl.load(side[3] + first * groups + group + row * groups))
    zeros = scales
    if KIND == 2:
        # Eight tokens' zeros are whole bytes, so only the rest of a row number decides the shift.
        flat = (row & 7) * groups + group + (start * groups & 3)
        place = flat // 4 + (row >> 3) * (2 * groups)  # row may be negative: no //
        zeros = _apart(gl.load(side[4] + (first * groups >> 2) + place))
    return words, scales, zeros


@gluon.jit
def _both_packed(
    side, begin, start, newest, GROUP: gl.constexpr, KIND: gl.constexpr, CLAMPED: gl.constexpr
):  # fmt: skip
    one = _packed(side, begin, 0, start, newest, GROUP, KIND, CLAMPED)
    return one, _packed(side, begin, HALF, start, newest, GROUP, KIND, CLAMPED)


@gluon.jit
def _means(ids, side):
    """Centroids of half a tile, two channels a word: int32 [HALF, D / 16, 8]."""
    unit = gl.arange(0, D // 16, layout=_OF_UNITS)[None, :] * 8
    pair = gl.arange(0, 8, layout=_OF_PAIRS)[None, None, :]
    means_ptr = side[2] + (unit[:, :, None] + pair) + (ids * (D // 2))[:, None, None]
    # 64 KB of them are read again and again, the rest once: qvg 7.34 ms for 7.44 of 28,080 tokens.
    return gl.load(means_ptr, eviction_policy="evict_last")


@gluon.jit
def _decoded(packed, means, step, start, GROUP: gl.constexpr, KIND: gl.constexpr):
    """Half a tile decoded, two channels a word: int32 [HALF, D / 2]. Tokens beyond the segment's
    end get whatever is finite."""
    words, scales, zeros = packed
    groups: gl.constexpr = D // GROUP
    pair = gl.arange(0, 8, layout=_OF_PAIRS)[None, None, :]
    if KIND == 1:
        # Float8e4m3 in a float32's exponent is 2^-120 of its value, of the smallest too.
        scale = (scales << 20).to(gl.float32, bitcast=True) * 1.329227995784916e36
        zero = gl.full([HALF, D // 16], 0x43044301, gl.int32, _OF_WORDS)
    else:
        # A byte in the last bits of 2^23, less that: no conversion, those are as dear as exp2.
        # One multiply-add, and exact up to its rounding.
        scale = (scales | 0x4B000000).to(gl.float32, bitcast=True)
        scale = gl.fma(scale, step, -8388608.0 * step)
        row = gl.arange(0, HALF, layout=_OF_ROWS)[:, None]
        unit = gl.arange(0, D // 16, layout=_OF_UNITS)[None, :]
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
    return gl.reshape(values, [HALF, D // 2])


@gluon.jit
def _decode_tile(
    tile, packed, means, next_ids, side, next_side, start, GROUP: gl.constexpr, KIND: gl.constexpr
):  # fmt: skip
    """TILE tokens into shared memory. Returns centroids of what is decoded next, which are loaded
    meanwhile: those of the second half once this tile's are used."""
    first = _decoded(packed[0], means[0], side[5], start, GROUP, KIND)
    next_first = _means(next_ids[0], next_side)
    second = _decoded(packed[1], means[1], side[5], start, GROUP, KIND)
    values = gl.permute(gl.join(first, second), [2, 0, 1])
    tile.store(gl.reshape(values, [TILE, D // 2]))
    return next_first


@gluon.jit
def _coefficients(segment, begin, RANK: gl.constexpr):
    """A tile's row scales and coefficients, four a word, those of 16 directions and of the rest."""
    _, _, stop, first_corrected, coefficients_ptr, row_scales_ptr = segment
    wide: gl.constexpr = 2 if RANK <= 8 else 4
    layout: gl.constexpr = gl.BlockedLayout([1, wide // 2, 2], [16, 2, 1], [4, 1, 1], [2, 1, 0])
    words: gl.constexpr = gl.SliceLayout(2, layout)
    row = gl.minimum(begin + gl.arange(0, TILE, layout=gl.SliceLayout(1, words)), stop - 1)
    row -= first_corrected
    row_scales = gl.load(row_scales_ptr + gl.maximum(row, 0))
    row_scales = _apart(row_scales.to(gl.uint16, bitcast=True))
    four = gl.arange(0, wide, layout=gl.SliceLayout(0, words))[None, :]
    places = coefficients_ptr + (row[:, None] * (RANK // 4) + four)
    there = (row >= 0)[:, None]
    one = gl.load(places, mask=there & (four < RANK // 4), other=0)
    two = one
    if RANK > 16:
        two = gl.load(places + 4, mask=there & (four < RANK // 4 - 4), other=0)
    return row_scales, one, two


@gluon.jit
def _turning(row_scales, words, RANK: gl.constexpr):
    """Coefficients x row scale in 16 directions, two a word: int32 [TILE, 8]."""
    wide: gl.constexpr = 2 if RANK <= 8 else 4
    layout: gl.constexpr = gl.BlockedLayout([1, wide // 2, 2], [16, 2, 1], [4, 1, 1], [2, 1, 0])
    pair = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    values = gl.inline_asm_elementwise(
        asm=_TWO_BYTES_ASM, constraints="=r,r,r",
        args=[(words ^ -0x7F7F7F80)[:, :, None] >> (pair * 16),
              row_scales.to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)[:, None, None]],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    values = gl.reshape(values, [TILE, wide * 2])
    if RANK <= 8:  # directions 8 to 15 are none
        values = gl.join(values, gl.zeros_like(values))
        values = gl.reshape(gl.permute(values, [0, 2, 1]), [TILE, 8])
    return values


@gluon.jit
def _store_coefficients(held, c_words, stage, RANK: gl.constexpr):
    """What _coefficients gave goes into the stage's tiles of 16 directions."""
    halves: gl.constexpr = (RANK + 15) // 16
    row_scales, one, two = held
    c_words.index(stage * halves).store(_turning(row_scales, one, RANK))
    if RANK > 16:
        c_words.index(stage * 2 + 1).store(_turning(row_scales, two, RANK))


@gluon.jit
def _segment(row, head, RANK: gl.constexpr):
    """Tiles, bounds, and what _coefficients reads of a row's keys."""
    start, stop = small(row, START), small(row, STOP)
    first_corrected, coefficients_ptr, row_scales_ptr = 0, 0, 0
    if RANK > 0:
        first_corrected = small(row, FIRST_CORRECTED)
        corrected = head * (small(row, TOKENS) - first_corrected)
        coefficients_ptr = address(row, COEFFICIENTS, gl.int32) + corrected * (RANK // 4)
        row_scales_ptr = address(row, ROW_SCALES, gl.float16) + corrected
    tiles = (stop - start + TILE - 1) // TILE
    return tiles, start, stop, first_corrected, coefficients_ptr, row_scales_ptr


@gluon.jit
def _words_of(shared, STAGES: gl.constexpr, RANK: gl.constexpr):
    """Tiles of keys, values and coefficients, seen as words of two channels."""
    _, _, k_smem, v_smem, c_smem, _, _ = shared
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    k_words = retyped(k_smem, gl.int32, [STAGES, TILE, D // 2], wide)
    v_words = retyped(v_smem, gl.int32, [STAGES, TILE, D // 2], wide)
    c_words = k_words
    if RANK > 0:
        c_words = retyped(c_smem, gl.int32, [STAGES * ((RANK + 15) // 16), TILE, 8],
                          gl.NVMMASharedLayout(32, 32))  # fmt: skip
    return k_words, v_words, c_words


@gluon.jit
def produce(
    shared, table_ptr, n_rows, head, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    K_GROUP: gl.constexpr, V_GROUP: gl.constexpr, RANK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Decodes all tiles, of keys and values in turn. Only the first of a segment, its last, may
    lack tokens.

    All is loaded ahead into the registers that it was last used from: copying from register to
    register would wait for the loads.
    """
    full, empty = shared[5], shared[6]
    k_words, v_words, c_words = _words_of(shared, STAGES, RANK)
    before = 0
    for number in range(n_rows):
        row = table_ptr + number * ROW
        keys = _head_side(row, head, K_GROUP, K_KIND, K_SIDE)
        values = _head_side(row, head, V_GROUP, V_KIND, V_SIDE)
        segment = _segment(row, head, RANK)
        tiles, start, newest = segment[0], segment[1], segment[2] - 1
        begin = start + (tiles - 1) * TILE
        k_ids, v_ids = _ids(keys, begin, newest, True), _ids(values, begin, newest, True)
        k_packed = _both_packed(keys, begin, start, newest, K_GROUP, K_KIND, True)
        v_packed = _both_packed(values, begin, start, newest, V_GROUP, V_KIND, True)
        held = 0
        if RANK > 0:
            held = _coefficients(segment, begin, RANK)
        k_first, k_second = _means(k_ids[0], keys), _means(k_ids[1], keys)
        k_ids = _ids(keys, gl.maximum(begin - TILE, start), newest, True)
        for tile in range(tiles):
            stage = (before + tile) % STAGES
            mbarrier.wait(empty.index(stage), ((before + tile) // STAGES & 1) ^ 1)
            if RANK > 0:
                _store_coefficients(held, c_words, stage, RANK)
            v_first = _decode_tile(k_words.index(stage), k_packed, (k_first, k_second), v_ids, keys,
                                   values, start, K_GROUP, K_KIND)  # fmt: skip
            v_second = _means(v_ids[1], values)
            if tile + 1 < tiles:
                v_ids = _ids(values, begin - TILE, newest, False)
            k_first = _decode_tile(v_words.index(stage), v_packed, (v_first, v_second), k_ids,
                                   values, keys, start, V_GROUP, V_KIND)  # fmt: skip
            fence_async_shared()  # waits for loads too, so the rest is loaded after it
            barrier()
            mbarrier.arrive(full.index(stage), count=1)
            k_second = _means(k_ids[1], keys)
            if tile + 1 < tiles:
                k_packed = _both_packed(keys, begin - TILE, start, newest, K_GROUP, K_KIND, False)
                v_packed = _both_packed(values, begin - TILE, start, newest, V_GROUP, V_KIND, False)
                if RANK > 0:
                    held = _coefficients(segment, begin - TILE, RANK)
            if tile + 2 < tiles:
                k_ids = _ids(keys, begin - 2 * TILE, newest, False)
            begin -= TILE
        before += tiles
