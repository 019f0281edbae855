"""Statistics on tensors whose answer is known, and on a small world's own recording."""

from __future__ import annotations

import pytest
import torch

from quantwm.errors import UserError
from quantwm.evaluation.statistics import (
    STATISTICS,
    cells,
    constant_share,
    frame_change,
    measure_statistics,
    outliers,
    spread_layers,
    ternary_error,
    top_energy,
)
from quantwm.worlds.embedded.adapter import EmbeddedWorld
from tests.box_room import episode, held


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_a_channel_that_stands_out_is_found():
    x = torch.ones(2, 30, 8)
    x[1, 3, 5] = -12.0
    assert outliers(x).tolist() == [1.0, 12.0]


def test_the_share_of_what_all_tokens_have_in_common():
    assert constant_share(torch.ones(1, 9, 4)).item() == pytest.approx(1)
    x = noise(1, 4000, 4)
    assert constant_share(x).item() < 0.01
    # mean 1 and deviation 1 in every channel: half of the energy is constant
    assert constant_share(x + 1).item() == pytest.approx(0.5, abs=0.03)


def test_energy_in_the_leading_directions():
    q = torch.zeros(1, 50, 16)
    q[..., 3] = 5
    assert top_energy(q, 1).item() == pytest.approx(1)
    assert top_energy(noise(1, 20000, 16), 4).item() == pytest.approx(4 / 16, abs=0.02)


def test_change_from_frame_to_frame():
    still = noise(1, 6, 8).repeat(1, 10, 1)  # ten equal frames of six tokens
    assert frame_change(still, 6).item() == 0.0
    assert frame_change(noise(1, 6000, 8), 6).item() == pytest.approx(1, abs=0.03)


def test_three_levels_keep_what_is_on_them():
    x = noise(1, 10, 128).sign()
    assert ternary_error(x) == 0.0
    assert 0.1 < ternary_error(noise(2, 100, 128)) < 0.6


def test_layers_are_spread():
    assert spread_layers(10) == (0, 2, 4, 7, 9) and spread_layers(3) == (0, 1, 2)


def test_a_worlds_own_recording_gives_every_line():
    world = EmbeddedWorld.random("tiny")
    width, height = world.spec.video_size
    truth = episode("turn", held("left", 63))
    small = truth.__class__(**{**vars(truth), "frames": truth.frames[:, :height, :width].copy()})
    result = measure_statistics(world, [small])
    assert set(result["statistics"]) == {spec.key for spec in STATISTICS}
    assert result["layers"] == [0, 1] and result["recorded_maps"] == 1
    assert 0 < result["statistics"]["query_top8"] <= 1
    assert 0 <= result["statistics"]["qvg_shift"] <= 1
    assert len(cells(result)) == len(STATISTICS) + 1
    with pytest.raises(UserError, match="16 chunks of truth"):
        measure_statistics(world, [small.only([0, 1, 2])])
