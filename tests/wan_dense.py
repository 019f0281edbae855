"""A Wan world's mathematics once more: float64, one sequence, a mask; from the published names.

Written from the fact sheet and not from the modules, so that a slip in either shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]
EPS = 1e-6


@dataclass(frozen=True)
class Sequence:
    """What one pass is given: latents [C, F, H, W], times [F], positions [F] of RoPE, seen
    bool [F, F] (row sees column), text rows; and, by family, camera, actions, labels, lenses.

    keyboard, mouse: [rows, dim] from video frame 0 on; frames: number of each latent frame.
    acts_on: as seen, for the action streams, whose published caches keep no sink.
    """

    latents: Tensor
    times: Tensor
    positions: Tensor
    seen: Tensor
    context: Tensor
    camera: Tensor | None = None
    keyboard: Tensor | None = None
    mouse: Tensor | None = None
    frames: Tensor | None = None
    acts_on: Tensor | None = None
    labels: Tensor | None = None
    lenses: tuple[Tensor, Tensor] | None = None


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    bias = w.get(f"{name}.bias")
    return x @ w[f"{name}.weight"].T + (0 if bias is None else bias)


def norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    out = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + EPS).sqrt()
    return out if weight is None else out * weight + bias


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def wave(values: Tensor, dim: int) -> Tensor:
    rates = torch.tensor([10000.0 ** (-i / (dim // 2)) for i in range(dim // 2)]).double()
    angle = values.double()[:, None] * rates
    return torch.cat([angle.cos(), angle.sin()], 1)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x [..., N, D]; positions [N, D / 2] already times their rates."""
    out = x.clone()
    even, odd = x[..., 0::2], x[..., 1::2]
    out[..., 0::2] = even * positions.cos() - odd * positions.sin()
    out[..., 1::2] = even * positions.sin() + odd * positions.cos()
    return out


def rates(dim: int, theta: float = 10000.0) -> Tensor:
    return torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)]).double()


