"""How much of everything a training run does: the named plans of `run_all`, and their switches."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path

from quantwm.errors import UserError
from quantwm.worlds.embedded.config import PRESETS, AutoencoderConfig, EmbeddedConfig
from training.evaluate import EvaluationConfig
from training.inputs import need_between
from training.losses import RolloutConfig, Stage, TransformerTraining
from training.train_autoencoder import AutoencoderTraining
from training.train_decoder import DECODER_PLANS, DecoderPlan


@dataclass(frozen=True)
class RunPlan:
    """Shares are of the whole run's minutes; see `PLANS`. The transformer starts with
    enough_episodes and gets the later ones, up to `episodes`, as they come. pieces: share of the
    episodes that are made of scripted walks; return_episodes: unseen ones of that kind, for the
    measurement of returns; decoder_minutes: of the decoder's own stage after the transformer."""

    world: EmbeddedConfig = PRESETS["shipped"]
    episodes: int = 1000
    length: int = 512
    first_episodes: int = 14
    enough_episodes: int = 300
    unseen_episodes: int = 32
    unseen_length: int = 272
    pieces: float = 0.3
    return_episodes: int = 24
    autoencoder_share: float = 0.26
    finish_minutes: float = 0.8
    save_every_minutes: float = 4.0
    autoencoder: AutoencoderTraining = field(default_factory=AutoencoderTraining)
    transformer: TransformerTraining = field(default_factory=TransformerTraining)
    decoder: DecoderPlan = field(default_factory=DecoderPlan)
    decoder_minutes: float = 0.0
    check: EvaluationConfig = field(
        default_factory=lambda: EvaluationConfig(rollout_frames=64, episodes=8, steps=2)
    )
    final: EvaluationConfig = field(
        default_factory=lambda: EvaluationConfig(rollout_frames=256, episodes=16, steps=2)
    )


QUICK_WORLD = replace(
    PRESETS["tiny"],
    transformer=replace(PRESETS["tiny"].transformer, latent_height=12, latent_width=16),
    autoencoder=AutoencoderConfig(
        encoder_widths=(16, 24, 32), decoder_widths=(16, 24, 32), decoder_depths=(1, 1, 1),
    ),
)  # fmt: skip

PLANS = {
    "full": RunPlan(),
    "continued": RunPlan(
        episodes=1400,
        enough_episodes=150,
        autoencoder_share=0.0,
        transformer=TransformerTraining(
            stages=(
                Stage(frames=64, batch=24, share=0.05),
                Stage(frames=128, batch=12, share=0.15),
                Stage(frames=256, batch=6, share=0.15),
                Stage(frames=128, batch=12, share=0.40, rolled=0.5, adversarial=1.0, edges=0.5),
                Stage(frames=256, batch=6, share=0.25, rolled=0.5, adversarial=1.0, edges=0.5),
            ),
            flat_share=0.6,
            short_chance=0.15,  # short windows are known since the first runs, which had 0.3
        ),
    ),
    "smoke": RunPlan(
        episodes=120,
        enough_episodes=40,
        unseen_episodes=14,
        return_episodes=8,
        autoencoder_share=0.0,
        finish_minutes=0.2,
        save_every_minutes=100.0,
        transformer=TransformerTraining(
            stages=(
                Stage(frames=64, batch=24, share=0.15),
                Stage(frames=256, batch=6, share=0.2),
                Stage(frames=128, batch=12, share=0.35, rolled=0.5, adversarial=1.0, edges=0.5),
                Stage(frames=256, batch=6, share=0.3, rolled=0.5, adversarial=1.0, edges=0.5),
            ),
            critic_warmup=5,
            log_every=10,
        ),
        final=EvaluationConfig(rollout_frames=128, episodes=8, steps=2),
    ),
    "quick": RunPlan(
        world=QUICK_WORLD,
        episodes=6,
        length=64,
        first_episodes=2,
        enough_episodes=4,
        unseen_episodes=2,
        unseen_length=48,
        return_episodes=2,
        autoencoder_share=0.2,
        finish_minutes=0.2,
        save_every_minutes=0.5,
        # of 60 steps an average over 500 would be nine tenths what was there before the first
        autoencoder=AutoencoderTraining(batch=16, warmup_steps=10, ema=0.9, log_every=20),
        transformer=TransformerTraining(
            stages=(
                Stage(frames=8, batch=4, share=0.4),
                Stage(frames=16, batch=2, share=0.2),
                Stage(frames=32, batch=1, share=0.1),
                Stage(frames=16, batch=2, share=0.1, own=0.7, adversarial=0.8, edges=0.5),
                Stage(frames=16, batch=2, share=0.2, rolled=0.5, adversarial=1.0, edges=0.5),
            ),
            rollouts=RolloutConfig(clips=4, longest_context=3),
            short_windows=(1, 2),
            context_chunks=2,
            critic_warmup=2,
            log_every=10,
        ),
        decoder=DECODER_PLANS["quick"],
        check=EvaluationConfig(context_chunks=2, rollout_frames=8, episodes=2, steps=2),
        final=EvaluationConfig(
            context_chunks=2,
            rollout_frames=16,
            episodes=2,
            steps=2,
            memory_frames=16,
            window=2,
            return_frames=44,
            return_after=17,
        ),
    ),
}
"""`continued` goes on from weights, `smoke` runs every stage of it for seconds on a GPU, `quick`
trains a toy on a CPU."""


