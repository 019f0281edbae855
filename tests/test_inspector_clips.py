"""Clips of the inspector: the ring of a run's last minute, slices, sessions, archives, videos."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_engine import SPEC, FakeEngine, read_bar_code

from app.backend import Settings
from app.inspector import clips, sources
from app.inspector.clips import ClipInfo, ClipStore, write_clip
from app.inspector.ring import MARGIN, RingShape, RingWriter, ring_shape, take_clip
from app.inspector.slices import line_points, slice_sheet, slices
from quantwm.errors import UserError
from quantwm.session_zip import zip_session
from quantwm.video import LosslessWriter
from quantwm.worlds.base import ChunkAction

LANES = ("bf16", "qvg", "quantwm")


def fake_run(mode: str = "free") -> FakeEngine:
    settings = Settings(
        world=SPEC.name, scene="hall", seed=0, lanes=LANES, mode=mode, steps=2, speed=0
    )
    return FakeEngine(settings, delay=0.0)


def fill(folder: Path, shape: RingShape, chunks: int) -> dict[int, np.ndarray]:
    """Push a run; returns frame number -> [lanes, H, W, 3]."""
    writer, engine, shown = RingWriter(folder, shape), fake_run(), {}
    blocks = [engine.start()]
    for number in range(chunks):
        held = frozenset({"w"}) if number % 2 else frozenset()
        blocks.append(engine.step(ChunkAction.held(held, 4)))
    for block in blocks:
        writer.push(block)
        for frame in np.stack([lane.frames for lane in block.lanes], axis=1):
            shown[len(shown)] = frame
    return shown


def random_frames(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 12, 16, 3), dtype=np.uint8)


def write_video(path: Path, frames: np.ndarray, fps: float = 8.0) -> Path:
    with LosslessWriter(path, fps) as writer:
        writer.write(frames)
    return path


def test_the_ring_gives_back_what_was_made_with_keys_and_borders(tmp_path: Path) -> None:
    shown = fill(tmp_path, ring_shape(LANES, SPEC.video_size, 40.0, 4, "free"), 5)
    clip = take_clip(tmp_path, tmp_path / "clips")
    assert clip.info.frames == 36 and clip.info.lanes == LANES and clip.info.live
    assert (clip.read(0, 36) == np.stack(list(shown.values()))).all()
    assert clip.info.borders == (0, 16, 20, 24, 28, 32)
    assert clip.info.keys[:24] == ((),) * 20 + (("w",),) * 4


def test_a_full_ring_keeps_the_newest_frames_only(tmp_path: Path) -> None:
    shape = RingShape(LANES, SPEC.video_size, 40.0, 4, 10, "free")
    shown = fill(tmp_path, shape, 30)
    clip = take_clip(tmp_path, tmp_path / "clips")
    kept = (shape.slots - MARGIN) * 4
    assert clip.info.frames == kept and clip.info.first == len(shown) - kept
    assert read_bar_code(clip.read(0, 1)[0, 0]) == clip.info.first
    assert (clip.read(kept - 1, kept)[0] == shown[len(shown) - 1]).all()


def test_a_ring_that_goes_on_while_it_is_read_is_never_mixed(tmp_path: Path, monkeypatch) -> None:
    shape = RingShape(LANES, SPEC.video_size, 40.0, 4, 6, "free")
    fill(tmp_path, shape, 20)
    newest = RingWriter.__new__(RingWriter)
    newest._shape, newest._next, newest._frames = shape, 24, 96
    newest._map = np.memmap(
        tmp_path / "ring.raw", np.uint8, "r+", shape=(shape.slots, shape.slot_bytes)
    )
    engine, real = fake_run(), write_clip

    def slow(folder: Path, info: ClipInfo, frames: object) -> object:
        def overtaken():
            for index, frame in enumerate(frames):
                if index == 0:
                    newest.push(engine.start())
                    newest.push(engine.step(ChunkAction.held(frozenset(), 4)))
                    newest.push(engine.step(ChunkAction.held(frozenset(), 4)))
                yield frame

        return real(folder, info, overtaken())

    monkeypatch.setattr("app.inspector.ring.write_clip", slow)
    with pytest.raises(UserError, match="pause it and inspect again"):
        take_clip(tmp_path, tmp_path / "clips")
    assert not list((tmp_path / "clips").glob("clip-*"))


def test_nothing_driven_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="press Drive first"):
        take_clip(tmp_path, tmp_path / "clips")


def test_a_ring_holds_a_minute_or_what_fits() -> None:
    small = ring_shape(LANES, (128, 96), 8.75, 4, "free")
    assert (small.slots - MARGIN) * small.piece == pytest.approx(60 * 8.75, abs=4)
    large = ring_shape(LANES, (1280, 704), 16.0, 16, "free")
    assert large.slots * large.slot_bytes <= clips.MAX_CLIP_BYTES + MARGIN * large.slot_bytes


def test_no_room_on_the_disk_is_one_line(tmp_path: Path, monkeypatch) -> None:
    usage = type("usage", (), {"free": 10 * 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(UserError, match="inspect a shorter piece"):
        write_clip(tmp_path, ClipInfo("x", ("a",), (16, 12), 8.0, 4), [])


def test_slices_are_the_lines_own_pixels(tmp_path: Path) -> None:
    a, b = random_frames(9), random_frames(9, seed=1)
    info = ClipInfo("x", ("a", "b"), (16, 12), 8.0, 9)
    clip = write_clip(tmp_path, info, zip(a, b, strict=True))
    row = slices(clip, (0, 5), (15, 5))
    assert (row[0] == a[:, 5]).all() and (row[1] == b[:, 5]).all()
    column = slices(clip, (3, 0), (3, 11))
    assert (column[1] == b[:, :, 3]).all()
    x, y = line_points((0, 0), (15, 11), (16, 12))
    assert len(x) == 16 and (x[0], y[0], x[-1], y[-1]) == (0, 0, 15, 11)
    assert slice_sheet(clip, (0, 5), (15, 5)).shape == (9, 32, 3)
    with pytest.raises(UserError, match="between"):
        slices(clip, (0, 0), (16, 0))


def test_a_store_forgets_its_oldest_clip_and_file(tmp_path: Path) -> None:
    store, info = ClipStore(), ClipInfo("x", ("a",), (16, 12), 8.0, 1)
    kept = [store.keep(write_clip(tmp_path, info, [[random_frames(1)[0]]])) for _ in range(5)]
    assert [clip.path.exists() for clip in kept] == [False, False, True, True, True]
    with pytest.raises(UserError, match="gone"):
        store.get(kept[0].token)
    assert store.get(kept[4].token) is kept[4]


@pytest.fixture
def session(tmp_path: Path) -> Path:
    from fake_engine import FakeBackend

    folder = tmp_path / "session"
    folder.mkdir()
    engine = fake_run("teacher")
    (tmp_path / "scenes").mkdir()
    writer = FakeBackend(tmp_path / "scenes").record(folder, engine.settings, None, engine)
    writer.write(engine.start())
    for _ in range(3):
        writer.write(engine.step(ChunkAction.held(frozenset({"left"}), 4)))
    writer.close()
    return folder


def test_a_recorded_session_opens_with_its_chunks(session: Path, tmp_path: Path) -> None:
    clip = sources.from_session(session, tmp_path / "clips", "Recorded")
    assert clip.info.lanes == LANES and clip.info.frames == 12 and clip.info.mode == "teacher"
    assert clip.info.borders == (0, 4, 8) and clip.info.keys == (("left",),) * 12
    assert read_bar_code(clip.read(0, 1)[0, 0]) == 16


def test_chunks_of_a_cut_off_recording_lie_where_they_lay(session: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (session / "actions.ndjson").read_text().splitlines()]
    assert [line["shown"] for line in lines] == [4, 4, 4]
    lines[0]["shown"] = 3  # a first chunk that shows less than the others, as Wan's do

    def opened() -> ClipInfo:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (session / "actions.ndjson").write_text(text)
        return sources.from_session(session, tmp_path / "clips", "Recorded").info

    lines[2]["shown"] = 9  # its video holds five of them: the last ones were lost
    assert opened().borders == (0, 3, 7) and len(opened().keys) == 12
    for line in lines:
        del line["shown"]  # an older session: equal chunks of whole latent frames
    assert opened().borders == (0, 4, 8)
    lines.append({**lines[-1], "block": 4})  # 12 frames in four chunks of four latent frames
    assert opened().borders == () and opened().keys == ()
    lines[0]["shown"] = 2**40
    with pytest.raises(UserError, match="line 1: shown is a number of frames to 4096"):
        opened()


def test_other_weights_are_said_and_still_play(session: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "_own_weights", lambda world: "f" * 64)
    clip = sources.from_session(session, tmp_path / "clips", "Recorded")
    assert clip.info.frames == 12
    assert any("this program has ffffffffffff" in note for note in clip.info.notes)


def test_the_weights_of_worlds_are_known_by_their_manifest() -> None:
    assert len(sources._own_weights("embedded") or "") == 64
    assert sources._own_weights("somebody-elses") is None


def test_an_archive_of_half_a_session_names_the_archive(session: Path, tmp_path: Path) -> None:
    (session / "actions.ndjson").unlink()
    archive = tmp_path / "half.zip"
    with zipfile.ZipFile(archive, "w") as packed_half:
        for path in session.iterdir():
            packed_half.write(path, path.name)
    with pytest.raises(UserError, match=r"^half\.zip holds no actions\.ndjson"):
        sources.from_uploads([(archive, "half.zip")], tmp_path / "clips")


def test_an_archive_opens_and_leaves_nothing_behind(session: Path, tmp_path: Path) -> None:
    archive = zip_session(session, tmp_path / "packed.zip")
    clip = sources.from_uploads([(archive, "packed.zip")], tmp_path / "clips")
    assert clip.info.frames == 12
    assert [p.name for p in (tmp_path / "clips").iterdir()] == [clip.path.name]


def test_videos_of_any_origin_open_and_the_shorter_one_ends_them(tmp_path: Path) -> None:
    a, b = random_frames(9), random_frames(7, seed=1)
    files = [
        (write_video(tmp_path / "a.mkv", a), "a.mkv"),
        (write_video(tmp_path / "b.mkv", b), "a.mkv"),
    ]
    clip = sources.from_uploads(files, tmp_path / "clips")
    assert clip.info.lanes == ("a.mkv", "a.mkv (2)") and clip.info.frames == 7
    assert (clip.read(0, 7)[:, 0] == a[:7]).all() and (clip.read(0, 7)[:, 1] == b).all()
    assert "a.mkv (2) ends first" in clip.info.notes[0]


def test_how_videos_differ_is_said(tmp_path: Path) -> None:
    frames = random_frames(6)
    files = [
        (write_video(tmp_path / "x.mkv", frames), "slow.mkv"),
        (write_video(tmp_path / "y.mkv", frames, fps=30.0), "fast.mkv"),
    ]
    clip = sources.from_uploads(files, tmp_path / "clips")
    assert any("slow.mkv 8, fast.mkv 29.94" in note for note in clip.info.notes)
    facts = [sources.probe_video(path) for path, _ in files]
    facts[0] = replace(facts[0], variable_rate=True, rotation=90, pixel_format="gray")
    found = " ".join(sources._video_notes(facts))
    for words in ("x.mkv has a variable frame rate", "turned by 90 degrees", "gray, "):
        assert words in found
    assert "differ (x" not in found and sources._video_notes(facts[1:]) == ()


def test_a_video_cut_in_the_middle_shows_what_could_be_read(tmp_path: Path) -> None:
    whole = write_video(tmp_path / "a.mkv", random_frames(20))
    cut = tmp_path / "b.mkv"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    clip = sources.from_uploads([(whole, "a.mkv"), (cut, "b.mkv")], tmp_path / "clips")
    assert 1 <= clip.info.frames < 20 and clip.info.notes


def test_the_same_file_twice_keeps_its_two_names(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mkv", random_frames(9))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    clip = sources.from_uploads([(path, "a.mkv"), (path, "a.mkv")], tmp_path / "clips")
    assert clip.info.lanes == ("a.mkv", "a.mkv (2)")
    first, second = clip.info.notes
    assert first.startswith("a.mkv has pictures of") and "announces" in first
    assert second.startswith("a.mkv (2) has pictures of")


def test_a_clip_that_would_not_fit_is_cut_and_says_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(clips, "MAX_CLIP_BYTES", 5 * 2 * 12 * 16 * 3)
    path = write_video(tmp_path / "a.mkv", random_frames(9))
    clip = sources.from_uploads([(path, "a"), (path, "b")], tmp_path / "clips")
    assert clip.info.frames == 5 and "first 5 frames" in clip.info.notes[0]


def text(folder: Path) -> Path:
    path = folder / "notes.txt"
    path.write_text("no video")
    return path


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda t: [(text(t), "notes.txt")], "neither a video"),
        (lambda t: [(write_video(t / "a.mkv", random_frames(3)), "a.mkv")], "two to 4 videos"),
        (
            lambda t: [
                (write_video(t / "a.mkv", random_frames(3)), "a.mkv"),
                (write_video(t / "b.mkv", random_frames(3)[:, :10]), "b.mkv"),
            ],
            "have one size",
        ),
    ],
)
def test_what_cannot_be_opened_is_one_line(tmp_path: Path, make, line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        sources.from_uploads(make(tmp_path), tmp_path / "clips")
    assert "\n" not in str(caught.value)


def test_a_large_picture_is_refused_before_it_is_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "MAX_SIDE", 8)
    path = write_video(tmp_path / "a.mkv", random_frames(3))
    with pytest.raises(UserError, match="sides of at most 8"):
        sources.from_uploads([(path, "a"), (path, "b")], tmp_path / "clips")


def packed(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    ("members", "line"),
    [
        ({"readme.md": b"x"}, "no session.json"),
        ({f"f{n}.csv": b"" for n in range(100)}, "100 files"),
        ({"../../session.json": b"{}"}, "not a quantwm-session"),
    ],
)
def test_an_archive_of_something_else_is_one_line(tmp_path: Path, members, line: str) -> None:
    archive = packed(tmp_path / "x.zip", members)
    with pytest.raises(UserError, match=line):
        sources.from_uploads([(archive, "x.zip")], tmp_path / "clips")
    assert not list((tmp_path / "clips").iterdir())
    assert not (tmp_path.parent / "session.json").exists()


def test_a_bomb_is_refused_before_it_unpacks(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "MAX_UNPACKED_BYTES", 1000)
    archive = packed(tmp_path / "x.zip", {"session.json": b" " * 2000})
    with pytest.raises(UserError, match="unpacks to more"):
        sources.from_uploads([(archive, "x.zip")], tmp_path / "clips")
