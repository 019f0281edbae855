"""Weight files: round trip, and one clear line for every kind of damage."""

from __future__ import annotations

import json

import pytest
import torch

from quantwm.errors import UserError
from quantwm.worlds.embedded.autoencoder import Autoencoder
from quantwm.worlds.embedded.config import PRESETS, EmbeddedConfig
from quantwm.worlds.embedded.transformer import Transformer
from quantwm.worlds.embedded.weights import (
    MANIFEST,
    _split,
    check_files,
    load_models,
    read_manifest,
    save_models,
)

CONFIG = PRESETS["tiny"]
CPU = torch.device("cpu")


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    models = Transformer(CONFIG.transformer), Autoencoder(CONFIG.autoencoder)
    models[1].latent_mean.fill_(0.123456789)
    return save_models(tmp_path / "w", CONFIG, *models, {"command": "test"}), models


def shard(manifest):
    return manifest.folder / manifest.files[0][0]


def test_round_trip_is_bf16_and_the_same_hash(saved):
    manifest, models = saved
    again = read_manifest(manifest.folder)
    assert again.config == CONFIG and again.sha256 == manifest.sha256
    assert again.training == {"command": "test"}
    seen = []
    loaded = load_models(again, CPU, torch.float32, lambda stage, part: seen.append((stage, part)))
    for ours, theirs in zip(models, loaded, strict=True):
        for name, tensor in ours.state_dict().items():
            stored = tensor if name.startswith("latent_") else tensor.bfloat16().float()
            assert torch.equal(theirs.state_dict()[name], stored), name
    assert all(p.device.type == "cpu" for p in loaded[0].parameters())
    assert seen[-1] == ("loading weights", 1.0)


def test_config_survives_json():
    data = json.loads(json.dumps(PRESETS["shipped"].to_json()))
    assert EmbeddedConfig.from_json(data) == PRESETS["shipped"]
    data["transformer"]["surprise"] = 1
    with pytest.raises(UserError, match="surprise"):
        EmbeddedConfig.from_json(data)


def test_shipped_sizes_stay_under_the_limits():
    with torch.device("meta"):
        models = (
            Transformer(PRESETS["shipped"].transformer),
            Autoencoder(PRESETS["shipped"].autoencoder),
        )
    tensors = {
        f"{i}.{k}": t.bfloat16() for i, m in enumerate(models) for k, t in m.state_dict().items()
    }
    sizes = [sum(tensors[k].numel() * 2 for k in names) for names in _split(tensors)]
    assert max(sizes) < 15_900_000 and sum(sizes) < 43_500_000 and len(sizes) == 3


def missing(manifest):
    shard(manifest).unlink()


def truncated(manifest):
    path = shard(manifest)
    path.write_bytes(path.read_bytes()[:-1])


def altered(manifest):
    path = shard(manifest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "says"), [(missing, "missing"), (truncated, "bytes where"), (altered, "altered")]
)
def test_harmed_file_is_named_in_one_line(saved, harm, says):
    manifest, _ = saved
    harm(manifest)
    with pytest.raises(UserError, match=says) as caught:
        load_models(read_manifest(manifest.folder), CPU, torch.float32)
    message = str(caught.value)
    assert "\n" not in message and manifest.files[0][0] in message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(format=99), "format 99"),
        (lambda d: d.pop("files"), "damaged"),
        (lambda d: d.update(files=[]), "no weight files"),
        (lambda d: d["files"][0].update(name="../evil"), "should not"),
        (lambda d: d["files"][0].update(bytes=True), "should not"),
        (lambda d: d["config"]["transformer"].update(latent_height=5), "patch"),
    ],
)
def test_harmed_manifest_is_refused(saved, change, says):
    manifest, _ = saved
    path = manifest.folder / MANIFEST
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=says):
        read_manifest(manifest.folder)


def test_no_manifest_and_no_json(tmp_path):
    with pytest.raises(UserError, match="not found"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(UserError, match="damaged"):
        read_manifest(tmp_path)


def test_config_that_does_not_fit_the_tensors(saved):
    manifest, _ = saved
    path = manifest.folder / MANIFEST
    data = json.loads(path.read_text())
    data["config"]["transformer"]["ffn"] = 64
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match="does not fit"):
        load_models(read_manifest(manifest.folder), CPU, torch.float32)


def test_a_file_of_another_kind_with_a_true_hash(saved):
    manifest, _ = saved
    from quantwm.worlds.embedded.weights import file_sha256

    shard(manifest).write_bytes(b"not safetensors at all")
    path = manifest.folder / MANIFEST
    data = json.loads(path.read_text())
    data["files"][0].update(bytes=22, sha256=file_sha256(shard(manifest)))
    path.write_text(json.dumps(data))
    check_files(read_manifest(manifest.folder))
    with pytest.raises(UserError, match="cannot be read"):
        load_models(read_manifest(manifest.folder), CPU, torch.float32)
