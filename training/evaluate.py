"""Measures a trained world on maps it never saw; also a command: python -m training.evaluate."""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quantwm.cli.common import pick_device
from quantwm.evaluation.measures import contrast, gradient_energy
from quantwm.metrics import psnr_per_frame, psnr_pooled
from quantwm.worlds.embedded.autoencoder import Autoencoder, to_bytes
from quantwm.worlds.embedded.config import SamplerConfig
from quantwm.worlds.embedded.transformer import Transformer
from quantwm.worlds.embedded.weights import load_models, read_manifest
from training.data import LatentPool, load_folder, reckoned_poses
from training.inputs import in_one_line, need_between, open_folder
from training.motion_check import keys_followed
from training.pictures import save_grid
from training.revisits import find_revisits
from training.rollout import roll_out
from training.train_autoencoder import reconstruction_psnr


@dataclass(frozen=True)
class EvaluationConfig:
    """Clips of context + rollout frames, from the start of every unseen episode.

    memory_frames: from here on, next chunks are measured with all and with 16 frames of history.
    return_frames: length of the clips of `measure_returns`; return_after: frames between the two
    visits, at least.
    """

    context_chunks: int = 4
    rollout_frames: int = 64
    steps: int = 4
    seed: int = 20_000
    episodes: int = 16
    memory_frames: int = 64
    window: int = 4  # chunks
    return_frames: int = 128
    return_after: int = 64
    motion_episodes: int = 8  # clips of which the judge of motion sees the free frames


def decode_clip(autoencoder: Autoencoder, latents: torch.Tensor) -> np.ndarray:
    """[T, C, h, w] -> uint8 [T, H, W, 3]."""
    with torch.no_grad():
        return to_bytes(autoencoder.decode(latents)).cpu().numpy()


def shipped_copy(model: Transformer) -> Transformer:
    """The model as it will ship: BF16 weights (float32 arithmetic on a CPU without its speed)."""
    copied = copy.deepcopy(model).to(torch.bfloat16).requires_grad_(False).eval()
    return copied if next(model.parameters()).is_cuda else copied.float()


def evaluate(
    model: Transformer,
    autoencoder: Autoencoder,
    frames: torch.Tensor,
    keys: torch.Tensor,
    sampler: SamplerConfig,
    config: EvaluationConfig,
) -> tuple[dict[str, float], list[tuple[np.ndarray, np.ndarray]]]:
    """frames uint8 [E, L, H, W, 3], keys [E, L, 6], unseen -> metrics, (truth, rollout) pairs.

    free_8_psnr: mean over frames of the PSNR to the truth, first 8 free-running frames;
    free_32_psnr: the first 32; next_chunk_psnr: each chunk from a history of true frames;
    memory_gain: what all of a true history brings over its last 16 frames, from frame
    `memory_frames` on; free_sharpness, free_colour: mean gradient of the rollout's last 16 frames
    over the truth's, and how far their mean colour (0 to 255) is from the truth's; free_energy,
    free_contrast: of all free frames over the truth's, as in the acceptance table (energy is a
    square: 0.25 of it is half of the gradient); follows_keys: of `keys_followed`.
    """
    start = config.context_chunks * model.config.frames_per_chunk
    length = min(start + config.rollout_frames, frames.shape[1])
    length -= length % model.config.frames_per_chunk
    clips, held = frames[: config.episodes, :length], keys[: config.episodes, :length]
    poses = torch.stack([reckoned_poses(row.cpu().numpy()) for row in held]).to(frames.device)
    pool = LatentPool.encode(autoencoder, clips, held, poses)
    results = _rolled_out(model, autoencoder, pool.latents, held, sampler, config, poses)
    truth = [clip.cpu().numpy() for clip in clips]

    def psnr(kind: str, first: int, end: int) -> float:
        span = slice(first, min(end, length))
        values = [
            psnr_per_frame(a[span], b[span]) for a, b in zip(results[kind], truth, strict=True)
        ]
        return round(float(np.mean(values)), 2)

    pooled = psnr_pooled(
        np.concatenate([clip[start : start + 8] for clip in results["free"]]),
        np.concatenate([clip[start : start + 8] for clip in truth]),
    )
    metrics = {
        "autoencoder_psnr": round(reconstruction_psnr(autoencoder, clips.flatten(0, 1)), 2),
        "next_chunk_psnr": psnr("next", start, length),
        "free_8_psnr": psnr("free", start, start + 8),
        "free_8_psnr_pooled": round(float(pooled), 2),
        "free_32_psnr": psnr("free", start, start + 32),
        "free_all_psnr": psnr("free", start, length),
        **_late(results["free"], truth, slice(max(start, length - 16), length)),
        **_appearance(results["free"], truth, start),
        "rollout_frames": length - start,
        "episodes": len(truth),
        "steps": config.steps,
    }
    if length > config.memory_frames:
        full, short = (psnr(kind, config.memory_frames, length) for kind in ("next", "window"))
        metrics["memory_gain"] = round(full - short, 2)
    some = slice(config.motion_episodes)
    metrics |= keys_followed(
        results["free"][some], truth[some], held[some], poses[some], start,
        model.config.frames_per_chunk, frames.device,
    )  # fmt: skip
    return metrics, [(b[start:], a[start:]) for a, b in zip(results["free"], truth, strict=True)]


