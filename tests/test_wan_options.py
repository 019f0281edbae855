"""What a large world may be told: tiles, weights that wait on the CPU, start pictures, room."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from test_wan_vae import make
from wan_helpers import CELLS, GRID, LATENT, make_cache, make_model
from wan_tiny import actions_of, tiny  # noqa: F401  (a fixture)

from quantwm.actions import parse_actions
from quantwm.engine import Engine
from quantwm.errors import UserError
from quantwm.lanes import lanes_for
from quantwm.worlds import registry, room
from quantwm.worlds.registry import Placement, load_world, world_prompts, world_scenes, world_spec
from quantwm.worlds.wan import catalog, entry, matrix_actions, needs, offload, presets
from quantwm.worlds.wan.action_module import action_windows
from quantwm.worlds.wan.rolling import RollingForcing
from quantwm.worlds.wan.self_forcing import Conditions, SelfForcing
from quantwm.worlds.wan.tiling import TileStates, _ramp, decode_tiled, starts
from quantwm.worlds.wan.world import extra_list, step_noise


@pytest.mark.parametrize(("size", "tile"), [(90, 32), (60, 60), (33, 32), (160, 48), (17, 16)])
def test_tiles_cover_a_side_and_overlap(size: int, tile: int) -> None:
    found = starts(size, tile)
    assert found[0] == 0 and found[-1] + min(tile, size) == size
    assert all(b - a <= tile - tile // 4 for a, b in pairwise(found))
    whole = torch.zeros(size * 8)
    for start in found:
        ramp = _ramp(start, tile, size, 8)
        assert (ramp > 0).all()
        whole[start * 8 : start * 8 + len(ramp)] += ramp
    assert (whole > 0.05).all()


@pytest.mark.parametrize("name", ["2.1", "2.2"])
def test_one_tile_is_the_whole_frame_and_streams_as_it(name: str) -> None:
    vae = make(name)
    latents = torch.randn(vae.config.latent_channels, 3, 4, 6)
    states, state = TileStates(), {}
    for piece in latents.split(1, dim=1):
        tiled = decode_tiled(vae.decode, piece, states, 16, vae.config.stride)
        assert torch.equal(tiled, vae.decode(piece, state))


def test_tiles_equal_the_whole_away_from_the_blend() -> None:
    """Without its attention, which sees a whole frame, the decoder reaches 17 latent cells."""
    vae = make("2.1")
    for name, parameter in vae.named_parameters():
        if "attentions" in name and "proj" in name:
            parameter.zero_()
    latents = torch.randn(vae.config.latent_channels, 2, 2, 112)
    tile, stride, reach = 64, vae.config.stride, 18
    second = starts(112, tile)[1]
    exact = [slice(0, (tile - reach) * stride), slice((second + reach) * stride, None)]
    mixed = slice(exact[0].stop, exact[1].start)
    states, whole = TileStates(), {}
    for piece in latents.split(1, dim=1):
        tiled = decode_tiled(vae.decode, piece, states, tile, stride)
        untiled = vae.decode(piece, whole)
        for some in exact:
            torch.testing.assert_close(tiled[..., some], untiled[..., some], rtol=0, atol=1e-5)
        off = (tiled - untiled)[..., mixed].abs().mean() / untiled.std()
        assert 0 < off < 0.2, "mixed, not cut"


@pytest.mark.parametrize("tiny", ["causal_forcing"], indirect=True)
def test_a_tiled_world_shows_the_same_video(tiny: str) -> None:  # noqa: F811
    """Its tiny frame fits into one tile, so every pixel is the same."""
    spec = world_spec("tiny")
    action = parse_actions("none-3", spec.keys, 3)[0]

    def video(placement: Placement) -> list[np.ndarray]:
        world = load_world("tiny", "cpu", placement=placement)
        with Engine(world, lanes_for(spec, ("bf16",)), seed=1, max_tokens=10_000) as engine:
            engine.start()
            return [engine.step(action).lanes[0].frames for _ in range(2)]

    plain = video(Placement())
    for other in (Placement(tile=16), Placement("vae"), Placement("blocks")):
        for one, two in zip(plain, video(other), strict=True):
            assert np.array_equal(one, two), other


def test_blocks_visit_one_at_a_time_and_leave() -> None:
    model = make_model()
    context = model.context_kv(torch.randn(5, 32))
    latents = torch.randn(3, 16, *LATENT)
    driver = SelfForcing(model, make_cache(model), context, GRID)
    plain = driver.commit(0, latents, Conditions())
    visits = offload.offload_blocks(model, torch.device("cpu"))
    seen: list[int] = []

    def away(block) -> int:
        """Parameters that are not at home."""
        home = visits._homes.get(block)
        views = [p.data for p in block.parameters()] if home is None else home.views
        pairs = zip(block.parameters(), views, strict=True)
        return sum(p.data_ptr() != view.data_ptr() for p, view in pairs)

    def watch(block, *_):
        assert all(p.data_ptr() % 16 == 0 for p in block.parameters())
        assert away(block) == len(list(block.parameters()))
        seen.append(sum(away(other) > 0 for other in model.blocks))

    for block in model.blocks:
        block.register_forward_pre_hook(watch)
    again = SelfForcing(model, make_cache(model), model.context_kv(torch.randn(5, 32)), GRID)
    again.context = context
    assert torch.equal(again.commit(0, latents, Conditions()), plain)
    assert seen == [1] * model.config.layers
    assert not any(map(away, model.blocks))
    for block in model.blocks:
        storages = {p.untyped_storage().data_ptr() for p in block.parameters()}
        own = sum(p.nbytes for p in block.parameters())
        assert len(storages) == 1 and own <= visits._homes[block].storage.nbytes < own + 2**14
    assert visits.count == 2 * model.config.layers, "context and pass"


@pytest.mark.parametrize("tiny", ["matrix_game2_universal"], indirect=True)
def test_start_pictures_that_ship(tiny: str) -> None:  # noqa: F811
    world, spec = load_world("tiny", "cpu"), world_spec("tiny")
    scenes = world_scenes("tiny")
    assert [scene.name for scene in scenes] == list(presets.PLACES)
    assert all(Path(scene.thumbnail).is_file() for scene in scenes)
    shown = {world.start(scene.name, None, "", 0).frames.tobytes() for scene in scenes}
    assert len(shown) == len(scenes)
    with pytest.raises(UserError, match="unknown scene 'moon'; there are lane"):
        world.start("moon", None, "", 0)
    assert world_prompts("tiny") == () and world_prompts("embedded") == ()
    assert len(world_prompts("lingbot_v2_1p3b")) >= 3
    assert actions_of(tiny) and spec.keys


def test_pictures_are_drawn_at_any_size_and_alike() -> None:
    for name in presets.PLACES:
        large, small = (presets.scene_picture(name, size) for size in ((640, 352), (64, 36)))
        assert large.shape == (352, 640, 3) and small.shape == (36, 64, 3)
        assert large.std() > 10, "something is to be seen"
        assert abs(large.mean() - small.mean()) < 8


def test_a_gpu_that_is_too_small_gets_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(room, "capacity_of", lambda device: 24 * 2**30)
    with pytest.raises(UserError, match=r"this device has 24\.0 GiB.*--offload blocks") as caught:
        room.require_room("lingbot_v2_14b", ("bf16", "quantwm"), gpu, offload=False)
    assert "\n" not in str(caught.value)
    room.require_room("matrix_game2_universal", ("bf16", "qvg", "quantwm"), gpu, offload=False)
    monkeypatch.setattr(room, "capacity_of", lambda device: 2 * 2**30)
    with pytest.raises(UserError, match="take a smaller world or a larger device"):
        room.require_room("lingbot_v2_14b", ("quantwm",), gpu, offload=True)
    monkeypatch.setattr(entry, "capacity_of", lambda device: 2 * 2**30)
    monkeypatch.setattr(entry.files, "require", lambda entry: None)
    with pytest.raises(UserError, match="smaller world"):
        load_world("lingbot_v2_14b", gpu, placement=Placement())


@pytest.mark.parametrize("tiny", ["matrix_game2_gta_drive"], indirect=True)
def test_action_rows_of_a_window_are_those_of_the_whole_rollout(tiny: str) -> None:  # noqa: F811
    """A session of an hour must not build an hour of rows for every chunk."""
    world, spec = load_world("tiny", "cpu"), world_spec("tiny")
    size, config = spec.cache.frames_per_chunk, world.model.config.action
    actions = parse_actions("w-4, w+a-3, d-2, none-3, s-6", spec.keys, size)
    frames = [keys for action in actions for keys in action.frames]
    whole = matrix_actions.action_rows("gta_drive", frames, 0)[0]
    with Engine(world, lanes_for(spec, ("bf16",)), seed=3, max_tokens=10_000) as engine:
        engine.start()
        lane = engine._running[0].state
        for action in actions:
            first, held = lane.next_frame, extra_list(lane.extra, "held")
            given = world._keyed(torch.zeros(0), held, action, first)
            assert len(given.keyboard) <= 4 * (config.window + size)
            mine = action_windows(given.keyboard, first, size, config, given.first_row)
            assert torch.equal(mine, action_windows(whole, first, size, config)), first
            engine.step(action)


@pytest.mark.parametrize("tiny", ["causal_forcing_long"], indirect=True)
def test_long_video_chunk_by_chunk_equals_the_whole_rollout(tiny: str) -> None:  # noqa: F811
    """Under the same noise; a whole rollout's last three chunks have fewer behind them."""
    world, spec = load_world("tiny", "cpu"), world_spec("tiny")
    size, chunks, seed = spec.cache.frames_per_chunk, 7, 5
    shape = (size, *spec.latent_shape)
    action = parse_actions("none-3", spec.keys, size)[0]
    seen = []
    with Engine(world, lanes_for(spec, ("bf16",)), seed=seed, max_tokens=10_000) as engine:
        engine.start()
        for index in range(chunks - 3):
            if index == 1:
                # Asked for twice, as after a failed decode: the flight must not have moved on.
                lane = engine._running[0].state
                world.generate_chunk(lane, action, torch.zeros(shape), 4)
            seen.append(engine.step(action).x0["bf16"][-1])
        driver = world._driver(engine._running[0].state)
    cache = make_cache(world.model, size, window=24, sink=3, cells=CELLS)
    whole = RollingForcing(
        world.model, cache, driver.context, world.grid, driver.steps, driver.rule
    )
    noise = torch.cat([step_noise(seed, index * size, 0, shape) for index in range(chunks)])
    latents, _ = whole.run(
        noise, lambda window, chunk: step_noise(seed, chunk * size, window - chunk + 1, shape)
    )
    torch.testing.assert_close(torch.cat(seen), latents[: len(seen) * size], rtol=0, atol=2e-4)


