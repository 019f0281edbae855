"""2-bit packing: the layout, and that unpack undoes it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from quantwm.cache.pack import pack, packed_bytes, unpack, unpack_range


def test_layout_is_little_end_first() -> None:
    codes = torch.tensor([[1, 2, 3, 0, 3, 0, 0, 2]], dtype=torch.uint8)
    assert pack(codes).tolist() == [[0b00_11_10_01, 0b10_00_00_11]]


def test_every_byte_survives_a_round_trip() -> None:
    every = torch.arange(256, dtype=torch.uint8).unsqueeze(0)
    assert torch.equal(pack(unpack(every, 1024)), every)


@given(st.integers(1, 70), st.integers(1, 3), st.integers(0, 2**31))
def test_unpack_undoes_pack(count: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 4, (rows, count), generator=generator, dtype=torch.uint8)
    packed = pack(codes)
    assert packed.shape == (rows, packed_bytes(count))
    assert torch.equal(unpack(packed, count), codes)


@given(st.integers(1, 60), st.data())
def test_unpack_range_is_a_slice_of_unpack(count: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    codes = (torch.arange(count, dtype=torch.uint8) * 7 % 4).expand(2, count)
    assert torch.equal(unpack_range(pack(codes), start, stop), codes[:, start:stop])