def _rolled_out(
    model: Transformer,
    autoencoder: Autoencoder,
    latents: torch.Tensor,
    held: torch.Tensor,
    sampler: SamplerConfig,
    config: EvaluationConfig,
    poses: torch.Tensor,
) -> dict[str, list[np.ndarray]]:
    """Frames of every clip: "free" running, the "next" chunk from true histories, and that from a
    "window" of them."""
    results = {}
    for name, forced, window in (
        ("free", False, None), ("next", True, None), ("window", True, config.window),
    ):  # fmt: skip
        rolled = roll_out(
            model, latents, held.float(), config.context_chunks, config.steps, sampler.shift,
            config.seed, forced, window, poses,
        )  # fmt: skip
        results[name] = [decode_clip(autoencoder, clip) for clip in rolled]
    return results


def _late(free: list[np.ndarray], truth: list[np.ndarray], late: slice) -> dict[str, float]:
    """Gradient and mean colour of a rollout's last frames beside the truth's, means over clips."""
    sharp, colour = [], []
    for a, b in zip(free, truth, strict=True):
        sharp.append(_gradient(a[late]) / _gradient(b[late]))
        colour.append(np.abs(a[late].mean(axis=(0, 1, 2)) - b[late].mean(axis=(0, 1, 2))).max())
    return {
        "free_sharpness": round(float(np.mean(sharp)), 3),
        "free_colour": round(float(np.mean(colour)), 1),
    }


def _appearance(free: list[np.ndarray], truth: list[np.ndarray], start: int) -> dict[str, float]:
    """Ratios of means over clips, all free frames."""
    found = {}
    for name, measure in (("energy", gradient_energy), ("contrast", contrast)):
        shown, true = (np.mean([measure(clip[start:]) for clip in x]) for x in (free, truth))
        found[f"free_{name}"] = round(float(shown / true), 3)
    return found