def places(times: Tensor, rows: int, columns: int, dim: int) -> Tensor:
    """Angles [F * rows * columns, dim / 2]: time, row and column share a head's channels."""
    side = 2 * (dim // 6)
    parts = dim - 2 * side, side, side
    out = []
    for t in times.tolist():
        for y in range(rows):
            for x in range(columns):
                out.append(torch.cat([p * rates(d) for p, d in zip((t, y, x), parts, strict=True)]))
    return torch.stack(out)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """[heads, N, D]."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v


def heads_of(x: Tensor, heads: int) -> Tensor:
    return torch.stack(x.chunk(heads, dim=-1))


def joined(x: Tensor) -> Tensor:
    return torch.cat(list(x), dim=-1)


def flow(w: Weights, heads: int, action_heads: int, freq_dim: int, s: Sequence) -> Tensor:
    """w: float64, original names without prefix (HY: diffusers' names turned to them)."""
    _, frames, height, width = s.latents.shape
    rows, columns = height // 2, width // 2
    cells = rows * columns
    patches = s.latents.double().unfold(2, 2, 2).unfold(3, 2, 2)  # [C, F, rows, columns, 2, 2]
    patches = patches.permute(1, 2, 3, 0, 4, 5).reshape(frames * cells, -1)
    kernel = w["patch_embedding.weight"].flatten(1)
    x = patches @ kernel.T + w["patch_embedding.bias"]
    dim = x.shape[1]
    time = linear(
        w, "time_embedding.2", silu(linear(w, "time_embedding.0", wave(s.times, freq_dim)))
    )
    if s.labels is not None:
        hidden = silu(linear(w, "action_embedding.0", wave(s.labels, freq_dim)))
        time = time + linear(w, "action_embedding.2", hidden)
    modulation = linear(w, "time_projection.1", silu(time)).reshape(frames, 6, dim)
    camera = None
    if s.camera is not None:
        channels = s.camera.shape[0]
        cam = s.camera.double().reshape(channels, frames, rows, 2, columns, 2)
        cam = cam.permute(1, 2, 4, 0, 3, 5).reshape(frames * cells, 4 * channels)
        cam = linear(w, "patch_embedding_wancamctrl", cam)
        hidden = silu(linear(w, "c2ws_hidden_states_layer1", cam))
        camera = cam + linear(w, "c2ws_hidden_states_layer2", hidden)
    mask = s.seen.repeat_interleave(cells, 0).repeat_interleave(cells, 1)
    angle = places(s.positions, rows, columns, dim // heads)
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
    for layer in range(layers):
        own = {
            name.split(".", 2)[2]: value
            for name, value in w.items()
            if name.startswith(f"blocks.{layer}.")
        }
        vectors = (own["modulation"] + modulation).repeat_interleave(cells, 0).unbind(1)
        hidden = norm(x) * (1 + vectors[1]) + vectors[0]
        x = x + vectors[2] * _self_attention(own, heads, hidden, angle, mask, s, cells)
        if camera is not None:
            inner = silu(linear(own, "cam_injector_layer1", camera))
            inner = camera + linear(own, "cam_injector_layer2", inner)
            x = (1 + linear(own, "cam_scale_layer", inner)) * x
            x = x + linear(own, "cam_shift_layer", inner)
        x = x + _cross_attention(
            own, heads, norm(x, own["norm3.weight"], own["norm3.bias"]), s.context
        )
        if "action_model.proj_keyboard.weight" in own:
            x = _actions(own, action_heads, x, s, cells)
        hidden = norm(x) * (1 + vectors[4]) + vectors[3]
        x = x + vectors[5] * linear(own, "ffn.2", gelu(linear(own, "ffn.0", hidden)))
    shift, scale = (w["head.modulation"] + time[:, None]).repeat_interleave(cells, 0).unbind(1)
    out = linear(w, "head.head", norm(x) * (1 + scale) + shift)
    out = out.reshape(frames, rows, columns, 2, 2, -1)
    return out.permute(5, 0, 1, 3, 2, 4).reshape(-1, frames, height, width)


def _self_attention(
    own: Weights, heads: int, x: Tensor, angle: Tensor, mask: Tensor, s: Sequence, cells: int
) -> Tensor:
    q = heads_of(rms(linear(own, "self_attn.q", x)) * own["self_attn.norm_q.weight"], heads)
    k = heads_of(rms(linear(own, "self_attn.k", x)) * own["self_attn.norm_k.weight"], heads)
    v = heads_of(linear(own, "self_attn.v", x), heads)
    out = linear(own, "self_attn.o", joined(attend(rotated(q, angle), rotated(k, angle), v, mask)))
    if s.lenses is None:
        return out
    projection, inverse = (m.double().repeat_interleave(cells, 0) for m in s.lenses)

    def by(matrices: Tensor, x: Tensor) -> Tensor:
        groups = x.reshape(*x.shape[:2], -1, 4, 1)
        return (matrices[None, :, None] @ groups).reshape(x.shape)

    turned = attend(by(projection.transpose(1, 2), q), by(inverse, k), by(inverse, v), mask)
    return out + linear(own, "self_attn.o_prope", joined(by(projection, turned)))


def _cross_attention(own: Weights, heads: int, x: Tensor, context: Tensor) -> Tensor:
    q = heads_of(rms(linear(own, "cross_attn.q", x)) * own["cross_attn.norm_q.weight"], heads)
    k = heads_of(rms(linear(own, "cross_attn.k", context)) * own["cross_attn.norm_k.weight"], heads)
    v = heads_of(linear(own, "cross_attn.v", context), heads)
    return linear(own, "cross_attn.o", joined(attend(q, k, v)))


def _actions(own: Weights, heads: int, x: Tensor, s: Sequence, cells: int) -> Tensor:
    """Latent frame f sees action rows 4f - 12 .. 4f - 1; those before the first repeat it."""
    own = {name.removeprefix("action_model."): value for name, value in own.items()}
    frames = s.frames.tolist()

    def windows(rows: Tensor) -> Tensor:
        taken = [[rows[max(4 * f - 12 + i, 0)] for i in range(12)] for f in frames]
        return torch.stack([torch.stack(one) for one in taken]).double()

    def turned(x: Tensor, per_frame: int) -> Tensor:
        angle = s.frames.double()[:, None] * rates(8, 256.0)
        angle = angle.repeat_interleave(per_frame, 0)
        return torch.cat([rotated(x[..., :8], angle), x[..., 8:]], -1)

    if s.mouse is not None:
        rows = windows(s.mouse).flatten(1).repeat_interleave(cells, 0)
        hidden = gelu(linear(own, "mouse_mlp.0", torch.cat([x, rows], -1)))
        hidden = linear(own, "mouse_mlp.2", hidden)
        mean, var = hidden.mean(-1, keepdim=True), hidden.var(-1, correction=0, keepdim=True)
        hidden = (hidden - mean) / (var + 1e-5).sqrt()
        hidden = hidden * own["mouse_mlp.3.weight"] + own["mouse_mlp.3.bias"]
        q, k, v = (heads_of(part, heads) for part in linear(own, "t_qkv", hidden).chunk(3, -1))
        q, k = turned(rms(q), cells), turned(rms(k), cells)
        out = torch.empty_like(v)
        for cell in range(cells):
            out[:, cell::cells] = attend(
                q[:, cell::cells], k[:, cell::cells], v[:, cell::cells], s.acts_on
            )
        x = x + linear(own, "proj_mouse", joined(out))
    keys = silu(linear(own, "keyboard_embed.0", windows(s.keyboard)))
    keys = linear(own, "keyboard_embed.2", keys).flatten(1)
    k, v = (heads_of(part, heads) for part in linear(own, "keyboard_attn_kv", keys).chunk(2, -1))
    q = turned(rms(heads_of(linear(own, "mouse_attn_q", x), heads)), cells)
    seen = s.acts_on.repeat_interleave(cells, 0)
    out = attend(q, turned(rms(k), 1), v, seen)
    return x + linear(own, "proj_keyboard", joined(out))


def text_context(w: Weights, rows: Tensor, length: int) -> Tensor:
    """Text rows, zero rows behind them, through the embedding: padding is seen."""
    padded = torch.zeros(length, rows.shape[1], dtype=torch.float64)
    padded[: len(rows)] = rows.double()
    return linear(w, "text_embedding.2", gelu(linear(w, "text_embedding.0", padded)))


def image_context(w: Weights, rows: Tensor) -> Tensor:
    """CLIP rows through norm, linear, exact GELU, linear, norm; these norms end at 1e-5."""

    def affine(name: str, x: Tensor) -> Tensor:
        out = x - x.mean(-1, keepdim=True)
        out = out / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return out * w[f"{name}.weight"] + w[f"{name}.bias"]

    hidden = linear(w, "img_emb.proj.1", affine("img_emb.proj.0", rows.double()))
    hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    return affine("img_emb.proj.4", linear(w, "img_emb.proj.3", hidden))
