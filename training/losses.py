"""What a step of the transformer's training minimises: settings, noisy streams, weighted errors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from quantwm.worlds.embedded.pose import YAW_FEATURES, pose_features
from quantwm.worlds.embedded.sampler import noise_levels
from quantwm.worlds.embedded.transformer import Attend, Transformer
from training.fading import faded
from training.own_history import STEPS, mixed_history, own_rollout
from training.teacher_forcing import predict_clip


@dataclass(frozen=True)
class Stage:
    """A share of the time at one clip length.

    own: share of the clips whose history is partly of the model's own making, each chunk from the
    truth; rolled: share of the clips whose history is a rollout of the model; adversarial: length
    of the critic's gradient over that of the error's, for chunks that hold no truth; edges:
    weight of `edge_error` for the same chunks.
    """

    frames: int
    batch: int
    share: float
    own: float = 0.0
    rolled: float = 0.0
    adversarial: float = 0.0
    edges: float = 0.0


@dataclass(frozen=True)
class RolloutConfig:
    """clips: in the pool, fewer of more than 128 frames. uses: how often each is used, on the mean,
    before all are made anew; busy: no more of the stage's time than this goes into making them.
    revisits: share of the clips that come back to what their context showed. longest_context: true
    chunks at the start, at most; half of the clips have as few as a session."""

    clips: int = 96
    uses: float = 3.0
    busy: float = 0.22
    revisits: float = 0.6
    longest_context: int = 20


@dataclass(frozen=True)
class TransformerTraining:
    """short_windows: with chance short_chance a step sees only so many past chunks, so that a
    16-frame window is something the model knows. context_noise: the clean stream of half of the
    clips is disturbed by up to this much, unannounced, as a rollout's own history is. lost: share
    of clips without positions, as after a walk along a wall. sampler_share: share of the chunks
    at one of the two noise levels that the product's sampler asks for (1 and 0.75); the rest is
    spread over all levels, and below sigma_floor the error's weight grows no more.
    revisits: share of the clips chosen because they come back to something not seen for 16 frames.
    second_round: share of steps whose own histories are made twice, the second time from the
    first. gaps: share of the clips with chunks hidden from all others, longest_gap at most in one.
    faded: share of the clips of truth whose history fades as rollouts do.
    After a rollout's history, `invented` is the weight of the error in columns that show what no
    true frame showed, `returned` in those that show it again RETURN_CHUNKS or more chunks after
    the last true one. continuation: what is invented aims at how the stage's first weights go on
    from that history; otherwise at the truth, which is another room than the one made up.
    continuity: the critic is also shown true chunks after a wrong frame or with wrong keys, and
    judges what is invented after the frame that the history shows."""

    stages: tuple[Stage, ...] = (
        Stage(frames=32, batch=48, share=0.25),
        Stage(frames=64, batch=24, share=0.25),
        Stage(frames=128, batch=12, share=0.15),
        Stage(frames=256, batch=6, share=0.10),
        Stage(frames=128, batch=10, share=0.25, rolled=0.5, adversarial=1.0, edges=0.5),
    )
    muon_lr: float = 0.02
    adam_lr: float = 1.5e-3
    critic_lr: float = 4e-4
    critic_warmup: int = 60
    warmup_steps: int = 100
    flat_share: float = 0.4
    floor: float = 0.03
    ema: float = 0.997
    sigma_shift: float = 3.0
    sigma_floor: float = 0.4
    sampler_share: float = 0.5
    short_windows: tuple[int, ...] = (3, 4, 8)
    short_chance: float = 0.3
    revisits: float = 0.4
    context_chunks: int = 4
    second_round: float = 0.3
    context_noise: float = 0.15
    gaps: float = 0.4
    longest_gap: int = 16
    faded: float = 0.5
    invented: float = 0.5
    returned: float = 2.0
    continuation: bool = True
    continuity: bool = True
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    pose: bool = True
    lost: float = 0.1
    max_steps: int = 1_000_000
    log_every: int = 50


@dataclass(frozen=True)
class Clips:
    """latents [B, T, C, H, W]; keys float32 [B, T, 6]; pose: features or None; history: what the
    model sees in place of the latents, if that is another thing; target: what it aims at, if that
    is; weight: of the error of every frame's columns, [B, T, W]; hidden: which chunks no other one
    sees, bool [B, chunks]; rolled: clips whose history is a rollout, bool [B]; known: columns that
    a true frame showed, bool [B, T, W]."""

    latents: torch.Tensor
    keys: torch.Tensor
    pose: torch.Tensor | None
    history: torch.Tensor | None = None
    target: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    rolled: torch.Tensor | None = None
    known: torch.Tensor | None = None


@dataclass(frozen=True)
class Stream:
    """What is to be denoised: noisy [B, T, C, H, W], sigma [B, T]; which chunks [B, chunks] the
    critic judges: those that hold no truth, being pure noise or the model's own first step; before
    which ones the history shows the truth, faded or not; before which ones it shows anything; the
    history [B, T, C, H, W]."""

    noisy: torch.Tensor
    sigma: torch.Tensor
    judged: torch.Tensor
    trusted: torch.Tensor
    shown: torch.Tensor
    history: torch.Tensor


def training_pose(
    poses: torch.Tensor, columns: int, lost: float, generator: torch.Generator
) -> torch.Tensor:
    """Features of poses [B, T, 3], each clip in axes of its own, laid at random.

    A long session is anywhere in its axes; only differences may count.
    """
    batch, like = len(poses), {"generator": generator, "device": poses.device}
    turn = 2 * math.pi * torch.rand(batch, 1, **like)
    shift = 4096 * torch.rand(batch, 1, 2, **like)
    start = poses[:, :1]
    dx, dy = (poses[..., 1:] - start[..., 1:]).unbind(-1)
    cos, sin = turn.cos(), turn.sin()
    moved = torch.stack((poses[..., 0] + turn, cos * dx - sin * dy, sin * dx + cos * dy), dim=-1)
    moved[..., 1:] += shift
    features = pose_features(moved, columns)
    known = (torch.rand(batch, 1, 1, 1, **like) >= lost).float()
    return torch.cat((features[..., :YAW_FEATURES], features[..., YAW_FEATURES:] * known), dim=-1)


def noisy_stream(
    clean: torch.Tensor, per_chunk: int, training: TransformerTraining, generator: torch.Generator
) -> Stream:
    """The clip with a noise level of its own for every chunk."""
    batch, frames = clean.shape[:2]
    like = {"generator": generator, "device": clean.device}
    u = torch.rand(batch, frames // per_chunk, **like)
    sigma = training.sigma_shift * u / (1 + (training.sigma_shift - 1) * u)
    asked = torch.tensor(noise_levels(STEPS, training.sigma_shift), device=clean.device)
    chosen = asked[torch.randint(STEPS, u.shape, **like)]
    sigma = torch.where(torch.rand(u.shape, **like) < training.sampler_share, chosen, sigma)
    level = sigma.repeat_interleave(per_chunk, dim=1)
    scale = level[:, :, None, None, None]
    noisy = (1 - scale) * clean + scale * torch.randn(clean.shape, **like)
    everywhere = torch.ones_like(sigma, dtype=torch.bool)
    return Stream(noisy, level, sigma == 1, everywhere, everywhere, clean)


def trusted_chunks(
    history: torch.Tensor, clean: torch.Tensor, hidden: torch.Tensor | None,
    rolled: torch.Tensor | None, per_chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Whether the frame before a chunk shows the truth, and whether one is seen at all: two times
    bool [B, chunks]; the first chunk has none. Outside of rollouts (rolled [B]; None: no clip is
    one) every frame shows the truth, as faded as it may be."""
    true = (history == clean).flatten(2).all(dim=2)[:, per_chunk - 1 :: per_chunk]
    true = torch.ones_like(true) if rolled is None else true | ~rolled[:, None]
    shown = torch.ones_like(true) if hidden is None else ~hidden
    true, shown = (
        torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1) for x in (true & shown, shown)
    )
    return true, shown


