"""The whole training, unattended, in given minutes: python -m training.run_all --out DIR.

Frames are recorded by other processes while the autoencoder already trains on those that exist;
then all frames become latents and the transformer trains for the rest. Usable weights lie in the
output folder from a few minutes after the transformer's start on, and are replaced as it improves.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantwm.cli.common import pick_device
from quantwm.errors import UserError
from quantwm.memory import free_bytes
from quantwm.worlds.embedded.autoencoder import Autoencoder
from quantwm.worlds.embedded.weights import load_models, read_manifest, save_models
from training.data import FramePool, LatentPool
from training.decoder_check import as_shipped
from training.evaluate import EvaluationConfig, evaluate, measure_returns, shipped_copy
from training.frame_source import FrameSource, own_maps
from training.frames import HEIGHT, WIDTH, require_engine
from training.inputs import (
    SEEDS,
    check_episodes,
    check_frames_fit,
    in_one_line,
    need_between,
    open_folder,
    without_folders,
)
from training.pictures import save_grid
from training.plans import PLANS, RunPlan, add_switches, apply_switches
from training.progress import Log
from training.state import TrainState, load_teacher
from training.train_autoencoder import reconstruction_psnr, train_autoencoder
from training.train_decoder import save_pictures, train_decoder
from training.train_transformer import train_transformer

DATA = (
    "Procedural maps (training/maps.py) with Freedoom art (BSD-3-Clause), rendered by ViZDoom, "
    "512x384 reduced to 128x96, 4 tics a frame"
)
DATA_OF_OWN = "Maps of {}, rendered by ViZDoom, 512x384 reduced to 128x96, 4 tics a frame"
FOLDERS = {"--out": "OUT", "--work": "WORK", "--weights": "WEIGHTS", "--resume": "CHECKPOINT",
           "--teacher": "TEACHER", "--wad": "WAD"}  # fmt: skip
FINISHED = 0.99
"""Share of a schedule from which on a checkpoint is a finished run's: of those the optimisers alone
are wanted, and the schedule starts again."""
REFRESH_SECONDS = 45.0
"""Between two looks for new episodes while the transformer trains."""


class Run:
    """One run: its folders, its log, and what is known so far for the manifest."""

    def __init__(self, plan: RunPlan, args: argparse.Namespace) -> None:
        self.plan, self.args = plan, args
        self.out: Path = open_folder(args.out, "--out")
        work: Path = args.work or Path(tempfile.mkdtemp(prefix="quantwm-training-"))
        self.work = open_folder(work, "--work")
        self.device = pick_device(args.device)
        self.log = Log(self.out / "training-log.jsonl")
        self.metrics: dict[str, Any] = {}
        self.minutes: dict[str, float] = {}
        self.last_save = time.monotonic()
        self.continued_from: dict[str, Any] | None = None
        if args.weights is not None:
            self.continued_from = dict(read_manifest(args.weights).training)

    @property
    def checkpoint(self) -> Path:
        return self.work / f"checkpoint-{self.out.name}.pt"

    def facts(self, state: TrainState) -> dict[str, Any]:
        """What the manifest says about how the weights were made."""
        gpu = torch.cuda.get_device_name() if self.device.type == "cuda" else "none"
        return {
            "command": "python -m training.run_all " + without_folders(FOLDERS, sys.argv[1:]),
            "data": DATA if self.args.wad is None else DATA_OF_OWN.format(self.args.wad.name),
            "episodes": self.metrics.get("frames", 0) // self.plan.length,
            "frames": self.metrics.get("frames", 0),
            "hardware": {"gpu": gpu, "cpu_cores": os.cpu_count()},
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "seed": self.args.seed,
            "minutes": {**self.minutes, "total": round(self.log.minutes, 2)},
            "steps": state.step,
            "runs": state.runs,
            "metrics": self.metrics,
            "continued_from": self.continued_from,
        }


def make_autoencoder(run: Run, pool: FramePool) -> Autoencoder:
    """New, or the one of earlier weights; trained (further) for its share of the minutes."""
    started, plan = time.monotonic(), run.plan
    minutes = run.args.minutes * plan.autoencoder_share
    if run.args.weights is not None:
        _, model = load_models(read_manifest(run.args.weights), run.device, torch.float32)
    else:
        torch.manual_seed(run.args.seed)
        model = Autoencoder(plan.world.autoencoder)
    if minutes > 0:
        model, steps = train_autoencoder(
            pool, model, plan.autoencoder, minutes, run.args.seed, run.log,
            run.device.type == "cuda" and not run.args.eager,
        )  # fmt: skip
        run.metrics["autoencoder_steps"] = steps
    run.minutes["autoencoder"] = round((time.monotonic() - started) / 60, 2)
    return model.eval().requires_grad_(False)


class GrowingLatents:
    """The latents of all episodes so far; `refresh` encodes those that came since."""

    def __init__(self, run: Run, pool: FramePool, autoencoder: Autoencoder) -> None:
        self._run, self._pool, self._autoencoder = run, pool, autoencoder
        self._done, self._last = 0, time.monotonic()
        self.latents = self._encode()

    def _encode(self) -> LatentPool:
        first, self._done = self._done, self._pool.count
        span = slice(first, self._done)
        device = self._run.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return LatentPool.encode(
                self._autoencoder, self._pool.frames[span], self._pool.keys[span],
                self._pool.poses[span],
            )  # fmt: skip

    def refresh(self, every: float = 0.0) -> None:
        """every: seconds since the last time before which nothing is done."""
        started = time.monotonic()
        if every and (started - self._last < every or self._pool.count == self._done):
            return
        self._last = started
        if self._pool.count > self._done:
            self.latents.append(self._encode())
        run, latents = self._run, self.latents.latents
        run.metrics["frames"] = self._done * run.plan.length
        run.minutes["encode"] = round(
            run.minutes.get("encode", 0.0) + (time.monotonic() - started) / 60, 2
        )
        run.log.event(
            "encoded", episodes=self._done, revisits=len(self.latents.revisits),
            mean=round(float(latents[::50].float().mean()), 3),
            std=round(float(latents[::50].float().std()), 3),
        )  # fmt: skip


def save_and_measure(
    run: Run,
    state: TrainState,
    autoencoder: Autoencoder,
    unseen: list[tuple[torch.Tensor, torch.Tensor]],
    config: EvaluationConfig,
    grid: str,
) -> None:
    """Exports the averaged weights, keeps a checkpoint, then measures and draws a grid."""
    state.save(run.checkpoint)
    world = run.plan.world
    save_models(run.out, world, state.average, autoencoder, run.facts(state))
    model = shipped_copy(state.average)
    metrics, pairs = evaluate(model, autoencoder, *unseen[0], world.sampler, config)
    metrics |= measure_returns(model, autoencoder, *unseen[1], world.sampler, config)
    run.metrics.update(metrics)
    run.log.event("measured", step=state.step, **metrics)
    save_grid(run.out / grid, pairs[:6], every=max(1, len(pairs[0][0]) // 10))
    save_models(run.out, world, state.average, autoencoder, run.facts(state))
    run.last_save = time.monotonic()


def train(run: Run, state: TrainState, growing: GrowingLatents, after: Any) -> None:
    """The transformer's share of the time; a loss that is not finite goes back to a checkpoint."""
    training = run.plan.transformer
    end = run.args.minutes - run.plan.finish_minutes - run.plan.decoder_minutes
    compiled = run.device.type == "cuda" and not run.args.eager
    attention = run.args.attention or ("flex" if compiled else "sdpa")
    started = run.log.minutes
    if state.progress > 0:
        run.log.event("going on", step=state.step, done=round(state.progress, 3))
    for _ in range(3):
        minutes = max(end - run.log.minutes, 0.05)
        try:
            used = train_transformer(
                state, growing.latents, training, minutes, run.args.seed, run.log, attention,
                compiled, after, growing.refresh,
            )  # fmt: skip
            run.metrics["attention"] = used
            break
        except KeyboardInterrupt:
            state.save(run.checkpoint)
            run.log.event("stopped", step=state.step, checkpoint=str(run.checkpoint))
            raise
        except FloatingPointError as error:
            run.log.event("diverged", reason=str(error))
            if not run.checkpoint.exists():
                raise
            state.load(run.checkpoint)
            training = replace(training, muon_lr=training.muon_lr / 2, adam_lr=training.adam_lr / 2)
    run.minutes["transformer"] = round(run.log.minutes - started, 2)


