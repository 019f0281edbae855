"""`replay`: run a recorded session again and say whether it is bit-identical."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantwm.cli.common import add_device, emit, pick_device, progress, progress_done, say
from quantwm.cli.download import add_weights
from quantwm.describe import versions
from quantwm.engine import Engine
from quantwm.errors import UserError
from quantwm.session import frames_sha256
from quantwm.session_reader import Session
from quantwm.session_zip import open_session
from quantwm.video import has_pyav, iter_video
from quantwm.worlds.base import WorldSpec
from quantwm.worlds.registry import load_world, world_spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `replay`."""
    parser.add_argument("folder", type=Path, help="a session folder or zip")
    add_weights(parser)
    add_device(parser)


class LaneCheck:
    """Compares a lane's new frames with its video, or without one with the recorded hashes."""

    def __init__(self, session: Session, lane: str) -> None:
        self.lane = lane
        self.first: dict[str, Any] | None = None
        self._hashes = session.frame_hashes[lane]
        path = session.video(lane)
        self._video: Iterator[np.ndarray] | None = None
        if path is not None and has_pyav():
            self._video = iter_video(path)
        elif not self._hashes:
            raise UserError(f"lane {lane} has neither a readable video nor hashes to compare with")

    @property
    def source(self) -> str:
        """What the frames are compared with."""
        return "hashes" if self._video is None else "video"

    def check(self, block: int, first_frame: int, frames: np.ndarray) -> bool:
        """Compare one chunk. False once the recording has no frame left to compare with."""
        if self._video is None:
            if block > len(self._hashes):
                return False
            if self.first is None and frames_sha256(frames) != self._hashes[block - 1]:
                self.first = {"block": block, "frame": first_frame}
            return True
        for offset, frame in enumerate(frames):
            recorded = next(self._video, None)
            if recorded is None:
                return False
            if self.first is None and not np.array_equal(recorded, frame):
                where = {"block": block, "frame": first_frame + offset}
                self.first = where | first_pixel(recorded, frame)
        return True

    def close(self) -> None:
        """Close the video file."""
        if self._video is not None:
            self._video.close()  # type: ignore[attr-defined]


def first_pixel(recorded: np.ndarray, now: np.ndarray) -> dict[str, Any]:
    """Where two frames uint8 [H, W, 3] first differ, row by row, with both colours there."""
    if recorded.shape != now.shape:
        return {"recorded_size": list(recorded.shape[1::-1]), "size": list(now.shape[1::-1])}
    y, x = (int(place) for place in np.argwhere((recorded != now).any(axis=2))[0])
    return {"pixel": [x, y], "recorded": recorded[y, x].tolist(), "now": now[y, x].tolist()}


def run(arguments: argparse.Namespace) -> int:
    """Rerun the session. Status 0 when every frame is bit-identical, 1 when one differs."""
    with open_session(arguments.folder) as session:
        return _replay(session, arguments)


def _replay(session: Session, arguments: argparse.Namespace) -> int:
    info = session.info
    for note in session.notes:
        say(note)
    if not session.actions:
        raise UserError(f"{arguments.folder} holds no action: there is nothing to replay")
    spec = world_spec(info.world)
    if (tuple(spec.keys), spec.cache.frames_per_chunk) != (info.keys, info.frames_per_chunk):
        raise UserError(f"the world {info.world} of this version has other keys than the session")
    device = pick_device(info.device if arguments.device == "auto" else arguments.device)
    checks = [LaneCheck(session, lane.name) for lane in info.lanes]
    say(f"loading {spec.title} on {device}")
    dtype = None if info.dtype is None else getattr(torch, info.dtype)
    world = load_world(info.world, device, dtype=dtype)
    if world.weights_sha256() != info.weights_sha256:
        say(
            f"the session was made with weights {info.weights_sha256[:12]}, these are "
            f"{world.weights_sha256()[:12]}: it plays, and its frames will differ"
        )
    _say_what_changed(session)
    frames, blocks = 0, 0
    with Engine(
        world,
        info.lanes,
        seed=info.seed,
        scene=info.scene,
        image=session.start_picture(),
        prompt=info.prompt,
        mode=info.mode,
        steps=info.steps,
        max_tokens=info.max_tokens or _tokens_of(session, spec),
    ) as engine:
        engine.start()
        for number, action in enumerate(session.actions, 1):
            if number in session.prompts:
                engine.change_prompt(session.prompts[number])
            block = engine.step(action)
            ours = {lane.name: lane.frames for lane in block.lanes}
            recorded = [check.check(block.index, frames, ours[check.lane]) for check in checks]
            if not all(recorded):
                short = next(c for c, found in zip(checks, recorded, strict=True) if not found)
                _recording_ended(session, short, block.index)
                break
            frames += len(block.lanes[0].frames)
            blocks += 1
            progress(f"chunk {block.index}/{len(session.actions)}")
        progress_done()
        kernels = engine.explain()
    for check in checks:
        check.close()
    weights = world.weights_sha256()
    return _report(session, checks, frames, blocks, str(device), kernels, weights)


def _recording_ended(session: Session, short: LaneCheck, block: int) -> None:
    """A killed run may have less than its actions say; a finished one was cut off afterwards."""
    verb = "s" if short.source == "video" else ""
    text = (
        f"the {short.source} of lane {short.lane} end{verb} in chunk {block}, before its actions do"
    )
    if session.complete:
        raise UserError(f"{text}, though the session was finished: restore it")
    if block == 1:
        raise UserError(f"{text}: there is nothing to compare with")
    say(text)


def _tokens_of(session: Session, spec: WorldSpec) -> int:
    # a session without a limit must not get this device's: as much as it ever held
    frames = spec.context_frames + len(session.actions) * spec.cache.frames_per_chunk
    return (frames + spec.cache.frames_per_chunk) * spec.cache.tokens_per_frame


def _report(
    session: Session,
    checks: Sequence[LaneCheck],
    frames: int,
    blocks: int,
    device: str,
    kernels: str,
    weights: str,
) -> int:
    for check in checks:
        if check.first is None:
            say(f"lane {check.lane}: bit-identical ({check.source}, {frames} frames)")
        else:
            say(f"lane {check.lane}: first differs {_where(check)}")
    identical = all(check.first is None for check in checks)
    emit(
        {
            "bit_identical": identical,
            "frames": frames,
            "blocks": blocks,
            "lanes": [
                {
                    "lane": check.lane,
                    "bit_identical": check.first is None,
                    "first_difference": check.first,
                    "compared_with": check.source,
                }
                for check in checks
            ],
            "device": device,
            "kernels": kernels,
            "session": str(session.folder),
            "weights_sha256": session.info.weights_sha256,
            "weights_now": weights,
        }
    )
    return 0 if identical else 1


def _where(check: LaneCheck) -> str:
    first = check.first or {}
    if check.source != "video":
        return f"in the chunk that starts at frame {first['frame']}"
    text = f"in frame {first['frame']}"
    if "pixel" in first:
        x, y = first["pixel"]
        text += f" at pixel ({x}, {y}): {first['recorded']} recorded, {first['now']} now"
    return text


def _say_what_changed(session: Session) -> None:
    now = versions()
    changed = [
        f"{name} {then} then, {now.get(name, 'none')} now"
        for name, then in session.info.versions.items()
        if name in ("python", "quantwm", "torch", "triton") and now.get(name) != then
    ]
    if changed:
        say(f"versions differ, so frames may: {'; '.join(changed)}")
