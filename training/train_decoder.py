"""The decoder's own stage, on what the transformer makes up: python -m training.train_decoder.

Encoder, latents and transformer stay bit by bit what they were, so that the world's course does not
change; only pictures do. What no true frame showed is soft, because an error's least is the mean of
all that may be there. Here a critic of pictures asks that it look and move like a true frame.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quantwm.cli.common import pick_device
from quantwm.errors import UserError
from quantwm.memory import free_bytes
from quantwm.worlds.embedded.autoencoder import Autoencoder
from quantwm.worlds.embedded.transformer import Transformer
from quantwm.worlds.embedded.weights import load_models, read_manifest, save_models
from training.data import FramePool, load_folder
from training.decoder_check import (
    DecoderCheck,
    DecoderCheckConfig,
    as_shipped,
    distance,
    is_fit,
    need_frames,
    psnr_floor,
)
from training.decoder_step import DecoderTrainer, DecoderTraining
from training.drifted import DriftConfig, Drifted, check_lengths
from training.frames import HEIGHT, WIDTH
from training.inputs import (
    SEEDS,
    check_frames_fit,
    in_one_line,
    need_between,
    open_folder,
    stored_shape,
    without_folders,
)
from training.pictures import save_grid
from training.progress import Budget, Log
from training.train_autoencoder import learning_rate, set_compiled, start_steps

FOLDERS = {"--out": "OUT", "--weights": "WEIGHTS", "--episodes": "FRAMES", "--unseen": "UNSEEN"}

Save = Callable[[Autoencoder, Mapping[str, Any]], None]
"""Writes weights with this decoder; metrics go into the manifest."""


@dataclass(frozen=True)
class DecoderPlan:
    """What the stage does; see `DECODER_PLANS`. check_seconds: between two measurements; margin: dB
    above the autoencoder's least PSNR under which true frames count more, up to most_truth."""

    training: DecoderTraining = field(default_factory=DecoderTraining)
    drift: DriftConfig = field(default_factory=DriftConfig)
    check: DecoderCheckConfig = field(default_factory=DecoderCheckConfig)
    episodes: int = 300
    check_seconds: float = 20.0
    look_every: int = 10
    margin: float = 0.3
    most_truth: float = 10.0
    max_steps: int = 1_000_000


DECODER_PLANS = {
    "full": DecoderPlan(),
    "quick": DecoderPlan(
        training=DecoderTraining(true_pairs=2, drifted_pairs=2, ema=0.9, warmup_steps=2),
        drift=DriftConfig(
            clips=2, frames=32, together=2, context_chunks=2, longest_context=3, seconds=20
        ),
        check=DecoderCheckConfig(
            episodes=2, context_chunks=2, free_frames=16, still_frames=8, autoencoder_frames=16
        ),
        episodes=4,
        check_seconds=5.0,
        look_every=1,
    ),
}


class Best:
    """The best decoder so far, as it would ship, and its numbers; the old one at first."""

    def __init__(self, check: DecoderCheck, plan: DecoderPlan, old: Autoencoder, log: Log) -> None:
        self._check, self._limits, self._log = check, plan.check, log
        self.model, self.step = old, 0
        self.before = self.found = check.measure(old)
        log.event("decoder before", **self.before)

    def offer(self, average: Autoencoder, step: int) -> tuple[bool, float]:
        """Measures a decoder; whether it is the best now, and by how many dB the autoencoder is
        above the least that it may have."""
        model = as_shipped(average)
        found = self._check.measure(model)
        fit = is_fit(found, self.before, self._limits)
        near = self._limits.near
        better = fit and distance(found, near) <= distance(self.found, near)
        if better:
            self.model, self.found, self.step = model, found, step
        self._log.event("decoder measured", step=step, **found, fit=fit, best=better)
        return better, found["autoencoder_psnr"] - psnr_floor(self.before, self._limits)

    @property
    def metrics(self) -> dict[str, Any]:
        return {
            **self.found, **self._check.amount, "best_step": self.step, "before": self.before,
        }  # fmt: skip


