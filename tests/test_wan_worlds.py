"""A tiny random checkpoint of each family in published naming: folder to frames, and the CLI."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_wan_encoders import UMT5
from wan_tiny import VAE_22, WORLDS, actions_of, random_, settings, tiny  # the last is a fixture

from quantwm.actions import parse_actions
from quantwm.cache.plan import plan_lanes
from quantwm.cli import main
from quantwm.describe import session_info
from quantwm.engine import Engine
from quantwm.errors import UserError
from quantwm.lanes import lanes_for
from quantwm.report.pool import WorldSource
from quantwm.session import SessionWriter
from quantwm.session_reader import load_session
from quantwm.worlds import registry
from quantwm.worlds import room as rooms
from quantwm.worlds.registry import load_world, world_presence, world_spec
from quantwm.worlds.wan import catalog, downloads, files, memory_frames, needs
from quantwm.worlds.wan.umt5 import Umt5Encoder
from quantwm.worlds.wan.vae import WanVae

__all__ = ["tiny"]


@pytest.mark.parametrize("tiny", sorted(WORLDS), indirect=True)
def test_from_published_files_to_frames(tiny: str) -> None:
    spec = world_spec("tiny")
    assert world_presence("tiny").present
    world = load_world("tiny", "cpu")
    # beyond the sink, which stays BF16 in every lane
    text = actions_of(tiny) if spec.keys else f"none-{max(3 * spec.cache.frames_per_chunk, 5)}"
    actions = parse_actions(text, spec.keys, spec.cache.frames_per_chunk)
    width, height = spec.video_size
    picture = np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8)
    all_three = tiny in ("causal_forcing", "matrix_game2_universal")
    lanes = settings(lanes_for(spec, ("bf16", "qvg", "quantwm") if all_three else ("bf16", "qvg")))
    with Engine(world, lanes, seed=3, prompt="a walk", image=picture, max_tokens=10_000) as engine:
        start = engine.start()
        assert start.lanes[0].frames.shape == (1, height, width, 3)
        for index, action in enumerate(actions):
            block = engine.step(action)
            count = 4 * spec.cache.frames_per_chunk - (3 if index == 0 else 0)
            for lane in block.lanes:
                assert lane.frames.shape == (count, height, width, 3)
                assert lane.frames.dtype == np.uint8
        # what a chunk was denoised against is the lane's own: two formats, two videos
        assert not np.array_equal(block.lanes[0].frames, block.lanes[1].frames)
    assert len(world.weights_sha256()) == 64
    assert world.weight_bytes() > 0


@pytest.mark.parametrize("tiny", ["matrix_game2_universal", "lingbot_v2_1p3b"], indirect=True)
def test_keys_change_what_is_seen_and_nothing_else_does(tiny: str) -> None:
    world, spec = load_world("tiny", "cpu"), world_spec("tiny")

    def last(text: str) -> np.ndarray:
        actions = parse_actions(text, spec.keys, spec.cache.frames_per_chunk)
        lanes = lanes_for(spec, ("bf16",))
        with Engine(world, lanes, seed=3, max_tokens=10_000) as engine:
            engine.start()
            return [engine.step(action).lanes[0].frames for action in actions][-1]

    assert np.array_equal(last("w-9"), last("w-9"))
    assert not np.array_equal(last("w-9"), last("s-9"))


@pytest.mark.parametrize("tiny", ["causal_forcing"], indirect=True)
def test_a_prompt_switch_recaches_the_cross_attention_only(tiny: str) -> None:
    world, spec = load_world("tiny", "cpu"), world_spec("tiny")
    action = parse_actions("none-3", spec.keys, 3)[0]

    def second(switch: str | None) -> np.ndarray:
        lanes = lanes_for(spec, ("bf16",))
        with Engine(world, lanes, seed=1, prompt="a walk", max_tokens=10_000) as engine:
            engine.start()
            engine.step(action)
            lane = engine._running[0].state
            history = lane.cache.history(0)[0]
            if switch is not None:
                world.change_prompt(lane, switch)
            assert torch.equal(lane.cache.history(0)[0], history)
            return engine.step(action).lanes[0].frames

    assert np.array_equal(second(None), second("a  walk"))
    assert not np.array_equal(second(None), second("through"))


@pytest.mark.parametrize("tiny", ["matrix_game2_universal"], indirect=True)
@pytest.mark.usefixtures("two_threads")
def test_play_and_replay_on_the_command_line(tiny: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "session"
    play = ["play", "--world", "tiny", "--actions", "w-6", "--lanes", "bf16", "--seed", "2",
            "--device", "cpu", "--out", str(out), "--no-video"]  # fmt: skip
    assert main(play) == 0
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert document["frames"] >= 21
    assert main(["replay", str(out), "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["bit_identical"]


@pytest.mark.parametrize("tiny", ["causal_forcing"], indirect=True)
def test_a_prompt_switch_is_recorded_and_replayed(tiny: str, tmp_path: Path, capsys) -> None:
    world, spec = load_world("tiny", "cpu"), world_spec("tiny")
    action = parse_actions("none-3", spec.keys, 3)[0]
    lanes = settings(lanes_for(spec, ("bf16", "qvg")))
    out = tmp_path / "session"
    with Engine(world, lanes, seed=1, prompt="a walk", max_tokens=10_000) as engine:
        engine.start()
        with SessionWriter(out, session_info(engine), video=False) as writer:
            for prompt in (None, "through", None):
                if prompt is not None:
                    engine.change_prompt(prompt)
                block = engine.step(action)
                assert block.prompt == prompt
                writer.write(block)
        with pytest.raises(UserError, match="at most 4,000 characters, got 10,000"):
            engine.change_prompt("a" * 10_000)
        with pytest.raises(UserError, match="the prompt is empty"):
            engine.change_prompt(" ")
        assert engine.prompt == "through", "a refused prompt changes nothing"
        assert engine.step(action).prompt is None
    assert load_session(out).prompts == {2: "through"}
    assert main(["replay", str(out), "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["bit_identical"]


@pytest.mark.parametrize("tiny", ["matrix_game2_universal"], indirect=True)
def test_weights_may_lie_anywhere(tiny: str, tmp_path: Path, capsys) -> None:
    """Moved to another disk, they are found where --weights says, and only there."""
    files.root().rename(tmp_path / "moved")
    play = ["play", "--world", "tiny", "--actions", "w-3", "--lanes", "bf16", "--device", "cpu",
            "--no-video", "--out", str(tmp_path / "session")]  # fmt: skip
    assert main(play) == 2
    assert "is missing" in capsys.readouterr().err
    moved = ["--weights", str(tmp_path / "moved")]
    assert main([*play, *moved]) == 0
    capsys.readouterr()
    assert main(["worlds", *moved]) == 0
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    found = next(world for world in document["worlds"] if world["world"] == "tiny")
    assert found["present"] and found["where"] == str(tmp_path / "moved")
    assert main(["download", "--world", "tiny", "--weights", str(Path(__file__))]) == 2
    assert "test_wan_worlds.py is a file" in capsys.readouterr().err
    files.set_root(tmp_path / "weights")
    WorldSource("tiny", folder=moved[1]).load(torch.device("cpu"))  # as a process of the report
    assert main(["evaluate-world", "--weights", str(Path(__file__))]) == 2
    assert "downloaded worlds" not in capsys.readouterr().err, "those are other weights"


@pytest.mark.parametrize("tiny", ["lingbot_v2_1p3b"], indirect=True)
def test_what_is_missing_is_named(tiny: str) -> None:
    entry = catalog.ENTRIES["tiny"]
    files.part_path(entry.parts["vae"]).unlink()
    found = world_presence("tiny")
    assert not found.present and "the vae is missing" in found.problem
    with pytest.raises(UserError, match="download it first"):
        load_world("tiny", "cpu")
    assert "CC BY-NC-SA" in registry.world_terms("tiny")
    with pytest.raises(UserError, match="only after its licence is agreed to"):
        registry.download_world("tiny", agreed=False)
    assert registry.world_terms("embedded") == ""
    with pytest.raises(UserError, match="comes with the repository"):
        registry.download_world("embedded", agreed=True)


@pytest.mark.parametrize("tiny", ["lingbot_v2_1p3b"], indirect=True)
def test_download_fetches_what_is_missing_with_progress(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    entry = catalog.ENTRIES["tiny"]
    vae = files.part_path(entry.parts["vae"])
    kept = vae.read_bytes()
    vae.unlink()
    asked = []

    def fetch(repo: str, allow_patterns: list[str], local_dir: Path) -> None:
        asked.append((repo, allow_patterns[0]))
        (local_dir / allow_patterns[0]).write_bytes(kept[: len(kept) // 2])
        assert half.wait(60), f"half had arrived and was not told: {stages}"
        (local_dir / allow_patterns[0]).write_bytes(kept)

    class Api:
        def model_info(self, repo: str, files_metadata: bool):
            names = {entry.parts["vae"].path: len(kept), "another.bin": 10**9}
            return SimpleNamespace(
                siblings=[SimpleNamespace(rfilename=n, size=s) for n, s in names.items()]
            )

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(downloads, "LOOK_SECONDS", 0.01)
    stages: list[tuple[str, float]] = []
    half = threading.Event()

    def progress(stage: str, share: float) -> None:
        stages.append((stage, share))
        if 0.4 < share < 0.6:
            half.set()

    registry.download_world("tiny", agreed=True, progress=progress)
    asked_once = [(entry.parts["vae"].repo, entry.parts["vae"].path)]
    assert asked == asked_once
    assert stages[-1][1] == 1.0 and "vae" in stages[0][0]
    shares = [share for _, share in stages[:-1]]
    assert shares == sorted(shares)
    assert world_presence("tiny").present
    vae.unlink()
    full = SimpleNamespace(free=len(kept) // 2)
    with monkeypatch.context() as small:
        small.setattr(downloads.shutil, "disk_usage", lambda path: full)
        with pytest.raises(UserError, match="GiB free: make room"):
            registry.download_world("tiny", agreed=True)
    assert asked == asked_once, "nothing was begun"
    assert main(["download", "--world", "tiny"]) == 2
    assert "add --agree" in capsys.readouterr().err and asked == asked_once
    assert main(["download", "--world", "tiny", "--agree"]) == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["present"]
    assert asked == 2 * asked_once
    assert main(["download", "--world", "embedded"]) == 0


@pytest.mark.parametrize("tiny", ["matrix_game2_universal"], indirect=True)
@pytest.mark.parametrize("client", ["httpx", "httpx2"])
def test_no_network_is_one_line(tiny: str, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever library the hub's client speaks HTTP with."""
    hub = pytest.importorskip("huggingface_hub")
    library = pytest.importorskip(client)
    files.part_path(catalog.ENTRIES["tiny"].parts["vae"]).unlink()

    class Api:
        def model_info(self, repo: str, files_metadata: bool):
            raise library.ConnectError("no such name\nand more")

    monkeypatch.setattr(hub, "HfApi", Api)
    with pytest.raises(UserError, match=r"downloaded from Skywork/.* \(no such name\)"):
        registry.download_world("tiny", agreed=True)


