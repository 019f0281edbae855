"""LPIPS and VBench's scores: their formulas on small stand-ins, and one word where models lack."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import quantwm.metrics.learned as learned
import quantwm.metrics.vbench as vbench
from quantwm.errors import UserError
from quantwm.metrics.learned import LearnedMeter
from quantwm.metrics.vbench import ConsistencyScore, MeanScore, as_tensor, load_scores
from quantwm.metrics.vit import VisionTransformer
from tests.test_metrics_agreement import smooth_clip

WIDTH, PATCH, SIDE = 64, 16, 4


def dino_weights(depth: int = 2) -> dict[str, torch.Tensor]:
    """A tiny state dict with the names of dino_vitbase16_pretrain.pth."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    weights = {
        "cls_token": random(1, 1, WIDTH),
        "pos_embed": random(1, 1 + SIDE * SIDE, WIDTH),
        "patch_embed.proj.weight": random(WIDTH, 3, PATCH, PATCH),
        "patch_embed.proj.bias": random(WIDTH),
        "norm.weight": torch.ones(WIDTH),
        "norm.bias": random(WIDTH),
    }
    for i in range(depth):
        for name, out, into in (
            ("attn.qkv", 3 * WIDTH, WIDTH),
            ("attn.proj", WIDTH, WIDTH),
            ("mlp.fc1", 4 * WIDTH, WIDTH),
            ("mlp.fc2", WIDTH, 4 * WIDTH),
        ):
            weights[f"blocks.{i}.{name}.weight"] = random(out, into)
            weights[f"blocks.{i}.{name}.bias"] = random(out)
        for name in ("norm1", "norm2"):
            weights[f"blocks.{i}.{name}.weight"] = torch.ones(WIDTH)
            weights[f"blocks.{i}.{name}.bias"] = torch.zeros(WIDTH)
    return weights


class Clip(torch.nn.Module):
    """Stands for OpenAI's TorchScript archives: a method encode_image."""

    @torch.jit.export
    def encode_image(self, pictures: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool2d(pictures, 2).flatten(1)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.encode_image(pictures)


class Musiq(torch.nn.Module):
    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return pictures.mean(dim=(1, 2, 3)) * 100


@pytest.fixture
def models(tmp_path: Path) -> Path:
    torch.save(dino_weights(), tmp_path / "dino_vitbase16_pretrain.pth")
    for name in ("ViT-B-32.pt", "ViT-L-14.pt"):
        torch.jit.script(Clip()).save(str(tmp_path / name))
    head = {"weight": torch.full((1, 12), 0.5), "bias": torch.tensor([5.0])}
    torch.save(head, tmp_path / "sa_0_4_vit_l_14_linear.pth")
    torch.jit.script(Musiq()).save(str(tmp_path / "musiq_spaq.ts"))
    return tmp_path


def test_vit_equals_torchs_own_encoder_layer():
    """One block against nn.TransformerEncoderLayer with the same weights."""
    weights = dino_weights(1)
    layer = torch.nn.TransformerEncoderLayer(
        WIDTH, 1, 4 * WIDTH, 0.0, "gelu", 1e-6, batch_first=True, norm_first=True
    ).eval()
    names = {
        "self_attn.in_proj_": "attn.qkv.", "self_attn.out_proj.": "attn.proj.",
        "linear1.": "mlp.fc1.", "linear2.": "mlp.fc2.", "norm1.": "norm1.", "norm2.": "norm2.",
    }  # fmt: skip
    state = {
        f"{ours}{kind}": weights[f"blocks.0.{theirs}{kind}"]
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    }
    layer.load_state_dict(state)
    pictures = torch.randn(2, 3, SIDE * PATCH, SIDE * PATCH)
    tokens = F.conv2d(
        pictures, weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"], PATCH
    )
    tokens = torch.cat((weights["cls_token"].expand(2, 1, -1), tokens.flatten(2).mT), 1)
    with torch.no_grad():
        want = layer(tokens + weights["pos_embed"])[:, 0]
        want = F.layer_norm(want, (WIDTH,), weights["norm.weight"], weights["norm.bias"], 1e-6)
    found = VisionTransformer(weights, "cpu")(pictures)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_vit_takes_other_sizes_and_refuses_other_weights():
    model = VisionTransformer(dino_weights(), "cpu")
    assert model(torch.randn(1, 3, 96, 133)).shape == (1, WIDTH)
    with pytest.raises(UserError, match="not the weights of a DINO"):
        VisionTransformer({"cls_token": torch.ones(1, 1, 4)}, "cpu")


def test_consistency_is_vbenchs_formula():
    features = {0.0: [1.0, 0.0], 1.0: [0.0, 1.0], 2.0: [0.6, 0.8]}
    score = ConsistencyScore(lambda x: torch.tensor([features[float(x)]]) * 7)
    for value in features:
        score.add(torch.tensor(value))
    # frame 1: (cos 0 + cos 0) / 2; frame 2: (0.6 + 0.8) / 2
    assert score.value() == pytest.approx((0.0 + 0.7) / 2)
    assert ConsistencyScore(lambda x: x).value() is None


def test_mean_score_is_over_its_scale():
    score = MeanScore(lambda x: x.mean(dim=(1, 2, 3)), 100.0)
    for level in (20, 40):
        score.add(as_tensor(np.full((8, 8, 3), level, np.uint8), "cpu"))
    assert score.value() == pytest.approx(0.3)


def test_every_score_through_its_files(models):
    makers, missing = load_scores(models, "cpu")
    assert list(makers) == list(vbench.MODELS) and missing == []
    meter = LearnedMeter(models)
    a, b = smooth_clip(0, 3), smooth_clip(1, 3)
    for frame, reference in zip(a, b, strict=True):
        meter.update(frame, reference)
    scores, _ = meter.scores()
    for name in ("subject_consistency", "background_consistency"):
        assert 0 < scores[name]["a"] <= 1 and scores[name]["a"] != scores[name]["b"]
    assert scores["imaging_quality"]["a"] == pytest.approx(a.mean() / 255, abs=1e-3)
    assert 0.4 < scores["aesthetic_quality"]["a"] < 0.7


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(learned.torch.hub, "get_dir", lambda: str(tmp_path))
    meter = LearnedMeter(None)
    scores, missing = meter.scores()
    assert scores == {} and len(missing) == 5
    assert "LPIPS" in missing[0] and "dino_vitbase16_pretrain.pth" in missing[1]
    assert all("\n" not in line for line in missing)
    with pytest.raises(UserError, match="TorchScript"):
        (tmp_path / "ViT-B-32.pt").write_bytes(b"x")
        load_scores(tmp_path, "cpu")


def test_lpips_is_used_where_its_weights_are(monkeypatch):
    monkeypatch.setattr(learned, "missing_for_lpips", lambda: None)
    monkeypatch.setattr(learned, "_network", lambda device: lambda x, y: (x - y).abs().mean())
    meter = LearnedMeter(None)
    frame = np.full((16, 16, 3), 255, np.uint8)
    meter.update(frame, frame // 255 * 0)
    assert meter.scores()[0]["lpips"] == pytest.approx(2.0)