def train_decoder(
    transformer: Transformer,
    autoencoder: Autoencoder,
    pool: FramePool,
    unseen: tuple[torch.Tensor, torch.Tensor],
    plan: DecoderPlan,
    shift: float,
    minutes: float,
    seed: int,
    log: Log,
    compiled: bool,
    save: Save,
) -> tuple[Best, DecoderCheck, int]:
    """Rolls out, trains for what is left of the minutes, keeps the best.

    transformer and autoencoder: as they ship, in the device's dtype; unseen: frames and keys.
    """
    budget = Budget(minutes)
    check = DecoderCheck(transformer, autoencoder, *unseen, shift, plan.check)
    best = Best(check, plan, autoencoder, log)
    save(best.model, best.metrics)
    drifted = Drifted(pool, plan.drift, seed)
    drifted.roll(transformer, autoencoder, shift, seed, log)
    training = plan.training
    batch = drifted.draw(training.true_pairs, training.drifted_pairs)
    torch.manual_seed(seed)
    model = as_shipped(autoencoder).to(torch.float32, memory_format=torch.channels_last)
    trainer = DecoderTrainer(model, training, batch, seed)
    trainer.set_rates(1 / training.warmup_steps, 1.0, 0.0)
    run = start_steps(trainer, compiled, log)
    steps = run_steps(trainer, run, drifted, best, plan, Budget(budget.left / 60), log, save)
    set_compiled(trainer.model, False)
    if best.offer(trainer.average, steps)[0]:
        save(best.model, best.metrics)
    log.event("decoder done", steps=steps, **best.found, best_step=best.step)
    return best, check, steps


def run_steps(
    trainer: DecoderTrainer,
    run: Callable[[], Any],
    drifted: Drifted,
    best: Best,
    plan: DecoderPlan,
    budget: Budget,
    log: Log,
    save: Save,
) -> int:
    """Steps until the time is over, at least one, measured every `check_seconds`; returns how many.

    A loss that is not finite goes back to the last measurement with half the rates, three times at
    most.
    """
    training, step, scale, returns = plan.training, 0, 1.0, 0
    trainer.keep()
    last_check = last_time = time.monotonic()
    last_step = 0
    while step < plan.max_steps and (budget.left > 0 or step == 0):
        rate, push = schedule(training, step, budget.fraction)
        trainer.set_rates(scale * rate, scale, push)
        trainer.batch.fill(drifted.draw(training.true_pairs, training.drifted_pairs))
        values = run()
        step += 1
        if step % plan.look_every:
            continue
        if not math.isfinite(float(values[0])) or not math.isfinite(float(values[5])):
            returns, scale = returns + 1, scale / 2
            log.event("diverged", step=step, returns=returns)
            if returns > 3:
                break
            trainer.back()
            continue
        now = time.monotonic()
        if now - last_check >= plan.check_seconds:
            rate_seen = (step - last_step) / max(now - last_time, 1e-9)
            say(log, step, values, push, rate_seen, budget)
            better, above = best.offer(trainer.average, step)
            if better:
                save(best.model, best.metrics)
            if math.isfinite(above):
                trainer.keep()
            if above < plan.margin:
                log.event("truth counts more", weight=trainer.heed_truth(1.5, plan.most_truth))
            last_check = last_time = time.monotonic()
            last_step = step
    return step


def say(log: Log, step: int, values: Any, push: float, steps_per_s: float, budget: Budget) -> None:
    loss, mse, coarse, grid, edges, critic, right = (float(value) for value in values)
    log.event(
        "decoder", step=step, loss=round(loss, 4),
        psnr=round(10 * math.log10(4 / max(mse, 1e-9)), 2),
        coarse=round(coarse, 4), grid=round(grid, 4), edges=round(edges, 4),
        critic_loss=round(critic, 3), critic_right=round(right, 3), push=round(push, 2),
        steps_per_s=round(steps_per_s, 1), eta_s=round(budget.left),
    )  # fmt: skip


def schedule(training: DecoderTraining, step: int, fraction: float) -> tuple[float, float]:
    """Factors of the decoder's rate and of the critic's push at a share of the time."""
    rate = learning_rate(step, fraction, training.warmup_steps, floor=0.1)
    push = (fraction - training.warmup) / max(training.ramp, 1e-6)
    return rate, min(max(push, 0.0), 1.0)