def disturbed(clean: torch.Tensor, amount: float, generator: torch.Generator) -> torch.Tensor:
    """Half of the clips with up to so much noise on them."""
    like = {"generator": generator, "device": clean.device}
    draw = torch.rand(len(clean), 2, 1, 1, 1, **like)
    size = (draw[:, 1:] < 0.5) * draw[:, :1] * amount
    return clean + size * torch.randn(clean.shape, **like)


def with_own_steps(
    model: Transformer, clips: Clips, history: torch.Tensor, stream: Stream, stage: Stage,
    tables: tuple[torch.Tensor, torch.Tensor], attend: Attend, training: TransformerTraining,
    generator: torch.Generator, residual_dtype: torch.dtype, rounds: int,
) -> tuple[torch.Tensor, Stream]:  # fmt: skip
    """History and stream of a stage on the model's own rollouts: half of the chunks to be denoised
    start from the model's own first step, and with `own` some of the history is generated too.

    Every round beyond the first generates all chunks anew from the mixed history of the one
    before, whose errors then lie one chunk deeper.
    """
    per_chunk = model.config.frames_per_chunk
    start, mixing = history, stage.own > 0
    for _ in range(rounds if mixing else 1):
        rollout = own_rollout(
            model, history, clips.keys, clips.pose, tables, attend, training.sigma_shift,
            generator, residual_dtype, finish=mixing,
        )  # fmt: skip
        if mixing:
            history = mixed_history(
                start, rollout.chunks, per_chunk, stage.own, training.context_chunks, generator
            )
    draw = torch.rand(stream.judged.shape, generator=generator, device=history.device)
    own = draw < 0.5
    mask = own.repeat_interleave(per_chunk, dim=1)
    noisy = torch.where(mask[:, :, None, None, None], rollout.entering, stream.noisy)
    sigma = torch.where(mask, rollout.level, stream.sigma)
    return history, replace(stream, noisy=noisy, sigma=sigma, judged=own | stream.judged)


