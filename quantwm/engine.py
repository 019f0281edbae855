"""One world, several lanes in lock-step: the same action and the same noise, a cache each."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from quantwm.actions import check_action
from quantwm.cache import dispatch
from quantwm.cache.formats import Format
from quantwm.cache.kv_cache import KVCache
from quantwm.cache.remedy import is_out_of_memory
from quantwm.cache.workspace import KEPT_ON_CPU, Workspace
from quantwm.engine_checks import (
    check_memory,
    check_start,
    checked_seed,
    first_scene,
    fitted_picture,
    out_of_memory,
    steps_for,
)
from quantwm.engine_types import BlockResult, LaneConfig, LaneResult
from quantwm.errors import UserError
from quantwm.lanes import (
    check_lanes,
    is_bf16,
    lane_format,
    limit_history,
    max_tokens_for,
    read_through,
    with_output_weights,
)
from quantwm.memory import read_memory
from quantwm.tensor_files import TensorRecorder
from quantwm.token_selection import QueryWatch
from quantwm.worlds.base import ChunkAction, ChunkOutput, LaneState, StartState, World

T = TypeVar("T")


@dataclass
class _Lane:
    """A lane at work: its configuration and the state the world carries for it."""

    config: LaneConfig
    state: LaneState


class Engine:
    """Runs one world in lock-step lanes.

    Lanes go through the world one after the other, so a lane's result cannot depend on which
    others run beside it. In mode "teacher" every lane's history holds the BF16 lane's latents:
    what then differs is the quantization of the history alone.

    Args:
        world: a loaded world; its weights are shared.
        lanes: from `lanes_for`, or built by hand.
        seed: of the noise; the same seed and actions give the same frames on the same device.
        scene, image, prompt: what `World.start` takes; image is any uint8 picture or clip, cut and
            resized to the world's size (`self.image`).
        mode: "free" or "teacher".
        steps: denoising steps, the world's default for its device when None.
        max_tokens: tokens of history kept, for all lanes alike; None keeps the policies' windows
            on a GPU and CPU_MAX_TOKENS on a CPU.
        recorder: keeps q, k, v of the first lane's clean passes.
        watch: keeps the reference lane's newest clean queries, for token selection.
        format_of: the cache format of a lane, for formats that `make_format` does not know.

    Raises:
        UserError: no lanes, two lanes of one name, an unknown mode, teacher mode without a BF16
            lane, a history too short for the policy, or too little memory (nothing is allocated).
    """

    def __init__(
        self,
        world: World,
        lanes: Sequence[LaneConfig],
        *,
        seed: int,
        scene: str | None = None,
        image: np.ndarray | None = None,
        prompt: str = "",
        mode: str = "free",
        steps: int | None = None,
        max_tokens: int | None = None,
        recorder: TensorRecorder | None = None,
        watch: QueryWatch | None = None,
        format_of: Callable[[LaneConfig], Format[Any]] = lane_format,
    ) -> None:
        self.world, self.seed, self.mode = world, checked_seed(seed), mode
        self.image = None if image is None else fitted_picture(image, world.spec.video_size)
        self.scene = scene if image is not None else scene or first_scene(world)
        self.prompt = prompt
        self._switched: str | None = None
        self.steps = steps_for(world, steps)
        self.max_tokens = max_tokens_for(world.device, max_tokens)
        spec = world.spec.cache
        self.lanes = tuple(
            replace(lane, policy=limit_history(lane.policy, spec, self.max_tokens))
            for lane in lanes
        )
        check_lanes(self.lanes, mode)
        check_memory(world, self.lanes)
        self._recorder, self._watch, self._format_of = recorder, watch, format_of
        self._workspace: Workspace | None = None
        self._running: list[_Lane] = []
        self._index = 0
        self._closed: str | None = None

    def start(self) -> BlockResult:
        """Encode the start scene and run its clean passes in every lane; also the way to reset."""
        self._check_open()
        self._drop_lanes()
        began = time.perf_counter()
        size = self.world.spec.cache.frames_per_chunk
        try:
            state, milliseconds = self._start_lanes(size)
        except BaseException as error:
            self._drop_lanes()  # some would be ahead of others
            if is_out_of_memory(error):
                raise UserError(out_of_memory("nothing was started", error)) from error
            raise
        self._index = 0
        frames = {lane.config.name: state.frames for lane in self._running}
        # A world whose first chunk is its own starts without context and without an action.
        action = state.actions[-1] if state.actions else ChunkAction.held(frozenset(), size)
        return self._block(0, action, frames, milliseconds, {}, began)

    def step(self, action: ChunkAction) -> BlockResult:
        """Advance every lane by one chunk under `action`.

        All lanes are denoised before any history changes; a failure there, or in the first clean
        pass, leaves the engine as it was. A failure in a later clean pass closes it, because some
        lanes would be a chunk ahead.
        """
        self._check_open()
        if not self._running:
            raise UserError("the engine has not started; call start() first")
        spec = self.world.spec
        check_action(action, spec.keys, spec.cache.frames_per_chunk)
        began = time.perf_counter()
        index = self._index + 1
        noise = chunk_noise(self.seed, index, (spec.cache.frames_per_chunk, *spec.latent_shape)).to(
            self.world.device
        )
        outputs, frames, milliseconds = self._denoise(index, action, noise)
        self._commit(index, action, outputs, milliseconds)
        self._index = index
        x0 = {name: output.x0 for name, output in outputs.items()}
        return self._block(index, action, frames, milliseconds, x0, began)

    def change_prompt(self, prompt: str) -> None:
        """Go on under another prompt; histories stay. UserError where the world takes none."""
        self._check_open()
        change = getattr(self.world, "change_prompt", None)
        if change is None:
            raise UserError(f"the world {self.world.spec.name} takes no prompt")
        for lane in self._running:
            change(lane.state, prompt)
        self.prompt = self._switched = prompt

    def explain(self) -> str:
        """Which kernels run and why, and how much history is kept, one line."""
        limit = "the policy's window" if self.max_tokens is None else f"{self.max_tokens:,} tokens"
        own = f"; {self.world.explain()}" if hasattr(self.world, "explain") else ""
        return f"{dispatch.explain(self.world.device)}; history limited to {limit}{own}"

    def close(self) -> None:
        """Free the lanes' caches and the scratch. The world stays loaded; a second call is fine."""
        self._closed = self._closed or "the engine is closed; make a new one"
        self._drop_lanes()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def history_frames(self) -> int:
        """Latent frames generated so far, the start scene counted."""
        return self._running[0].state.next_frame if self._running else 0

    @property
    def caches(self) -> Mapping[str, KVCache]:
        """Every lane's cache, for instruments that only read."""
        return {lane.config.name: lane.state.cache for lane in self._running}

    def _start_lanes(self, frames_per_chunk: int) -> tuple[StartState, dict[str, float]]:
        state = self.world.start(self.scene, self.image, self.prompt, self.seed)
        check_start(state, frames_per_chunk)
        on_cpu = self.world.device.type == "cpu"
        self._workspace = Workspace(kept_limit=KEPT_ON_CPU if on_cpu else 0)
        self._running = [self._make_lane(config) for config in self.lanes]
        milliseconds: dict[str, float] = {}
        for lane in self._running:
            _, milliseconds[lane.config.name] = self._timed(
                lambda lane=lane: self._prefill(lane, state)
            )
        return state, milliseconds

    def _denoise(
        self, index: int, action: ChunkAction, noise: torch.Tensor
    ) -> tuple[dict[str, ChunkOutput], dict[str, np.ndarray], dict[str, float]]:
        outputs: dict[str, ChunkOutput] = {}
        frames: dict[str, np.ndarray] = {}
        milliseconds: dict[str, float] = {}
        try:
            for lane in self._running:
                name = lane.config.name
                outputs[name], milliseconds[name] = self._timed(
                    lambda lane=lane: self.world.generate_chunk(
                        lane.state, action, noise, self.steps
                    )
                )
                if not bool(torch.isfinite(outputs[name].latents).all()):
                    raise UserError(
                        f"lane {name} produced NaN or infinite latents in chunk {index}; "
                        "the chunk was dropped"
                    )
                frames[name] = self._decode(lane, outputs[name].latents)
        except BaseException as error:
            outputs.clear()
            self._abort()
            if is_out_of_memory(error):
                raise UserError(out_of_memory(f"chunk {index} was dropped", error)) from error
            raise
        return outputs, frames, milliseconds

    def _commit(
        self,
        index: int,
        action: ChunkAction,
        outputs: Mapping[str, ChunkOutput],
        milliseconds: dict[str, float],
    ) -> None:
        teacher = next(
            (
                lane.config.name
                for lane in self._running
                if self.mode == "teacher" and is_bf16(lane.config)
            ),
            None,
        )
        for lane in self._running:
            name = lane.config.name
            latents = outputs[teacher or name].latents
            try:
                _, spent = self._timed(
                    lambda lane=lane, latents=latents: self.world.commit_chunk(
                        lane.state, latents, action
                    )
                )
            except BaseException as error:
                self._commit_failed(
                    index, name, committed=lane is not self._running[0], error=error
                )
                raise
            milliseconds[name] += spent

    def _commit_failed(
        self, index: int, name: str, *, committed: bool, error: BaseException
    ) -> None:
        """Drop the chunk in every lane, or close when another lane has committed it already."""
        self._abort()
        if committed:
            self.close()
        after = "the engine is closed, start a new one" if committed else "the chunk was dropped"
        if is_out_of_memory(error):
            message = out_of_memory(f"in chunk {index} {after}", error)
        else:
            message = f"the clean pass of lane {name} failed in chunk {index} ({error}); {after}"
        message = " ".join(message.split())
        if committed:
            self._closed = message
        if isinstance(error, Exception):
            raise UserError(message) from error

    def _decode(self, lane: _Lane, latents: torch.Tensor) -> np.ndarray:
        """The chunk's frames; a video autoencoder goes on from the lane's own earlier frames."""
        streaming = getattr(self.world, "decode_chunk", None)
        return self.world.decode(latents) if streaming is None else streaming(lane.state, latents)

    def _prefill(self, lane: _Lane, state: StartState) -> None:
        size = self.world.spec.cache.frames_per_chunk
        for number, action in enumerate(state.actions):
            latents = state.latents[number * size : (number + 1) * size]
            self.world.commit_chunk(lane.state, latents, action)

    def _make_lane(self, config: LaneConfig) -> _Lane:
        cache = KVCache(
            self.world.spec.cache,
            with_output_weights(self._format_of(config), self.world),
            config.policy,
            device=self.world.device,
            dtype=self.world.dtype,
            workspace=self._workspace,
            seed=self.seed,
        )
        if self._recorder is not None and config is self.lanes[0]:
            cache = self._recorder.attach(cache, self.world.spec.cache)
        reference = next((lane for lane in self.lanes if is_bf16(lane)), self.lanes[0])
        if self._watch is not None and config is reference:
            cache = self._watch.attach(cache)
        return _Lane(config, LaneState(config.name, read_through(config, cache)))

    def _abort(self) -> None:
        for lane in self._running:
            lane.state.cache.abort_chunk()
        self._empty_device_cache()

    def _drop_lanes(self) -> None:
        self._running.clear()
        self._workspace = None
        self._empty_device_cache()

    def _empty_device_cache(self) -> None:
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise UserError(self._closed)

    def _timed(self, call: Callable[[], T]) -> tuple[T, float]:
        """A call's result and wall milliseconds, the device's work included."""
        self._synchronize()
        began = time.perf_counter()
        result = call()
        self._synchronize()
        return result, (time.perf_counter() - began) * 1000

    def _synchronize(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)

    def _block(
        self,
        index: int,
        action: ChunkAction,
        frames: Mapping[str, np.ndarray],
        milliseconds: Mapping[str, float],
        x0: Mapping[str, tuple[torch.Tensor, ...]],
        began: float,
    ) -> BlockResult:
        results = []
        parts = {"weights": self.world.weight_bytes()}
        for lane in self._running:
            name, ledger = lane.config.name, lane.state.cache.ledger()
            results.append(
                LaneResult(
                    name=name,
                    frames=frames[name],
                    ms=milliseconds[name],
                    kv_bytes=ledger.total,
                    ratio=ledger.nominal_ratio,
                    resident_ratio=ledger.resident_ratio,
                    tokens=ledger.tokens,
                )
            )
            parts[f"kv:{name}"] = ledger.total
        parts["scratch"] = self._workspace.nbytes if self._workspace else 0
        first = self.history_frames - self.world.spec.cache.frames_per_chunk if index else 0
        switched, self._switched = self._switched, None
        return BlockResult(
            index=index,
            first_frame=first,
            action=action,
            lanes=tuple(results),
            memory=read_memory(self.world.device, parts),
            ms=(time.perf_counter() - began) * 1000,
            x0=x0,
            prompt=switched if index else None,
        )


def chunk_noise(seed: int, index: int, shape: Sequence[int]) -> torch.Tensor:
    """Noise of one chunk, float32 on the CPU; depends on nothing but seed, index and shape.

    A generator of its own: what k-means or another lane draws cannot move it, and a GPU starts
    from the same numbers as a CPU.
    """
    # SeedSequence mixes the pair: seed + index alone would give seed 0, chunk 1 and seed 1,
    # chunk 0 the same noise.
    mixed = np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0]
    generator = torch.Generator().manual_seed(int(mixed) >> 1)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)