def add_switches(parser: argparse.ArgumentParser) -> None:
    """One switch per ingredient, so that a short run can say what each is worth."""
    group = parser.add_argument_group("ingredients")
    group.add_argument("--ae-share", type=float, help="of the minutes, for the autoencoder")
    group.add_argument("--ae-lr", type=float, help="peak rate of the autoencoder")
    group.add_argument(
        "--decoder-minutes", type=float, help="at the end, for the decoder on made-up latents"
    )
    group.add_argument("--muon-lr", type=float, help="peak rate of the blocks' matrices")
    group.add_argument("--no-pose", action="store_true", help="the keys alone, no reckoned pose")
    group.add_argument("--own", type=float, help="share of clips with chunks of their own making")
    group.add_argument("--rolled", type=float, help="share of clips that are rollouts; 0 is none")
    group.add_argument("--invented", type=float, help="weight of what no true frame showed there")
    group.add_argument("--faded", type=float, help="share of true clips whose history fades")
    group.add_argument(
        "--teacher", type=Path, help="weights that go on where something is invented; the run's own"
    )
    group.add_argument(
        "--no-continuation", action="store_true", help="what is invented aims at the truth"
    )
    group.add_argument(
        "--no-continuity", action="store_true", help="the critic sees no mismatched pairs"
    )
    group.add_argument("--returned", type=float, help="weight of what is shown again there")
    group.add_argument("--gaps", type=float, help="share of clips with gaps in their history")
    group.add_argument("--pieces", type=float, help="share of episodes made of scripted walks")
    group.add_argument("--adversarial", type=float, help="weight of the critic; 0 is none")
    group.add_argument("--edges", type=float, help="weight of the edges' strength; 0 is none")
    group.add_argument("--sampler-share", type=float, help="of chunks at the sampler's levels")
    group.add_argument("--revisits", type=float, help="share of clips chosen to hold a revisit")
    group.add_argument("--context-noise", type=float, help="noise on the history, at most")
    group.add_argument("--short-chance", type=float, help="share of steps with a short window")
    group.add_argument("--frames", type=int, help="no stage with clips longer than this")
    group.add_argument("--episodes", type=int, help="of training, 18.9 MB of memory each")


OF_TRAINING = (
    "sampler_share", "context_noise", "revisits", "short_chance", "gaps", "invented", "returned",
    "faded",
)  # fmt: skip
"""Switches that are fields of `TransformerTraining`."""


def check_switches(args: argparse.Namespace) -> None:
    """UserError for a share or a rate that makes no sense."""
    for name in ("ae_share", "own", "rolled", "pieces", "adversarial", "edges", *OF_TRAINING):
        value, most = getattr(args, name), 10 if name in ("adversarial", "returned") else 1
        if value is not None and not 0 <= value <= most:
            raise UserError(f"--{name.replace('_', '-')} must be 0 to {most}, got {value}")
    for name in ("ae_lr", "muon_lr"):
        value = getattr(args, name)
        if value is not None and not 0 < value <= 1:
            raise UserError(
                f"--{name.replace('_', '-')} must be above 0 and at most 1, got {value}"
            )


def apply_switches(plan: RunPlan, args: argparse.Namespace) -> RunPlan:
    """The plan as the switches change it. UserError for a value that makes no sense."""
    check_switches(args)
    decoder = plan.decoder_minutes if args.decoder_minutes is None else args.decoder_minutes
    need_between("--decoder-minutes", decoder, 0, 0.8 * args.minutes)
    episodes = plan.episodes if args.episodes is None else args.episodes
    need_between("--episodes", episodes, plan.first_episodes, 100_000)
    training = plan.transformer
    for name in ("muon_lr", *OF_TRAINING):
        if getattr(args, name) is not None:
            training = replace(training, **{name: getattr(args, name)})
    stages = [
        stage for stage in training.stages if args.frames is None or stage.frames <= args.frames
    ]
    if not stages:
        raise UserError(
            f"--frames {args.frames} leaves no stage; the shortest has "
            f"{min(s.frames for s in training.stages)} frames"
        )
    changed = []
    for stage in stages:
        last = stage.own > 0 or stage.rolled > 0
        own = args.own if last and args.own is not None else stage.own
        rolled = args.rolled if last and args.rolled is not None else stage.rolled
        critic = args.adversarial if args.adversarial is not None else stage.adversarial
        edges = args.edges if args.edges is not None else stage.edges
        if own == 0 and rolled == 0:
            critic = edges = 0.0
        changed.append(replace(stage, own=own, rolled=rolled, adversarial=critic, edges=edges))
    training = replace(
        training, stages=tuple(changed), pose=not args.no_pose,
        continuation=training.continuation and not args.no_continuation,
        continuity=training.continuity and not args.no_continuity,
    )  # fmt: skip
    autoencoder = plan.autoencoder
    if args.ae_lr is not None:
        autoencoder = replace(autoencoder, lr=args.ae_lr)
    share = plan.autoencoder_share if args.ae_share is None else args.ae_share
    world = plan.world
    if args.no_pose:
        world = replace(world, transformer=replace(world.transformer, pose=False))
    longest = max(stage.frames for stage in changed)
    return replace(
        plan, transformer=training, autoencoder=autoencoder, autoencoder_share=share,
        episodes=episodes, enough_episodes=min(plan.enough_episodes, episodes),
        pieces=plan.pieces if args.pieces is None else args.pieces, decoder_minutes=decoder,
        world=replace(world, train_frames=max(longest, 2 * world.context_frames)),
    )  # fmt: skip
