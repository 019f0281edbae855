"""The decoder's own stage: its critic, its losses, its check, and the command on a toy."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quantwm.errors import UserError
from quantwm.metrics import sharpness, temporal_difference
from quantwm.worlds.embedded.autoencoder import Autoencoder
from quantwm.worlds.embedded.config import KEYS, PRESETS
from quantwm.worlds.embedded.transformer import Transformer
from quantwm.worlds.embedded.weights import load_models, read_manifest, save_models
from training.decoder_check import (
    DecoderCheckConfig,
    _change,
    _energy,
    as_shipped,
    distance,
    is_fit,
    need_frames,
)
from training.decoder_step import (
    DecoderBatch,
    DecoderTrainer,
    DecoderTraining,
    anchor_error,
    known_error,
    push_scales,
)
from training.frames import episode_path
from training.picture_critic import (
    PictureCritic,
    PictureCriticConfig,
    critic_hinge,
    edge_distance,
    edge_strengths,
    grid_error,
    phase_strengths,
)
from training.plans import QUICK_WORLD
from training.report import one_run, switches
from training.train_decoder import main, parse, run, schedule

SMALL = PictureCriticConfig(widths=(8, 16, 16))


def textured_pairs(count: int, seed: int) -> torch.Tensor:
    """Hard random squares, the second of each pair moved by 2 pixels: [N, 2, 3, 48, 64]."""
    noise = torch.rand(count, 3, 12, 18, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    wide = F.interpolate(noise, scale_factor=4.0)
    return torch.stack((wide[..., :64], wide[..., 2:66]), dim=1)[..., :48, :]


def blurred(pairs: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(pairs.flatten(0, 1), 5, stride=1, padding=2).unflatten(0, (-1, 2))


def train_critic(fake) -> float:
    """Share of right scores on pairs it never saw, after 40 steps."""
    torch.manual_seed(0)
    critic = PictureCritic(SMALL)
    adam = torch.optim.AdamW(critic.parameters(), lr=3e-3, betas=(0.0, 0.99))
    for step in range(40):
        real = textured_pairs(4, step)
        loss, _ = critic_hinge(critic, real, fake(real))
        adam.zero_grad()
        loss.backward()
        adam.step()
    real = textured_pairs(8, 1000)
    return float(critic_hinge(critic, real, fake(real))[1])


def test_critic_tells_sharp_from_blurred_and_still_texture_from_moving():
    assert train_critic(blurred) > 0.9
    assert train_critic(lambda pairs: pairs[:, :1].expand_as(pairs)) > 0.75
    assert train_critic(lambda pairs: pairs) == pytest.approx(0.5, abs=0.01)


def test_edges_are_compared_wherever_they_lie():
    sharp = textured_pairs(4, 1)[:, 0]
    assert float(edge_distance(sharp.flip(3), sharp)) < 0.02
    soft = blurred(textured_pairs(4, 1))[:, 0].requires_grad_(True)
    distance_before = edge_distance(soft, sharp)
    distance_before.backward()
    nearer = edge_distance(soft - 20 * soft.grad, sharp)
    assert nearer.item() < distance_before.item()
    assert edge_strengths(torch.full((1, 3, 16, 16), 0.3)).max() < 2e-3


def test_anchor_sees_colour_and_not_texture():
    flat = torch.zeros(1, 3, 16, 16)
    squares = F.avg_pool2d(flat, 4)
    stripes = flat.clone()
    stripes[..., ::2], stripes[..., 1::2] = 0.5, -0.5
    assert float(anchor_error(stripes, squares)) == 0.0
    assert float(anchor_error(flat + 0.1, squares)) == pytest.approx(0.1)


def test_edges_at_the_latents_grid_are_seen():
    noise = torch.randn(8, 3, 48, 64, generator=torch.Generator().manual_seed(0))
    assert (phase_strengths(noise) - 1).abs().max() < 0.1
    blocks = F.interpolate(noise[..., :6, :8], scale_factor=8.0)
    assert phase_strengths(blocks)[:, 7].min() == pytest.approx(8.0)
    assert grid_error(noise) < 0.01 < grid_error(0.5 * noise + blocks)


def test_truth_counts_only_where_it_is_known_and_was_drawn():
    shown = torch.zeros(1, 3, 16, 16)
    drawn = torch.zeros(1, 3, 16, 16)
    drawn[..., 8:] = 0.5
    known = torch.tensor([[True, True]])
    noisy = shown + 0.05
    # the right half was drawn as something else than the truth, so only the left one counts
    error = known_error(noisy, shown, F.avg_pool2d(drawn, 4), known)
    assert float(error) == pytest.approx(0.025)
    assert float(known_error(noisy, shown, F.avg_pool2d(shown, 4), ~known)) == 0.0


def test_push_is_a_share_of_the_errors_gradient():
    gradient, pushed = torch.ones(2, 3, 4, 4), torch.randn(6, 3, 4, 4)
    scales = push_scales(gradient, pushed, (0.5, 1.0))
    of_true, of_drifted = (scales[0] * pushed[:2]).norm(), (scales[1] * pushed[2:]).norm()
    assert float(of_true) == pytest.approx(0.5 * float(gradient.norm()), rel=1e-5)
    # a mean over twice as many pictures: the gradient at each is half as long
    per_picture = float(gradient.norm()) * 2**0.5 / 4**0.5
    assert float(of_drifted) == pytest.approx(per_picture, rel=1e-5)


def toy_batch(model: Autoencoder, pairs: int = 2) -> DecoderBatch:
    pictures = textured_pairs(pairs, 5)[..., :32, :48]
    frames = ((pictures + 1) * 127.5).to(torch.uint8).permute(0, 1, 3, 4, 2).contiguous()
    with torch.no_grad():
        latents = model.encode(blurred(pictures).flatten(0, 1))
        squares = F.avg_pool2d(model.decode(latents), 4).unflatten(0, (-1, 2))
    latents = latents.unflatten(0, (-1, 2))
    known = torch.zeros(pairs, 2, latents.shape[-1], dtype=torch.bool)
    return DecoderBatch(frames, latents, frames.clone(), squares, known)


@pytest.fixture
def trainer() -> DecoderTrainer:
    torch.manual_seed(2)
    model = Autoencoder(PRESETS["tiny"].autoencoder)
    config = DecoderTraining(critic=SMALL, lr=1e-3, anchor=20.0)
    return DecoderTrainer(model, config, toy_batch(model), seed=0)


def test_step_moves_the_decoder_alone_and_keeps_coarse_means(trainer):
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.set_rates(1.0, 1.0, 1.0)
    for _ in range(20):
        values = trainer.step()
    assert all(bool(torch.isfinite(value)) for value in values)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name]) == (not name.startswith("decoder"))
    with torch.no_grad():
        drawn = trainer.model.decode(trainer.batch.drifted.flatten(0, 1))
    assert float(anchor_error(drawn, trainer.batch.squares.flatten(0, 1))) < 0.05


def test_going_back_restores_what_was_kept(trainer):
    trainer.set_rates(1.0, 1.0, 1.0)
    trainer.step()
    trainer.keep()
    kept = [value.clone() for value in trainer._tensors()]
    with torch.no_grad():
        trainer.model.decoder[0].weight.fill_(float("nan"))
    trainer.step()
    trainer.back()
    assert all(torch.equal(a, b) for a, b in zip(trainer._tensors(), kept, strict=True))
    assert all(bool(torch.isfinite(value)) for value in trainer.step())


def test_critic_learns_alone_at_first():
    training = DecoderTraining(warmup=0.1, ramp=0.2)
    assert schedule(training, 1000, 0.05)[1] == 0.0
    assert schedule(training, 1000, 0.2)[1] == pytest.approx(0.5)
    assert schedule(training, 1000, 0.5)[1] == 1.0


def test_limits_of_a_decoder_and_what_is_best():
    config = DecoderCheckConfig()
    before = {
        "autoencoder_psnr": 35.4, "free_energy": 0.35, "free_change": 0.9, "still_change": 0.7,
        "free_8_psnr": 28.0, "free_grid": 0.1,
    }  # fmt: skip
    good = before | {"free_energy": 0.8, "still_change": 0.9}
    assert is_fit(good, before, config)
    for bad in (
        {"autoencoder_psnr": 34.2}, {"free_change": 1.2}, {"still_change": 1.3},
        {"free_8_psnr": 26.0}, {"free_grid": 0.3}, {"autoencoder_psnr": float("nan")},
    ):  # fmt: skip
        assert not is_fit(good | bad, before, config)
    assert distance(good) < distance(before)
    assert distance({"free_energy": 0.95}, near=0.1) == distance({"free_energy": 1.0}, near=0.1)
    assert distance({"free_energy": 2.0}) == pytest.approx(distance({"free_energy": 0.5}))
    assert is_fit({**good, "autoencoder_psnr": 32.2}, {**before, "autoencoder_psnr": 33.0}, config)


def test_measures_are_those_of_the_acceptance_table():
    frames = np.random.default_rng(0).integers(0, 256, (4, 24, 32, 3), dtype=np.uint8)
    tensor = torch.from_numpy(frames)
    assert float(_energy(tensor)) == pytest.approx(sharpness(frames).mean(), rel=1e-5)
    assert float(_change(tensor)) == pytest.approx(temporal_difference(frames).mean(), rel=1e-5)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Weights of the toy world and two folders of random episodes."""
    folder = tmp_path_factory.mktemp("decoder")
    torch.manual_seed(0)
    transformer = Transformer(QUICK_WORLD.transformer)
    transformer.init_weights(torch.Generator().manual_seed(0))
    autoencoder = Autoencoder(QUICK_WORLD.autoencoder)
    facts = {"command": "an earlier run", "data": "noise", "metrics": {"x": 1}}
    save_models(folder / "weights", QUICK_WORLD, transformer, autoencoder, facts)
    rng = np.random.default_rng(0)
    for name, count, first in (("frames", 2, 10_000), ("unseen", 2, 1_000_000)):
        for number in range(count):
            coarse = rng.integers(0, 256, (40, 12, 16, 3), dtype=np.uint8)
            frames = coarse.repeat(8, axis=1).repeat(8, axis=2)
            keys = rng.integers(0, 2, (40, len(KEYS)), dtype=np.uint8)
            path = episode_path(folder / name, first + number)
            path.parent.mkdir(exist_ok=True)
            np.savez(path, frames=frames, keys=keys)
    return folder


