"""Tiny random checkpoints of every Wan family, written as their repositories hold them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_wan_encoders import UMT5, original_clip, transformers_name
from test_wan_loading import CONFIGS
from test_wan_vae import original_name
from wan_helpers import make_model, tiny_action, upstream_weights

from quantwm.worlds import registry
from quantwm.worlds.wan import catalog, files, memory_world
from quantwm.worlds.wan import world as world_module
from quantwm.worlds.wan.clip import ClipConfig, ClipVision
from quantwm.worlds.wan.umt5 import Umt5Encoder
from quantwm.worlds.wan.vae import VaeConfig, WanVae

VAE_21 = VaeConfig(base=4, decoder_base=4)
VAE_22 = VaeConfig(
    base=4, decoder_base=4, latent_channels=16, resnets=1, residual=True,
    mean=(0.0,) * 16, std=(1.0,) * 16,
)  # fmt: skip
WORLDS = {
    "causal_forcing": CONFIGS["causal_forcing"],
    "causal_forcing_framewise": CONFIGS["causal_forcing"],
    "causal_forcing_long": CONFIGS["causal_forcing"],
    "matrix_game2_universal": replace(
        CONFIGS["matrix_game2_universal"], context_dim=160, context_len=5
    ),
    "matrix_game2_gta_drive": replace(
        CONFIGS["matrix_game2_universal"], context_dim=160, context_len=5,
        action=tiny_action(keys=2),
    ),
    "matrix_game2_templerun": replace(
        CONFIGS["matrix_game2_templerun"], context_dim=160, context_len=5
    ),
    "lingbot_v2_1p3b": CONFIGS["lingbot_world_v2"],
    "lingbot_v2_14b": CONFIGS["lingbot_world_v2"],
    "hy_worldplay_wan5b": CONFIGS["hy_worldplay_wan5b"],
    "hy_worldplay_wan5b_append": CONFIGS["hy_worldplay_wan5b"],
}  # fmt: skip
ACTIONS = {"gta_drive": "w-3, w+a-4", "templerun": "w-3, left-4"}


def random_(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(4)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module.requires_grad_(False)


def write_shards(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Two files and their index, as large models are published."""
    folder.mkdir()
    names, where = sorted(weights), {}
    for number, own in enumerate((names[::2], names[1::2]), 1):
        file = f"diffusion_pytorch_model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in own}, folder / file)
        where |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def write_parts(entry: catalog.Entry, original: str = "") -> None:
    """The files of a world, as its repositories hold them. original: the published world's name."""
    for name, part in entry.parts.items():
        path = files.part_path(part)
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == "transformer":
            weights = upstream_weights(make_model(entry.config))
            if path.suffix:
                torch.save({"generator": weights, "generator_ema": weights}, path)
            elif original == "lingbot_v2_14b":
                write_shards(weights, path)
            else:
                path.mkdir()
                save_file(weights, path / "weights.safetensors")
        elif name == "vae":
            weights = random_(WanVae(entry.vae)).state_dict()
            if path.suffix:
                torch.save({original_name(k): v for k, v in weights.items()}, path)
            else:
                path.mkdir()
                save_file(weights, path / "diffusion_pytorch_model.safetensors")
                mean, std = list(entry.vae.mean), list(entry.vae.std)
                (path / "config.json").write_text(
                    json.dumps({"latents_mean": mean, "latents_std": std})
                )
        elif name == "text":
            weights = random_(Umt5Encoder(UMT5)).state_dict()
            if path.suffix:
                torch.save(weights, path)
            else:
                path.mkdir()
                named = {transformers_name(k): v.clone() for k, v in weights.items()}
                named["encoder.embed_tokens.weight"] = named["shared.weight"].clone()
                save_file(named, path / "model.safetensors")
        elif name == "clip":
            tower = ClipVision(ClipConfig(width=160, heads=2, layers=2, hidden=64, rows=5))
            torch.save(original_clip(dict(random_(tower).state_dict())), path)
        else:
            write_tokenizer(path)


def write_tokenizer(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir()
    vocabulary = {"<unk>": 0, "a": 1, "walk": 2, "through": 3}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A tiny world in the registry under "tiny", its files in a folder of the test."""
    name = request.param
    original = catalog.ENTRIES[name]
    config = WORLDS[name]
    if config.context == "text":
        config = replace(config, context_len=512)
    entry = replace(
        original,
        name="tiny",
        config=config,
        vae=VAE_22 if original.kind == "memory" else VAE_21,
        latent=(4, 6),
    )
    before = files.root()
    files.set_root(tmp_path / "weights")
    request.addfinalizer(lambda: files.set_root(before))
    monkeypatch.setattr(memory_world, "POINTS", 200)
    monkeypatch.setattr(world_module, "CONDITION_LATENTS", 3)  # 9 video frames to encode
    monkeypatch.setitem(catalog.ENTRIES, "tiny", entry)
    monkeypatch.setitem(registry.WORLDS, "tiny", "quantwm.worlds.wan.entry:tiny")
    write_parts(entry, name)
    return name


def actions_of(name: str) -> str:
    return ACTIONS.get(name.removeprefix("matrix_game2_"), "w-4, w+right-4")


def settings(lanes):
    small = {"centroids": 4}
    return [replace(one, settings={} if one.method == "bf16" else small) for one in lanes]
