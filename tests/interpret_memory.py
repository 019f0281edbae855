"""Kernels that are broken on purpose, so that the guard is seen to work; test_memory_guard.py runs
it.

Not collected by name: TRITON_INTERPRET=1 must be set before triton is imported.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from memory_guard import MemoryFault, guarded_launches  # noqa: F401  (the last is a fixture)

TOKENS, BLOCK = 37, 16


@triton.jit
def copy_kernel(
    out_ptr, x_ptr, n_tokens, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """A block of tokens; AHEAD: the next block's are loaded too, behind the last one as well."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + rows, mask=rows < n_tokens, other=0)
    if AHEAD:
        x += 0 * tl.load(x_ptr + rows + BLOCK_N, mask=rows < n_tokens, other=0)
    if MASKED:
        tl.store(out_ptr + rows, x, mask=rows < n_tokens)
    else:
        tl.store(out_ptr + rows, x)


@triton.jit
def meeting_kernel(out_ptr, x_ptr, KIND: tl.constexpr):
    """Programs that write one place alike or not, or that read what another one writes."""
    number = tl.program_id(0)
    if KIND == 0:
        tl.store(out_ptr, 7)
    elif KIND == 1:
        tl.store(out_ptr, number)
    elif KIND == 2:
        tl.store(out_ptr + number + 1, tl.load(out_ptr + number))
    elif KIND == 3:
        tl.store(out_ptr + number, tl.load(out_ptr + number + 1))
    else:
        tl.atomic_add(out_ptr, number)


@triton.jit
def table_kernel(out_ptr, table_ptr, reach):
    """A whole number of each of the tensors that a table has the addresses of."""
    number = tl.program_id(0)
    there = tl.load(table_ptr + number).to(tl.pointer_type(tl.int32))
    tl.store(out_ptr + number, tl.load(there + reach))


def copied(x: torch.Tensor, ahead: bool = False, masked: bool = True) -> torch.Tensor:
    # Far from x wherever the allocator puts both: a fault is told by the argument that is nearest.
    out = torch.empty(64 * TOKENS, dtype=torch.int32)[32 * TOKENS :][:TOKENS]
    grid = (triton.cdiv(TOKENS, BLOCK),)
    copy_kernel[grid](out, x, TOKENS, BLOCK_N=BLOCK, AHEAD=ahead, MASKED=masked)
    return out


def test_what_is_right_runs() -> None:
    x = torch.arange(TOKENS, dtype=torch.int32)
    assert torch.equal(copied(x), x)
    longer = torch.arange(3 * TOKENS, dtype=torch.int32)
    assert torch.equal(copied(longer[TOKENS:]), longer[TOKENS : 2 * TOKENS])


def test_a_load_beside_the_tensor_is_named_with_its_distance() -> None:
    """Numbers 37 to 47 of 4 bytes each; memory of the same storage does not count."""
    storage = torch.zeros(3 * TOKENS, dtype=torch.int32)
    for x in (storage[:TOKENS].clone(), storage[TOKENS : 2 * TOKENS]):
        with pytest.raises(MemoryFault, match=r"copy_kernel, program \(1, 0, 0\): a load goes 44 "
                           r"bytes behind the 148 bytes of x_ptr, 11 lanes"):  # fmt: skip
            copied(x, ahead=True)


def test_a_tail_without_a_mask_is_seen() -> None:
    with pytest.raises(MemoryFault, match="a store goes 44 bytes behind the 148 bytes of out_ptr"):
        copied(torch.arange(TOKENS, dtype=torch.int32), masked=False)


def test_a_load_before_the_tensor_is_seen() -> None:
    out, held = torch.zeros(2, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)[4:]
    with pytest.raises(MemoryFault, match="goes 8 bytes before the 20 bytes of what table_ptr"):
        table_kernel[(1,)](out, torch.tensor([held.data_ptr()]), -2)


def test_programs_that_meet_are_seen() -> None:
    def run(kind: int) -> torch.Tensor:
        out = torch.zeros(9, dtype=torch.int32)
        meeting_kernel[(4,)](out, out.clone(), KIND=kind)
        return out

    assert run(0)[0] == 7 and run(4)[0] == 6
    with pytest.raises(MemoryFault, match="writes 1 bytes of out_ptr otherwise than program"):
        run(1)
    with pytest.raises(MemoryFault, match="reads 4 bytes of out_ptr, which program number 0 wrote"):
        run(2)
    with pytest.raises(MemoryFault, match="writes 4 bytes of out_ptr, which program number 0 read"):
        run(3)


def test_tensors_behind_a_table_of_addresses_count() -> None:
    held = [torch.full((3,), number, dtype=torch.int32) for number in (5, 6)]
    table = torch.tensor([tensor.data_ptr() for tensor in held])
    out = torch.empty(2, dtype=torch.int32)
    table_kernel[(2,)](out, table, 2)
    assert out.tolist() == [5, 6]
    with pytest.raises(MemoryFault, match="goes 4 bytes behind the 12 bytes of what table_ptr"):
        table_kernel[(2,)](out, table, 3)


def test_what_launchers_allocate_is_poisoned() -> None:
    assert torch.empty(3).isnan().all() and torch.empty(2, dtype=torch.uint8).tolist() == [127, 127]
