"""Token selection on the live run: a page asks, the loop that drives answers between two chunks.

The loop may run in a forked process, so the question travels on a shared board and the answer in a
file of the session's folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from app.controls import Board
from quantwm.engine_types import BlockResult, EngineLike
from quantwm.errors import UserError
from quantwm.token_selection import LayerPicks

WAIT_SECONDS = 20.0
ANSWER = "token-answer.json"


@dataclass(frozen=True)
class _Shown:
    """Video frames first .. first + count - 1 show latent frames latent .. latent + latents - 1."""

    first: int
    count: int
    latent: int
    latents: int


def ask(
    board: Board, slot: int, folder: Path, frame: int, x: int, y: int, alive: Callable[[], bool]
) -> dict[str, object]:
    """Ask the loop that drives; waits for its answer.

    Raises:
        UserError: nobody drives, or the loop refused.
    """
    number = int(board.read(slot).get("number", 0)) + 1
    board.write(slot, {"number": number, "frame": frame, "x": x, "y": y})
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if not alive():
            raise UserError("token selection needs the live run; press Drive and pause, then ask")
        answer = _read(folder / ANSWER)
        if answer.get("number") == number:
            if "error" in answer:
                raise UserError(str(answer["error"]))
            return answer
        time.sleep(0.02)
    raise UserError("the run did not answer; pause it and try again")


class Prober:
    """The loop's side: remembers which frames show what, and answers what is asked."""

    def __init__(self, board: Board, slot: int, folder: Path) -> None:
        self._board, self._slot, self._folder = board, slot, folder
        self._answered = int(board.read(slot).get("number", 0))
        self._shown: list[_Shown] = []

    def restart(self) -> None:
        """A new run: frames are counted from 0 again."""
        self._shown.clear()

    def note(self, block: BlockResult, frames_per_chunk: int, frames_per_latent: int) -> None:
        """A chunk was made (the start block holds several)."""
        count = len(block.lanes[0].frames)
        first = self._shown[-1].first + self._shown[-1].count if self._shown else 0
        if block.index == 0:
            latents, latent = -(-count // frames_per_latent), 0
        else:
            latents, latent = frames_per_chunk, block.first_frame
        self._shown.append(_Shown(first, count, latent, latents))

    def serve(self, engine: EngineLike) -> None:
        """Answer the newest question, if there is one."""
        asked = self._board.read(self._slot)
        number = int(asked.get("number", 0))
        if number <= self._answered:
            return
        self._answered = number
        try:
            answer = self._answer(engine, asked)
        except UserError as error:
            answer = {"error": str(error)}
        partial = self._folder / f"{ANSWER}.part"
        partial.write_text(json.dumps({"number": number, **answer}))
        partial.replace(self._folder / ANSWER)

    def _answer(self, engine: EngineLike, asked: Mapping[str, object]) -> dict[str, object]:
        pick = getattr(engine, "pick_tokens", None)
        if pick is None:
            raise UserError("this world does not show which tokens are picked")
        frame, x, y = (int(asked[name]) for name in ("frame", "x", "y"))
        rows, columns, width, height, layers = pick(self._latent(frame), x, y)
        wide, high = width / columns, height / rows

        def box(row: int, column: int) -> list[float]:
            return [column * wide, row * high, wide, high]

        return {
            "patch": box(int(y / high), int(x / wide)),
            "layers": [self._layer(layer, box) for layer in layers],
            "note": "Every picture is the frame whose patch has the highest score for the query of "
            "the patch that was clicked.",
        }

    def _layer(
        self, layer: LayerPicks, box: Callable[[int, int], list[float]]
    ) -> dict[str, object]:
        lanes = [
            {
                "lane": name,
                "picks": [
                    {"frame": self._frame(p.frame), "box": box(p.row, p.column), "lead": p.lead}
                    for p in found
                ],
            }
            for name, found in layer.lanes.items()
        ]
        return {"layer": layer.layer, "lanes": lanes}

    def _latent(self, frame: int) -> int:
        """The latent frame that a video frame shows."""
        for shown in self._shown:
            if shown.first <= frame < shown.first + shown.count:
                return shown.latent + (frame - shown.first) * shown.latents // shown.count
        raise UserError(f"frame {frame} is not of this run; take the live run again")

    def _frame(self, latent: int) -> int:
        """The first video frame that shows a latent frame."""
        for shown in self._shown:
            if shown.latent <= latent < shown.latent + shown.latents:
                step = (latent - shown.latent) * shown.count
                return shown.first + -(-step // shown.latents)
        return 0


def _read(path: Path) -> dict[str, object]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