def arguments(toy, out, *more: str) -> list[str]:
    return [
        "--quick", "--device", "cpu", "--weights", str(toy / "weights"), "--out", str(out),
        "--episodes", str(toy / "frames"), "--unseen", str(toy / "unseen"), *more,
    ]  # fmt: skip


def test_the_stage_changes_pictures_and_nothing_else(toy, tmp_path, monkeypatch):
    words = arguments(toy, tmp_path / "out", "--minutes", "0.15", "--seed", "3")
    monkeypatch.setattr("sys.argv", ["train_decoder", *words])
    main()
    before, after = (read_manifest(folder) for folder in (toy / "weights", tmp_path / "out"))
    facts = after.training
    assert facts["continued_from"] == dict(before.training)
    assert facts["steps"] > 0 and "--weights WEIGHTS" in facts["command"]
    assert str(toy) not in json.dumps(facts)
    assert {"before", "free_energy", "autoencoder_psnr", "best_step"} <= set(facts["metrics"])
    told = "\n".join(one_run(after))
    assert f"{facts['steps']} steps, energy of free frames" in told and "| transformer" not in told
    assert "2 unseen maps, 2 steps, 16 free frames:" in told and "* `an earlier run`" in told
    was, now = (where["free_energy"] for where in (facts["metrics"]["before"], facts["metrics"]))
    assert f"over the truth's | {was} to {now} |" in told
    assert switches(facts["command"]) == "`decoder alone --quick --device cpu --seed 3`"
    models = [load_models(m, torch.device("cpu"), torch.float32) for m in (before, after)]
    for old, new in zip(*models, strict=True):
        theirs = new.state_dict()
        for name, value in old.state_dict().items():
            assert torch.equal(value, theirs[name]) or name.startswith("decoder.")
    stages = [json.loads(row)["stage"] for row in
              (tmp_path / "out" / "decoder-log.jsonl").read_text().splitlines()]  # fmt: skip
    assert {"start", "decoder before", "rolled out", "decoder measured", "decoder done"} <= set(
        stages
    )
    assert (tmp_path / "out" / "grid-decoder.png").is_file()


