"""`WanWorld`: what every world of the family does; denoising is left to its two kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from quantwm.cache.capture import CudaCapture
from quantwm.errors import UserError
from quantwm.worlds.base import ChunkAction, ChunkOutput, LaneState, Scene, StartState
from quantwm.worlds.wan import presets
from quantwm.worlds.wan.backbone import CausalWan, ContextKV, Forward
from quantwm.worlds.wan.catalog import Entry
from quantwm.worlds.wan.clip import ClipVision
from quantwm.worlds.wan.graphs import GraphedWan, worthwhile
from quantwm.worlds.wan.offload import Visits
from quantwm.worlds.wan.pictures import (
    CONDITION_LATENTS,
    plain_picture,
    start_picture,
    to_bytes,
    to_signed,
)
from quantwm.worlds.wan.tiling import TileStates, decode_tiled
from quantwm.worlds.wan.vae import WanVae
from quantwm.worlds.wan.vae_layers import State

LATENTS_AT_ONCE = 1  # frames decoded at a time, so that memory does not grow with a chunk
VideoState = State | TileStates
Report = Callable[[str, float], None]
"""(what is being done, its share from 0 to 1), for whoever waits."""


@dataclass(frozen=True)
class Session:
    """What a start fixed for all lanes: seed, cross-attention and the start picture's latents.

    image: [16, CONDITION_LATENTS, h, w] of the picture followed by grey, or [C, 1, h, w] of the
    picture alone for a memory world; None without a picture.
    """

    seed: int
    context: ContextKV
    image: torch.Tensor | None


class WanWorld(ABC):
    """One loaded world of the family. Lanes bring their caches; weights are shared."""

    def __init__(
        self,
        entry: Entry,
        model: CausalWan,
        vae: WanVae,
        *,
        prompts: Callable[[str, Report], torch.Tensor] | None = None,
        clip: ClipVision | None = None,
        sha256: Callable[[], str] = lambda: "random",
        graphs: bool | None = None,
        tile: int = 0,
        vae_waits: bool = False,
    ) -> None:
        """prompts: encodes a prompt, for a prompted world. sha256: of the weight files.

        graphs: replay CUDA graphs between attentions; None takes them where launching is what
        a pass waits for. tile: latent cells a side that the autoencoder decodes at once, 0 for
        whole frames. vae_waits: its weights are on the CPU while it has nothing to do.
        """
        self.entry, self.model, self.vae, self.clip = entry, model, vae, clip
        self.spec = entry.spec()
        self.device, self.dtype = model.device, model.dtype
        self.grid = (entry.latent[0] // 2, entry.latent[1] // 2)
        self.forward = self._launched(graphs)
        self._prompts, self._sha256 = prompts, sha256
        self._session: Session | None = None
        self._newest_prompt: tuple[str, ContextKV] | None = None
        self._tile = tile
        self._visit_vae = Visits(self.device) if vae_waits else nullcontext
        self.report: Report = lambda stage, share: None

    def scenes(self) -> Sequence[Scene]:
        return presets.scenes() if self.entry.pictured else []

    @torch.inference_mode()
    def start(
        self, scene: str | None, image: np.ndarray | None, prompt: str, seed: int
    ) -> StartState:
        """Encode picture and prompt; the rollout begins with its own first chunk.

        Without picture and scene a plain picture is made from the seed, without a prompt the
        first of presets.PROMPTS is used.
        """
        picture = self._picture(scene, image, seed)
        signed = to_signed(picture).to(self.device)
        context = self._context(signed, prompt or presets.PROMPTS[0])
        self.report("Encoding the start", 0.0)
        self._session = Session(seed, context, self._image(signed))
        channels, height, width = self.spec.latent_shape
        latents = torch.empty(0, channels, height, width, dtype=self.dtype, device=self.device)
        shown = picture if self.entry.pictured else np.zeros_like(picture)
        return StartState(latents, (), shown[None])

    def at_size(self, size: tuple[int, int]) -> WanWorld:
        """The same weights at another of its resolutions, (width, height), started by itself.

        Raises:
            UserError: it was not trained for this size.
        """
        known = (self.spec.video_size, *self.spec.resolutions)
        if size not in known:
            shown = ", ".join("{}x{}".format(*one) for one in known)
            raise UserError(f"{self.spec.name} runs at {shown}, not at {size[0]}x{size[1]}")
        stride, twin = self.entry.vae.stride, copy(self)
        latent = (size[1] // stride, size[0] // stride)
        others = tuple(one for one in known if one != size)
        twin.entry = replace(self.entry, latent=latent, resolutions=others)
        twin.spec, twin.grid = twin.entry.spec(), (latent[0] // 2, latent[1] // 2)
        twin.forward, twin._session = twin._launched(None), None
        return twin

    @torch.inference_mode()
    def change_prompt(self, lane: LaneState, prompt: str) -> None:
        """Recompute the lane's cross-attention; history and camera stay as they are."""
        if not self.entry.prompted:
            raise UserError(f"{self.spec.name} has no prompt; it starts from a picture")
        lane.extra["session"] = replace(self._session_of(lane), context=self._prompted(prompt))

    @abstractmethod
    def generate_chunk(
        self, lane: LaneState, action: ChunkAction, noise: torch.Tensor, steps: int
    ) -> ChunkOutput: ...

    @abstractmethod
    def commit_chunk(self, lane: LaneState, latents: torch.Tensor, action: ChunkAction) -> None: ...

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """latents [F, C, H, W] as the beginning of a video -> uint8 [1 + 4(F-1), H, W, 3]."""
        return self._decode(latents, self._new_state())

    @torch.inference_mode()
    def decode_chunk(self, lane: LaneState, latents: torch.Tensor) -> np.ndarray:
        """The lane's next frames, continuing its video; kept once the chunk is committed."""
        held = lane.extra.get("vae")
        state: VideoState = self._new_state() if held is None else held.copy()
        frames = self._decode(latents, state)
        lane.extra["vae_next"] = state
        return frames

    def explain(self) -> str:
        """How passes are launched, a few words."""
        if isinstance(self.forward, GraphedWan):
            return f"world replays {self.forward.count} CUDA graphs a pass"
        return "world runs op by op"

    def weight_bytes(self) -> int:
        modules = [module for module in (self.model, self.vae, self.clip) if module is not None]
        return sum(
            tensor.numel() * tensor.element_size()
            for module in modules
            for tensor in module.parameters()
        )

    def weights_sha256(self) -> str:
        return self._sha256()

    def _launched(self, graphs: bool | None) -> Forward:
        cuda, spec = self.device.type == "cuda", self.spec.cache
        # Weights that come and go have no fixed place to be replayed from, and a flight of chunks
        # has other shapes than a chunk.
        if self.model.visit is not nullcontext or self.entry.kind == "rolling":
            return self.model
        if graphs is None:
            graphs = cuda and worthwhile(self.model, spec.tokens_per_chunk)
        if not graphs:
            return self.model
        if not cuda:
            raise UserError(f"graphs need a CUDA device, the world is on {self.device}")
        return GraphedWan(self.model, spec.frames_per_chunk, CudaCapture(self.device))

    def _decode(self, latents: torch.Tensor, state: VideoState) -> np.ndarray:
        pieces = latents.transpose(0, 1).split(LATENTS_AT_ONCE, dim=1)
        with self._visit_vae(self.vae):
            return np.concatenate([to_bytes(self._decode_piece(piece, state)) for piece in pieces])

    def _decode_piece(self, piece: torch.Tensor, state: VideoState) -> torch.Tensor:
        if isinstance(state, TileStates):
            return decode_tiled(self.vae.decode, piece, state, self._tile, self.entry.vae.stride)
        return self.vae.decode(piece, state)

    def _new_state(self) -> VideoState:
        return TileStates() if self._tile else {}

    def _committed(self, lane: LaneState, frames: int) -> None:
        """The chunk is history now: so are its frames in the lane's video."""
        if "vae_next" in lane.extra:
            lane.extra["vae"] = lane.extra.pop("vae_next")
        lane.next_frame += frames

    def _session_of(self, lane: LaneState) -> Session:
        session = lane.extra.setdefault("session", self._session)
        if not isinstance(session, Session):
            raise UserError(f"{self.spec.name} has not started; call start() first")
        return session

    def _check_steps(self, steps: int) -> None:
        if steps != self.entry.step_count:
            raise UserError(
                f"{self.spec.name} was distilled for {self.entry.step_count} steps, got {steps}"
            )

    def _picture(self, scene: str | None, image: np.ndarray | None, seed: int) -> np.ndarray:
        """uint8 [H, W, 3] at the world's size: a person's picture, a scene or a plain one."""
        size = self.spec.video_size
        if image is not None:
            return start_picture(image, size)
        if scene is None:
            return plain_picture(size, seed)
        if not self.entry.pictured:
            raise UserError(f"unknown scene {scene!r}; {self.spec.name} has none, give a prompt")
        return presets.scene_picture(scene, size)

    def _prompted(self, prompt: str) -> ContextKV:
        """Cross-attention of a prompt, computed once for all lanes that ask for it."""
        if self._prompts is None:
            raise UserError(f"{self.spec.name} was loaded without its text encoder")
        if self._newest_prompt is None or self._newest_prompt[0] != prompt:
            self.report("Reading the prompt", 0.0)
            self._newest_prompt = prompt, self.model.context_kv(self._prompts(prompt, self.report))
        return self._newest_prompt[1]

    def _context(self, picture: torch.Tensor, prompt: str) -> ContextKV:
        if self.entry.prompted:
            return self._prompted(prompt)
        if self.clip is None:
            raise UserError(f"{self.spec.name} was loaded without its image encoder")
        return self.model.context_kv(self.clip.encode(picture))

    def _image(self, picture: torch.Tensor) -> torch.Tensor | None:
        """Latents of the start picture, as the kind of world is conditioned on them."""
        if not self.entry.pictured:
            return None
        with self._visit_vae(self.vae):
            if self.entry.kind == "memory":
                return self.vae.encode(picture[:, None])
            grey = picture.new_zeros(3, 4 * (CONDITION_LATENTS - 1), *picture.shape[1:])
            return self.vae.encode(torch.cat([picture[:, None], grey], dim=1))


def step_noise(seed: int, frame: int, step: int, shape: Sequence[int]) -> torch.Tensor:
    """Fresh noise of one step of the chunk at `frame`; the same for every lane and device.

    Kept for the lanes that ask after the first one; not to be written to.
    """
    return _step_noise(seed, frame, step, tuple(shape))


@lru_cache(maxsize=8)
def _step_noise(seed: int, frame: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    mixed = np.random.SeedSequence((seed, frame, step, 1)).generate_state(1, np.uint64)[0]
    generator = torch.Generator().manual_seed(int(mixed) >> 1)
    return torch.randn(shape, generator=generator)


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on a device. From pageable memory the host would wait for all that is queued
    there: 20 ms, the rest of a pass of Matrix-Game-2, before every denoising step."""
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def extra_list(extra: Mapping[str, object], name: str) -> list:
    """A lane's own list, empty before its first chunk."""
    held = extra.get(name)
    return held if isinstance(held, list) else []
