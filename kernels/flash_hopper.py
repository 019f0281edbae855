"""Fused attention over packed keys and values by warps with parts of their own, for Hopper.

A warpgroup decodes tiles of keys and values into shared memory; three others, 64 queries each,
multiply and keep the softmax. So decoding, its loads' latency and the tensor cores' work pass at
one time, where `kernels.flash` does one after the other. Numbers are those of flash_kernel for
packed sides of head dim 128. Of a segment tiles go from the last to the first, so that the one part
of a tile comes before the loop; several segments of one kind are one launch.

Floor: flash_kernel's. Reached, 40 heads of 4,680 queries and 32,760 keys of which the last 4,680
are plain (H200, 2026-11-30): 447 TFLOP/s (qvg) and 406 (quantwm, rank 8), 45 and 41%. The decoding
warps bound it: with tiles that nobody decodes it took 5.3 and 5.5 ms for 7.0 and 7.7.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.flash_hopper_tiles import (
    BASIS,
    ROW,
    START,
    STOP,
    TILE,
    D,
    address,
    barrier,
    produce,
    retyped,
    small,
)

_S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.value, 16]))
_O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D.value, 16]))
_O_ROWS = gl.constexpr(gl.SliceLayout(1, _O_LAYOUT.value))


@gluon.jit
def _scores(queries, k_tile, c_smem, stage, RANK: gl.constexpr):
    """Scores of a tile, float32 [64, TILE], in their own unit."""
    q_tile, turned, turned_2 = queries
    nothing = gl.full([64, TILE], 0.0, gl.float32, _S_LAYOUT)
    scores = warpgroup_mma(q_tile, k_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
    if RANK > 0:
        c_tile = c_smem.index(stage * ((RANK + 15) // 16))
        scores = warpgroup_mma(turned, c_tile.permute([1, 0]), scores, is_async=True)
    if RANK > 16:
        c_tile = c_smem.index(stage * 2 + 1)
        scores = warpgroup_mma(turned_2, c_tile.permute([1, 0]), scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _turn(q_tile, basis_ptr, basis_tile, turned_tile, FIRST: gl.constexpr, RANK: gl.constexpr):
    """Queries in 16 of the directions that keys are corrected in, from FIRST on, into turned_tile,
    bfloat16 [64, 16]: the memory of basis_tile's first half."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    direction = FIRST + gl.arange(0, 16, layout=gl.SliceLayout(0, layout))[None, :]
    channel = gl.arange(0, D, layout=gl.SliceLayout(1, layout))[:, None]
    basis = gl.load(basis_ptr + channel * RANK + direction, mask=direction < RANK, other=0.0)
    basis_tile.store(basis.to(gl.bfloat16))
    fence_async_shared()
    barrier()
    of_turned: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    nothing = gl.full([64, 16], 0.0, gl.float32, of_turned)
    turned = warpgroup_mma(q_tile, basis_tile, nothing, use_acc=False)
    barrier()
    turned_tile.store(turned.to(gl.bfloat16))
    fence_async_shared()
    barrier()


