"""The loop that drives an engine for one session: newest control in, one message a chunk out.

It runs where the GPU is, possibly in a forked process: it reads controls and writes its state
through the shared boards and yields nothing but text.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from app import limits, wire
from app.backend import Backend, Recording, Settings
from app.controls import Board, ControlDesk, ControlSnapshot
from app.files import SessionFolder
from app.inspector.probe import Prober
from app.inspector.ring import RingWriter, ring_shape
from quantwm.actions import parse_actions
from quantwm.engine_types import BlockResult, EngineLike
from quantwm.errors import UserError
from quantwm.metrics import psnr_pooled
from quantwm.worlds.base import ChunkAction, WorldSpec

IDENTICAL_DB = 99.0
"""Stands for the infinite PSNR of identical pictures, which JSON cannot carry."""


class Runner:
    """Drives until the page stops it, goes away, or its turn is over."""

    def __init__(
        self,
        backend: Backend,
        desk: ControlDesk,
        status: Board,
        slot: int,
        folder: SessionFolder,
        alive: Callable[[], bool],
        wanted: Callable[[], bool],
        check: Callable[[object], Settings],
        ticket: int,
        prober: Prober,
    ) -> None:
        self._backend = backend
        self._desk = desk
        self._status = status
        self._slot = slot
        self._folder = folder
        self._alive = alive
        self._wanted = wanted
        self._check = check
        self._ticket = ticket
        self._number = 0
        self._sent = 0.0
        self._stepped = 0
        self._consumed = -1
        self._engine: EngineLike | None = None
        self._settings: Settings | None = None
        self._world: WorldSpec | None = None
        self._script: list[ChunkAction] = []
        self._resets = self._prompts = 0
        self._prober = prober
        self._ring: RingWriter | None = None
        self._recording: Recording | None = None
        self._copied: Path | None = None
        self._recorded = 0
        self._state: dict[str, object] = {}

    def messages(self, settings: Settings) -> Iterator[str]:
        """Run after run (a reset starts the next) until it is over; the last message says why."""
        began = time.monotonic()
        first = self._desk.newest(self._slot)
        self._resets, self._prompts = first.resets, first.prompts
        self._report(flushed=first.flushes)
        try:
            yield from self._start(settings)
            while True:
                why = yield from self._drive(began)
                if why is not None:
                    break
                newest = self._desk.newest(self._slot)
                self._resets = newest.resets
                yield from self._restart(self._check(newest.settings))
            self._release()
            self._report(stage="", progress=0.0)
            yield self._say("ended", message=why)
        finally:
            self._release()

    def _restart(self, settings: Settings) -> Iterator[str]:
        """The next run. Where another world cannot be had, the one before goes on.

        It is driven on as it was where both fit into memory while the new one was loaded;
        otherwise it starts again from its own start. Recordings are closed and kept either way.
        """
        before = self._settings
        if settings.world == before.world:
            self._release()
            yield from self._start(settings)
            return
        try:
            if not self._backend.fits_beside(settings.world):
                self._release()
            self._new_stages()
            self._backend.load(settings.world, self._progress)
            self._release()
            yield from self._start(settings)
        except UserError as error:
            goes_on = self._engine is not None
            yield self._say("notice", message=str(error), world=before.world, running=goes_on)
            if goes_on:
                self._report(stage="", progress=1.0)
            else:
                yield from self._start(before)

    def _start(self, settings: Settings) -> Iterator[str]:
        picture = self._picture(settings)
        self._new_stages()
        self._progress("Opening the world", 0.0)
        self._engine = self._backend.open(settings, picture, self._progress)
        try:
            self._progress("Walking into the scene", 0.0)
            block = self._engine.start()
        except BaseException:
            self._engine.close()  # a run that never began is not what goes on
            self._engine = None
            raise
        self._settings = settings
        self._world = self._backend.catalogue(settings.world).world
        self._script = self._played(settings)
        self._record_new(settings, picture)
        self._ring_new(settings, block)
        newest = self._desk.newest(self._slot)
        self._stepped = newest.steps
        self._consumed = newest.seq
        self._report(stage="", progress=1.0)
        run = {"kernels": self._engine.explain(), "seed": settings.seed}
        yield self._block(block, newest, run=run)

    def _drive(self, began: float) -> Iterator[str]:
        """Chunks until a reset (None) or an end (its reason)."""
        world, settings = self._world, self._settings
        chunk = world.cache.frames_per_chunk
        period = chunk * world.frames_per_latent / world.fps
        due = touched = time.monotonic()
        for _ in range(limits.MAX_CHUNKS):
            while True:
                now = time.monotonic()
                control = self._desk.newest(self._slot)
                self._flush(control)
                self._prober.serve(self._engine)
                if control.resets > self._resets:
                    return None
                if control.prompts > self._prompts:
                    yield from self._switch_prompt(control)
                stepping = control.steps > self._stepped
                if control.run or stepping:
                    touched = now
                why = self._over(control, now, now - began, now - touched)
                if why is not None:
                    return why
                if (stepping or (control.run and now >= due)) and self._drawn(control, now):
                    break
                time.sleep(limits.IDLE_POLL_SECONDS)
            ahead = min(control.steps - self._stepped, limits.MAX_STEPS_BEHIND)
            # Presses that came while a chunk was made are a chunk each, in their order.
            until = control.next_tap(self._consumed) if ahead > 1 else control.seq
            keys = control.effective(now, self._consumed, until)
            self._consumed = until
            if stepping:
                self._stepped = control.steps - ahead + 1
            due = now + (period / settings.speed if settings.speed > 0 else 0.0)
            block = self._engine.step(self._action(keys & world.keys.keys(), chunk))
            yield self._block(block, control)
        return f"this run reached {limits.MAX_CHUNKS:,} chunks; press Drive to start another"

    def _action(self, keys: frozenset[str], chunk: int) -> ChunkAction:
        """Keys that are held win; otherwise the script goes on, once through."""
        if keys or not self._script:
            return ChunkAction.held(keys, chunk)
        action = self._script.pop(0)
        self._report(script=len(self._script))
        return action

    def _played(self, settings: Settings) -> list[ChunkAction]:
        """The chunks of the chosen script."""
        scripts = self._backend.catalogue(settings.world).scripts
        chosen = next((one for one in scripts if one.name == settings.script), None)
        if chosen is None:
            return []
        spec = self._world
        return list(parse_actions(chosen.actions, spec.keys, spec.cache.frames_per_chunk))

    def _switch_prompt(self, control: ControlSnapshot) -> Iterator[str]:
        """Another prompt for the run that goes on; a mistake leaves the one before."""
        self._prompts = control.prompts
        wanted = self._check(control.settings).prompt
        self._new_stages()
        try:
            if not wanted:
                raise UserError("the prompt is empty: describe what should be seen")
            self._engine.change_prompt(wanted)
        except UserError as error:
            yield self._say("notice", message=str(error), world=self._world.name, running=True)
        else:
            yield self._say("notice", message="The prompt is in use from the next chunk on",
                            world=self._world.name, running=True, good=True)  # fmt: skip
        finally:
            self._report(stage="", progress=1.0)

    def _over(self, control: ControlSnapshot, now: float, turn: float, idle: float) -> str | None:
        """Why the turn ends now, or None."""
        if control.stop or not self._alive():
            return "stopped"
        wanted = self._wanted()
        if wanted and turn > limits.TURN_SECONDS_WHEN_WANTED:
            return "your turn is over, the next visitor drives; press Drive to stand in line"
        if idle > (limits.IDLE_SECONDS_WHEN_WANTED if wanted else limits.IDLE_SECONDS):
            return "the world was released because nobody drove it; press Drive to start again"
        silence = now - control.received if control.received else 0.0
        if silence > (limits.VANISHED_SECONDS if wanted else limits.IDLE_SECONDS):
            return "the page was silent for too long and the world was released"
        left = round(limits.TURN_SECONDS_WHEN_WANTED - turn) if wanted else None
        if left != self._state.get("left"):
            self._report(left=left)
        return None

    def _drawn(self, control: ControlSnapshot, now: float) -> bool:
        """Whether the page keeps up: few blocks in flight, or an answer is long overdue."""
        in_flight = self._number - 1 - control.ack
        if in_flight < limits.BLOCKS_IN_FLIGHT:
            return True
        return now - self._sent > limits.ACK_PATIENCE_SECONDS and now - control.received < 1.0

    def _block(self, block: BlockResult, control: ControlSnapshot, **more: object) -> str:
        self._record(block)
        self._remember(block)
        fields = wire.block_fields(block, control, _psnr_to_bf16(block))
        text = self._say("block", **fields, **more)
        self._sent = time.monotonic()
        return text

    def _say(self, kind: str, **fields: object) -> str:
        self._number += 1
        return wire.message(kind, n=self._number - 1, drive=self._ticket, **fields)

    def _picture(self, settings: Settings) -> np.ndarray | None:
        return self._folder.picture(settings.picture) if settings.picture is not None else None

    def _new_stages(self) -> None:
        self._report(stages=[])

    def _progress(self, stage: str, progress: float) -> None:
        """One named bar per stage; a new stage means that the one before is done."""
        share = min(max(progress, 0.0), 1.0)
        stages = [[name, done] for name, done in self._state.get("stages", []) if name != stage]
        stages = [[name, 1.0] for name, _ in stages][-limits.MAX_STAGES :]
        self._report(stage=stage, progress=share, stages=[*stages, [stage, round(share, 3)]])

    def _report(self, **fields: object) -> None:
        self._state.update(fields)
        self._status.write(self._slot, self._state)

    # Recording ------------------------------------------------------------------------------

    def _record_new(self, settings: Settings, picture: np.ndarray | None) -> None:
        target = self._folder.recording()
        self._recorded = 0
        self._recording = self._backend.record(target, settings, picture, self._engine)
        self._report(recording=True, unrecorded="")

    def _ring_new(self, settings: Settings, block: BlockResult) -> None:
        world = self._world
        height, width = block.lanes[0].frames.shape[1:3]
        lanes = tuple(lane.name for lane in block.lanes)
        piece = world.cache.frames_per_chunk * world.frames_per_latent
        shape = ring_shape(lanes, (width, height), world.fps, piece, settings.mode)
        self._prober.restart()
        try:
            self._ring = RingWriter(self._folder.path, shape)
        except UserError as error:
            self._ring = None
            self._report(uninspected=str(error))

    def _remember(self, block: BlockResult) -> None:
        """For the inspector: raw frames of the last minute, and what they show."""
        world = self._world
        self._prober.note(block, world.cache.frames_per_chunk, world.frames_per_latent)
        if self._ring is not None:
            self._ring.push(block)

    def _record(self, block: BlockResult) -> None:
        if self._recording is None:
            return
        self._recorded += sum(lane.frames.nbytes for lane in block.lanes)
        if self._recorded > limits.MAX_RECORDING_BYTES:
            self._end_recording(f"the recording ended at chunk {block.index}: it is full")
            return
        self._recording.write(block)
        if self._recording.stopped is not None:
            self._end_recording(f"the recording ended at chunk {block.index}: the disk is full")

    def _flush(self, control: ControlSnapshot) -> None:
        if control.flushes > int(self._state.get("flushed", 0)):
            self._copy_recording()
            self._report(flushed=control.flushes)

    def _copy_recording(self) -> None:
        """A whole session of what there is, for Download, beside the recording, which goes on.

        It is the newest folder until the recording is closed. Only the last copy is kept. Where it
        cannot be made, the recording ends and is what is packed.
        """
        if self._recording is None:
            return
        if self._copied is not None:
            shutil.rmtree(self._copied, ignore_errors=True)
        self._copied = self._folder.recording()
        try:
            self._recording.copy_to(self._copied)
        except UserError as error:
            shutil.rmtree(self._copied, ignore_errors=True)
            self._end_recording(f"{error}; the recording was ended and packed")

    def _end_recording(self, why: str) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()
            self._report(recording=False, unrecorded=why)

    def _release(self) -> None:
        self._end_recording("the run is over")
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def _psnr_to_bf16(block: BlockResult) -> dict[str, float]:
    """PSNR of this chunk's frames to the BF16 lane's, decibels; nothing without that lane."""
    reference = next((lane.frames for lane in block.lanes if lane.name == "bf16"), None)
    if reference is None or block.index == 0:
        return {}
    return {
        lane.name: min(psnr_pooled(lane.frames, reference), IDENTICAL_DB)
        for lane in block.lanes
        if lane.name != "bf16"
    }
