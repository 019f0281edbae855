"""RoPE: relative scores, norms, axes, far positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantwm.errors import UserError
from quantwm.worlds.embedded.rope import apply_rope, rope_split, rope_tables


def test_split_of_the_shipped_head_is_that_of_the_recorded_tensors():
    assert rope_split(128) == (44, 42, 42)
    assert sum(rope_split(64)) == 64
    with pytest.raises(UserError, match="even"):
        rope_split(7)


@given(shift=st.integers(0, 5000), head_dim=st.sampled_from([12, 64, 128]))
def test_scores_depend_on_relative_frames_only(shift, head_dim):
    generator = torch.Generator().manual_seed(shift)
    q, k = torch.randn(2, 1, 2 * 6, head_dim, generator=generator, dtype=torch.float64).float()
    scores = []
    for first in (0, shift):
        cos, sin = rope_tables(first, 2, (2, 3), head_dim)
        scores.append(apply_rope(q, cos, sin) @ apply_rope(k, cos, sin).mT)
    # float32 angles would be off by 1e-3 at frame 5000
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-4)


def test_rotation_keeps_the_length_of_every_pair():
    x = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(0))
    y = apply_rope(x, *rope_tables(7, 2, (3, 4), 64))
    assert not torch.allclose(x, y)
    pairs = [t.unflatten(-1, (-1, 2)).norm(dim=-1) for t in (x, y)]
    torch.testing.assert_close(pairs[0], pairs[1])


@pytest.mark.parametrize("token", [0, 5, 13, 40])
def test_channels_turn_with_their_own_axis(token):
    """Token i stands at t = i // (rows * columns); pair 0 of an axis turns by its position."""
    rows, columns, head_dim = 3, 4, 64
    cos, sin = rope_tables(2, 4, (rows, columns), head_dim)
    time, side, _ = rope_split(head_dim)
    position = (2 + token // 12, token % 12 // columns, token % columns)
    for axis, channel in enumerate((0, time, time + side)):
        angle = torch.tensor(float(position[axis]))
        torch.testing.assert_close(cos[token, channel], angle.cos())
        torch.testing.assert_close(sin[token, channel + 1], angle.sin())


def test_bfloat16_input_is_turned_in_float32():
    x = torch.randn(1, 6, 12, generator=torch.Generator().manual_seed(1)).bfloat16()
    tables = rope_tables(1000, 1, (2, 3), 12)
    exact = apply_rope(x.float(), *tables)
    assert torch.equal(apply_rope(x, *tables), exact.bfloat16())
