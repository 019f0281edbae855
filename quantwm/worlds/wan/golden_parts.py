"""Golden parts: text encoder, autoencoders and action mappings against the published ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from quantwm.goldens import Comparison, GoldenSet
from quantwm.worlds.wan import hy_actions, lingbot_actions, matrix_actions, prope
from quantwm.worlds.wan.loading import assign, on_meta
from quantwm.worlds.wan.memory_frames import (
    MMDIT_8B,
    WAN_5B,
    overlaps,
    select,
    visible_points,
)
from quantwm.worlds.wan.steering import Axes
from quantwm.worlds.wan.umt5 import Umt5Encoder, canonical_umt5, infer_umt5_config
from quantwm.worlds.wan.vae import WanVae
from quantwm.worlds.wan.vae_layers import State
from quantwm.worlds.wan.vae_names import canonical_vae, infer_vae_config


def umt5(golden: GoldenSet, compare: Comparison) -> None:
    """The encoder's output in FP32 and BF16, padding rows zero."""
    for run, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        weights = canonical_umt5(golden.weights)
        config = infer_umt5_config(weights)
        encoder = on_meta(lambda config=config: Umt5Encoder(config))
        assign(encoder, weights, "a UMT5 encoder", dtype, "cpu")
        out = encoder(golden["in.ids"], golden["in.mask"])
        compare.check(f"encoder.{run}.prompt_embeds", out)


def vae(golden: GoldenSet, compare: Comparison) -> None:
    """Whole decode, streaming decode and encode in FP32."""
    weights = canonical_vae(golden.weights)
    info = golden.info
    config = infer_vae_config(weights, tuple(info["latents_mean"]), tuple(info["latents_std"]))
    sizes = info["config"]["model"]
    config = replace(
        config,
        multipliers=tuple(sizes["dim_mult"]),
        time_levels=tuple(sizes["temperal_downsample"]),
    )
    model = on_meta(lambda: WanVae(config))
    assign(model, weights, "a Wan VAE", torch.float32, "cpu")
    latents = golden["in.latents"][0].float()
    compare.check("vae.fp32.decoded", model.decode(latents, {}))
    state: State = {}
    parts = [model.decode(part, state) for part in latents.split(info["config"]["chunks"], dim=1)]
    compare.check("vae.fp32.decoded_in_chunks", torch.cat(parts, dim=1))
    counts = torch.tensor([part.shape[1] for part in parts])
    compare.check("vae.fp32.frames_per_chunk", counts)
    compare.check("vae.fp32.encoded", model.encode(golden["in.video"][0].float()))
    largest = model.raw_decode(latents, {}).abs().max()
    compare.check("vae.fp32.decoded_before_clamp_absmax", largest)


def matrix_game2_actions(golden: GoldenSet, compare: Comparison) -> None:
    """Every prompt answer, and key sequences per chunk."""
    info = golden.info["config"]
    size = info["num_frame_per_block"]
    for mode, answers in info["table"].items():
        rows = [
            matrix_actions.action_row(mode, matrix_actions.parse_prompt(mode, answer))
            for answer in answers
        ]
        compare.check(f"{mode}.table.keyboard", torch.tensor([row[0] for row in rows]))
        compare.check(f"{mode}.table.mouse", torch.tensor([row[1] for row in rows]))
    for mode, answers in info["sequences"].items():
        keyboard, mouse = [], []
        for chunk, answer in enumerate(answers):
            held = matrix_actions.parse_prompt(mode, answer)
            rows = matrix_actions.action_rows(mode, [held] * size, chunk * size)
            keyboard.append(rows[0])
            compare.check(f"{mode}.sequence.c{chunk}.keyboard", torch.cat(keyboard))
            if rows[1] is not None:
                mouse.append(rows[1])
                compare.check(f"{mode}.sequence.c{chunk}.mouse", torch.cat(mouse))


_PAIRS = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))


