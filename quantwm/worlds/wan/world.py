"""`WanWorld`: what every world of the family does; denoising is left to its two kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from quantwm.errors import UserError
from quantwm.worlds.base import ChunkAction, ChunkOutput, LaneState, Scene, StartState
from quantwm.worlds.capture import CudaCapture
from quantwm.worlds.wan.backbone import CausalWan, ContextKV, Forward
from quantwm.worlds.wan.catalog import Entry
from quantwm.worlds.wan.clip import ClipVision
from quantwm.worlds.wan.graphs import GraphedWan, worthwhile
from quantwm.worlds.wan.pictures import (
    CONDITION_LATENTS,
    plain_picture,
    start_picture,
    to_bytes,
    to_signed,
)
from quantwm.worlds.wan.vae import WanVae
from quantwm.worlds.wan.vae_layers import State

DEFAULT_PROMPT = "A walk through a quiet landscape in clear daylight, seen through one's own eyes."
MAX_TILE_LATENTS = 1  # latent frames decoded at a time, so that memory does not grow with a chunk


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
        prompts: Callable[[str], torch.Tensor] | None = None,
        clip: ClipVision | None = None,
        sha256: Callable[[], str] = lambda: "random",
        graphs: bool | None = None,
    ) -> None:
        """prompts: encodes a prompt, for a prompted world. sha256: of the weight files.

        graphs: replay CUDA graphs between attentions; None takes them where launching is what
        a pass waits for.
        """
        self.entry, self.model, self.vae, self.clip = entry, model, vae, clip
        self.spec = entry.spec()
        self.device, self.dtype = model.device, model.dtype
        self.grid = (entry.latent[0] // 2, entry.latent[1] // 2)
        self.forward = self._launched(graphs)
        self._prompts, self._sha256 = prompts, sha256
        self._session: Session | None = None

    def scenes(self) -> Sequence[Scene]:
        return []

    @torch.inference_mode()
    def start(
        self, scene: str | None, image: np.ndarray | None, prompt: str, seed: int
    ) -> StartState:
        """Encode picture and prompt; the rollout begins with its own first chunk.

        Without a picture a plain one is made from the seed, without a prompt a plain one is used.
        """
        if scene is not None:
            raise UserError(f"unknown scene {scene!r}; {self.spec.name} has none, give a picture")
        size = self.spec.video_size
        picture = plain_picture(size, seed) if image is None else start_picture(image, size)
        signed = to_signed(picture).to(self.device)
        self._session = Session(
            seed, self._context(signed, prompt or DEFAULT_PROMPT), self._image(signed)
        )
        channels, height, width = self.spec.latent_shape
        latents = torch.empty(0, channels, height, width, dtype=self.dtype, device=self.device)
        shown = picture if self.entry.pictured else np.zeros_like(picture)
        return StartState(latents, (), shown[None])

    @torch.inference_mode()
    def change_prompt(self, lane: LaneState, prompt: str) -> None:
        """Recompute the lane's cross-attention; history and camera stay as they are."""
        if not self.entry.prompted:
            raise UserError(f"{self.spec.name} has no prompt; it starts from a picture")
        context = self.model.context_kv(self._features(prompt))
        lane.extra["session"] = replace(self._session_of(lane), context=context)

    @abstractmethod
    def generate_chunk(
        self, lane: LaneState, action: ChunkAction, noise: torch.Tensor, steps: int
    ) -> ChunkOutput: ...

    @abstractmethod
    def commit_chunk(self, lane: LaneState, latents: torch.Tensor, action: ChunkAction) -> None: ...

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """latents [F, C, H, W] as the beginning of a video -> uint8 [1 + 4(F-1), H, W, 3]."""
        return self._decode(latents, {})

    @torch.inference_mode()
    def decode_chunk(self, lane: LaneState, latents: torch.Tensor) -> np.ndarray:
        """The lane's next frames, continuing its video; kept once the chunk is committed."""
        state: State = dict(lane.extra.get("vae", {}))
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
        if graphs is None:
            graphs = cuda and worthwhile(self.model, spec.tokens_per_chunk)
        if not graphs:
            return self.model
        if not cuda:
            raise UserError(f"graphs need a CUDA device, the world is on {self.device}")
        return GraphedWan(self.model, spec.frames_per_chunk, CudaCapture(self.device))

    def _decode(self, latents: torch.Tensor, state: State) -> np.ndarray:
        parts = [
            to_bytes(self.vae.decode(part, state))
            for part in latents.transpose(0, 1).split(MAX_TILE_LATENTS, dim=1)
        ]
        return np.concatenate(parts)

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

    def _features(self, prompt: str) -> torch.Tensor:
        if self._prompts is None:
            raise UserError(f"{self.spec.name} was loaded without its text encoder")
        return self._prompts(prompt)

    def _context(self, picture: torch.Tensor, prompt: str) -> ContextKV:
        if self.entry.prompted:
            return self.model.context_kv(self._features(prompt))
        if self.clip is None:
            raise UserError(f"{self.spec.name} was loaded without its image encoder")
        return self.model.context_kv(self.clip.encode(picture))

    def _image(self, picture: torch.Tensor) -> torch.Tensor | None:
        """Latents of the start picture, as the kind of world is conditioned on them."""
        if not self.entry.pictured:
            return None
        if self.entry.kind == "memory":
            return self.vae.encode(picture[:, None])
        grey = picture.new_zeros(3, 4 * (CONDITION_LATENTS - 1), *picture.shape[1:])
        return self.vae.encode(torch.cat([picture[:, None], grey], dim=1))


def step_noise(seed: int, frame: int, step: int, shape: Sequence[int]) -> torch.Tensor:
    """Fresh noise of one step of the chunk at `frame`; the same for every lane and device."""
    mixed = np.random.SeedSequence((seed, frame, step, 1)).generate_state(1, np.uint64)[0]
    generator = torch.Generator().manual_seed(int(mixed) >> 1)
    return torch.randn(tuple(shape), generator=generator)


def extra_list(extra: Mapping[str, object], name: str) -> list:
    """A lane's own list, empty before its first chunk."""
    held = extra.get(name)
    return held if isinstance(held, list) else []