def test_placements_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="offload is one of auto, none, vae, blocks"):
        Placement("everything")
    for tile in (8, 4096, True):
        with pytest.raises(UserError, match="16 to 1024"):
            Placement(tile=tile)
    with pytest.raises(UserError, match="nothing to offload"):
        load_world("embedded", "cpu", placement=Placement("blocks"))


def test_every_driven_world_takes_the_same_action_strings() -> None:
    text = "w-8, right-12, w+right-4, s+left-2, a-1, d-1, up-2, down-2, none-4"
    for name in registry.WORLDS:
        spec = registry.world_spec(name)
        if spec.keys:
            parsed = parse_actions(text, spec.keys, spec.cache.frames_per_chunk)
            assert sum(len(action.frames) for action in parsed) >= 36, name


@pytest.mark.parametrize(
    ("mode", "arrow", "letter"),
    [("gta_drive", "up", "w"), ("gta_drive", "down", "s"), ("gta_drive", "left", "a"),
     ("gta_drive", "right", "d"), ("templerun", "up", "w"), ("templerun", "down", "s")],
)  # fmt: skip
def test_keys_that_stand_for_others(mode: str, arrow: str, letter: str) -> None:
    one, other = (matrix_actions.action_row(mode, frozenset({key})) for key in (arrow, letter))
    assert one == other != matrix_actions.action_row(mode, frozenset())


