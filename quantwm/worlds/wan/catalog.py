"""The Wan worlds by name: sizes, schedule, window, licence, and where their files come from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantwm.cache.spec import CachePolicy
from quantwm.worlds.base import WorldSpec
from quantwm.worlds.wan.config import PRESETS, WanConfig
from quantwm.worlds.wan.geometry import cache_spec, key_layout
from quantwm.worlds.wan.matrix_actions import CONTROLS
from quantwm.worlds.wan.memory_frames import CLIP, WAN_5B
from quantwm.worlds.wan.rolling import RollingRule
from quantwm.worlds.wan.steering import KEYS
from quantwm.worlds.wan.vae import VaeConfig

LINGBOT_LICENCE = "CC BY-NC-SA 4.0: not for commercial use; what is made from it is shared alike"
TENCENT_LICENCE = (
    "Tencent HY-WorldPlay community licence: not for the European Union, the United Kingdom and "
    "South Korea; more than a million monthly users need a licence of their own"
)
SPAN_FRAMES = 3  # latent frames of Causal-Forcing's chunkwise chunk, which the published span is
_T5 = "models_t5_umt5-xxl-enc-bf16.pth"
_TOKENIZER = "google/umt5-xxl"
_WAN_1P3B = "Wan-AI/Wan2.1-T2V-1.3B"


@dataclass(frozen=True)
class Part:
    """One component's files in a public repository.

    Attributes:
        repo: of the Hugging Face hub. path: the file or folder to load, inside the repository.
        ema: take the averaged copy where the file holds two.
    """

    repo: str
    path: str
    ema: bool = False


@dataclass(frozen=True)
class Entry:
    """One world of the family.

    Attributes:
        name, title, licence: for people. family: what its checkpoint must turn out to be.
        agree: the terms that a person agrees to before it is downloaded; "" where it is free.
        kind: "text" (prompt only), "camera" (LingBot), "keys" (Matrix-Game-2), "memory" (HY)
            or "rolling" (prompt only, several chunks in flight).
        config: of the transformer. vae: of its autoencoder.
        latent: height and width of a latent frame. fps: of its training data.
        frames_per_chunk, window, sink: latent frames; window None keeps everything.
        compress_sink: encode the sink too; where it is a third of the window it decides the ratio.
        steps: denoising steps in the notation of its schedule. shift: of the schedule.
        first_steps: other steps of the first chunk, empty where they are the same.
        parts: "transformer", "vae", and of "text", "tokenizer", "clip" those it needs.
        appends: a memory world whose cache grows chunk by chunk instead of being made anew.
        mode: Matrix-Game-2's control mode. resolutions: other video sizes it was trained for.
    """

    name: str
    title: str
    licence: str
    family: str
    kind: str
    config: WanConfig
    vae: VaeConfig
    latent: tuple[int, int]
    fps: float
    frames_per_chunk: int
    steps: tuple[float, ...]
    parts: dict[str, Part]
    shift: float = 5.0
    first_steps: tuple[float, ...] = ()
    window: int | None = None
    sink: int = 0
    compress_sink: bool = False
    agree: str = ""
    appends: bool = False
    mode: str = ""
    resolutions: tuple[tuple[int, int], ...] = ()

    @property
    def prompted(self) -> bool:
        return self.config.context == "text"

    @property
    def pictured(self) -> bool:
        """Whether it starts from a picture."""
        return self.kind not in ("text", "rolling")

    @property
    def step_count(self) -> int:
        """Passes of a chunk; HY's list ends with the last sigma, which is not a pass."""
        return len(self.steps) - 1 if self.kind == "memory" else len(self.steps)

    @property
    def keys(self) -> dict[str, str]:
        if not self.pictured:
            return {}
        return dict(CONTROLS[self.mode].keys) if self.kind == "keys" else dict(KEYS)

    def spec(self) -> WorldSpec:
        """The WorldSpec that follows; one codebook per native chunk, as published.

        A chunk of one frame shares its codebook with the next two: alone, the codebook would take
        a third of the frame's packed bytes.
        """
        tokens = self.config.tokens_per_frame(*self.latent)
        height, width = self.latent
        rope = key_layout(self.config, self.latent, self.kind)
        cache = cache_spec(self.config, tokens, self.frames_per_chunk, rope)
        return WorldSpec(
            name=self.name,
            title=self.title,
            licence=self.licence,
            source=self.parts["transformer"].repo,
            cache=cache,
            policy=CachePolicy(
                sink_frames=self.sink,
                window_frames=self.window,
                span_tokens=max(cache.tokens_per_chunk, SPAN_FRAMES * tokens),
                compress_sink=self.compress_sink,
            ),
            format_settings={"bf16": {}, "qvg": {}, "quantwm": {}},
            latent_shape=(self.config.out_channels, height, width),
            video_size=(width * self.vae.stride, height * self.vae.stride),
            fps=self.fps,
            frames_per_latent=4,
            keys=self.keys,
            default_steps={"cpu": self.step_count, "cuda": self.step_count},
            context_frames=0,
            resolutions=self.resolutions,
            remade=self.kind == "memory" and not self.appends,
        )


VAE_21 = VaeConfig()
# The 2.2 autoencoder's latent statistics stand in the config.json beside its weights.
VAE_22 = VaeConfig(
    base=160, decoder_base=256, latent_channels=48, residual=True, mean=(0.0,) * 48, std=(1.0,) * 48
)
_WAN21_PARTS = {
    "vae": Part(_WAN_1P3B, "Wan2.1_VAE.pth"),
    "text": Part(_WAN_1P3B, _T5),
    "tokenizer": Part(_WAN_1P3B, _TOKENIZER),
}

