"""Trains the transformer by teacher forcing, in stages of growing length, until time is over."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from quantwm.errors import UserError
from quantwm.worlds.embedded.config import TransformerConfig
from quantwm.worlds.embedded.transformer import Attend, Transformer
from training.critic import Critic, add_critic_gradient, chunks_of, critic_loss
from training.data import LatentPool
from training.losses import (
    Clips,
    Stage,
    Stream,
    TransformerTraining,
    forward_loss,
    training_pose,
)
from training.muon import Muon
from training.progress import Budget, Log
from training.teacher_forcing import (
    block_mask,
    dense_mask,
    flex_attend,
    sdpa_attend,
    two_stream_tables,
)


@dataclass
class TrainState:
    """Everything that a checkpoint holds."""

    model: Transformer
    average: Transformer
    muon: Muon
    adam: torch.optim.AdamW
    step: int = 0
    runs: list[dict[str, Any]] = field(default_factory=list)

    critic: Critic | None = None
    critic_adam: torch.optim.AdamW | None = None

    @classmethod
    def fresh(
        cls, config: TransformerConfig, training: TransformerTraining, seed: int,
        device: torch.device,
    ) -> TrainState:  # fmt: skip
        model = Transformer(config)
        model.init_weights(torch.Generator().manual_seed(seed))
        model = model.to(device)
        average = copy.deepcopy(model).requires_grad_(False)
        matrices = [
            p for name, p in model.blocks.named_parameters() if p.ndim == 2 and "table" not in name
        ]
        chosen = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        adam = torch.optim.AdamW(
            rest, lr=training.adam_lr, betas=(0.9, 0.95), weight_decay=0.0,
            fused=device.type == "cuda",
        )  # fmt: skip
        return cls(model, average, Muon(matrices, lr=training.muon_lr), adam)

    def save(self, path: Path) -> None:
        """Whole or not at all: written beside, then renamed."""
        partial = path.with_suffix(".part")
        torch.save(
            {
                "model": self.model.state_dict(), "average": self.average.state_dict(),
                "muon": self.muon.state_dict(), "adam": self.adam.state_dict(),
                "step": self.step, "runs": self.runs,
            },
            partial,
        )  # fmt: skip
        partial.replace(path)

    def load(self, path: Path) -> None:
        """UserError when the file is missing or of another model."""
        if not path.is_file():
            raise UserError(f"checkpoint {path} does not exist; leave out --resume to start afresh")
        data = torch.load(path, map_location="cpu", weights_only=True)
        try:
            self.model.load_state_dict(data["model"])
            self.average.load_state_dict(data["average"])
            self.muon.load_state_dict(data["muon"])
            self.adam.load_state_dict(data["adam"])
        except (KeyError, RuntimeError, ValueError) as error:
            line = str(error).splitlines()[0]
            raise UserError(f"checkpoint {path} is of another model: {line}") from error
        self.step, self.runs = data["step"], data["runs"]

    def start_from(self, model: Transformer) -> None:
        """Takes over exported weights, the average of an earlier run; optimisers start anew.

        Weights of a model that was not told poses lack one matrix, which stays zero: the same
        model at first.
        """
        for mine in (self.model, self.average):
            left = mine.load_state_dict(model.state_dict(), strict=False)
            if left.unexpected_keys or set(left.missing_keys) - {"pose_in.weight"}:
                raise UserError(
                    f"the weights are of another model: {left.missing_keys or left.unexpected_keys}"
                )

    def need_critic(self, rate: float, seed: int) -> Critic:
        """The critic, made at its first use; it is no part of a checkpoint."""
        if self.critic is None:
            device = self.model.patch_in.weight.device
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                self.critic = Critic(self.model.config).to(device)
            self.critic_adam = torch.optim.AdamW(
                self.critic.parameters(), lr=rate, betas=(0.0, 0.99), weight_decay=0.0,
                fused=device.type == "cuda",
            )  # fmt: skip
        return self.critic

    def clear_gradients(self) -> None:
        self.muon.zero_grad(set_to_none=True)
        self.adam.zero_grad(set_to_none=True)

    def update_average(self, decay: float) -> None:
        decay = min(decay, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.parameters()), list(self.model.parameters()), 1 - decay
            )


def rate_factor(step: int, fraction: float, training: TransformerTraining) -> float:
    """Warm-up in steps, flat, then cosine to the floor over the run's time.

    Every run starts at the top again, so a resumed run is a warm restart.
    """
    warm = min((step + 1) / training.warmup_steps, 1.0)
    late = max(0.0, fraction - training.flat_share) / max(1 - training.flat_share, 1e-6)
    cosine = training.floor + (1 - training.floor) * 0.5 * (1 + math.cos(math.pi * late))
    return warm * cosine


class Attention:
    """The attention of a stage: masks for every window in use, made once.

    `flex` skips hidden tiles and needs compiled blocks; `sdpa` works anywhere.
    """

    def __init__(
        self, kind: str, frames: int, config: TransformerConfig,
        training: TransformerTraining, device: torch.device,
    ) -> None:  # fmt: skip
        if kind not in ("flex", "sdpa"):
            raise UserError(f"attention must be flex or sdpa, got {kind!r}")
        chunks = frames // config.frames_per_chunk
        self._short = [w for w in training.short_windows if w < chunks]
        self._chance, self._full = training.short_chance, chunks
        self._second = training.second_round
        windows = [*self._short, chunks]
        if kind == "flex":
            self._by_window = {
                w: flex_attend(block_mask(frames, config, w, device)) for w in windows
            }
        else:
            self._by_window = {
                w: sdpa_attend(dense_mask(frames, config, w, device)) for w in windows
            }

    @property
    def full(self) -> Attend:
        return self._by_window[self._full]

    def rounds(self, generator: torch.Generator) -> int:
        """How many own rollouts a step makes, in a stage that makes any."""
        return 1 + int(float(torch.rand((), generator=generator)) < self._second)

    def pick(self, generator: torch.Generator) -> Attend:
        """Usually the whole past, now and then a short window (generator on the CPU)."""
        draw = torch.rand(2, generator=generator)
        if self._short and float(draw[0]) < self._chance:
            return self._by_window[self._short[int(draw[1] * len(self._short))]]
        return self._by_window[self._full]


def peak_memory(device: torch.device) -> dict[str, float]:
    """Since the stage began, in GiB; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {"peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 1)}


def draw_clips(
    pool: LatentPool, stage: Stage, config: TransformerConfig, training: TransformerTraining,
    generator: torch.Generator,
) -> Clips:  # fmt: skip
    latents, keys, poses = pool.random_clips(
        stage.batch, stage.frames, generator, training.revisits
    )
    told = config.pose and training.pose
    pose = training_pose(poses, config.grid[1], training.lost, generator) if told else None
    return Clips(latents, keys, pose)


def judge_step(
    state: TrainState, stage: Stage, training: TransformerTraining, clean: torch.Tensor,
    out: torch.Tensor, stream: Stream, loss: torch.Tensor, step: int, seed: int,
) -> None:  # fmt: skip
    """Backward of the model, with the critic's gradient once it has learned a little; then the
    critic's own step on the same prediction. step: within the stage."""
    per_chunk = state.model.config.frames_per_chunk
    critic = state.need_critic(training.critic_lr, seed)
    counts = stream.judged[:, 1:].flatten().float()
    critic.requires_grad_(False)
    if step < training.critic_warmup:
        loss.backward()
    else:
        add_critic_gradient(critic, out, loss, clean, counts, stage.adversarial, per_chunk)
    critic.requires_grad_(True)
    fake, before = chunks_of(out.detach(), clean, per_chunk)
    real, _ = chunks_of(clean, clean, per_chunk)
    critic_loss(critic, real, fake, before, counts).backward()
    state.critic_adam.step()
    state.critic_adam.zero_grad(set_to_none=True)


def train_stage(
    state: TrainState,
    stage: Stage,
    pool: LatentPool,
    training: TransformerTraining,
    run: Budget,
    seconds: float,
    attention: str,
    seed: int,
    log: Log,
    after_step: Callable[[TrainState], None],
) -> None:
    """Steps at one clip length for `seconds`; the rate follows the whole run's time."""
    device, config = pool.latents.device, state.model.config
    on_gpu = device.type == "cuda"
    generator = torch.Generator(device).manual_seed(seed + state.step)
    chooser = torch.Generator().manual_seed(seed + state.step)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    masks = Attention(attention, stage.frames, config, training, device)
    tables = two_stream_tables(stage.frames, config, device)
    residual = torch.bfloat16 if on_gpu else torch.float32
    tokens = 2 * stage.batch * stage.frames * config.tokens_per_frame
    end, first = time.monotonic() + seconds, state.step
    last_time, last_step = time.monotonic(), state.step
    while time.monotonic() < end and state.step - first < training.max_steps:
        factor = rate_factor(state.step - state.runs[-1]["first_step"], run.fraction, training)
        for optimiser, peak in ((state.muon, training.muon_lr), (state.adam, training.adam_lr)):
            for group in optimiser.param_groups:
                group["lr"] = peak * factor
        clips = draw_clips(pool, stage, config, training, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss, mse, out, stream = forward_loss(
                state.model, clips, stage, tables, masks.pick(chooser), masks.full, training,
                generator, residual, masks.rounds(chooser),
            )  # fmt: skip
            if stage.adversarial > 0:
                judge_step(
                    state, stage, training, clips.latents.float(), out, stream, loss,
                    state.step - first, seed,
                )  # fmt: skip
            else:
                loss.backward()
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        state.muon.step()
        state.adam.step()
        state.clear_gradients()
        state.step += 1
        state.update_average(training.ema)
        if state.step % training.log_every == 0 or state.step == first + 1:
            value = float(loss.detach())
            now = time.monotonic()
            rate = (state.step - last_step) / (now - last_time)
            last_time, last_step = now, state.step
            log.event(
                "transformer", step=state.step, frames=stage.frames, own=stage.own,
                loss=round(value, 4), mse=round(float(mse), 4), steps_per_s=round(rate, 2),
                tokens_per_s=round(rate * tokens), lr=round(training.muon_lr * factor, 5),
                eta_s=round(run.left), **peak_memory(device),
            )  # fmt: skip
            if not math.isfinite(value):
                raise FloatingPointError(f"the loss is {value} at step {state.step}")
        after_step(state)


def train_transformer(
    state: TrainState,
    pool: LatentPool,
    training: TransformerTraining,
    minutes: float,
    seed: int,
    log: Log,
    attention: str,
    compiled: bool,
    after_step: Callable[[TrainState], None],
    before_stage: Callable[[], None],
) -> str:
    """Runs the stages; returns the attention that was used. `pool` may grow before each.

    When the critic, own histories or the compiled attention fail on this machine, says so and goes
    on without.
    """
    run = Budget(minutes)
    state.runs.append({"minutes": minutes, "first_step": state.step, "seed": seed})
    set_compiled(state.model, compiled)
    total = sum(stage.share for stage in training.stages)
    done = 0.0
    for stage in training.stages:
        done += stage.share / total
        before_stage()
        while True:
            torch.compiler.reset()  # shapes are static: each stage compiles for its own lengths
            seconds = run.seconds * done - run.elapsed
            try:
                train_stage(
                    state, stage, pool, training, run, seconds, attention, seed, log, after_step
                )
                break
            except torch.OutOfMemoryError:
                # somebody else on this device may hold memory: go on with smaller batches
                if stage.batch == 1:
                    raise
                stage = replace(stage, batch=stage.batch // 2)
                log.event("out of memory", batch=stage.batch)
                state.clear_gradients()
                torch.cuda.empty_cache()
            except (RuntimeError, TypeError) as error:
                state.clear_gradients()
                reason = str(error)[:300]
                if stage.adversarial > 0:
                    stage = replace(stage, adversarial=0.0)
                    log.event("the critic fails; going on without it", reason=reason)
                elif stage.own > 0:
                    stage = replace(stage, own=0.0, edges=0.0)
                    log.event("own histories fail; going on without them", reason=reason)
                elif attention == "flex":
                    attention = "sdpa"
                    log.event("attention falls back to sdpa", reason=reason)
                    set_compiled(state.model, False)
                else:
                    raise
    return attention


def set_compiled(model: Transformer, compiled: bool) -> None:
    """Block by block: ten layers share one compilation, about a tenth of the wait."""
    for block in model.blocks:
        if compiled:
            block.compile(dynamic=False)
        else:
            block._compiled_call_impl = None