def sigma_weight(sigma: torch.Tensor, floor: float) -> torch.Tensor:
    """What turns an error of clean latents into about that of velocities."""
    return sigma.clamp_min(floor) ** -2


def weighted_error(
    out: torch.Tensor, clean: torch.Tensor, sigma: torch.Tensor, per_chunk: int, floor: float,
    columns: torch.Tensor | None = None, known: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Weighted x-prediction loss (about that of velocities) and plain mean squared error.

    columns: weights [B, T, W]. Where `known` [B, T, W] is given and false, only means of 3 x 3
    latents count: a teacher that blurs says what is where, and not how sharp it is. The first
    chunk has no past and is never generated by the product, so it does not count.
    """
    apart = (out - clean)[:, per_chunk:]
    error = apart.square().mean(dim=(2, 3))
    mse = error.detach().mean()
    if known is not None:
        coarse = F.avg_pool2d(apart.flatten(0, 1), 3, 1, 1, count_include_pad=False)
        coarse = coarse.view_as(apart).square().mean(dim=(2, 3))
        error = torch.where(known[:, per_chunk:], error, coarse)
    weight = sigma_weight(sigma[:, per_chunk:], floor).unsqueeze(2)
    if columns is not None:
        weight = weight * columns[:, per_chunk:]
    return (weight * error).mean(), mse


def edge_error(
    out: torch.Tensor, clean: torch.Tensor, judged: torch.Tensor, per_chunk: int,
    known: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """How much weaker or stronger the latents change from place to place than the truth's do.

    Mean over channels, frames and 4 x 4 patches of the difference in mean absolute step, for the
    judged chunks [B, chunks]. A blur is weak latents: to make the steps that are there as strong
    as the truth's costs less error than to invent others. Frames of which most is not `known`
    [B, T, W] are another room than the truth's: there the means over the whole frame count.
    """
    counts = judged[:, 1:].repeat_interleave(per_chunk, dim=1).float()
    total = torch.zeros(len(out), out.shape[1] - per_chunk, device=out.device)
    for axis in (3, 4):
        steps = [x[:, per_chunk:].diff(dim=axis).abs().flatten(0, 1) for x in (out, clean)]
        apart = steps[0] - steps[1]
        difference = F.avg_pool2d(apart, 4, ceil_mode=True)
        if known is not None:
            here = (known[:, per_chunk:].float().mean(dim=2) >= 0.5).flatten()[:, None, None, None]
            whole = apart.mean(dim=(2, 3), keepdim=True)
            difference = torch.where(here, difference, whole)
        difference = difference.abs().mean(dim=(1, 2, 3))
        total = total + difference.view_as(total)
    return (total * counts).sum() / counts.sum().clamp_min(1)


def forward_loss(
    model: Transformer, clips: Clips, stage: Stage, tables: tuple[torch.Tensor, torch.Tensor],
    attend: Attend, full: Attend, training: TransformerTraining, generator: torch.Generator,
    residual_dtype: torch.dtype, rounds: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Stream]:  # fmt: skip
    """(loss, plain mean squared error, prediction [B, T, C, H, W], the stream it is of).

    attend: of this step; full: sees the whole past, for the model's own rollouts; rounds: of them.
    """
    per_chunk = model.config.frames_per_chunk
    truth = clips.latents.float()
    clean = truth if clips.target is None else clips.target.float()
    stream = noisy_stream(clean, per_chunk, training, generator)
    history = truth if clips.history is None else clips.history.float()
    if training.faded > 0:
        weak = faded(history, training.faded, per_chunk, training.context_chunks, generator)
        if clips.rolled is None:
            history = weak
        else:
            history = torch.where(clips.rolled[:, None, None, None, None], history, weak)
    if stage.own > 0 or stage.rolled > 0:
        history, stream = with_own_steps(
            model, clips, history, stream, stage, tables, full, training, generator, residual_dtype,
            rounds,
        )  # fmt: skip
    trusted, shown = trusted_chunks(history, truth, clips.hidden, clips.rolled, per_chunk)
    stream = replace(stream, trusted=trusted, shown=shown, history=history)
    history = disturbed(history, training.context_noise, generator)
    out = predict_clip(
        model, history, stream.noisy, stream.sigma, clips.keys, tables, attend, residual_dtype,
        clips.pose,
    )  # fmt: skip
    loss, mse = weighted_error(
        out, clean, stream.sigma, per_chunk, training.sigma_floor, clips.weight,
        clips.known if training.continuation else None,
    )  # fmt: skip
    if stage.edges > 0:
        edges = edge_error(out, truth, stream.judged, per_chunk, clips.known)
        loss = loss + stage.edges * edges
    return loss, mse, out, stream
