"""Messages from the server to the stage: one JSON text per yield.

A block's pictures travel as ONE picture, the sheet: columns are lanes, rows are the frames of the
chunk. The page decodes one picture and cuts all lanes from it, so that they cannot drift apart.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from app import limits
from app.backend import MODES, Catalogue, WorldCard
from app.controls import ControlSnapshot, bind_keys
from quantwm.engine_types import BlockResult, LaneResult, MemoryReading


def message(kind: str, **fields: object) -> str:
    """One message. NaN and infinity become null: JSON knows neither."""
    return json.dumps(
        {"v": limits.PROTOCOL_VERSION, "kind": kind, **_finite(fields)},
        separators=(",", ":"),
        allow_nan=False,
    )


def sheet(lanes: Sequence[np.ndarray]) -> np.ndarray:
    """lanes: uint8 [T, H, W, 3] each -> uint8 [T * H, lanes * W, 3]."""
    frames, height, width, _ = lanes[0].shape
    for lane in lanes:
        if lane.shape != lanes[0].shape or lane.dtype != np.uint8:
            raise ValueError(
                f"lanes must be uint8 of one shape, got {lane.dtype} {lane.shape} "
                f"beside {lanes[0].dtype} {lanes[0].shape}"
            )
    wide = np.concatenate(lanes, axis=2)
    return np.ascontiguousarray(wide.reshape(frames * height, len(lanes) * width, 3))


def encode_picture(picture: np.ndarray, lossless: bool) -> str:
    """uint8 [H, W, 3] -> a data URI, PNG or JPEG 4:4:4."""
    import imageio.v3 as iio

    if lossless:
        data = iio.imwrite("<bytes>", picture, extension=".png", compress_level=1)
        return "data:image/png;base64," + base64.b64encode(data).decode()
    data = iio.imwrite(
        "<bytes>", picture, extension=".jpg", quality=limits.JPEG_QUALITY, subsampling=0
    )
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


def block_fields(
    block: BlockResult, control: ControlSnapshot, psnr: Mapping[str, float]
) -> dict[str, object]:
    """A chunk of every lane, with the bytes and times beside it: the fields of a "block"."""
    frames = [lane.frames for lane in block.lanes]
    count, height, width, _ = frames[0].shape
    return {
        "i": block.index,
        "first": block.first_frame,
        "frames": count,
        "size": [width, height],
        "keys": [sorted(keys) for keys in block.action.frames],
        "seq": control.seq,
        "t": control.sent_ms,
        "ms": block.ms,
        "lanes": [_lane(lane, psnr.get(lane.name)) for lane in block.lanes],
        "memory": _memory(block.memory),
        "sheet": encode_picture(sheet(frames), width * height <= limits.LOSSLESS_PIXELS),
    }


def hello_message(catalogue: Catalogue, token: str | None, worlds: Sequence[WorldCard] = ()) -> str:
    """What the page shows before anything is loaded; `token` is null in the page's own HTML."""
    return message("hello", **hello_fields(catalogue, token, worlds))


def card_fields(card: WorldCard) -> dict[str, object]:
    """One world of the picker."""
    return {**vars(card), "lanes": list(card.lanes)}


def hello_fields(
    catalogue: Catalogue, token: str | None, worlds: Sequence[WorldCard]
) -> dict[str, object]:
    """What there is to choose: the worlds, and everything of the one that is shown."""
    world = catalogue.world
    return {
        "session": token,
        "world": {
            "name": world.name,
            "title": world.title,
            "licence": world.licence,
            "size": list(world.video_size),
            "fps": world.fps,
            "chunk": world.cache.frames_per_chunk * world.frames_per_latent,
        },
        "device": catalogue.device,
        "keys": bind_keys(world.keys),
        "legend": dict(world.keys),
        "scenes": [
            {"name": s.name, "title": s.title, "picture": _thumbnail(s.thumbnail)}
            for s in catalogue.scenes
        ],
        "lanes": [vars(lane) for lane in catalogue.lanes],
        "modes": MODES,
        "upload": catalogue.accepts_picture,
        "prompts": list(catalogue.prompts),
        "scripts": [
            {"name": s.name, "title": s.title, "scene": s.scene} for s in catalogue.scripts
        ],
        "worlds": [card_fields(card) for card in worlds],
        "defaults": {
            "scene": catalogue.scene,
            "seed": catalogue.seed,
            "lanes": list(catalogue.chosen),
            "mode": "free",
            "steps": catalogue.steps,
            "speed": 1,
            "script": None,
        },
        "limits": {
            "seed": limits.MAX_SEED,
            "steps": limits.MAX_DENOISING_STEPS,
            "lanes": limits.MAX_LANES,
            "upload": limits.MAX_UPLOAD_BYTES,
            "prompt": limits.MAX_PROMPT_CHARACTERS,
        },
    }


def _lane(lane: LaneResult, psnr: float | None) -> dict[str, object]:
    return {
        "name": lane.name,
        "ms": lane.ms,
        "kv": lane.kv_bytes,
        "ratio": lane.ratio,
        "resident": lane.resident_ratio,
        "tokens": lane.tokens,
        "psnr": psnr,
    }


def _memory(memory: MemoryReading) -> dict[str, object]:
    return {
        "source": memory.source,
        "parts": [[name, size] for name, size in memory.parts.items()],
        "used": memory.used,
        "total": memory.total,
    }


def _thumbnail(path: str) -> str:
    kind = Path(path).suffix.removeprefix(".")
    return f"data:image/{kind};base64,{base64.b64encode(Path(path).read_bytes()).decode()}"


def _finite(value: object) -> object:
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
