"""Parameter names: the original Wan names turned into diffusers' names, and model families told."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from quantwm.errors import UserError
from quantwm.worlds.wan.checkpoint import shape_of
from quantwm.worlds.wan.config import ActionConfig, WanConfig

PREFIXES = ("model.", "module.")
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""Put into names, wherever they occur, by FSDP, activation checkpointing and torch.compile."""

# Applied in this order to whole name parts; norm2 and norm3 change places, because diffusers
# calls the cross-attention's norm norm2 and the original calls it norm3.
_RENAMES = (
    ("time_embedding.0.", "condition_embedder.time_embedder.linear_1."),
    ("time_embedding.2.", "condition_embedder.time_embedder.linear_2."),
    ("text_embedding.0.", "condition_embedder.text_embedder.linear_1."),
    ("text_embedding.2.", "condition_embedder.text_embedder.linear_2."),
    ("time_projection.1.", "condition_embedder.time_proj."),
    ("img_emb.proj.0.", "condition_embedder.image_embedder.norm1."),
    ("img_emb.proj.1.", "condition_embedder.image_embedder.ff.net.0.proj."),
    ("img_emb.proj.3.", "condition_embedder.image_embedder.ff.net.2."),
    ("img_emb.proj.4.", "condition_embedder.image_embedder.norm2."),
    ("head.modulation", "scale_shift_table"),
    ("head.head.", "proj_out."),
    (".modulation", ".scale_shift_table"),
    (".self_attn.", ".attn1."),
    (".cross_attn.", ".attn2."),
    (".q.", ".to_q."),
    (".k.", ".to_k."),
    (".v.", ".to_v."),
    (".o.", ".to_out.0."),
    (".ffn.0.", ".ffn.net.0.proj."),
    (".ffn.2.", ".ffn.net.2."),
)


def diffusers_name(name: str) -> str:
    """One original Wan parameter name -> diffusers' name; other names pass unchanged."""
    if ".action_model." in name:
        return name
    original = name
    for old, new in _RENAMES:
        if old in name or name.startswith(old):
            name = name.replace(old, new, 1)
    if re.match(r"blocks\.\d+\.norm3\.", original):
        name = name.replace(".norm3.", ".norm2.")
    return name