def refine_decoder(
    run: Run, state: TrainState, autoencoder: Autoencoder, pool: FramePool,
    unseen: tuple[torch.Tensor, torch.Tensor],
) -> Autoencoder:  # fmt: skip
    """The decoder's own stage; the autoencoder as it came where that fails on this machine."""
    started, plan = run.log.minutes, run.plan
    device = run.device.type
    try:
        best, check, _ = train_decoder(
            shipped_copy(state.average), as_shipped(autoencoder), pool, unseen, plan.decoder,
            plan.world.sampler.shift, plan.decoder_minutes, run.args.seed, run.log,
            device == "cuda" and not run.args.eager, lambda model, metrics: None,
        )  # fmt: skip
    except RuntimeError as error:
        run.log.event("DECODER LEFT AS IT WAS", reason=str(error)[:300])
        return autoencoder
    save_pictures(run.out / "grid-decoder.png", check, autoencoder, best.model)
    run.metrics["decoder"] = best.metrics
    run.minutes["decoder"] = round(run.log.minutes - started, 2)
    return best.model.to(next(autoencoder.parameters()).dtype)


def require_libraries() -> None:
    """UserError before the first minute is spent, not when weights or pictures are written."""
    require_engine()
    missing = [
        name for name in ("safetensors", "imageio", "PIL") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise UserError(
            f"training needs {', '.join(missing)}: pip install safetensors imageio pillow"
        )


def check_inputs(plan: RunPlan, args: argparse.Namespace) -> None:
    """UserError for what would fail later, after minutes of recording and training."""
    device = pick_device(args.device)
    of_one = plan.length * HEIGHT * WIDTH * 3
    check_frames_fit(plan.episodes, of_one, free_bytes(device))
    own_maps(args)
    if args.work is not None:
        for name, length in (("frames", plan.length), ("unseen", plan.unseen_length),
                             ("returns", plan.unseen_length)):  # fmt: skip
            shape = (length, HEIGHT, WIDTH, 3)
            check_episodes(args.work / name, shape, all_must_fit=name != "frames")
    if args.weights is not None:
        theirs, mine = read_manifest(args.weights).config, plan.world
        if theirs.autoencoder != mine.autoencoder:
            raise UserError(f"the autoencoder of {args.weights} has other sizes than the plan")
        if replace(theirs.transformer, pose=mine.transformer.pose) != mine.transformer:
            raise UserError(f"the transformer of {args.weights} has other sizes than the plan")
    if args.teacher is not None:
        read_manifest(args.teacher)
    if args.resume is not None and not args.resume.is_file():
        raise UserError(f"checkpoint {args.resume} does not exist; leave out --resume")


def run_all(plan: RunPlan, args: argparse.Namespace) -> dict[str, Any]:
    """The run; returns the facts that the manifest holds."""
    require_libraries()
    check_inputs(plan, args)
    run = Run(plan, args)
    if run.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        # it plans anew for every length of history, which rollouts have one of for each chunk
        torch.backends.cuda.enable_cudnn_sdp(False)
    run.log.event("start", budget=args.minutes, device=str(run.device), seed=args.seed)
    source = FrameSource(plan, args, run.work, run.device, run.log)
    try:
        return train_all(run, source)
    finally:
        source.close()


def train_all(run: Run, source: FrameSource) -> dict[str, Any]:
    """Autoencoder, latents, transformer, last measurement."""
    plan, args, pool = run.plan, run.args, source.pool
    pool.wait_for(plan.first_episodes, 180)
    run.minutes["first_frames"] = round(run.log.minutes, 2)
    autoencoder = make_autoencoder(run, pool)
    unseen = source.unseen()
    frames = unseen[0][0].flatten(0, 1)
    psnr = reconstruction_psnr(autoencoder, frames[:: plan.unseen_episodes])
    run.log.event("autoencoder done", psnr_unseen=round(psnr, 2))
    pool.wait_up_to(plan.enough_episodes, args.minutes * 3)
    growing = GrowingLatents(run, pool, autoencoder)
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    state = TrainState.fresh(plan.world.transformer, plan.transformer, args.seed, run.device)
    if args.weights is not None:
        model, _ = load_models(read_manifest(args.weights), run.device, torch.float32)
        state.start_from(model)
        if plan.world.transformer.pose and not model.config.pose:
            run.log.event("weights know no pose", pose_in="starts at zero")
        del model
    if args.teacher is not None:
        state.teacher = load_teacher(args.teacher, autoencoder, run.device)
    if args.resume is not None:
        state.load(args.resume)
        if state.progress >= FINISHED:
            state.progress = 0.0

    def after(state: TrainState) -> None:
        growing.refresh(every=REFRESH_SECONDS)
        if time.monotonic() - run.last_save > plan.save_every_minutes * 60:
            save_and_measure(run, state, autoencoder, unseen, plan.check, "grid-latest.png")

    save_models(run.out, plan.world, state.average, autoencoder, run.facts(state))
    run.last_save = time.monotonic()
    train(run, state, growing, after)
    source.close()
    if plan.decoder_minutes > 0:
        autoencoder = refine_decoder(run, state, autoencoder, pool, unseen[0])
    one_step = replace(plan.check, steps=1)
    metrics, _ = evaluate(
        shipped_copy(state.average), autoencoder, *unseen[0], plan.world.sampler, one_step
    )
    run.metrics["one_step"] = metrics
    run.log.event("measured with one step", **metrics)
    save_and_measure(run, state, autoencoder, unseen, plan.final, "grid-final.png")
    run.log.event("done", took=run.minutes)
    return dict(read_manifest(run.out).training)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, help="of the whole run (16; quick 2)")
    parser.add_argument("--out", type=Path, required=True, help="weights, manifest, log, pictures")
    parser.add_argument(
        "--work", type=Path, help="frames and checkpoint; a temporary folder if unset"
    )
    parser.add_argument("--plan", choices=sorted(PLANS), help="full, or continued with --weights")
    parser.add_argument("--quick", action="store_true", help="a toy run of everything on a CPU")
    parser.add_argument(
        "--no-record", action="store_true", help="another run records into the same --work"
    )
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wad", type=Path, help="train on the maps of this WAD")
    parser.add_argument("--maps", nargs="+", help="only these of its maps")
    parser.add_argument("--unseen-maps", nargs="+", help="kept from training; every fifth if unset")
    parser.add_argument("--attention", choices=("flex", "sdpa"))
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--weights", type=Path, help="go on from exported weights (warm restart)")
    parser.add_argument("--resume", type=Path, help="go on from a checkpoint; needs --weights too")
    add_switches(parser)
    args = parser.parse_args(argv)
    if args.no_record and args.work is None:
        raise UserError("--no-record needs --work, the folder that another run records into")
    if args.resume is not None and args.weights is None:
        raise UserError(
            "--resume needs --weights: the checkpoint's latents are of that autoencoder"
        )
    if args.resume is not None:
        args.ae_share = 0.0
    name = "quick" if args.quick else ("continued" if args.weights is not None else "full")
    args.plan = args.plan or name
    if args.minutes is None:
        args.minutes = 2.0 if args.plan == "quick" else 16.0
    need_between("--minutes", args.minutes, 0.2, 24 * 60)
    need_between("--processes", args.processes, 1)
    need_between("--seed", args.seed, 0, SEEDS - 1)
    if args.wad is None and (args.maps or args.unseen_maps):
        raise UserError("--maps and --unseen-maps name maps of a WAD; give --wad FILE too")
    return args


def main() -> None:
    args = parse()
    print(json.dumps(run_all(apply_switches(PLANS[args.plan], args), args)))


if __name__ == "__main__":
    raise SystemExit(in_one_line(main))