@torch.no_grad()
def measure_returns(
    model: Transformer,
    autoencoder: Autoencoder,
    frames: torch.Tensor,
    keys: torch.Tensor,
    sampler: SamplerConfig,
    config: EvaluationConfig,
) -> dict[str, float]:
    """Free-running clips whose context shows what they come back to `return_after` frames later.

    frames, keys: as for `evaluate`. return_psnr: of the 4 frames of the return to the truth, all
    of the history in reach; return_gain: over the same with a window of 16 frames, same noise;
    return_sharpness: gradient over the truth's. Nothing where no clip fits.
    """
    start = config.context_chunks * model.config.frames_per_chunk
    length = min(config.return_frames, frames.shape[1])
    length -= length % model.config.frames_per_chunk
    poses = torch.stack([reckoned_poses(row.cpu().numpy()) for row in keys]).to(frames.device)
    chosen = choose_returns(find_revisits(poses), frames.shape[1], start, length, config)
    if not len(chosen):
        return {}
    episode, at, first = chosen.unbind(dim=1)
    span = first[:, None] + torch.arange(length, device=first.device)
    clips, held, told = (x[episode[:, None], span] for x in (frames, keys, poses))
    pool = LatentPool.encode(autoencoder, clips, held, told)
    seen = (at - first)[:, None] + torch.arange(4, device=at.device)
    row = torch.arange(len(seen), device=at.device)[:, None]
    truth = clips[row, seen].cpu().numpy()
    psnr, sharp = {}, 0.0
    for name, window in (("full", None), ("window", config.window)):
        latents = roll_out(
            model, pool.latents, held.float(), config.context_chunks, config.steps, sampler.shift,
            config.seed, False, window, told,
        )  # fmt: skip
        shown = [decode_clip(autoencoder, clip) for clip in latents[row, seen]]
        pairs = list(zip(shown, truth, strict=True))
        psnr[name] = float(np.mean([psnr_per_frame(a, b) for a, b in pairs]))
        if name == "full":
            sharp = float(np.mean([_gradient(a) / _gradient(b) for a, b in pairs]))
    return {
        "return_psnr": round(psnr["full"], 2),
        "return_gain": round(psnr["full"] - psnr["window"], 2),
        "return_sharpness": round(sharp, 3),
        "returns": len(chosen),
    }


def choose_returns(
    revisits: torch.Tensor, episode_length: int, start: int, length: int, config: EvaluationConfig
) -> torch.Tensor:
    """int64 [n, 3]: episode, frame of the return, and first frame of a clip whose context of
    `start` frames ends with the first visit; up to three an episode, spread over it."""
    episode, frame, before = revisits.unbind(dim=1)
    first = before - start + 2
    fits = (first >= 0) & (first + length <= episode_length)
    fits &= (frame - before >= config.return_after) & (frame - first + 4 <= length)
    found = torch.stack((episode, frame, first), dim=1)[fits]
    picked = []
    for number in found[:, 0].unique():
        here = found[found[:, 0] == number]
        picked.append(here[torch.linspace(0, len(here) - 1, 3).long().unique()])
    return torch.cat(picked) if picked else found


def _gradient(frames: np.ndarray) -> float:
    values = frames.astype(np.float32)
    return float(np.abs(np.diff(values, axis=2)).mean() + np.abs(np.diff(values, axis=1)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, default=Path("assets/embedded"))
    parser.add_argument("--episodes", type=Path, required=True, help="folder of unseen episodes")
    parser.add_argument("--out", type=Path, help="PNG grid of truth and rollout")
    parser.add_argument("--steps", type=int, default=2, help="denoising steps a chunk")
    parser.add_argument("--frames", type=int, default=64, help="free-running frames of a clip")
    parser.add_argument("--count", type=int, default=16, help="episodes that are measured")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = pick_device(args.device)
    need_between("--steps", args.steps, 1, 64)
    need_between("--count", args.count, 1)
    need_between("--frames", args.frames, 4)
    if args.out is not None:
        open_folder(args.out.resolve().parent, "--out")
    manifest = read_manifest(args.weights)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, autoencoder = load_models(manifest, device, dtype)
    frames, keys = load_folder(args.episodes, device)
    config = EvaluationConfig(steps=args.steps, rollout_frames=args.frames, episodes=args.count)
    metrics, pairs = evaluate(model, autoencoder, frames, keys, manifest.config.sampler, config)
    if args.out is not None:
        save_grid(args.out, pairs[:6], every=6)
    print(json.dumps(metrics))


if __name__ == "__main__":
    raise SystemExit(in_one_line(main))
