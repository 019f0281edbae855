"""Trains the transformer by teacher forcing, in stages of growing length, until time is over."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from quantwm.errors import UserError
from quantwm.worlds.embedded.config import TransformerConfig
from quantwm.worlds.embedded.transformer import Attend, Transformer
from training.critic import (
    add_critic_gradient,
    chunks_of,
    context_of,
    critic_loss,
    mismatched_contexts,
)
from training.data import LatentPool
from training.evaluate import shipped_copy
from training.gaps import HiddenChunks, draw_gaps
from training.losses import (
    Clips,
    Stage,
    Stream,
    TransformerTraining,
    forward_loss,
    sigma_weight,
    training_pose,
)
from training.progress import Budget, Log, Pace
from training.rollout_pool import RolloutPool
from training.state import TrainState
from training.teacher_forcing import (
    block_mask,
    dense_mask,
    flex_attend,
    sdpa_attend,
    two_stream_tables,
)


def rate_factor(step: int, fraction: float, training: TransformerTraining) -> float:
    """Warm-up in steps, flat, then cosine to the floor over the run's time.

    A warm restart (--weights) starts at the top again; a run that is gone on with (--resume) warms
    its new critic up and goes on at the rate of the time that it has behind it.
    """
    warm = min((step + 1) / training.warmup_steps, 1.0)
    late = max(0.0, fraction - training.flat_share) / max(1 - training.flat_share, 1e-6)
    cosine = training.floor + (1 - training.floor) * 0.5 * (1 + math.cos(math.pi * late))
    return warm * cosine


class Attention:
    """The attention of a stage: masks for every window in use, made once.

    `flex` skips hidden tiles and needs compiled blocks; `sdpa` works anywhere. hidden: the gaps of
    the step at hand, None in a run without.
    """

    def __init__(
        self, kind: str, stage: Stage, config: TransformerConfig,
        training: TransformerTraining, device: torch.device,
    ) -> None:  # fmt: skip
        if kind not in ("flex", "sdpa"):
            raise UserError(f"attention must be flex or sdpa, got {kind!r}")
        frames = stage.frames
        chunks = frames // config.frames_per_chunk
        self._short = [w for w in training.short_windows if w < chunks]
        self._chance, self._full = training.short_chance, chunks
        self._second = training.second_round
        windows = [*self._short, chunks]
        self.hidden = HiddenChunks(stage.batch, chunks, device) if training.gaps > 0 else None
        if kind == "flex":
            self._by_window = {
                w: flex_attend(block_mask(frames, config, w, device, self.hidden)) for w in windows
            }
        else:
            self._by_window = {
                w: sdpa_attend(dense_mask(frames, config, w, device), self.hidden) for w in windows
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

    def hide(self, clips: Clips, attend: Attend) -> Clips:
        """The step's gaps into the masks; none in a step with a short window, of which a gap could
        leave nothing."""
        if self.hidden is None:
            return clips
        if attend is not self.full:
            clips = replace(clips, hidden=torch.zeros_like(clips.hidden))
        self.hidden.set(clips.hidden)
        return clips


def peak_memory(device: torch.device) -> dict[str, float]:
    """Since the stage began, in GiB; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {"peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 1)}


def draw_clips(
    pool: LatentPool, rollouts: RolloutPool | None, stage: Stage, config: TransformerConfig,
    training: TransformerTraining, generator: torch.Generator,
) -> Clips:  # fmt: skip
    """The clips of a step: some that the model has rolled out, the others true; with their gaps."""
    rolled = round(stage.rolled * stage.batch) if rollouts is not None else 0
    per_chunk, chunks = config.frames_per_chunk, stage.frames // config.frames_per_chunk
    batch = pool.random_clips(
        stage.batch - rolled, stage.frames, generator, training.revisits
    )  # fmt: skip
    of_rollouts = {}
    if rolled:
        own = rollouts.draw(rolled, generator)
        true = batch.latents
        batch = batch.with_more(own.clips)
        like = {"device": true.device}
        shape = (len(true), stage.frames, config.latent_width)
        of_rollouts = {
            "history": torch.cat((true, own.history)),
            "target": torch.cat((true, own.target)),
            "weight": torch.cat((torch.ones(shape, **like), own.weight)),
            "known": torch.cat((torch.ones(shape, dtype=torch.bool, **like), own.known)),
            "rolled": torch.arange(stage.batch, **like) >= len(true),
        }
    told = config.pose and training.pose
    pose = training_pose(batch.poses, config.grid[1], training.lost, generator) if told else None
    hidden = None
    if training.gaps > 0:
        hidden = draw_gaps(
            batch.marks, chunks, per_chunk, training.gaps, training.context_chunks,
            training.longest_gap, generator,
        )  # fmt: skip
    return Clips(batch.latents, batch.keys, pose, hidden=hidden, **of_rollouts)


def judge_step(
    state: TrainState, stage: Stage, training: TransformerTraining, clips: Clips,
    out: torch.Tensor, stream: Stream, loss: torch.Tensor, step: int, seed: int,
    generator: torch.Generator,
) -> torch.Tensor:  # fmt: skip
    """Backward of the model, with the critic's gradient once it has learned a little; then the
    critic's own step on the same prediction. Returns its loss: 2 where it sees no difference, 0
    where it is never wrong. step: within the stage."""
    per_chunk, clean = state.model.config.frames_per_chunk, clips.latents.float()
    critic = state.need_critic(training.critic_lr, seed)
    counts = stream.judged[:, 1:].flatten().float()
    context = context_of(stream.history, clips.keys, stream.trusted, per_chunk)
    contexts = (context,)
    if training.continuity:
        contexts = (
            context, context_of(stream.history, clips.keys, stream.shown, per_chunk),
        )  # fmt: skip
    critic.requires_grad_(False)
    if step < training.critic_warmup:
        loss.backward()
    else:
        weight = sigma_weight(stream.sigma[:, per_chunk::per_chunk], training.sigma_floor)
        target = clean if clips.target is None else clips.target.float()
        add_critic_gradient(
            critic, out, loss, target, contexts, counts, weight.flatten(), stage.adversarial
        )
    critic.requires_grad_(True)
    real, fake = chunks_of(clean, per_chunk), chunks_of(out.detach(), per_chunk)
    wrong = None
    if training.continuity:
        wrong = mismatched_contexts(context, clean.shape[2], generator)
    of_critic = critic_loss(critic, real, fake, context, counts, wrong)
    of_critic.backward()
    state.critic_adam.step()
    state.critic_adam.zero_grad(set_to_none=True)
    return of_critic.detach()


def refill_rollouts(
    state: TrainState, rollouts: RolloutPool, pool: LatentPool, generator: torch.Generator, log: Log
) -> None:
    """New rollouts of what would ship now, when the old ones are used up; says what they are."""
    if not rollouts.is_stale():
        return
    with failing_as("rollouts"):
        teacher = state.need_teacher() if rollouts.has_teacher else None
        facts = rollouts.refill(shipped_copy(state.average), teacher, pool, generator)
    log.event("rollouts", step=state.step, **facts)


def set_rates(state: TrainState, fraction: float, training: TransformerTraining) -> float:
    """Rates of both optimisers at this fraction of the run; the factor on their peaks."""
    factor = rate_factor(state.step - state.runs[-1]["first_step"], fraction, training)
    for optimiser, peak in ((state.muon, training.muon_lr), (state.adam, training.adam_lr)):
        for group in optimiser.param_groups:
            group["lr"] = peak * factor
    return factor


def take_step(state: TrainState, fraction: float, training: TransformerTraining) -> None:
    """One step of both optimisers along the gradients that are there, and of the average."""
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    state.muon.step()
    state.adam.step()
    state.clear_gradients()
    state.step += 1
    state.progress = fraction
    state.update_average(training.ema)


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
    masks = Attention(attention, stage, config, training, device)
    rollouts = RolloutPool(training, stage.frames, seed) if stage.rolled > 0 else None
    tables = two_stream_tables(stage.frames, config, device)
    residual = torch.bfloat16 if on_gpu else torch.float32
    end, first = time.monotonic() + seconds, state.step
    pace = Pace(2 * stage.batch * stage.frames * config.tokens_per_frame, state.step)
    while time.monotonic() < end and state.step - first < training.max_steps:
        factor = set_rates(state, run.fraction, training)
        if rollouts is not None:
            refill_rollouts(state, rollouts, pool, generator, log)
        clips = draw_clips(pool, rollouts, stage, config, training, generator)
        attend = masks.pick(chooser)
        clips = masks.hide(clips, attend)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss, mse, out, stream = forward_loss(
                state.model, clips, stage, tables, attend, masks.full, training,
                generator, residual, masks.rounds(chooser),
            )  # fmt: skip
            if stage.adversarial > 0:
                with failing_as("critic"):
                    of_critic = judge_step(
                        state, stage, training, clips, out, stream, loss, state.step - first, seed,
                        generator,
                    )  # fmt: skip
            else:
                loss.backward()
        take_step(state, run.fraction, training)
        if state.step % training.log_every == 0 or state.step == first + 1:
            value = float(loss.detach())
            judged = {"critic_loss": round(float(of_critic), 3)} if stage.adversarial > 0 else {}
            log.event(
                "transformer", step=state.step, frames=stage.frames, gaps=training.gaps,
                rolled=stage.rolled, critic=stage.adversarial, **judged, loss=round(value, 4),
                mse=round(float(mse), 4), **pace.so_far(state.step),
                lr=round(training.muon_lr * factor, 5), eta_s=round(run.left),
                **peak_memory(device),
            )  # fmt: skip
            if not math.isfinite(value):
                raise FloatingPointError(f"the loss is {value} at step {state.step}")
        after_step(state)


class PartError(RuntimeError):
    """A part of the recipe failed, without which training can go on."""

    def __init__(self, part: str, error: Exception) -> None:
        super().__init__(f"{part}: {error}")
        self.part = part


@contextlib.contextmanager
def failing_as(part: str) -> Iterator[None]:
    """Errors inside are those of a part, except too little memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        raise PartError(part, error) from error


def lesser(
    error: Exception, stage: Stage, training: TransformerTraining, attention: str, log: Log
) -> tuple[Stage, TransformerTraining, str] | None:
    """What to go on with after an error, said in the log: without the part that failed, or, where
    the forward itself fails, without gaps, then without FlexAttention. None: nothing is left out.
    """
    reason = str(error)[:300]
    part = error.part if isinstance(error, PartError) else ""
    if part == "critic":
        log.event("THE CRITIC FAILS; going on without it", reason=reason)
        return replace(stage, adversarial=0.0), training, attention
    if part == "rollouts":
        log.event("ROLLOUTS FAIL; going on with histories made chunk by chunk", reason=reason)
        return replace(stage, rolled=0.0, own=0.7), training, attention
    if attention == "flex" and training.gaps > 0:
        log.event("GAPS FAIL; going on without them", reason=reason)
        return stage, replace(training, gaps=0.0), attention
    if attention == "flex":
        log.event("FLEX FAILS; going on with sdpa", reason=reason)
        return stage, training, "sdpa"
    if stage.own > 0:
        log.event("OWN HISTORIES FAIL; going on without them", reason=reason)
        return replace(stage, own=0.0, edges=0.0), training, attention
    return None


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
    """Runs the stages, from where `state` stands on; returns the attention that was used. `pool`
    may grow before each.

    When the critic, rollouts, gaps or the compiled attention fail on this machine, says so and
    goes on without.
    """
    run = Budget(minutes, state.progress)
    state.runs.append({"minutes": minutes, "first_step": state.step, "seed": seed})
    set_compiled(state.model, compiled)
    total = sum(stage.share for stage in training.stages)
    done = 0.0
    for stage in training.stages:
        done += stage.share / total
        if state.progress >= done:  # a run that is gone on with had this stage behind it
            continue
        before_stage()
        while True:
            torch.compiler.reset()  # shapes are static: each stage compiles for its own lengths
            seconds = run.seconds_to(done)
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
                left = lesser(error, stage, training, attention, log)
                if left is None:
                    raise
                stage, training, attention = left
                set_compiled(state.model, compiled and attention == "flex")
    return attention


def set_compiled(model: Transformer, compiled: bool) -> None:
    """Block by block: ten layers share one compilation, about a tenth of the wait."""
    for block in model.blocks:
        if compiled:
            block.compile(dynamic=False)
        else:
            block._compiled_call_impl = None
