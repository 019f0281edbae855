"""The inspector's addresses: exact frames, curves, slices, uploads, and what is refused."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.testclient import TestClient
from test_inspector_clips import LANES, fill, random_frames, write_video

from app.files import SessionFiles
from app.inspector import curves as measures
from app.inspector import probe, routes, sources
from app.inspector.ring import ring_shape
from app.inspector.routes import Inspector
from app.sessions import SessionManager
from quantwm.metrics import psnr_per_frame


class Visitor:
    """One page's talk with the inspector."""

    def __init__(self, folder: Path) -> None:
        self.sessions = SessionManager(SessionFiles(folder))
        self.client = TestClient(Starlette(routes=Inspector(self.sessions).routes()))
        self.token = self.client.get("/inspect/api/offers?session=").json()["session"]
        self.folder = self.sessions.get(self.token).folder.path

    def get(self, what: str, **more: object):
        return self.client.get(f"/inspect/api/{what}", params={"session": self.token, **more})

    def post(self, what: str, **more: object):
        return self.client.post(f"/inspect/api/{what}", json={"session": self.token, **more})

    def upload(self, *paths: Path):
        files = [("file", (path.name, path.read_bytes())) for path in paths]
        return self.client.post("/inspect/api/upload", params={"session": self.token}, files=files)


@pytest.fixture
def visitor(tmp_path: Path) -> Visitor:
    return Visitor(tmp_path / "s")


def picture(response) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.asarray(Image.open(io.BytesIO(response.content)))


