"""`play`: run a session headless, in lock-step lanes, and write its folder."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path

from quantwm.actions import parse_actions
from quantwm.cache.formats import split_methods
from quantwm.cli.common import (
    add_device,
    emit,
    integer,
    names,
    number,
    pick_device,
    progress,
    progress_done,
    say,
    table,
)
from quantwm.cli.download import add_weights
from quantwm.describe import session_info
from quantwm.engine import Engine
from quantwm.engine_types import BlockResult
from quantwm.errors import UserError
from quantwm.lanes import MODES, check_lanes, lanes_for, limit_history, max_tokens_for
from quantwm.session import SessionWriter, check_folder
from quantwm.tensor_files import TensorRecorder, default_layers
from quantwm.totals import RunTotals, finite_or_none
from quantwm.video import has_pyav, read_start
from quantwm.worlds.registry import (
    OFFLOADS,
    Placement,
    load_world,
    world_prompts,
    world_scenes,
    world_scripts,
    world_spec,
)
from quantwm.worlds.wan.umt5 import clean_prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `play`."""
    parser.add_argument("--world", default="embedded", help="a name that `worlds` lists")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--actions",
        metavar="STRING",
        help='keys and how many latent frames they are held, "w-8, right-12, w+right-4, none-4"',
    )
    what.add_argument(
        "--script",
        metavar="NAME",
        help="a recorded action script of the world, from its own scene; `worlds` lists them",
    )
    parser.add_argument(
        "--lanes",
        type=split_methods,
        default=("bf16", "qvg", "quantwm"),
        help="formats, with a preset or settings behind a colon: bf16,quantwm:rank=4,clip=0.7",
    )
    parser.add_argument("--seed", type=integer(0, 2**63 - 1), default=0)
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--scene", help="a start scene of the world; the first one by default")
    start.add_argument("--image", type=Path, help="a picture or video of your own to start from")
    parser.add_argument("--prompt", default="", help="for worlds that read one")
    parser.add_argument(
        "--offload",
        choices=OFFLOADS,
        help="what of a large world waits on the CPU",
    )
    parser.add_argument("--mode", default="free", choices=MODES)
    parser.add_argument("--steps", type=integer(1, 1000), help="denoising steps a chunk")
    parser.add_argument(
        "--max-tokens", type=integer(1, 2**40), help="tokens of history kept, in every lane"
    )
    parser.add_argument("--out", type=Path, help="a new folder; runs/<world>-<time> by default")
    parser.add_argument(
        "--no-video", action="store_true", help="write no video (works without PyAV)"
    )
    parser.add_argument(
        "--record-tensors",
        type=Path,
        metavar="FILE",
        help="write q, k, v of the first lane's clean passes as safetensors, for `study`",
    )
    parser.add_argument(
        "--record-layers", type=names, default=(), help="layers to record, 0,5,9; three by default"
    )
    add_weights(parser)
    add_device(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the session; mistakes are found before the weights are loaded."""
    spec = world_spec(arguments.world)
    if arguments.script is not None:
        _take_script(arguments)
    actions = parse_actions(arguments.actions, spec.keys, spec.cache.frames_per_chunk)
    lanes = lanes_for(spec, arguments.lanes)
    if not arguments.no_video and not has_pyav():
        raise UserError("video needs PyAV: pip install av, or add --no-video")
    device = pick_device(arguments.device)
    check_lanes(lanes, arguments.mode)
    limit_history(spec.policy, spec.cache, max_tokens_for(device, arguments.max_tokens))
    _check_scene(spec.name, arguments.scene)
    _check_prompt(spec.name, arguments.prompt)
    folder = arguments.out or Path("runs") / f"{spec.name}-{datetime.now():%Y%m%d-%H%M%S}"
    image = None
    if arguments.image is not None:
        image = read_start(arguments.image, spec.video_size, spec.context_frames)
    recorder = _recorder(arguments, spec.cache.layers)
    check_folder(folder)
    say(f"loading {spec.title} on {device}")
    placement = None
    if arguments.offload or arguments.prompt:
        placement = Placement(arguments.offload or "auto", prompt=arguments.prompt or None)
    world = load_world(arguments.world, device, _stage, placement=placement)
    progress_done()
    if hasattr(world, "report"):
        world.report = _stage
    with Engine(
        world,
        lanes,
        seed=arguments.seed,
        scene=arguments.scene,
        image=image,
        prompt=arguments.prompt,
        mode=arguments.mode,
        steps=arguments.steps,
        max_tokens=arguments.max_tokens,
        recorder=recorder,
    ) as engine:
        info = session_info(engine, arguments.actions)
        say(engine.explain())
        first = engine.start()
        with SessionWriter(
            folder, info, video=not arguments.no_video, start_picture=engine.image
        ) as writer:
            writer.write(first)
            for number_, action in enumerate(actions, 1):
                block = engine.step(action)
                writer.write(block)
                progress(_progress_line(number_, len(actions), block))
            progress_done()
    _tell(arguments, recorder, writer)
    return 0


def _tell(
    arguments: argparse.Namespace, recorder: TensorRecorder | None, writer: SessionWriter
) -> None:
    """What was recorded and measured."""
    if recorder is not None:
        recorder.save(arguments.record_tensors)
        say(f"recorded {recorder.tokens:,} tokens to {arguments.record_tensors}")
    if writer.stopped is not None:
        say(writer.stopped)
    say(_summary(writer.totals))
    emit(
        {
            "frames": writer.totals.frames,
            "lanes": [lane.to_json() for lane in writer.totals.lanes.values()],
            "fps": writer.totals.fps,
            "device": writer.info.device,
            "kernels": writer.info.kernels,
            "session": str(writer.folder),
            "weights_sha256": writer.info.weights_sha256,
        }
    )


def _take_script(arguments: argparse.Namespace) -> None:
    """Fills in the script's actions, and its scene where no other start is asked for."""
    scripts = {script.name: script for script in world_scripts(arguments.world)}
    if arguments.script not in scripts:
        listed = ", ".join(scripts) or "none in this world"
        raise UserError(f"unknown script {arguments.script[:40]!r}; there are {listed}")
    script = scripts[arguments.script]
    arguments.actions = script.actions
    if arguments.image is None and arguments.scene is None:
        arguments.scene = script.scene


def _check_scene(world: str, scene: str | None) -> None:
    known = [known.name for known in world_scenes(world)]
    if scene is not None and scene not in known:
        listed = ", ".join(known) or "none in this world"
        raise UserError(f"unknown scene {scene[:40]!r}; there are {listed}")


def _check_prompt(world: str, prompt: str) -> None:
    """Before a text encoder of 11 GB is asked."""
    own = world_prompts(world)
    if prompt and not own:
        raise UserError(f"{world} takes no prompt; leave --prompt out")
    if prompt:
        clean_prompt(prompt)
    elif own:
        say(f"no --prompt: the world's own is used, {own[0]!r}")


def _recorder(arguments: argparse.Namespace, layers: int) -> TensorRecorder | None:
    if arguments.record_tensors is None:
        return None
    try:
        chosen = tuple(int(text) for text in arguments.record_layers) or default_layers(layers)
    except ValueError:
        chosen = (-1,)
    if any(not 0 <= layer < layers for layer in chosen):
        raise UserError(
            f"--record-layers takes layer numbers from 0 to {layers - 1}, for example 0"
        )
    if arguments.record_tensors.exists():
        raise UserError(f"{arguments.record_tensors} exists; name a new file")
    return TensorRecorder(chosen)


def _stage(stage: str, share: float) -> None:
    progress(f"{stage}: {100 * share:.0f} %")


def _progress_line(done: int, total: int, block: BlockResult) -> str:
    lanes = "  ".join(f"{lane.name} {lane.ms:.0f} ms" for lane in block.lanes)
    return f"chunk {done}/{total}  {lanes}"


def _summary(totals: RunTotals) -> str:
    rows = [["lane", "PSNR to bf16", "KV MiB", "ratio", "resident", "ms/chunk"]]
    for lane in totals.lanes.values():
        psnr = lane.psnr_to_bf16
        same = psnr is not None and finite_or_none(psnr) is None
        rows.append(
            [
                lane.name,
                "identical" if same else number(psnr, 2, " dB"),
                number(lane.kv_bytes / 2**20, 2),
                number(lane.ratio, 2, "x"),
                number(lane.resident_ratio, 2, "x"),
                number(lane.ms / lane.blocks if lane.blocks else None, 0),
            ]
        )
    return f"{table(rows)}\n{totals.frames} frames, {number(totals.fps, 2)} frames/s of all lanes"
