"""What a causal Wan transformer looks like, and the published models written as presets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantwm.errors import UserError

CONTEXTS = ("text", "image")


@dataclass(frozen=True)
class Precision:
    """Where the arithmetic leaves the dtype of the weights. In FP32 all three rules agree.

    Attributes:
        modulation_fp32: the six modulation vectors and what they multiply are FP32.
        residual_fp32: the residual stream stays FP32 and the head runs in FP32 (autocast rules);
            otherwise it is rounded to the dtype of the weights after every addition.
        sinusoid_fp64: the timestep's sinusoid is computed in FP64, otherwise in FP32.
    """

    modulation_fp32: bool
    residual_fp32: bool
    sinusoid_fp64: bool


PRECISIONS = {
    "native": Precision(modulation_fp32=False, residual_fp32=False, sinusoid_fp64=True),
    "fp32_residual": Precision(modulation_fp32=True, residual_fp32=True, sinusoid_fp64=True),
    "fp32_modulation": Precision(modulation_fp32=True, residual_fp32=False, sinusoid_fp64=False),
}


@dataclass(frozen=True)
class ActionConfig:
    """Matrix-Game-2's action module, present in the blocks named by `layers`.

    Attributes:
        layers: indices of the blocks that carry one.
        heads, head_dim: of its two attentions (mouse and keyboard).
        keyboard_dim, mouse_dim: values of one action row; mouse_dim 0 leaves the mouse out.
        embed_dim: width of one embedded keyboard row.
        window: latent frames of action rows that one latent frame sees (3, so 12 rows).
        rows_per_frame: action rows (video frames) per latent frame.
        rope_dim, rope_theta: leading channels of a head that are rotated, and the base.
    """

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    keyboard_dim: int
    mouse_dim: int
    embed_dim: int = 128
    window: int = 3
    rows_per_frame: int = 4
    rope_dim: int = 8
    rope_theta: float = 256.0

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def rows(self) -> int:
        """Action rows that one latent frame sees."""
        return self.window * self.rows_per_frame


@dataclass(frozen=True)
class WanConfig:
    """One causal Wan transformer.

    Attributes:
        layers, heads, head_dim: of the self-attention; width is heads * head_dim.
        ffn_dim: hidden width of the feed-forward.
        in_channels: latent channels that enter (noise, plus mask and image where conditioned).
        out_channels: channels of the predicted flow.
        context: "text" (UMT5 rows) or "image" (CLIP rows) for the cross-attention.
        context_dim, context_len: width and number of context rows.
        freq_dim: width of the timestep's sinusoid.
        camera: per-block camera injectors fed by a Pluecker embedding (LingBot).
        camera_channels: channels of that embedding per latent cell, before 2x2 folding.
        prope: second attention branch with camera projections, and action labels (HY).
        action: Matrix-Game-2's action module.
        precision: a key of PRECISIONS.
    """

    layers: int
    heads: int
    ffn_dim: int
    in_channels: int
    out_channels: int
    context_dim: int
    head_dim: int = 128
    context: str = "text"
    context_len: int = 512
    freq_dim: int = 256
    camera: bool = False
    camera_channels: int = 384
    prope: bool = False
    action: ActionConfig | None = None
    precision: str = "native"

    def __post_init__(self) -> None:
        if self.context not in CONTEXTS:
            raise UserError(f"context must be one of {', '.join(CONTEXTS)}, got {self.context!r}")
        if self.precision not in PRECISIONS:
            names = ", ".join(PRECISIONS)
            raise UserError(f"precision must be one of {names}, got {self.precision!r}")
        if self.prope and self.head_dim % 4:
            raise UserError(f"a PRoPE branch needs head_dim divisible by 4, got {self.head_dim}")
        if self.head_dim % 2:
            raise UserError(f"rotary positions need an even head_dim, got {self.head_dim}")

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def rules(self) -> Precision:
        return PRECISIONS[self.precision]

    def tokens_per_frame(self, height: int, width: int) -> int:
        """Tokens of one latent frame of [height, width] cells after 2x2 patching."""
        if height % 2 or width % 2:
            raise UserError(f"latent height and width must be even, got {height}x{width}")
        return (height // 2) * (width // 2)


def _matrix_game(keyboard_dim: int, mouse_dim: int) -> WanConfig:
    action = ActionConfig(
        layers=tuple(range(15)), heads=16, head_dim=64, keyboard_dim=keyboard_dim,
        mouse_dim=mouse_dim,
    )  # fmt: skip
    return WanConfig(
        layers=30, heads=12, ffn_dim=8960, in_channels=36, out_channels=16, context="image",
        context_dim=1280, context_len=257, action=action,
    )  # fmt: skip


_LINGBOT_1P3B = WanConfig(
    layers=30, heads=12, ffn_dim=8960, in_channels=36, out_channels=16, context_dim=4096,
    camera=True, precision="fp32_residual",
)  # fmt: skip

PRESETS: dict[str, WanConfig] = {
    "causal_forcing_1p3b": WanConfig(
        layers=30, heads=12, ffn_dim=8960, in_channels=16, out_channels=16, context_dim=4096
    ),
    "lingbot_v2_1p3b": _LINGBOT_1P3B,
    "lingbot_v2_14b": replace(_LINGBOT_1P3B, layers=40, heads=40, ffn_dim=13824),
    "matrix_game2_universal": _matrix_game(keyboard_dim=4, mouse_dim=2),
    "matrix_game2_gta_drive": _matrix_game(keyboard_dim=2, mouse_dim=2),
    "matrix_game2_templerun": _matrix_game(keyboard_dim=7, mouse_dim=0),
    "hy_worldplay_wan5b": WanConfig(
        layers=30, heads=24, ffn_dim=14336, in_channels=48, out_channels=48, context_dim=4096,
        prope=True, precision="fp32_modulation",
    ),
}  # fmt: skip