def test_what_ships_is_rounded_and_its_latents_statistics_are_not():
    torch.manual_seed(1)
    model = Autoencoder(PRESETS["tiny"].autoencoder)
    model.latent_std.fill_(1.2345678)
    copied = as_shipped(model)
    weight = model.decoder[0].weight
    assert torch.equal(copied.decoder[0].weight, weight.to(torch.bfloat16).float())
    assert torch.equal(copied.latent_std, model.latent_std)
    assert not torch.equal(model.decoder[0].weight, copied.decoder[0].weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--minutes", "0"], "--minutes must be 0.1 to"),
        (["--count", "0"], "--count must be at least 1"),
        (["--episodes", "EMPTY"], "no episodes in"),
        (["--unseen", "EMPTY"], "no episodes in"),
        (["--weights", "EMPTY"], "weights of the embedded world not found"),
        (["--out", "WEIGHTS"], "--out must be another folder than --weights"),
    ],
)
def test_mistakes_are_one_line(toy, tmp_path, monkeypatch, change, message):
    folders = {"EMPTY": str(tmp_path / "empty"), "WEIGHTS": str(toy / "weights")}
    (tmp_path / "empty").mkdir()
    words = arguments(toy, tmp_path / "out", *(folders.get(word, word) for word in change))
    monkeypatch.setattr("sys.argv", ["train_decoder", *words])
    with pytest.raises(UserError, match=message) as raised:
        main()
    assert "\n" not in str(raised.value)


def test_rollouts_need_long_enough_episodes(toy, tmp_path):
    args = parse([word for word in arguments(toy, tmp_path / "out") if word != "--quick"])
    with pytest.raises(UserError, match=r"of 256 frames need .*training\.frames --length 256"):
        run(args)
    short = torch.zeros(1, 11, 96, 128, 3, dtype=torch.uint8)
    need_frames(short, DecoderCheckConfig(context_chunks=1), per_chunk=4)
    with pytest.raises(UserError, match="unseen episodes need at least 12 frames, these have 11"):
        need_frames(short, DecoderCheckConfig(context_chunks=2), per_chunk=4)
