"""Messages to the stage: lossless sheets, finite numbers, the same fields for every lane."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
from fake_engine import FakeBackend, read_bar_code

from app import limits, wire
from app.controls import ControlSnapshot
from app.handlers import parse_settings


def pixels(uri: str) -> np.ndarray:
    return iio.imread(base64.b64decode(uri.split(",", 1)[1]))


def test_sheet_keeps_every_pixel_where_the_page_looks() -> None:
    rng = np.random.default_rng(0)
    lanes = [rng.integers(0, 256, (5, 6, 9, 3), dtype=np.uint8) for _ in range(3)]
    decoded = pixels(wire.encode_picture(wire.sheet(lanes), lossless=True))
    for lane, frames in enumerate(lanes):
        for frame in range(5):
            cut = decoded[frame * 6 : frame * 6 + 6, lane * 9 : lane * 9 + 9]
            np.testing.assert_array_equal(cut, frames[frame])


def test_sheet_refuses_lanes_that_differ() -> None:
    with pytest.raises(ValueError, match="one shape"):
        wire.sheet([np.zeros((2, 4, 4, 3), np.uint8), np.zeros((3, 4, 4, 3), np.uint8)])


def test_large_frames_travel_as_jpeg() -> None:
    picture = np.full((64, 64, 3), 77, np.uint8)
    uri = wire.encode_picture(picture, lossless=False)
    assert uri.startswith("data:image/jpeg")
    assert np.abs(pixels(uri).astype(int) - 77).max() <= 1


def test_numbers_are_always_json() -> None:
    text = wire.message("x", a=math.nan, b=[math.inf, 1.00004], c={"d": -math.inf})
    assert json.loads(text) == {
        "v": limits.PROTOCOL_VERSION,
        "kind": "x",
        "a": None,
        "b": [None, 1.0],
        "c": {"d": None},
    }


def test_a_block_names_every_lane(tmp_path: Path) -> None:
    backend = FakeBackend(tmp_path)
    settings = parse_settings({}, backend.catalogue())
    engine = backend.open(settings, None, lambda *_: None)
    block = engine.start()
    control = ControlSnapshot(seq=9, sent_ms=5.0)
    fields = json.loads(wire.message("block", **wire.block_fields(block, control, {"qvg": 30.0})))
    assert [lane["name"] for lane in fields["lanes"]] == ["bf16", "qvg", "quantwm"]
    assert [lane["psnr"] for lane in fields["lanes"]] == [None, 30.0, None]
    assert (fields["seq"], fields["i"], fields["frames"]) == (9, 0, 16)
    assert fields["memory"]["source"] == "test numbers"
    sheet = pixels(fields["sheet"])
    assert sheet.shape == (16 * 96, 3 * 128, 3)
    for frame in range(16):
        for lane in range(3):
            cut = sheet[frame * 96 : frame * 96 + 96, lane * 128 : lane * 128 + 128]
            assert read_bar_code(cut) == frame


def test_hello_offers_everything_and_no_secret(tmp_path: Path) -> None:
    hello = json.loads(wire.hello_message(FakeBackend(tmp_path).catalogue(), None))
    assert hello["session"] is None
    assert len(hello["scenes"]) == 6
    assert all(scene["picture"].startswith("data:image/png") for scene in hello["scenes"])
    assert hello["keys"]["ArrowUp"] == "w"
    assert str(tmp_path) not in json.dumps(hello)
