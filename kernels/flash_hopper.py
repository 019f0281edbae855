"""Fused attention over packed keys and values by warps with parts of their own, for Hopper.

A warpgroup decodes tiles of keys into shared memory, another those of values; two others, 64
queries each, multiply and keep the softmax. So decoding, its loads' latency and the tensor cores'
work pass at one time, where `kernels.flash` does one after the other. Numbers are those of
flash_kernel for packed sides of head dim 128. Of a segment tiles go from the last to the first, so
that the one part of a tile comes before the loop; several segments of one kind are one launch.

Floor: flash_kernel's. Reached, 40 heads of 4,680 queries and 32,760 keys of which the last 4,680
are plain (H200, 2026-11-30): 375 TFLOP/s (qvg) and 349 (quantwm, rank 8), 38 and 35%. The decoding
warps bound it: without their arithmetic it is 8 and 20% faster.
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
    K_SIDE,
    ROW,
    START,
    STOP,
    V_SIDE,
    address,
    barrier,
    produce,
    small,
)


@gluon.jit
def _scores(q_tile, turned, turned_2, k_tile, c_smem, stage, RANK: gl.constexpr,
            BLOCK_N: gl.constexpr):  # fmt: skip
    """Starts the scores of a tile, float32 [64, BLOCK_N], in the scores' own unit."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    nothing = gl.full([64, BLOCK_N], 0.0, gl.float32, layout)
    scores = warpgroup_mma(q_tile, k_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
    if RANK > 0:
        c_tile = c_smem.index(stage * ((RANK + 15) // 16))
        scores = warpgroup_mma(turned, c_tile.permute([1, 0]), scores, is_async=True)
    if RANK > 16:
        c_tile = c_smem.index(stage * 2 + 1)
        scores = warpgroup_mma(turned_2, c_tile.permute([1, 0]), scores, is_async=True)
    return scores


@gluon.jit
def _store_basis(basis_ptr, basis_tile, FIRST: gl.constexpr, D: gl.constexpr, RANK: gl.constexpr):
    """16 directions of the head from FIRST on, [D, 16], 0 beyond RANK."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    direction = FIRST + gl.arange(0, 16, layout=gl.SliceLayout(0, layout))[None, :]
    channel = gl.arange(0, D, layout=gl.SliceLayout(1, layout))[:, None]
    basis = gl.load(basis_ptr + channel * RANK + direction, mask=direction < RANK, other=0.0)
    basis_tile.store(basis.to(gl.bfloat16))


@gluon.jit
def _turned(q_tile, basis_tile):
    """Queries in 16 of the directions that keys are corrected in, bfloat16 [64, 16], as an operand
    in registers."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    nothing = gl.full([64, 16], 0.0, gl.float32, layout)
    turned = warpgroup_mma(q_tile, basis_tile, nothing, use_acc=False)
    return gl.convert_layout(turned.to(gl.bfloat16), gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def _weighed(scores, largest, total, scale):
    """Weights of a tile, what is kept of those before, and the softmax' state after it."""
    above = gl.maximum(largest, gl.max(scores, axis=1))
    shift = above * scale
    weights = gl.exp2(scores * scale - shift[:, None])
    kept = gl.exp2(largest * scale - shift)
    return weights, kept, above, total * kept + gl.sum(weights, axis=1)


@gluon.jit
def _given_back(empty):
    """All of the warpgroup have read the tile."""
    barrier()
    mbarrier.arrive(empty, count=1)


@gluon.jit
def _consume(
    NUMBER: gl.constexpr, shared, given, D: gl.constexpr, RANK: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 queries over all tiles. A tile's scores are computed beside the values' product of the
    one before, which goes on during the softmax."""
    q_smem, basis_smem, k_smem, v_smem, c_smem, k_full, k_empty, v_full, v_empty = shared
    table_ptr, n_rows, head, block, n_queries, q_ptr, q_stride_n, out_ptr = given[:8]
    sums_ptr, largest_ptr, total_ptr, is_first, is_last, scale = given[8:]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    row = block + NUMBER * 64

    q_rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    q_at = q_rows[:, None] * q_stride_n + gl.arange(0, D, layout=gl.SliceLayout(0, wide))[None, :]
    q_tile = q_smem.index(NUMBER)
    q_tile.store(gl.load(q_ptr + q_at, mask=(q_rows < n_queries)[:, None], other=0.0))
    fence_async_shared()
    barrier()
    place = row + gl.arange(0, 64, layout=s_rows)
    going_on = place < n_queries * (1 - is_first)
    largest = gl.load(largest_ptr + place, mask=going_on, other=float("-inf")).to(gl.float32)
    total = gl.load(total_ptr + place, mask=going_on, other=0.0).to(gl.float32)
    o_place = row + gl.arange(0, 64, layout=o_rows)
    sums_at = o_place[:, None] * D + gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))[None, :]
    o_going_on = (o_place < n_queries * (1 - is_first))[:, None]
    sums = gl.load(sums_ptr + sums_at, mask=o_going_on, other=0.0).to(gl.float32)

    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s_layout))
    halves: gl.constexpr = (RANK + 15) // 16
    at = 0
    for number in range(n_rows):
        entry = table_ptr + number * ROW
        tokens = small(entry, STOP) - small(entry, START)
        tiles = (tokens + BLOCK_N - 1) // BLOCK_N
        turned, turned_2 = 0, 0
        if RANK > 0:
            basis_ptr = address(entry, BASIS, gl.bfloat16) + head * D * RANK
            for half in gl.static_range(halves):
                basis_tile = basis_smem.index(NUMBER * halves + half)
                _store_basis(basis_ptr, basis_tile, half * 16, D, RANK)
            fence_async_shared()
            barrier()
            turned = _turned(q_tile, basis_smem.index(NUMBER * halves))
            if RANK > 16:
                turned_2 = _turned(q_tile, basis_smem.index(NUMBER * halves + 1))
        stage = at % STAGES
        mbarrier.wait(k_full.index(stage), at // STAGES & 1)
        scores = _scores(q_tile, turned, turned_2, k_smem.index(stage), c_smem, stage, RANK,
                         BLOCK_N)  # fmt: skip
        scores = warpgroup_mma_wait(0, deps=[scores])
        _given_back(k_empty.index(stage))
        left = tokens - (tiles - 1) * BLOCK_N
        scores = gl.where((column < left)[None, :], scores, float("-inf"))
        weights, kept, largest, total = _weighed(scores, largest, total, scale)
        sums *= gl.convert_layout(kept, o_rows)[:, None]
        p = gl.convert_layout(weights.to(gl.bfloat16), p_layout)
        for tile in range(at + 1, at + tiles):
            stage = tile % STAGES
            mbarrier.wait(k_full.index(stage), tile // STAGES & 1)
            scores = _scores(q_tile, turned, turned_2, k_smem.index(stage), c_smem, stage, RANK,
                             BLOCK_N)  # fmt: skip
            before = (tile - 1) % STAGES
            mbarrier.wait(v_full.index(before), (tile - 1) // STAGES & 1)
            sums = warpgroup_mma(p, v_smem.index(before), sums, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            _given_back(k_empty.index(stage))
            weights, kept, largest, total = _weighed(scores, largest, total, scale)
            sums, p = warpgroup_mma_wait(0, deps=[sums, p])
            _given_back(v_empty.index(before))
            sums *= gl.convert_layout(kept, o_rows)[:, None]
            p = gl.convert_layout(weights.to(gl.bfloat16), p_layout)
        at += tiles
        before = (at - 1) % STAGES
        mbarrier.wait(v_full.index(before), (at - 1) // STAGES & 1)
        sums = warpgroup_mma(p, v_smem.index(before), sums, is_async=True)
        sums, p = warpgroup_mma_wait(0, deps=[sums, p])
        _given_back(v_empty.index(before))

    there = (o_place < n_queries)[:, None]
    if is_last:
        sums = sums / gl.convert_layout(total, o_rows)[:, None]
        gl.store(out_ptr + sums_at, sums.to(out_ptr.dtype.element_ty), mask=there)
    else:
        gl.store(sums_ptr + sums_at, sums, mask=there)
        gl.store(largest_ptr + place, largest, mask=place < n_queries)
        gl.store(total_ptr + place, total, mask=place < n_queries)


@gluon.jit(do_not_specialize=["n_rows", "n_queries", "is_first", "is_last"])
def flash_hopper_kernel(
    q_ptr, q_stride_h, q_stride_n, out_ptr, sums_ptr, largest_ptr, total_ptr, table_ptr,
    n_rows, n_queries, is_first, is_last, scale,
    D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr, K_GROUP: gl.constexpr,
    V_GROUP: gl.constexpr, RANK: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Keys and values of n_rows segments for 128 queries. Grid (query blocks, heads).

    The state is flash_kernel's; both sides packed, D = 128. Launched with 4 warps, those of the
    first consumer.
    """
    head = gl.program_id(1).to(gl.int64)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    slim: gl.constexpr = gl.NVMMASharedLayout(32, 16)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], tile_layout)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, D], tile_layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, D], tile_layout)
    halves: gl.constexpr = (RANK + 15) // 16
    c_smem, basis_smem = k_smem, q_smem
    if RANK > 0:
        c_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * halves, BLOCK_N, 16], slim)
        basis_smem = gl.allocate_shared_memory(gl.bfloat16, [2 * halves, D, 16], slim)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    shared = (q_smem, basis_smem, k_smem, v_smem, c_smem, k_full, k_empty, v_full, v_empty)
    given = (
        table_ptr, n_rows, head, gl.program_id(0) * 128, n_queries, q_ptr + head * q_stride_h,
        q_stride_n, out_ptr + head * n_queries * D, sums_ptr + head * n_queries * D,
        largest_ptr + head * n_queries, total_ptr + head * n_queries, is_first, is_last, scale,
    )  # fmt: skip
    gl.warp_specialize(
        [(_consume, (0, shared, given, D, RANK, BLOCK_N, STAGES)),
         (_consume, (1, shared, given, D, RANK, BLOCK_N, STAGES)),
         (produce, (shared, table_ptr, n_rows, head, D, K_KIND, K_GROUP, RANK, BLOCK_N, STAGES,
                    K_SIDE)),
         (produce, (shared, table_ptr, n_rows, head, D, V_KIND, V_GROUP, 0, BLOCK_N, STAGES,
                    V_SIDE))],
        [4, 4, 4], [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
    )  # fmt: skip