_CAUSAL_FORCING = Entry(
    name="causal_forcing",
    title="Causal-Forcing 1.3B, chunkwise: a prompt, no controls",
    licence="Apache-2.0",
    family="causal_forcing",
    kind="text",
    config=PRESETS["causal_forcing_1p3b"],
    vae=VAE_21,
    latent=(60, 104),
    fps=16.0,
    frames_per_chunk=3,
    steps=(1000, 750, 500, 250),
    # Trained on 21 latent frames; a sink keeps longer rollouts together.
    window=21,
    sink=3,
    parts={
        "transformer": Part("zhuhz22/Causal-Forcing", "chunkwise/causal_forcing.pt"),
        **_WAN21_PARTS,
    },
)

_LINGBOT_14B = Entry(
    name="lingbot_v2_14b",
    title="LingBot-World-v2 14B: a picture, a prompt and a camera",
    licence=LINGBOT_LICENCE,
    agree=LINGBOT_LICENCE,
    family="lingbot_world_v2",
    kind="camera",
    config=PRESETS["lingbot_v2_14b"],
    vae=VAE_21,
    latent=(60, 104),
    fps=16.0,
    frames_per_chunk=4,
    steps=(0, 250, 500, 750),
    shift=10.0,
    window=18,
    sink=6,
    compress_sink=True,
    resolutions=((1280, 720),),
    parts={
        "transformer": Part("robbyant/lingbot-world-v2-14b-causal-fast", "transformers"),
        "vae": Part("robbyant/lingbot-world-v2-14b-causal-fast", "Wan2.1_VAE.pth"),
        "text": Part("robbyant/lingbot-world-v2-14b-causal-fast", _T5),
        "tokenizer": Part("robbyant/lingbot-world-v2-14b-causal-fast", _TOKENIZER),
    },
)


def _matrix_game(
    mode: str, title: str, folder: str, window: int, steps: tuple[float, ...]
) -> Entry:
    repo = "Skywork/Matrix-Game-2.0"
    return Entry(
        name=f"matrix_game2_{mode}",
        title=f"Matrix-Game-2 {title}: a picture, keys and mouse",
        licence="MIT",
        family=f"matrix_game2_{mode}",
        kind="keys",
        config=PRESETS[f"matrix_game2_{mode}"],
        vae=VAE_21,
        latent=(44, 80),
        fps=25.0,
        frames_per_chunk=3,
        steps=steps,
        window=window,
        mode=mode,
        parts={
            "transformer": Part(repo, folder),
            "vae": Part(repo, "Wan2.1_VAE.pth"),
            "clip": Part(repo, "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"),
        },
    )


_HY = Entry(
    name="hy_worldplay_wan5b",
    title="HY-World 1.5 (Wan 5B): a picture, a prompt, a camera and a memory",
    licence=TENCENT_LICENCE,
    agree=TENCENT_LICENCE,
    family="hy_worldplay_wan5b",
    kind="memory",
    config=PRESETS["hy_worldplay_wan5b"],
    vae=VAE_22,
    latent=(44, 80),
    fps=16.0,
    frames_per_chunk=CLIP,
    steps=(1000.0, 960.0, 888.8889, 727.2728, 0.0),
    window=WAN_5B.frames + CLIP,
    parts={
        "transformer": Part("tencent/HY-WorldPlay", "wan_distilled_model/model.pt"),
        "vae": Part("Wan-AI/Wan2.2-TI2V-5B-Diffusers", "vae"),
        "text": Part("Wan-AI/Wan2.2-TI2V-5B-Diffusers", "text_encoder"),
        "tokenizer": Part("Wan-AI/Wan2.2-TI2V-5B-Diffusers", "tokenizer"),
    },
)

_ALL = (
    _CAUSAL_FORCING,
    replace(
        _CAUSAL_FORCING,
        name="causal_forcing_framewise",
        title="Causal-Forcing 1.3B, framewise: a prompt, no controls",
        frames_per_chunk=1,
        parts={
            "transformer": Part("zhuhz22/Causal-Forcing", "framewise/causal_forcing.pt", ema=True),
            **_WAN21_PARTS,
        },
    ),
    replace(
        _CAUSAL_FORCING,
        name="causal_forcing_long",
        title="Causal-Forcing 1.3B, long video: a prompt, no controls",
        kind="rolling",
        window=RollingRule().cache_frames,
        sink=RollingRule().chunk_frames,
        parts={
            "transformer": Part("zhuhz22/Causal-Forcing", "chunkwise/longvideo.pt"),
            **_WAN21_PARTS,
        },
    ),
    _matrix_game("universal", "universal", "base_distilled_model", 6, (1000, 666, 333)),
    _matrix_game("gta_drive", "GTA driving", "gta_distilled_model", 4, (1000, 666, 333)),
    _matrix_game("templerun", "Temple Run", "templerun_distilled_model", 6, (1000, 750, 500, 250)),
    _LINGBOT_14B,
    replace(
        _LINGBOT_14B,
        name="lingbot_v2_1p3b",
        title="LingBot-World-v2 1.3B: a picture, a prompt and a camera",
        config=PRESETS["lingbot_v2_1p3b"],
        shift=5.0,
        parts={
            "transformer": Part("robbyant/lingbot-world-v2-1.3b-causal-fast", "transformers"),
            **_WAN21_PARTS,
        },
    ),
    _HY,
    replace(
        _HY,
        name="hy_worldplay_wan5b_append",
        title="HY-World 1.5 (Wan 5B), appending: its memory grows instead of being made anew",
        appends=True,
        # QVG's integration keeps 48 to 56 frames.
        window=56,
    ),
)
ENTRIES = {entry.name: entry for entry in _ALL}