@pytest.mark.parametrize("tiny", ["matrix_game2_universal"], indirect=True)
def test_memory_that_ends_while_loading_is_one_line(tiny: str, monkeypatch) -> None:
    def full(*given: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")

    with monkeypatch.context() as small:
        small.setattr("quantwm.worlds.wan.entry.load_clip", full)
        with pytest.raises(UserError, match=r"does not fit into the memory .*--offload blocks"):
            load_world("tiny", "cpu")
    assert load_world("tiny", "cpu").weight_bytes() > 0


@pytest.mark.parametrize("tiny", ["lingbot_v2_1p3b"], indirect=True)
def test_main_memory_that_is_short_is_one_line(tiny: str, monkeypatch) -> None:
    """Before anything is read: else the system ends the program."""
    needed = needs.weights_by_part(catalog.ENTRIES["tiny"], 4)
    both = needed["transformer"] + needed["autoencoder"]
    with monkeypatch.context() as small:
        small.setattr("quantwm.worlds.wan.entry.free_bytes", lambda device: both - 1)
        with pytest.raises(UserError, match=r"of weights in main memory here .* smaller world"):
            load_world("tiny", "cpu")
        small.setattr("quantwm.worlds.wan.entry.free_bytes", lambda device: both)
        world = load_world("tiny", "cpu")
    with Engine(world, lanes_for(world.spec, ("bf16",)), seed=0, prompt="a walk",
                max_tokens=10_000) as engine:  # fmt: skip
        with monkeypatch.context() as small:
            small.setattr("quantwm.worlds.wan.prompts.free_bytes", lambda device: 1000)
            with pytest.raises(UserError, match=r"text encoder needs .* for a moment"):
                engine.start()
        engine.start()


@pytest.mark.parametrize("tiny", ["lingbot_v2_1p3b"], indirect=True)
def test_parts_of_another_world_are_one_line(tiny: str) -> None:
    """Each is a whole and honest file by itself."""
    entry = catalog.ENTRIES["tiny"]
    text = files.part_path(entry.parts["text"])
    kept = text.read_bytes()
    other = Umt5Encoder(replace(UMT5, width=16, attention_width=16))
    torch.save(dict(random_(other).state_dict()), text)
    with Engine(load_world("tiny", "cpu"), lanes_for(entry.spec(), ("bf16",)), seed=0,
                prompt="a walk", max_tokens=10_000) as engine:  # fmt: skip
        with pytest.raises(UserError, match="features have 16 channels, the transformer takes 32"):
            engine.start()
        text.write_bytes(kept)
        engine.start()
    vae = dict(random_(WanVae(VAE_22)).state_dict())
    torch.save(vae, files.part_path(entry.parts["vae"]))
    with pytest.raises(UserError, match="16 channels and 8 pixels a cell, the file holds"):
        load_world("tiny", "cpu")


@pytest.mark.parametrize("tiny", ["lingbot_v2_1p3b"], indirect=True)
def test_another_size_or_family_is_refused(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = catalog.ENTRIES["tiny"]
    for change, message in (
        ({"config": replace(entry.config, layers=5)}, "choose the other size"),
        ({"config": replace(entry.config, in_channels=20)}, "has in_channels 20, the file 36"),
        ({"family": "causal_forcing"}, "is lingbot_world_v2, not causal_forcing"),
    ):
        monkeypatch.setitem(catalog.ENTRIES, "tiny", replace(entry, **change))
        with pytest.raises(UserError, match=message):
            load_world("tiny", "cpu")


@pytest.mark.parametrize("tiny", ["matrix_game2_universal"], indirect=True)
def test_bad_pictures_and_prompts_are_one_line(tiny: str) -> None:
    world = load_world("tiny", "cpu")
    for bad in (np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3))):
        with pytest.raises(UserError, match="a start picture is"):
            world.start(None, bad, "", 0)
    with pytest.raises(UserError, match="unknown scene"):
        world.start("x", None, "", 0)
    assert world.start(None, np.zeros((3, 4000, 3), np.uint8), "", 0).frames.shape[1:] == (
        32, 48, 3,
    )  # fmt: skip