@pytest.mark.parametrize(
    ("name", "lanes", "gib"),
    [("lingbot_v2_1p3b", ("bf16",), 14.05), ("causal_forcing", ("qvg",), 11.27),
     ("hy_worldplay_wan5b", ("quantwm",), 24.97),
     ("matrix_game2_universal", ("bf16", "qvg", "quantwm"), 13.64)],
)  # fmt: skip
def test_needs_are_the_peaks_of_an_h200(name: str, lanes: tuple[str, ...], gib: float) -> None:
    """docs/models.md, 2026-11-30."""
    found = needs.room(catalog.ENTRIES[name], lanes).total(lanes) / 2**30
    assert found == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize("tiny", ["lingbot_v2_1p3b"], indirect=True)
def test_a_text_encoder_without_room_beside_the_transformer_comes_first(
    tiny: str,  # noqa: F811
    monkeypatch,
) -> None:
    own, cpu, stages = catalog.ENTRIES["tiny"], torch.device("cpu"), []
    both = sum(needs.weights_by_part(own, 4).values())
    for free in (both, both + 2 * needs.text_encoder_bytes(own)):
        monkeypatch.setattr("quantwm.worlds.wan.entry.free_bytes", lambda device, free=free: free)
        placement = Placement(prompt="a walk")
        world = load_world("tiny", cpu, lambda stage, _: stages.append(stage), placement=placement)
        world.report = lambda stage, _: stages.append(stage)
        stages.append("start")
        with Engine(world, lanes_for(world.spec, ("bf16",)), seed=0, prompt="a walk",
                    max_tokens=10_000) as engine:  # fmt: skip
            engine.start()
    text, start = "Loading the text encoder", stages.index("start")
    assert stages.index(text) < stages.index("Loading the transformer") < start
    assert stages.index(text, start) > stages.index("start", start + 1), "read once, and released"
