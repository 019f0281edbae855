"""Code words of a step's tokens, and the levels they stand for as the left operand of a product.

Four threads of a warp have a token: a block of 16 channels each, or half of one in a part of two
blocks. What a thread looks up is what a tensor core wants from it, so nothing passes through shared
memory; the rows of `rows_qtc_kernel` lie in the order that follows from it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.decode_tile import BACKWARDS


@triton.jit
def part_words(
    widths_ptr, pairs_ptr, FIRST: tl.constexpr, SHARE: tl.constexpr, NB: tl.constexpr
):  # fmt: skip
    """Of 4 / SHARE blocks from FIRST on of one head, for four threads of which SHARE have a block
    together: the part, which is the blocks, their widths, where their odd bits lie in words of 16,
    int32 [4] each, how many blocks of the head have digit 0, 1 and 2, and where the blocks' pairs
    of levels begin; and the largest of the widths.
    """
    every = tl.arange(0, 8)
    all_widths = tl.load(widths_ptr + every, mask=every < NB, other=0).to(tl.int32)
    block = FIRST + tl.arange(0, 4) // SHARE
    width = tl.load(widths_ptr + block, mask=block < NB, other=0).to(tl.int32)
    # Widths do not increase, so the blocks that have digit k are the first ones.
    first = tl.sum((all_widths >= 2).to(tl.int32), axis=0)
    second = tl.sum((all_widths >= 4).to(tl.int32), axis=0)
    third = tl.sum((all_widths >= 6).to(tl.int32), axis=0)
    before = (every[None, :] < block[:, None]) & (all_widths % 2 == 1)[None, :]
    odd = 2 * (first + second + third) + tl.sum(before.to(tl.int32), axis=1)
    # Widths end at 6: `nothing` is 0, but hides that these words follow each other. Known to, they
    # are loaded in another layout than the look-ups, and all pairs then pass through shared memory.
    pairs = pairs_ptr + of_threads(((1 << (2 * width)) - 1) // 3)
    widest = tl.max(width, axis=0)
    return (block + (width >> 3), width, odd, first, second, third, pairs), widest


@triton.jit
def _of_tokens(x):
    """[STEP] along the tokens of a step's words."""
    return x[:, None] if BACKWARDS else x[None, :]


@triton.jit
def of_threads(x):
    """[4] along the four threads that have a token's words."""
    return x[None, :] if BACKWARDS else x[:, None]


