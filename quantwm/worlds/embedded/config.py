"""Sizes of the embedded world: its transformer, its autoencoder, its sampler, its presets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from quantwm.errors import UserError

KEYS = ("w", "s", "a", "d", "left", "right")
"""Keys that the model is conditioned on, in the order of its input vector."""


@dataclass(frozen=True)
class TransformerConfig:
    """The causal chunk-autoregressive transformer.

    With the shipped sizes: 18.1 million parameters, 48 tokens a frame, 192 a chunk.
    """

    layers: int = 10
    width: int = 384
    heads: int = 3
    head_dim: int = 128
    ffn: int = 1408  # with the autoencoder 43.2 MB in BF16; 1536 would break the 44 MB limit
    frames_per_chunk: int = 4
    latent_channels: int = 16
    latent_height: int = 12
    latent_width: int = 16
    patch: int = 2
    rope_theta: float = 10000.0
    sigma_features: int = 256
    pose: bool = False  # whether tokens are told heading and position reckoned from the keys

    def __post_init__(self) -> None:
        if self.latent_height % self.patch or self.latent_width % self.patch:
            raise UserError(
                f"patch {self.patch} does not divide the latent size "
                f"{self.latent_height} x {self.latent_width}"
            )
        if self.head_dim % 2 or self.head_dim < 6:
            raise UserError(f"head_dim must be even and at least 6, got {self.head_dim}")

    @property
    def grid(self) -> tuple[int, int]:
        """Tokens of a frame: rows, columns."""
        return self.latent_height // self.patch, self.latent_width // self.patch

    @property
    def tokens_per_frame(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def tokens_per_chunk(self) -> int:
        return self.tokens_per_frame * self.frames_per_chunk

    @property
    def patch_features(self) -> int:
        return self.latent_channels * self.patch**2

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        return self.latent_channels, self.latent_height, self.latent_width


@dataclass(frozen=True)
class AutoencoderConfig:
    """Convolutional autoencoder, one frame at a time: 8x in space, nothing in time.

    Widths are those of the levels at 1/2, 1/4 and 1/8 of the picture.
    """

    latent_channels: int = 16
    encoder_widths: tuple[int, int, int] = (64, 128, 160)
    encoder_depths: tuple[int, int, int] = (1, 1, 1)
    decoder_widths: tuple[int, int, int] = (64, 128, 192)
    decoder_depths: tuple[int, int, int] = (2, 2, 2)
    groups: int = 8


@dataclass(frozen=True)
class SamplerConfig:
    """Few-step flow matching: noise levels u mapped to shift u / (1 + (shift - 1) u)."""

    shift: float = 3.0
    cpu_steps: int = 2
    cuda_steps: int = 2


@dataclass(frozen=True)
class EmbeddedConfig:
    """All of the embedded world.

    train_frames is the longest context seen in training, in frames; the default window.
    """

    transformer: TransformerConfig = field(default_factory=lambda: TransformerConfig(pose=True))
    autoencoder: AutoencoderConfig = field(default_factory=AutoencoderConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    context_frames: int = 16
    train_frames: int = 256
    fps: float = 8.75  # 4 of the engine's 35 tics a frame

    @property
    def video_size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return self.transformer.latent_width * 8, self.transformer.latent_height * 8

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EmbeddedConfig:
        """The inverse of to_json. UserError when a field is missing or unknown."""
        try:
            parts = dict(data)
            autoencoder = {
                k: tuple(v) if isinstance(v, list) else v for k, v in parts["autoencoder"].items()
            }
            parts["autoencoder"] = AutoencoderConfig(**autoencoder)
            parts["transformer"] = TransformerConfig(**parts["transformer"])
            parts["sampler"] = SamplerConfig(**parts["sampler"])
            return cls(**parts)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"the manifest's config does not fit this version of the embedded world: {error}"
            ) from error


PRESETS: dict[str, EmbeddedConfig] = {
    "shipped": EmbeddedConfig(),
    "tiny": EmbeddedConfig(
        transformer=TransformerConfig(
            layers=2, width=64, heads=2, head_dim=64, ffn=128, latent_height=4, latent_width=6,
            sigma_features=32, pose=True,
        ),
        autoencoder=AutoencoderConfig(
            encoder_widths=(8, 16, 16), decoder_widths=(8, 16, 16),
            encoder_depths=(1, 1, 1), decoder_depths=(1, 1, 1), groups=4,
        ),
    ),
}  # fmt: skip
"""`shipped` is what assets/ holds; `tiny` runs in tests in milliseconds, with random weights."""