def strip_prefix(name: str) -> str:
    """Remove wrappers (FSDP, DataParallel, a `model.` attribute, ...), however nested."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    stripped = True
    while stripped:
        stripped = False
        for prefix in PREFIXES:
            if name.startswith(prefix):
                name, stripped = name[len(prefix) :], True
    return name


def canonical(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Published weights under diffusers' names; UserError where two names become one."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        new = diffusers_name(strip_prefix(name))
        if new in out:
            raise UserError(f"the checkpoint holds two tensors for {new}: one file per model")
        out[new] = tensor
    return out


# Not of this backbone, but told apart so that the message can name them.
_FOREIGN = (
    ("double_blocks.0.img_attn_prope_proj.weight", "hy_worldplay_8b"),
    ("x_embedder.proj.weight", "longcat_video"),
)
_MATRIX_GAME = {
    4: "matrix_game2_universal",
    2: "matrix_game2_gta_drive",
    7: "matrix_game2_templerun",
}


def family(weights: Mapping[str, torch.Tensor]) -> str:
    """The model family of canonical weights, told by its marker tensors."""
    for marker, name in _FOREIGN:
        if marker in weights:
            return name
    if "patch_embedding.weight" not in weights:
        sample = ", ".join(sorted(weights)[:3]) or "nothing"
        raise UserError(
            f"these are not the weights of a known video world model: no patch_embedding.weight, "
            f"found {sample}"
        )
    if "patch_embedding_wancamctrl.weight" in weights:
        return "lingbot_world_v2"
    keyboards = [n for n in weights if n.endswith("action_model.keyboard_embed.0.weight")]
    if keyboards:
        keys = shape_of(weights, keyboards[0], 2, "Matrix-Game-2")[1]
        if keys not in _MATRIX_GAME:
            known = ", ".join(map(str, _MATRIX_GAME))
            raise UserError(f"a Matrix-Game-2 keyboard has {known} keys, these weights have {keys}")
        return _MATRIX_GAME[keys]
    if any(name.endswith("attn1.to_out_prope.0.weight") for name in weights):
        return "hy_worldplay_wan5b"
    if "condition_embedder.text_embedder.linear_1.weight" in weights:
        channels = shape_of(weights, "patch_embedding.weight", 5, "a Wan transformer")[1]
        if channels == 16:
            return "causal_forcing"
        raise UserError(
            f"a plain Wan transformer with {channels} input channels is not a causal world model; "
            "Causal-Forcing has 16"
        )
    raise UserError(
        "a Wan transformer of no known family: no text, camera, action or PRoPE tensors"
    )


_PRECISION = {"lingbot_world_v2": "fp32_residual", "hy_worldplay_wan5b": "fp32_modulation"}


def infer_config(
    weights: Mapping[str, torch.Tensor], head_dim: int = 128, action_head_dim: int = 64
) -> WanConfig:
    """The sizes of canonical weights. Heads cannot be read from shapes: head_dim is given."""
    name = family(weights)
    if name in dict(_FOREIGN).values():
        raise UserError(f"{name} is not a Wan transformer; the Wan backbone cannot load it")
    width, in_channels = shape_of(weights, "patch_embedding.weight", 5, name)[:2]
    if width % head_dim:
        raise UserError(f"width {width} is not a multiple of the head size {head_dim}")
    indices = {int(m.group(1)) for m in map(re.compile(r"blocks\.(\d+)\.").match, weights) if m}
    if indices != set(range(len(indices))) or not indices:
        raise UserError(f"the checkpoint's blocks are not 0..n-1: found {sorted(indices)[:8]}")
    image = name.startswith("matrix_game2")
    context = (
        "condition_embedder.image_embedder.norm1.weight"
        if image
        else "condition_embedder.text_embedder.linear_1.weight"
    )
    context_dim = shape_of(weights, context, 1 if image else 2, name)[-1]
    time = shape_of(weights, "condition_embedder.time_embedder.linear_1.weight", 2, name)
    camera = name == "lingbot_world_v2"
    return WanConfig(
        layers=len(indices), heads=width // head_dim, head_dim=head_dim,
        ffn_dim=shape_of(weights, "blocks.0.ffn.net.0.proj.weight", 2, name)[0],
        in_channels=in_channels,
        out_channels=shape_of(weights, "proj_out.weight", 2, name)[0] // 4,
        context="image" if image else "text",
        context_dim=context_dim, context_len=257 if image else 512,
        freq_dim=time[1],
        camera=camera,
        camera_channels=shape_of(weights, "patch_embedding_wancamctrl.weight", 2, name)[1] // 4
        if camera else 384,
        prope=name == "hy_worldplay_wan5b",
        action=_infer_action(weights, action_head_dim) if image else None,
        precision=_PRECISION.get(name, "native"),
    )  # fmt: skip


def _infer_action(weights: Mapping[str, torch.Tensor], head_dim: int) -> ActionConfig:
    pattern = re.compile(r"blocks\.(\d+)\.action_model\.keyboard_embed\.0\.weight")
    layers = tuple(sorted(int(m.group(1)) for m in map(pattern.match, weights) if m))
    if not layers:
        raise UserError("these Matrix-Game-2 weights have their action modules outside of blocks")
    prefix = f"blocks.{layers[0]}.action_model."

    def sizes(name: str) -> tuple[int, ...]:
        return shape_of(weights, prefix + name, 2, "Matrix-Game-2's action module")

    embed, keyboard_dim = sizes("keyboard_embed.0.weight")
    inner, width = sizes("mouse_attn_q.weight")
    rows, mouse_dim = sizes("keyboard_attn_kv.weight")[1] // embed, 0
    if rows >= 4 and prefix + "mouse_mlp.0.weight" in weights:
        mouse_dim = (sizes("mouse_mlp.0.weight")[1] - width) // rows
    if rows < 4 or mouse_dim < 0 or inner < head_dim:
        raise UserError(
            f"the sizes of Matrix-Game-2's action module contradict each other: {inner} of width, "
            f"{rows} action rows, a mouse of {mouse_dim}"
        )
    return ActionConfig(
        layers=layers, heads=inner // head_dim, head_dim=head_dim, keyboard_dim=keyboard_dim,
        embed_dim=embed, window=rows // 4, mouse_dim=mouse_dim,
    )  # fmt: skip