@pytest.mark.parametrize("tiny", ["hy_worldplay_wan5b", "hy_worldplay_wan5b_append"], indirect=True)
def test_a_memory_is_planned_as_it_is_held(tiny: str) -> None:
    spec = world_spec("tiny")
    lanes = settings(lanes_for(spec, ("qvg",)))
    if tiny.endswith("append"):
        lanes = [replace(lanes[0], policy=replace(lanes[0].policy, window_frames=20))]
    with Engine(
        load_world("tiny", "cpu"), lanes, seed=3, prompt="a walk", max_tokens=10_000
    ) as engine:
        engine.start()
        for action in parse_actions("w-20", spec.keys, spec.cache.frames_per_chunk):
            engine.step(action)
        held = engine.caches["qvg"].ledger().parts
    assert plan_lanes(spec.cache, lanes, 4, remade=spec.remade).methods[0].bytes == held


def test_every_entry_is_listed_and_its_needs_are_known() -> None:
    assert set(catalog.ENTRIES) == set(registry.WORLDS) - {"embedded"}
    lanes = ("bf16", "qvg", "quantwm")
    for name, entry in catalog.ENTRIES.items():
        found = needs.room(entry, lanes)
        weights = needs.weights_by_part(entry)
        assert weights["transformer"] == 2 * sum(
            p.numel() for p in needs.on_meta(lambda e=entry: needs.CausalWan(e.config)).parameters()
        )
        assert found.weights == sum(weights.values()) > found.least > 0
        assert found.caches["quantwm"] < found.caches["bf16"]
        gpu = torch.device("cuda")
        fitting = rooms.fit(name, lanes, gpu, 2**41)
        assert (fitting.lanes, fitting.offload, fitting.advice) == (lanes, False, None)
        assert min(found.working, found.streaming) > 2**30, "more than most caches"
        leanest = min(lanes, key=lambda lane: found.total((lane,)))
        some = rooms.fit(name, lanes, gpu, found.total((leanest,)))
        assert len(some.lanes) == 1 and not some.offload
        assert f"lanes {some.lanes[0]}" in some.advice and "\n" not in some.advice
        least = found.total((leanest,), offload=True)
        less = rooms.fit(name, lanes, gpu, least)
        assert less.offload and "--offload blocks" in less.advice
        nothing = rooms.fit(name, lanes, gpu, least - 1)
        assert nothing.lanes == () and "smaller world" in nothing.advice
    assert memory_frames.WAN_5B.frames == 16


def test_prompts_are_looked_at_before_anything_is_loaded(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = ["play", "--actions", "none-4", "--max-tokens", "90000", "--no-video"]
    for world, prompt, says in (
        ("matrix_game2_universal", "a walk", "takes no prompt"),
        ("causal_forcing", "x" * 10_000, "at most 4,000 characters, got 10,000"),
        ("causal_forcing", "&nbsp;", "is empty"),
    ):
        assert main([*play, "--world", world, "--prompt", prompt]) == 2
        assert says in capsys.readouterr().err
    monkeypatch.setattr(files, "_root", tmp_path)
    asked = [*play, "--world", "causal_forcing", "--out", str(tmp_path / "session")]
    assert main(asked) == 2
    assert "the world's own is used" in capsys.readouterr().err
