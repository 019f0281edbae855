"""`EmbeddedWorld`: the World protocol over our own model; its attention goes through the cache."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from quantwm.cache.capture import CudaCapture
from quantwm.cache.spec import CachePolicy, CacheSpec, RopeLayout
from quantwm.errors import UserError
from quantwm.worlds.base import (
    ChunkAction,
    ChunkOutput,
    LaneState,
    Scene,
    StartState,
    WorldSpec,
)
from quantwm.worlds.embedded.autoencoder import Autoencoder, to_bytes, to_signed
from quantwm.worlds.embedded.config import PRESETS, EmbeddedConfig
from quantwm.worlds.embedded.dtypes import check_dtype, pick_cpu_dtype
from quantwm.worlds.embedded.graphs import GraphedDecoder, GraphedTransformer
from quantwm.worlds.embedded.keys import LEGEND, KeyVector, action_map
from quantwm.worlds.embedded.pose import START, Walk, as_array, follow, pose_features
from quantwm.worlds.embedded.rope import ChunkTables, rope_split
from quantwm.worlds.embedded.sampler import sample
from quantwm.worlds.embedded.scenes import list_scenes, load_scene, seed_picture, still_clip
from quantwm.worlds.embedded.together import Together
from quantwm.worlds.embedded.transformer import Attend, Transformer
from quantwm.worlds.embedded.weights import Progress, finish, load_models, read_manifest

ASSETS = Path(__file__).resolve().parents[3] / "assets"
POSE = "pose"  # key of a lane's extra: the walk so far, reckoned from its keys
SPAN_TOKENS = 3072  # 16 chunks of 192 tokens share 64 centroids


def world_spec(config: EmbeddedConfig, name: str = "embedded") -> WorldSpec:
    """The WorldSpec that follows from a config."""
    model = config.transformer
    return WorldSpec(
        name=name,
        title="Embedded world: generated rooms",
        licence="Weights Apache-2.0; learned from Freedoom art (BSD-3-Clause)",
        source="assets/embedded, trained by training/",
        cache=CacheSpec(
            layers=model.layers,
            heads=model.heads,
            head_dim=model.head_dim,
            tokens_per_frame=model.tokens_per_frame,
            frames_per_chunk=model.frames_per_chunk,
            rope=RopeLayout(rope_split(model.head_dim), model.grid, model.rope_theta),
        ),
        policy=CachePolicy(span_tokens=SPAN_TOKENS, window_frames=config.train_frames),
        format_settings={
            "qvg": {"centroids": 64},
            "quantwm": {"centroids": 64},
            "qvg-pro": {"centroids": 64},
        },
        latent_shape=model.latent_shape,
        video_size=config.video_size,
        fps=config.fps,
        frames_per_latent=1,
        keys=LEGEND,
        default_steps={"cpu": config.sampler.cpu_steps, "cuda": config.sampler.cuda_steps},
        context_frames=config.context_frames,
    )


SPEC = world_spec(PRESETS["shipped"])
"""Of the shipped world, known before anything is loaded."""


def load(
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    assets: Path = ASSETS,
    graphs: bool | None = None,
) -> EmbeddedWorld:
    """Checks and loads the shipped weights. dtype None: BF16 on a GPU, the faster one on a CPU.

    graphs: as in `EmbeddedWorld`.
    """
    device = torch.device(device)
    if dtype is None:
        dtype = pick_cpu_dtype() if device.type == "cpu" else torch.bfloat16
    check_dtype(dtype)
    manifest = read_manifest(assets / "embedded")
    transformer, autoencoder = load_models(manifest, device, dtype, progress)
    return EmbeddedWorld(
        manifest.config, transformer, autoencoder, manifest.sha256, assets / "scenes", graphs
    )


class EmbeddedWorld:
    """One loaded world; lanes share its weights and bring their own caches."""

    def __init__(
        self,
        config: EmbeddedConfig,
        transformer: Transformer,
        autoencoder: Autoencoder,
        sha256: str,
        scenes: Path | None,
        graphs: bool | None = None,
    ) -> None:
        """Both models in inference mode on one device; scenes: folder of start scenes or None.

        graphs: replay CUDA graphs where shapes are fixed (None: on a GPU); the same numbers
        either way. UserError where there is no GPU to replay them.
        """
        self.config = config
        self.spec = world_spec(config)
        self.device = transformer.patch_in.weight.device
        self.dtype = transformer.patch_in.weight.dtype
        self._transformer, self._autoencoder = transformer, autoencoder
        self._sha256, self._scene_folder = sha256, scenes
        self._weight_bytes = _bytes_of(transformer, autoencoder)  # asked for in every chunk
        # A pure function of few arguments, asked for again in every lane.
        self._condition = functools.lru_cache(maxsize=256)(self._make_condition)
        self._pose = functools.lru_cache(maxsize=16)(self._make_pose)
        self._together = functools.lru_cache(maxsize=4)(functools.partial(Together, self))
        self._rope = self.tables()
        self._graphed: tuple[GraphedTransformer, GraphedDecoder] | None = None
        if self.device.type == "cuda" if graphs is None else graphs:
            self._graphed = self.capture(self._rope)

    def capture(
        self, rope: ChunkTables, batch: tuple[int, ...] = ()
    ) -> tuple[GraphedTransformer, GraphedDecoder]:
        """CUDA graphs of a pass and of decoding its chunk, which read these tables' memory.

        batch: leading dimensions of a pass. UserError where there is no GPU to replay them.
        """
        if self.device.type != "cuda":
            raise UserError(f"graphs need a CUDA device, the world is on {self.device}")
        capture = CudaCapture(self.device)
        frames = math.prod(batch) * self.spec.cache.frames_per_chunk
        return (
            GraphedTransformer(self._transformer, (rope.cos, rope.sin), capture, batch),
            GraphedDecoder(self._autoencoder, (frames, *self.spec.latent_shape), capture),
        )

    @property
    def models(self) -> tuple[Transformer, Autoencoder]:
        """Both in inference mode, shared by everything that runs this world."""
        return self._transformer, self._autoencoder

    @property
    def graphed(self) -> bool:
        """Whether passes replay CUDA graphs."""
        return self._graphed is not None

    def tables(self) -> ChunkTables:
        """RoPE tables of one chunk, in memory of their own."""
        model = self.config.transformer
        return ChunkTables(
            model.frames_per_chunk, model.grid, model.head_dim, model.rope_theta, self.device
        )

    def without_graphs(self) -> EmbeddedWorld:
        """The same weights, launched op by op: what the graphs are held to, bit for bit."""
        models = self._transformer, self._autoencoder
        return EmbeddedWorld(self.config, *models, self._sha256, self._scene_folder, graphs=False)

    def together(self, count: int) -> Together:
        """The world for `count` sessions in lock-step; made once for every count."""
        return self._together(count)

    def explain(self) -> str:
        """How passes and decoder are launched, a few words."""
        if self._graphed is None:
            return "world runs op by op"
        return f"world replays {self.spec.cache.layers + 2} CUDA graphs"

    @classmethod
    def random(
        cls,
        preset: str = "tiny",
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        graphs: bool | None = None,
    ) -> EmbeddedWorld:
        """A world with random weights: same code, no files, nothing to see."""
        if preset not in PRESETS:
            raise UserError(f"unknown preset {preset!r}; there are {', '.join(PRESETS)}")
        check_dtype(dtype)
        config, device = PRESETS[preset], torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            transformer = Transformer(config.transformer)
            autoencoder = Autoencoder(config.autoencoder)
        return cls(
            config,
            finish(transformer.to(device, dtype), device),
            finish(autoencoder.to(device, dtype), device),
            sha256=f"random-{preset}-{seed}",
            scenes=None,
            graphs=graphs,
        )

    def value_metric(self, layer: int, stream: str) -> torch.Tensor:
        """W^T W of the output weights that each head's values meet, float32 [H, D, D]."""
        model = self.config.transformer
        weight = self._transformer.blocks[layer].o.weight.float()
        heads = weight.unflatten(1, (model.heads, model.head_dim)).transpose(0, 1)
        return heads.transpose(1, 2) @ heads

    def scenes(self) -> Sequence[Scene]:
        return [] if self._scene_folder is None else list_scenes(self._scene_folder)

    def start(
        self, scene: str | None, image: np.ndarray | None, prompt: str, seed: int
    ) -> StartState:
        """A scene's 16 true frames with their keys, or a picture held still for 16 frames.

        image: uint8 [H, W, 3] of any size, or a clip of them, cut to the world's aspect and
        scaled. The prompt has no effect on this world. A world without scenes starts from a
        picture made from the seed.
        """
        per_chunk = self.spec.cache.frames_per_chunk
        scenes = self.scenes()
        if image is None and scene is None and scenes:
            scene = scenes[0].name
        if image is None and scene is None:
            image = seed_picture(self.spec.video_size, seed)
        if image is not None:
            frames = still_clip(image, self.spec.video_size, self._context)
            keys: tuple[frozenset[str], ...] = (frozenset(),) * self._context
        else:
            if self._scene_folder is None or scene is None:
                raise UserError(f"unknown scene {scene!r}; this world has none")
            clip = load_scene(self._scene_folder, scene, self.spec.video_size)
            frames, keys = clip.frames, clip.keys
        actions = tuple(
            ChunkAction(keys[i : i + per_chunk]) for i in range(0, len(keys), per_chunk)
        )
        return StartState(self.encode(frames), actions, frames)

    @property
    def _context(self) -> int:
        return self.spec.context_frames

    @torch.no_grad()
    def encode(self, frames: np.ndarray) -> torch.Tensor:
        """uint8 [T, H, W, 3] -> latents [T, C, h, w] in the compute dtype."""
        pictures = to_signed(torch.from_numpy(frames).to(self.device), self.dtype)
        return self._autoencoder.encode(pictures).to(self.dtype)

    @torch.no_grad()
    def generate_chunk(
        self, lane: LaneState, action: ChunkAction, noise: torch.Tensor, steps: int
    ) -> ChunkOutput:
        """Denoises one chunk against lane.cache, whose history stays as it is."""
        expected = (self.spec.cache.frames_per_chunk, *self.spec.latent_shape)
        if tuple(noise.shape) != expected:
            raise UserError(f"noise must be {expected}, got {tuple(noise.shape)}")
        vectors = action_map(action, expected[0])
        lane.cache.begin_chunk(lane.next_frame, expected[0])
        try:
            with self.attention_kernels():
                latents, predictions = sample(
                    lambda x, sigma: self._pass(lane, x, sigma, vectors, clean=False),
                    noise.to(self.device),
                    steps,
                    self.config.sampler.shift,
                )
        finally:
            lane.cache.abort_chunk()
        return ChunkOutput(
            latents.to(self.dtype), tuple(prediction.to(self.dtype) for prediction in predictions)
        )

    @torch.no_grad()
    def commit_chunk(self, lane: LaneState, latents: torch.Tensor, action: ChunkAction) -> None:
        """The clean pass at noise 0: keys and values of every layer go to the cache for good."""
        frames = self.spec.cache.frames_per_chunk
        vectors = action_map(action, frames)
        lane.cache.begin_chunk(lane.next_frame, frames)
        try:
            with self.attention_kernels():
                self._pass(lane, latents, 0.0, vectors, clean=True)
            lane.cache.finalize_chunk()
        except BaseException:
            lane.cache.abort_chunk()
            raise
        lane.next_frame += frames
        lane.extra[POSE] = follow(_walk(lane), vectors)[1]

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """latents [frames, C, h, w] -> uint8 [frames, H, W, 3]."""
        if self._graphed is not None and tuple(latents.shape) == self._graphed[1].shape:
            return self._graphed[1](latents).to("cpu", copy=True).numpy()
        return to_bytes(self._autoencoder.decode(latents.to(self.device))).cpu().numpy()

    def weight_bytes(self) -> int:
        return self._weight_bytes

    def weights_sha256(self) -> str:
        return self._sha256

    def _pass(
        self,
        lane: LaneState,
        latents: torch.Tensor,
        sigma: float,
        vectors: tuple[KeyVector, ...],
        clean: bool,
    ) -> torch.Tensor:
        shared, head = self._condition(sigma, vectors)
        pose = self._pose(_walk(lane), vectors) if self.config.transformer.pose else None
        cos, sin = self._rope.seek(lane.next_frame)

        def attend_at(layer: int) -> Attend:
            attend: Callable[..., torch.Tensor] = lane.cache.attend
            return functools.partial(attend, layer, clean=clean)

        if self._graphed is not None:
            return self._graphed[0](latents, shared, head, attend_at, pose)
        return self._transformer(latents, shared, head, cos, sin, attend_at, pose=pose)

    def attention_kernels(self) -> contextlib.AbstractContextManager[None]:
        """On a GPU without cuDNN's attention: it plans anew for every length of history, 0.5 ms
        of the host for each of 150 calls a chunk. Entered once a chunk and lane, since entering
        costs as much as a launch."""
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        return sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        )

    def _make_condition(
        self, sigma: float, vectors: tuple[KeyVector, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        levels = torch.full((len(vectors),), sigma, device=self.device)
        return self._transformer.condition(levels, torch.tensor(vectors, device=self.device))

    def _make_pose(self, walk: Walk, vectors: tuple[KeyVector, ...]) -> torch.Tensor:
        """Features of a chunk's tokens; the walk goes on from the session's start for good, so an
        evicted history takes nothing with it. Built on the CPU, in float32, everywhere."""
        poses = torch.from_numpy(as_array(follow(walk, vectors)[0]))
        return pose_features(poses, self.config.transformer.grid[1]).to(self.device)


def _walk(lane: LaneState) -> Walk:
    walk = lane.extra.get(POSE, START)
    return cast(Walk, walk)


def _bytes_of(*models: torch.nn.Module) -> int:
    return sum(
        tensor.numel() * tensor.element_size()
        for model in models
        for tensor in model.state_dict().values()
    )