@gluon.jit
def _attend_tile(
    tile, left, queries, so_far, scale, shared, RANK: gl.constexpr, STAGES: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """A tile's part of the output; PART: only its first `left` tokens are there. queries: tiles of
    them and of them turned. so_far: sums of weighed values, largest score, total weight.

    One product after the other: three warpgroups fill each other's waits, and so the scores need no
    registers beside the next ones (128 of a thread, wgmma refuses 120).
    """
    _, _, k_smem, v_smem, c_smem, full, empty = shared
    sums, largest, total = so_far
    stage = tile % STAGES
    mbarrier.wait(full.index(stage), tile // STAGES & 1)
    scores = _scores(queries, k_smem.index(stage), c_smem, stage, RANK)
    if PART:
        column = gl.arange(0, TILE, layout=gl.SliceLayout(0, _S_LAYOUT))
        scores = gl.where((column < left)[None, :], scores, float("-inf"))
    above = gl.maximum(largest, gl.max(scores, axis=1))
    shift = above * scale
    weights = gl.exp2(scores * scale - shift[:, None])
    kept = gl.exp2(largest * scale - shift)
    total = total * kept + gl.sum(weights, axis=1)
    sums *= gl.convert_layout(kept, _O_ROWS)[:, None]
    p = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, _O_LAYOUT, 2))
    # Passed already; without it ptxas moves the products together and runs out of registers.
    mbarrier.wait(full.index(stage), tile // STAGES & 1)
    sums = warpgroup_mma(p, v_smem.index(stage), sums, is_async=True)
    sums, p = warpgroup_mma_wait(0, deps=[sums, p])
    barrier()
    mbarrier.arrive(empty.index(stage), count=1)
    return sums, above, total


@gluon.jit
def _load_queries(row, n_queries, q_ptr, q_stride_n, q_tile):
    """64 queries from row on into shared memory, 0 beyond the last."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    at = rows[:, None] * q_stride_n + gl.arange(0, D, layout=gl.SliceLayout(0, wide))[None, :]
    q_tile.store(gl.load(q_ptr + at, mask=(rows < n_queries)[:, None], other=0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def _consume(
    NUMBER: gl.constexpr, shared, given, RANK: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """64 queries over all tiles."""
    table_ptr, n_rows, head, block, n_queries, q_ptr, q_stride_n, out_ptr = given[:8]
    sums_ptr, largest_ptr, total_ptr, is_first, is_last, scale = given[8:]
    row = block + NUMBER * 64
    q_tile = shared[0].index(NUMBER)
    _load_queries(row, n_queries, q_ptr, q_stride_n, q_tile)
    place = row + gl.arange(0, 64, layout=gl.SliceLayout(1, _S_LAYOUT))
    going_on = place < n_queries * (1 - is_first)
    largest = gl.load(largest_ptr + place, mask=going_on, other=float("-inf")).to(gl.float32)
    total = gl.load(total_ptr + place, mask=going_on, other=0.0).to(gl.float32)
    o_place = row + gl.arange(0, 64, layout=_O_ROWS)
    sums_at = o_place[:, None] * D + gl.arange(0, D, layout=gl.SliceLayout(0, _O_LAYOUT))[None, :]
    o_going_on = (o_place < n_queries * (1 - is_first))[:, None]
    sums = gl.load(sums_ptr + sums_at, mask=o_going_on, other=0.0).to(gl.float32)

    halves: gl.constexpr = (RANK + 15) // 16
    basis_smem, queries = shared[1], (q_tile, q_tile, q_tile)
    turned_smem = basis_smem
    if RANK > 0:
        turned_smem = retyped(basis_smem, gl.bfloat16, [6 * halves, 64, 16],
                              gl.NVMMASharedLayout(32, 16))  # fmt: skip
        first = NUMBER * halves * 2
        queries = (q_tile, turned_smem.index(first), turned_smem.index(first + 2 * halves - 2))
    so_far = (sums, largest, total)
    before = 0
    for number in range(n_rows):
        entry = table_ptr + number * ROW
        tokens = small(entry, STOP) - small(entry, START)
        tiles = (tokens + TILE - 1) // TILE
        for half in gl.static_range(halves):
            basis_ptr = address(entry, BASIS, gl.bfloat16) + head * D * RANK
            _turn(q_tile, basis_ptr, basis_smem.index(NUMBER * halves + half),
                  turned_smem.index((NUMBER * halves + half) * 2), half * 16, RANK)  # fmt: skip
        left = tokens - (tiles - 1) * TILE
        so_far = _attend_tile(before, left, queries, so_far, scale, shared, RANK, STAGES, True)
        for tile in range(before + 1, before + tiles):
            so_far = _attend_tile(tile, left, queries, so_far, scale, shared, RANK, STAGES, False)
        before += tiles

    sums, largest, total = so_far
    there = (o_place < n_queries)[:, None]
    if is_last:
        sums = sums / gl.convert_layout(total, _O_ROWS)[:, None]
        gl.store(out_ptr + sums_at, sums.to(out_ptr.dtype.element_ty), mask=there)
    else:
        gl.store(sums_ptr + sums_at, sums, mask=there)
        gl.store(largest_ptr + place, largest, mask=place < n_queries)
        gl.store(total_ptr + place, total, mask=place < n_queries)


@gluon.jit(do_not_specialize=["n_rows", "n_queries", "is_first", "is_last"])
def flash_hopper_kernel(
    q_ptr, q_stride_h, q_stride_n, out_ptr, sums_ptr, largest_ptr, total_ptr, table_ptr,
    n_rows, n_queries, is_first, is_last, scale,
    K_KIND: gl.constexpr, V_KIND: gl.constexpr, K_GROUP: gl.constexpr, V_GROUP: gl.constexpr,
    RANK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Keys and values of n_rows segments for 192 queries. Grid (query blocks, heads).

    The state is flash_kernel's; both sides packed, D = 128. Launched with 4 warps, those of the
    first consumer; 128 registers of each of 512 threads are all that a multiprocessor has.
    """
    head = gl.program_id(1).to(gl.int64)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    slim: gl.constexpr = gl.NVMMASharedLayout(32, 16)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [3, 64, D], tile_layout)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, D], tile_layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, D], tile_layout)
    halves: gl.constexpr = (RANK + 15) // 16
    c_smem, basis_smem = k_smem, q_smem
    if RANK > 0:
        c_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * halves, TILE, 16], slim)
        basis_smem = gl.allocate_shared_memory(gl.bfloat16, [3 * halves, D, 16], slim)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=3)
    shared = (q_smem, basis_smem, k_smem, v_smem, c_smem, full, empty)
    given = (
        table_ptr, n_rows, head, gl.program_id(0) * 192, n_queries, q_ptr + head * q_stride_h,
        q_stride_n, out_ptr + head * n_queries * D, sums_ptr + head * n_queries * D,
        largest_ptr + head * n_queries, total_ptr + head * n_queries, is_first, is_last, scale,
    )  # fmt: skip
    gl.warp_specialize(
        [(_consume, (0, shared, given, RANK, STAGES)),
         (_consume, (1, shared, given, RANK, STAGES)),
         (_consume, (2, shared, given, RANK, STAGES)),
         (produce, (shared, table_ptr, n_rows, head, K_KIND, V_KIND, K_GROUP, V_GROUP, RANK,
                    STAGES))],
        [4, 4, 4], [128, 128, 128],
    )  # fmt: skip