def save_pictures(path: Path, check: DecoderCheck, old: Autoencoder, new: Autoencoder) -> None:
    """Free frames of six unseen episodes: truth, then as the old and as the new decoder draws."""
    rows = check.pairs([old, new], 6)
    groups = [[clip.cpu().numpy() for clip in row] for row in rows]
    save_grid(path, groups, every=max(1, len(groups[0][0]) // 10))


def facts_of(
    args: argparse.Namespace, before: Mapping[str, Any], pool: FramePool, log: Log, steps: int,
    metrics: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """What the manifest says; what it said of the weights gone on from stays as it was."""
    gpu = torch.cuda.get_device_name() if pool.frames.is_cuda else "none"
    minutes = round(log.minutes, 2)
    return {
        "command": "python -m training.train_decoder " + without_folders(FOLDERS, sys.argv[1:]),
        "data": before.get("data", "unknown"),
        "episodes": pool.count,
        "frames": pool.count * pool.frames.shape[1],
        "hardware": {"gpu": gpu, "cpu_cores": os.cpu_count()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "seed": args.seed,
        "minutes": {"decoder": minutes, "total": minutes},
        "steps": steps,
        "metrics": dict(metrics),
        "continued_from": dict(before),
    }


def load_episodes(folder: Path, most: int, device: torch.device) -> FramePool:
    """The first episodes of a folder; all of the length of its first. UserError without any."""
    paths = sorted(folder.glob("episode-*.npz"))
    if not paths:
        raise UserError(f"no episodes in {folder}; make them with python -m training.frames")
    shape = stored_shape(paths[0])
    if shape[1:] != (HEIGHT, WIDTH, 3):
        raise UserError(f"{paths[0]} is no episode of frames {HEIGHT} x {WIDTH}; record it again")
    count = min(most, len(paths))
    check_frames_fit(count, math.prod(shape), free_bytes(device), "--count")
    pool = FramePool(folder, count, shape[0], device)
    if pool.load_new() == 0:
        raise UserError(f"no usable episode in {folder}{pool.problem}")
    return pool


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The command; returns the facts that the manifest holds."""
    plan = DECODER_PLANS["quick" if args.quick else "full"]
    device = pick_device(args.device)
    manifest = read_manifest(args.weights)
    if args.out.resolve() == args.weights.resolve():
        raise UserError(f"--out must be another folder than --weights, got {args.out}")
    log = Log(open_folder(args.out, "--out") / "decoder-log.jsonl")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.enable_cudnn_sdp(False)  # as in run_all: it plans anew every chunk
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    transformer, autoencoder = load_models(manifest, device, dtype)
    unseen = load_folder(args.unseen, device)
    pool = load_episodes(args.episodes, args.count or plan.episodes, device)
    per_chunk = manifest.config.transformer.frames_per_chunk
    check_lengths(pool, plan.drift)
    need_frames(unseen[0], plan.check, per_chunk)
    log.event("start", budget=args.minutes, device=str(device), episodes=pool.count)
    steps = 0

    def save(model: Autoencoder, metrics: Mapping[str, Any]) -> None:
        facts = facts_of(args, manifest.training, pool, log, steps, metrics)
        save_models(args.out, manifest.config, transformer, model, facts)

    best, check, steps = train_decoder(
        transformer, autoencoder, pool, unseen, plan, manifest.config.sampler.shift,
        args.minutes - log.minutes, args.seed, log, device.type == "cuda" and not args.eager, save,
    )  # fmt: skip
    save_pictures(args.out / "grid-decoder.png", check, autoencoder, best.model)
    save(best.model, best.metrics)
    return facts_of(args, manifest.training, pool, log, steps, best.metrics)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--weights", type=Path, required=True, help="exported weights to go on from"
    )
    parser.add_argument("--out", type=Path, required=True, help="weights, manifest, log, picture")
    parser.add_argument("--episodes", type=Path, required=True, help="of training maps")
    parser.add_argument("--unseen", type=Path, required=True, help="episodes that are measured")
    parser.add_argument("--minutes", type=float, default=4.0, help="of the whole command")
    parser.add_argument("--count", type=int, help="episodes that are read, 18.9 MB of memory each")
    parser.add_argument("--quick", action="store_true", help="a toy run on a CPU")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    need_between("--minutes", args.minutes, 0.1, 24 * 60)
    need_between("--seed", args.seed, 0, SEEDS - 1)
    if args.count is not None:
        need_between("--count", args.count, 1)
    return args


def main() -> None:
    print(json.dumps(run(parse())))


if __name__ == "__main__":
    raise SystemExit(in_one_line(main))