def hy_worldplay_actions(golden: GoldenSet, compare: Comparison) -> None:
    """Pose strings, all held combinations, view overlap, memory selection and PRoPE."""
    info = golden.info["config"]
    for index, text in enumerate(info["pose_strings"]):
        c2w, labels = hy_actions.trajectory(hy_actions.parse_pose(text))
        at = f"strings.p{index}"
        compare.check(f"{at}.c2w", torch.from_numpy(c2w))
        compare.check(f"{at}.w2c", hy_actions.world_to_camera(c2w))
        compare.check(f"{at}.K", hy_actions.intrinsics(len(c2w)))
        compare.check(f"{at}.action", torch.from_numpy(labels))
    held = [
        hy_actions.trajectory([Axes(forward, right, yaw, pitch)] * 2)
        for forward, right in _PAIRS
        for yaw, pitch in _PAIRS
    ]
    shape = (len(_PAIRS), len(_PAIRS), 3)
    labels = torch.stack([torch.from_numpy(label) for _, label in held])
    compare.check("combos.held.label", labels.reshape(shape))
    poses = torch.stack([torch.from_numpy(pose) for pose, _ in held])
    compare.check("combos.held.c2w", poses.reshape(*shape, 4, 4))
    _hy_memory(golden, compare)


def _hy_memory(golden: GoldenSet, compare: Comparison) -> None:
    info = golden.info["config"]
    c2w, _ = hy_actions.trajectory(hy_actions.parse_pose(info["memory_pose"]))
    derived = hy_actions.world_to_camera(c2w).float()
    compare.check("memory.traj.w2c", derived)
    w2c, points = golden["memory.traj.w2c"], golden["memory.in.points_local"]
    for frame in info["current"]:
        for name, rule in (("wan5b", WAN_5B), ("mmdit8b", MMDIT_8B)):
            chosen = torch.tensor(select(w2c, frame, points, rule))
            compare.check(f"memory.selected.{name}_{frame}", chosen)
    visible = visible_points(points)
    values = torch.stack([overlaps(query, w2c[::2], visible) for query in w2c[::3]])
    compare.check("memory.overlap.query_every3_history_every2", values)
    q, k, v = (golden[f"prope.in.{name}"][0] for name in "qkv")
    lenses = prope.cameras(w2c[:4], hy_actions.intrinsics(4), torch.float32)
    q = prope.apply(lenses.projection.transpose(1, 2), q)
    k, v = prope.apply(lenses.inverse, k), prope.apply(lenses.inverse, v)
    out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    turned = prope.apply(lenses.projection, out)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("o", turned)):
        compare.check(f"prope.out.{name}", tensor)


def lingbot_world_actions(golden: GoldenSet, compare: Comparison) -> None:
    """Key strings and key segments to poses, relative poses and the folded Pluecker embedding."""
    info = golden.info["config"]
    for index, text in enumerate(info["key_strings"]):
        wasd, ijkl = lingbot_actions.parse_keys(text)
        at = f"keys.k{index}"
        compare.check(f"{at}.wasd", torch.from_numpy(wasd))
        compare.check(f"{at}.ijkl", torch.from_numpy(ijkl))
        _lingbot_case(golden, compare, at, lingbot_actions.key_trajectory(wasd, ijkl))
    rule = info["wasd_schedule"]
    poses = lingbot_actions.segment_trajectory(rule["keys"], rule["frames"], rule["segment_frames"])
    _lingbot_case(golden, compare, "wasd.example", poses)


def _lingbot_case(golden: GoldenSet, compare: Comparison, at: str, c2w: np.ndarray) -> None:
    info = golden.info["config"]
    height, width = info["image_hw"]
    compare.check(f"{at}.c2w", torch.from_numpy(c2w))
    latent = torch.from_numpy(lingbot_actions.latent_poses(c2w, info["chunk_size"]))
    compare.check(f"{at}.latent_c2w", latent)
    relative = lingbot_actions.relative_poses(latent)
    compare.check(f"{at}.relative", relative)
    scaled = lingbot_actions.scaled_intrinsics(info["intrinsics_480x832"], height, width)
    compare.check(f"{at}.scaled_K", scaled)
    rays = lingbot_actions.pluecker(relative, scaled, height, width)
    compare.check(f"{at}.plucker_first3", rays[:3])
    folded = lingbot_actions.folded(rays)
    compare.check(f"{at}.folded_first3", folded[:, :3])
    compare.check(f"{at}.folded_mean_per_frame", folded[::16].mean(dim=(2, 3)).T)