@triton.jit
def words_of_step(
    codes_ptr, at, valid, part, WORDS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """A step's code words of one part, digits 0, 1, 2 and the odd bits: [STEP, 4] or [4, STEP]
    (decode_tile.py), int32 but for the last.

    at: tokens, valid: which of them; part: what `part_words` gave; MOST: bits that a code of the
    part can have.
    """
    block, width, odd, first, second, third, _ = part
    rows = _of_tokens(valid)
    words_ptr = codes_ptr.to(tl.pointer_type(tl.int32)) + _of_tokens(at * (WORDS // 2))
    words_ptr += of_threads(block)
    word0 = tl.load(words_ptr, mask=rows & of_threads(block < first), other=0)
    word1 = tl.zeros_like(word0)
    word2 = tl.zeros_like(word0)
    if MOST >= 4:
        held = rows & of_threads(block < second)
        word1 = tl.load(words_ptr + first, mask=held, other=0)
    if MOST >= 6:
        held = rows & of_threads(block < third)
        word2 = tl.load(words_ptr + (first + second), mask=held, other=0)
    bits = tl.load(codes_ptr + _of_tokens(at * WORDS) + of_threads(odd),
                   mask=rows & of_threads(width % 2 == 1), other=0)  # fmt: skip
    return word0, word1, word2, bits


@triton.jit
def _level_pair(pairs, two, top, PLACE: tl.constexpr, TOP: tl.constexpr):
    """The two levels of pair PLACE of every block, int32 like two.

    pairs: where the block's begin. two: nibbles 0 and 1 of every other pair, a byte each; top:
    nibble 2 of every pair.
    """
    code = (two >> (PLACE // 2 * 8)) & 255
    if TOP:
        if PLACE < 2:
            code |= (top << (8 - 4 * PLACE)) & 3840
        else:
            code |= (top >> (4 * PLACE - 8)) & 3840
    return tl.load(pairs + code)


@triton.jit
def _pairs(pairs, even, odd, top, SHARE: tl.constexpr, TOP: tl.constexpr):
    """Pairs of levels of a part, int32 [STEP, 4, 8 / SHARE] or [4, STEP, 8 / SHARE]."""
    p0 = _level_pair(pairs, even, top, 0, TOP)
    p1 = _level_pair(pairs, odd, top, 1, TOP)
    p2 = _level_pair(pairs, even, top, 2, TOP)
    p3 = _level_pair(pairs, odd, top, 3, TOP)
    if SHARE == 2:
        both = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    else:
        p0 = tl.join(p0, _level_pair(pairs, even, top, 4, TOP))
        p1 = tl.join(p1, _level_pair(pairs, odd, top, 5, TOP))
        p2 = tl.join(p2, _level_pair(pairs, even, top, 6, TOP))
        p3 = tl.join(p3, _level_pair(pairs, odd, top, 7, TOP))
        both = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    return tl.reshape(both, (even.shape[0], even.shape[1], 8 // SHARE))


@triton.jit
def levels_of_step(
    words, part, widest, SHARE: tl.constexpr, MOST: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Levels of a step's tokens in one part as the left operand, [STEP, 64 / SHARE].

    words: of `words_of_step`; part, widest: of `part_words`.
    A pair's code is the nibbles digit 0, digit 1, digit 2; the odd bits, spread to two of each
    nibble, are the nibble behind the digits that there are.
    Rows and columns are put where a tensor core wants what a thread has: nothing is moved.
    """
    word0, word1, word2, bits = words
    _, width, _, _, _, _, pairs = part
    STEP: tl.constexpr = word0.shape[0] * word0.shape[1] // 4
    bits = bits.to(tl.int32) & 0xFFFF
    bits = (bits | (bits << 8)) & 0x00FF00FF
    bits = (bits | (bits << 4)) & 0x0F0F0F0F
    bits = (bits | (bits << 2)) & 0x33333333
    word0 |= bits & of_threads(-(width == 1).to(tl.int32))
    if MOST >= 3:
        word1 |= bits & of_threads(-(width == 3).to(tl.int32))
    if MOST >= 5:
        word2 |= bits & of_threads(-(width == 5).to(tl.int32))
    if SHARE == 2:
        shift = of_threads(tl.arange(0, 4) % 2 * 16)
        word0, word1, word2 = word0 >> shift, word1 >> shift, word2 >> shift
    even = (word0 & 0x0F0F0F0F) | ((word1 & 0x0F0F0F0F) << 4)
    odd = ((word0 >> 4) & 0x0F0F0F0F) | (word1 & -0x0F0F0F10)
    if MOST < 5:
        both = _pairs(pairs, even, odd, word2, SHARE, False)
    elif widest > 4:
        both = _pairs(pairs, even, odd, word2, SHARE, True)
    else:
        both = _pairs(pairs, even, odd, word2, SHARE, False)
    if tl.bfloat16 == DOT_DTYPE:
        low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        low = (both << 16).to(tl.float32, bitcast=True)
        high = (both & -65536).to(tl.float32, bitcast=True)
    if BACKWARDS:
        levels = tl.reshape(tl.join(low, high), (2, STEP // 16, 8, 4, 8 // SHARE, 2))
        levels = tl.permute(levels, (1, 0, 2, 4, 3, 5))
    else:
        levels = tl.reshape(tl.join(low, high), (4, 2, STEP // 16, 8, 8 // SHARE, 2))
        levels = tl.permute(levels, (2, 1, 3, 4, 0, 5))
    return tl.reshape(levels, (STEP, 64 // SHARE))
