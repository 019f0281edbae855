"""The Wan autoencoders: streaming equals whole, and every published naming loads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantwm.errors import UserError
from quantwm.worlds.wan.vae import VaeConfig, WanVae
from quantwm.worlds.wan.vae_names import load_vae

CONFIGS = {
    "2.1": VaeConfig(base=4, decoder_base=4),
    "2.2": VaeConfig(
        base=4, decoder_base=8, latent_channels=6, resnets=1, residual=True,
        mean=(0.1,) * 6, std=(2.0,) * 6,
    ),
}  # fmt: skip


def make(name: str) -> WanVae:
    torch.manual_seed(3)
    vae = WanVae(CONFIGS[name])
    for parameter in vae.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return vae.requires_grad_(False)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("parts", [(1, 1, 1, 1, 1), (1, 4), (3, 2), (2, 1, 2)])
def test_streaming_decode_equals_whole_decode(name: str, parts: tuple[int, ...]) -> None:
    vae = make(name)
    latents = torch.randn(vae.config.latent_channels, 5, 2, 3)
    whole = vae.decode(latents, {})
    assert whole.shape == (3, 17, 2 * vae.config.stride, 3 * vae.config.stride)
    state: dict = {}
    streamed = [vae.decode(part, state) for part in latents.split(parts, dim=1)]
    assert [part.shape[1] for part in streamed] == [
        4 * n - (3 if index == 0 else 0) for index, n in enumerate(parts)
    ]
    torch.testing.assert_close(torch.cat(streamed, dim=1), whole, rtol=0, atol=1e-5)
    # What is kept for the next frame holds no memory of a larger tensor.
    assert all(kept.untyped_storage().nbytes() == 4 * kept.numel() for kept in state.values())


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_later_latents_never_change_earlier_frames(name: str) -> None:
    vae = make(name)
    latents = torch.randn(vae.config.latent_channels, 4, 2, 2)
    changed = latents.clone()
    changed[:, 2:] += 1.0
    a, b = vae.decode(latents, {}), vae.decode(changed, {})
    torch.testing.assert_close(a[:, :5], b[:, :5], rtol=0, atol=1e-5)
    assert not torch.allclose(a[:, 5:], b[:, 5:])


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_encode_gives_one_latent_per_four_frames(name: str) -> None:
    vae = make(name)
    side = 2 * vae.config.stride
    video = torch.rand(3, 9, side, side) * 2 - 1
    latents = vae.encode(video)
    assert latents.shape == (vae.config.latent_channels, 3, 2, 2)
    torch.testing.assert_close(vae.encode(video[:, :1]), latents[:, :1], rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="1 \\+ 4n frames"):
        vae.encode(video[:, :3])


def original_name(name: str) -> str:
    """This module's name -> Wan2.1_VAE.pth's."""
    name = re.sub(r"^quant_conv\.", "conv1.", name)
    name = re.sub(r"^post_quant_conv\.", "conv2.", name)
    for side, per in (("down", 3), ("up", 4)):
        match = re.match(
            rf"(\w+)\.{side}_blocks\.(\d+)\.(?:resnets\.(\d+)|{side}sampler)\.(.*)", name
        )
        if match:
            index = per - 1 if match[3] is None else int(match[3])
            name = f"{match[1]}.{side}samples.{int(match[2]) * per + index}.{match[4]}"
    name = name.replace("mid_block.resnets.0.", "middle.0.").replace(
        "mid_block.resnets.1.", "middle.2."
    )
    name = name.replace("mid_block.attentions.0.", "middle.1.")
    if "samples." in name or "middle.0" in name or "middle.2" in name:
        for new, old in (
            (".conv_shortcut.", ".shortcut."), (".norm1.", ".residual.0."),
            (".conv1.", ".residual.2."), (".norm2.", ".residual.3."), (".conv2.", ".residual.6."),
        ):  # fmt: skip
            name = name.replace(new, old)
    name = re.sub(r"\.conv_in\.", ".conv1.", name)
    return name.replace(".norm_out.", ".head.0.").replace(".conv_out.", ".head.2.")


def diffusers_name(name: str, residual: bool) -> str:
    if residual:
        return name
    match = re.match(r"encoder\.down_blocks\.(\d+)\.(?:resnets\.(\d+)|downsampler)\.(.*)", name)
    if match:
        index = int(match[1]) * 3 + (2 if match[2] is None else int(match[2]))
        return f"encoder.down_blocks.{index}.{match[3]}"
    return name.replace(".upsampler.", ".upsamplers.0.")


def same(vae: WanVae, other: WanVae) -> bool:
    a, b = vae.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_the_original_file_loads(tmp_path: Path) -> None:
    vae = make("2.1")
    weights = {original_name(name): tensor for name, tensor in vae.state_dict().items()}
    assert "decoder.upsamples.11.resample.1.weight" in weights
    torch.save(weights, tmp_path / "Wan2.1_VAE.pth")
    loaded = load_vae(tmp_path / "Wan2.1_VAE.pth", torch.float32, "cpu")
    assert same(loaded, vae) and loaded.config == vae.config


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_diffusers_folder_loads(tmp_path: Path, name: str) -> None:
    vae = make(name)
    weights = {diffusers_name(k, name == "2.2"): t for k, t in vae.state_dict().items()}
    save_file(weights, tmp_path / "diffusion_pytorch_model.safetensors")
    if name == "2.2":
        with pytest.raises(UserError, match=r"config\.json"):
            load_vae(tmp_path, torch.float32, "cpu")
        statistics = {"latents_mean": list(vae.config.mean), "latents_std": list(vae.config.std)}
        (tmp_path / "config.json").write_text(json.dumps(statistics))
    loaded = load_vae(tmp_path, torch.float32, "cpu")
    assert same(loaded, vae) and loaded.config == vae.config


def test_another_file_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="not the weights of a Wan VAE"):
        load_vae(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize("residual", [False, True])
def test_a_random_vae_equals_diffusers(tmp_path: Path, residual: bool) -> None:
    """Decode and encode, from the folder that diffusers writes."""
    diffusers = pytest.importorskip("diffusers", exc_type=ImportError)
    channels = 48 if residual else 16
    mean, std = torch.linspace(-1, 1, channels).tolist(), torch.linspace(0.5, 2, channels).tolist()
    more = {"is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2,
            "scale_factor_spatial": 16, "decoder_base_dim": 8}  # fmt: skip
    torch.manual_seed(3)
    theirs = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=channels, dim_mult=[1, 2, 4, 4], num_res_blocks=1 + residual,
        attn_scales=[], temperal_downsample=[False, True, True], latents_mean=mean,
        latents_std=std, **(more if residual else {}),
    ).eval().requires_grad_(False)  # fmt: skip
    theirs.save_pretrained(tmp_path)
    mine = load_vae(tmp_path, torch.float32, "cpu")
    latents = torch.randn(1, channels, 3, 2, 3)
    shift, scale = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (mean, std))
    wanted = theirs.decode(latents * scale + shift).sample[0]
    torch.testing.assert_close(mine.decode(latents[0], {}), wanted, atol=1e-5, rtol=1e-4)
    video = torch.rand(1, 3, 5, 2 * mine.config.stride, mine.config.stride) * 2 - 1
    wanted = ((theirs.encode(video).latent_dist.mode() - shift) / scale)[0]
    torch.testing.assert_close(mine.encode(video[0]), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", "3", '{"latents_mean": "ab", "latents_std": [1]}',
     '{"latents_mean": [null], "latents_std": [1]}', '{"latents_mean": 1, "latents_std": 2}',
     '{"latents_mean": [0, 1], "latents_std": [1, 1]}',
     '{"latents_mean": [NaN], "latents_std": [1]}',
     '{"latents_mean": [0], "latents_std": [0]}', "[" * 100_000],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_a_config_that_is_none_is_one_line(tmp_path: Path, text: str) -> None:
    weights = {diffusers_name(k, True): t for k, t in make("2.2").state_dict().items()}
    save_file(weights, tmp_path / "x.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json|means and deviations") as caught:
        load_vae(tmp_path, torch.float32, "cpu")
    assert "\n" not in str(caught.value)
