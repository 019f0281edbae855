"""Action strings: "w-8, right-12, w+right-4, none-4" to chunks of held keys, and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from quantwm.errors import UserError
from quantwm.worlds.base import ChunkAction, KeySet

MAX_FRAMES = 10_000
"""Latent frames that one action string may ask for: 83 minutes at 2 latent frames a second."""

MAX_CHARACTERS = 200_000
"""Longest action string that is parsed at all; 10,000 single-frame items fit."""

NONE = "none"
"""The word for a frame without keys."""

_ITEM = re.compile(r"(?P<keys>[^\s\-,]+)(?:-(?P<frames>[^\s,]*))?")
_EXAMPLE = '"w-8, right-12, w+right-4, none-4"'


def parse_actions(text: str, keys: Iterable[str], frames_per_chunk: int) -> tuple[ChunkAction, ...]:
    """Parse an action string into chunks.

    Items are separated by commas; an item is keys joined by "+" (or "none") and, after a dash,
    how many latent frames they are held. Without a number an item lasts one chunk. Frames are
    packed into chunks of frames_per_chunk one after the other; the last chunk is filled up with
    frames without keys.

    Raises:
        UserError: names the item, its character position (from 1) and what would be right.
    """
    if len(text) > MAX_CHARACTERS:
        raise UserError(
            f"the action string has {len(text):,} characters, at most {MAX_CHARACTERS:,} are read"
        )
    if not text.strip():
        raise UserError(f"the action string is empty; write for example {_EXAMPLE}")
    known = tuple(keys)
    frames: list[KeySet] = []
    position = 0
    for item in text.split(","):
        held, count = _parse_item(item, position, known, frames_per_chunk)
        if len(frames) + count > MAX_FRAMES:
            raise UserError(
                f"the action string asks for more than {MAX_FRAMES:,} latent frames "
                f"at character {_start(item, position)}; shorten it or split the session"
            )
        frames.extend([held] * count)
        position += len(item) + 1
    return pack_frames(frames, frames_per_chunk)


def pack_frames(frames: Sequence[KeySet], frames_per_chunk: int) -> tuple[ChunkAction, ...]:
    """Pack per-frame keys into chunks; the last chunk is filled up with frames without keys."""
    missing = -len(frames) % frames_per_chunk
    padded = [*frames, *[frozenset()] * missing]
    return tuple(
        ChunkAction(tuple(padded[i : i + frames_per_chunk]))
        for i in range(0, len(padded), frames_per_chunk)
    )


def format_actions(actions: Sequence[ChunkAction]) -> str:
    """The canonical action string: runs of equal frames, keys in alphabetical order.

    `parse_actions(format_actions(a), keys, n) == a` for chunks of n frames.
    """
    runs: list[tuple[KeySet, int]] = []
    for frame in (frame for action in actions for frame in action.frames):
        if runs and runs[-1][0] == frame:
            runs[-1] = (frame, runs[-1][1] + 1)
        else:
            runs.append((frame, 1))
    return ", ".join(f"{keys_text(held)}-{count}" for held, count in runs)


def keys_text(held: KeySet) -> str:
    """Keys of one frame in an action string, "right+w" or "none"."""
    return "+".join(sorted(held)) or NONE


def action_to_json(action: ChunkAction) -> list[list[str]]:
    """Keys of each frame as sorted lists, for one line of actions.ndjson."""
    return [sorted(frame) for frame in action.frames]


def action_from_json(value: object, keys: Iterable[str], frames_per_chunk: int) -> ChunkAction:
    """Read back what `action_to_json` wrote; the value comes from a file and is not trusted."""
    known = set(keys)
    if not isinstance(value, list) or len(value) != frames_per_chunk:
        raise UserError(
            f"an action holds a list of {frames_per_chunk} frames, "
            f"each a list of keys from {_listed(sorted(known))}"
        )
    for frame in value:
        if not isinstance(frame, list) or not all(
            isinstance(key, str) and key in known for key in frame
        ):
            raise UserError(f"a frame holds a list of keys from {_listed(sorted(known))}")
    return ChunkAction(tuple(frozenset(frame) for frame in value))


def check_action(action: ChunkAction, keys: Mapping[str, str], frames_per_chunk: int) -> None:
    """UserError unless the action fits the world: one set of known keys per latent frame."""
    if len(action.frames) != frames_per_chunk:
        raise UserError(
            f"an action of this world has {frames_per_chunk} frames, got {len(action.frames)}"
        )
    for frame in action.frames:
        unknown = sorted(frame - keys.keys())
        if unknown:
            raise UserError(f"unknown key {unknown[0]!r}; this world knows {_listed(keys)}")


def _parse_item(
    item: str, position: int, known: Sequence[str], frames_per_chunk: int
) -> tuple[KeySet, int]:
    start = _start(item, position)
    word = item.strip()
    if not word:
        raise UserError(
            f"nothing between commas at character {start}; write for example {_EXAMPLE}"
        )
    match = _ITEM.fullmatch(word)
    if match is None:
        raise UserError(
            f"cannot read {_shown(word)} at character {start}: an item is keys joined by + "
            f"and a number of latent frames, for example {_EXAMPLE}"
        )
    held = _parse_keys(match["keys"].lower(), start, known)
    if match["frames"] is None:
        return held, frames_per_chunk
    return held, _parse_count(match["frames"], word, start)


def _parse_keys(text: str, start: int, known: Sequence[str]) -> KeySet:
    if text == NONE:
        return frozenset()
    names = text.split("+")
    for name in names:
        if name == NONE:
            raise UserError(f'"none" at character {start} stands alone, without other keys')
        if name not in known:
            raise UserError(
                f"unknown key {_shown(name)} at character {start}; "
                f"this world knows {_listed([*known, NONE])}"
            )
    if len(set(names)) != len(names):
        raise UserError(
            f"a key is named twice in {_shown(text)} at character {start}; name it once"
        )
    return frozenset(names)


def _parse_count(text: str, word: str, start: int) -> int:
    # isdecimal alone accepts digits of every script; int() would too.
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) >= 1):
        raise UserError(
            f"cannot read the number of frames in {_shown(word)} at character {start}: "
            f"it is a whole number from 1 to {MAX_FRAMES:,}, for example w-8"
        )
    return int(text)


def _start(item: str, position: int) -> int:
    return position + len(item) - len(item.lstrip()) + 1


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