def test_sheets_hold_the_very_frames_of_the_run(visitor: Visitor) -> None:
    shown = fill(visitor.folder, ring_shape(LANES, (128, 96), 40.0, 4, "free"), 5)
    reply = visitor.post("open", source="live").json()
    assert reply["ok"] and reply["info"]["live"] and reply["info"]["frames"] == len(shown)
    per = reply["info"]["sheet_frames"]
    for number in range(-(-len(shown) // per)):
        sheet = picture(visitor.get("sheet", clip=reply["clip"], number=number))
        for row in range(sheet.shape[0] // 96):
            for lane in range(3):
                cut = sheet[row * 96 : row * 96 + 96, lane * 128 : lane * 128 + 128]
                assert (cut == shown[number * per + row][lane]).all()


def measured(visitor: Visitor, clip: str) -> dict:
    deadline = time.monotonic() + 60
    while not (curves := visitor.get("curves", clip=clip).json())["done"]:
        assert time.monotonic() < deadline, curves
        time.sleep(0.02)
    return curves


def test_curves_agree_with_the_library_and_are_written_as_csv(
    visitor: Visitor, tmp_path: Path
) -> None:
    a, b = random_frames(6), random_frames(6, seed=1)
    reply = visitor.upload(
        write_video(tmp_path / "a.mkv", a), write_video(tmp_path / "b.mkv", b)
    ).json()
    curves = measured(visitor, reply["clip"])
    assert curves["reference"] == "a.mkv"
    assert curves["lanes"]["b.mkv"]["psnr"] == pytest.approx(psnr_per_frame(b, a), abs=1e-3)
    assert len(curves["lanes"]["b.mkv"]["excess"]) == 5
    assert curves["diverged"] == {"b.mkv": 0}
    rows = visitor.get("curves.csv", clip=reply["clip"]).text.splitlines()
    assert len(rows) == 7 and rows[1].startswith("0,b.mkv,a.mkv,")


def test_lpips_is_a_curve_where_its_weights_are(
    visitor: Visitor, tmp_path: Path, monkeypatch
) -> None:
    a, b = random_frames(4), random_frames(4, seed=1)
    files = [write_video(tmp_path / "a.mkv", a), write_video(tmp_path / "b.mkv", b)]
    curves = measured(visitor, visitor.upload(*files).json()["clip"])
    assert "at least 32 pixels" in curves["note"] and "lpips" not in curves["lanes"]["b.mkv"]
    monkeypatch.setattr(measures, "SMALLEST_LPIPS", 8)
    monkeypatch.setattr(measures, "missing_for_lpips", lambda: "no LPIPS: /models/somewhere")
    curves = measured(visitor, visitor.upload(*files).json()["clip"])
    assert "lacks torchmetrics" in curves["note"] and "/root" not in curves["note"]
    monkeypatch.setattr(measures, "missing_for_lpips", lambda: None)
    distance = lambda x, y: float(np.abs(x.astype(int) - y).mean())  # noqa: E731
    monkeypatch.setattr(measures, "load_lpips", lambda device: distance)
    clip = visitor.upload(*files).json()["clip"]
    curves = measured(visitor, clip)
    expected = [distance(x, y) for x, y in zip(b, a, strict=True)]
    assert curves["lanes"]["b.mkv"]["lpips"] == pytest.approx(expected, abs=1e-3)
    assert curves["note"] == ""
    rows = visitor.get("curves.csv", clip=clip).text.splitlines()
    assert rows[0].endswith(",lpips") and float(rows[1].split(",")[-1]) == pytest.approx(
        expected[0], rel=1e-4
    )


def test_a_model_that_breaks_costs_no_other_curve(
    visitor: Visitor, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(measures, "SMALLEST_LPIPS", 8)
    monkeypatch.setattr(measures, "missing_for_lpips", lambda: None)
    monkeypatch.setattr(measures, "load_lpips", lambda device: 1 / 0)
    path = write_video(tmp_path / "a.mkv", random_frames(3))
    curves = measured(visitor, visitor.upload(path, path).json()["clip"])
    assert len(curves["lanes"]["a.mkv (2)"]["psnr"]) == 3 and "No whole LPIPS" in curves["note"]


def test_identical_frames_are_99_decibels(visitor: Visitor, tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mkv", random_frames(3))
    reply = visitor.upload(path, path).json()
    curves = measured(visitor, reply["clip"])
    assert curves["lanes"]["a.mkv (2)"]["psnr"] == [99.0] * 3


def test_a_slice_is_the_history_of_its_line(visitor: Visitor, tmp_path: Path) -> None:
    a, b = random_frames(6), random_frames(6, seed=1)
    reply = visitor.upload(
        write_video(tmp_path / "a.mkv", a), write_video(tmp_path / "b.mkv", b)
    ).json()
    found = picture(visitor.get("slice", clip=reply["clip"], x0=0, y0=4, x1=15, y1=4))
    assert (found == np.concatenate([a[:, 4], b[:, 4]], axis=1)).all()


def test_what_is_wrong_is_one_line(visitor: Visitor, tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mkv", random_frames(3))
    clip = visitor.upload(path, path).json()["clip"]
    other = Visitor(tmp_path / "other")
    for response, line in (
        (visitor.get("sheet", clip=clip, number=1), "sheet 1 is behind it"),
        (visitor.get("sheet", clip=clip, number="-1"), "whole number"),
        (visitor.get("sheet", clip="nothing", number=0), "open it again"),
        (visitor.get("slice", clip=clip, x0=0, y0=0, x1=16, y1=0), "x1 must be"),
        (visitor.post("open", source="../../etc"), "no such recorded session"),
        (visitor.post("open", source="live"), "press Drive first"),
        (other.get("sheet", clip=clip, number=0), "open it again"),
        (visitor.client.get("/inspect/api/curves?session=x"), "session has ended"),
        (visitor.client.post("/inspect/api/open", content=b"{"), "not JSON"),
        (visitor.post("tokens", frame=0, x=0, y=0), "press Drive"),
        (visitor.post("tokens", frame=-1, x=0, y=0), "frame must be"),
    ):
        assert response.status_code == 400 and line in response.json()["error"]
        assert "\n" not in response.json()["error"]


def test_a_file_that_is_too_large_is_refused_and_gone(
    visitor: Visitor, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(sources, "MAX_UPLOAD_BYTES", 100)
    path = write_video(tmp_path / "a.mkv", random_frames(3))
    response = visitor.upload(path, path)
    assert response.status_code == 400 and "larger than" in response.json()["error"]
    assert not list((visitor.folder / "clips").glob("upload-*"))


def test_an_upload_is_refused_before_it_is_taken(visitor: Visitor) -> None:
    url, token = "/inspect/api/upload", {"session": visitor.token}
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    huge = visitor.client.post(url, params=token, headers={**form, "Content-Length": str(2**40)})
    assert huge.status_code == 400 and "1,048,576 MB are more than is taken" in huge.text
    chunked = visitor.client.post(url, params=token, headers=form, content=iter([b"--x"]))
    assert chunked.status_code == 400 and "Content-Length" in chunked.text


def test_more_files_than_lanes_are_refused_in_one_line(visitor: Visitor, tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mkv", random_frames(3))
    response = visitor.upload(*[path] * 5)
    assert response.status_code == 400 and "Maximum number of files" in response.json()["error"]


def test_mistakes_name_the_persons_file(visitor: Visitor, tmp_path: Path) -> None:
    whole = write_video(tmp_path / "a.mkv", random_frames(3))
    cut = tmp_path / "mine.mkv"
    cut.write_bytes(whole.read_bytes()[:60])
    response = visitor.upload(cut, whole)
    assert response.status_code == 400 and "mine.mkv" in response.json()["error"]
    assert "upload-" not in response.text and str(visitor.folder) not in response.text


def test_an_unexpected_error_is_a_number_that_is_in_the_log(
    visitor: Visitor, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(routes.ring, "take_clip", lambda *_: 1 / 0)
    response = visitor.post("open", source="live")
    assert response.status_code == 500
    number = response.json()["error"].split("error ")[1].split()[0]
    assert number in caplog.text and "ZeroDivisionError" in caplog.text


def test_a_page_of_its_own_leaves_nothing_behind(visitor: Visitor) -> None:
    fill(visitor.folder, ring_shape(LANES, (128, 96), 40.0, 4, "free"), 1)
    assert visitor.post("open", source="live").json()["ok"]
    driving = visitor.sessions.open("a driving page").token
    for token in (visitor.token, driving, "nobody"):
        visitor.client.post(f"/inspect/api/leave?session={token}")
    assert visitor.sessions.alive(driving) and not visitor.sessions.alive(visitor.token)
    assert not visitor.folder.exists()


def test_only_the_pages_own_files_are_served(visitor: Visitor) -> None:
    assert "<title>QuantWM inspector" in visitor.client.get("/inspect").text
    assert visitor.client.get("/inspect/web/main.js").status_code == 200
    for name in ("inspector.html", "..%2F..%2Fapp.py", "nothing.js"):
        assert visitor.client.get(f"/inspect/web/{name}").status_code == 404


def test_the_driving_loop_answers_a_question_about_tokens(
    visitor: Visitor, tmp_path: Path, monkeypatch
) -> None:
    from test_inspector_clips import fake_run

    from quantwm.token_selection import LayerPicks, Pick

    sessions, token = visitor.sessions, visitor.token
    session = sessions.get(token)
    engine, asked = fake_run(), []

    def pick_tokens(frame: int, x: int, y: int):
        asked.append((frame, x, y))
        layer = LayerPicks(3, {"bf16": (Pick(2, 1, 7, 0.5),)})
        return 6, 8, 128, 96, [layer]

    engine.pick_tokens = pick_tokens
    sessions.join(token)
    with sessions.hold(token):
        session.folder.path.mkdir(parents=True, exist_ok=True)
        prober = probe.Prober(sessions.probes, session.slot, session.folder.path)
        prober.note(engine.start(), 4, 1)
        done = threading.Event()

        def loop() -> None:
            while not done.is_set():
                prober.serve(engine)
                time.sleep(0.005)

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            reply = visitor.post("tokens", frame=5, x=20, y=17).json()
            refused = visitor.post("tokens", frame=999, x=0, y=0)
        finally:
            done.set()
            thread.join()
    assert asked == [(5, 20, 17)]
    assert reply["patch"] == [16, 16, 16, 16]
    pick = reply["layers"][0]["lanes"][0]["picks"][0]
    assert pick == {"frame": 2, "box": [112, 16, 16, 16], "lead": 0.5}
    assert "frame 999 is not of this run" in refused.json()["error"]
