"""UMT5 and CLIP: both namings load, and CLIP equals transformers' own tower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantwm.errors import UserError
from quantwm.worlds.wan.clip import canonical_clip, infer_clip_config, load_clip
from quantwm.worlds.wan.umt5 import (
    MAX_CHARACTERS,
    Umt5Config,
    Umt5Encoder,
    clean_prompt,
    load_umt5,
    tokenize,
)

UMT5 = Umt5Config(
    vocabulary=50, width=32, attention_width=32, ffn_dim=48, heads=4, layers=2, buckets=32
)
HF = (
    ("token_embedding", "shared"),
    ("pos_embedding.embedding", "layer.0.SelfAttention.relative_attention_bias"),
    (".attn.", ".layer.0.SelfAttention."),
    (".norm1", ".layer.0.layer_norm"),
    (".norm2", ".layer.1.layer_norm"),
    (".ffn.gate.0", ".layer.1.DenseReluDense.wi_0"),
    (".ffn.fc1", ".layer.1.DenseReluDense.wi_1"),
    (".ffn.fc2", ".layer.1.DenseReluDense.wo"),
)


def transformers_name(name: str) -> str:
    for own, other in HF:
        name = name.replace(own, other)
    if name.startswith("blocks."):
        return "encoder.block." + name.removeprefix("blocks.")
    return "encoder.final_layer_norm.weight" if name == "norm.weight" else name


def umt5() -> Umt5Encoder:
    torch.manual_seed(1)
    encoder = Umt5Encoder(UMT5)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return encoder.requires_grad_(False)


def test_umt5_loads_from_both_namings(tmp_path: Path) -> None:
    encoder = umt5()
    torch.save(encoder.state_dict(), tmp_path / "models_t5.pth")
    renamed = {transformers_name(k): v.clone() for k, v in encoder.state_dict().items()}
    renamed["encoder.embed_tokens.weight"] = renamed["shared.weight"].clone()
    (tmp_path / "text_encoder").mkdir()
    save_file(renamed, tmp_path / "text_encoder" / "model.safetensors")
    ids = torch.randint(0, 50, (1, 9))
    expected = encoder(ids, torch.ones_like(ids))
    for path in (tmp_path / "models_t5.pth", tmp_path / "text_encoder"):
        loaded = load_umt5(path, torch.float32, "cpu")
        assert loaded.config == UMT5
        assert torch.equal(loaded(ids, torch.ones_like(ids)), expected)


def test_umt5_padding_changes_nothing_and_is_zero() -> None:
    encoder = umt5()
    ids = torch.randint(0, 50, (1, 9))
    mask = torch.ones_like(ids)
    mask[:, 6:] = 0
    padded = encoder(ids, mask)[0]
    torch.testing.assert_close(padded[:6], encoder.encode(ids[0, :6].tolist()), rtol=0, atol=1e-5)
    assert padded[6:].eq(0).all()


def test_umt5_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.UMT5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", dropout_rate=0.0,
    )  # fmt: skip
    peer = transformers.UMT5EncoderModel(config).eval()
    encoder = umt5()
    renamed = {transformers_name(k): v for k, v in encoder.state_dict().items()}
    renamed["encoder.embed_tokens.weight"] = renamed["shared.weight"]
    peer.load_state_dict(renamed, strict=True)
    ids = torch.randint(0, 50, (1, 40))
    with torch.no_grad():
        expected = peer(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    torch.testing.assert_close(encoder(ids, torch.ones_like(ids)), expected, rtol=0, atol=1e-4)


def test_prompts_are_cleaned_and_bounded() -> None:
    assert clean_prompt("  a&amp;b\n\tc ") == "a&b c"
    bad = {"": "empty", " \n": "empty", "&nbsp; &#32;": "empty", "a \ud800 b": "half a character",
           "x" * (MAX_CHARACTERS + 1): "at most"}  # fmt: skip
    for text, message in bad.items():
        with pytest.raises(UserError, match=message):
            clean_prompt(text)
    assert len(clean_prompt("x" * MAX_CHARACTERS)) == MAX_CHARACTERS


def clip_tower():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = transformers.CLIPVisionConfig(
        hidden_size=160, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        image_size=28, patch_size=14, hidden_act="gelu",
    )  # fmt: skip
    return transformers.CLIPVisionModel(config).eval()


def original_clip(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The mapped weights in the published file's form: `visual.` names and parts to ignore."""
    out = {f"visual.{name}": tensor for name, tensor in weights.items()}
    last = {k: v for k, v in out.items() if ".transformer.1." in k}
    out |= {k.replace(".transformer.1.", ".transformer.2."): v for k, v in last.items()}
    return out | {"textual.x": torch.ones(2), "log_scale": torch.ones(1),
                  "visual.head": torch.ones(2, 2)}  # fmt: skip


def test_clip_equals_transformers_tower_before_its_last_block(tmp_path: Path) -> None:
    tower = clip_tower()
    save_file(
        {name: tensor.contiguous() for name, tensor in tower.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    own = load_clip(tmp_path, torch.float32, "cpu")
    assert (own.config.layers, own.config.heads, own.config.side) == (2, 2, 28)
    pixels = torch.randn(1, 3, 28, 28)
    with torch.no_grad():
        expected = tower(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
    torch.testing.assert_close(own(pixels), expected, rtol=0, atol=1e-5)


def test_clip_loads_the_original_file_and_leaves_the_text_tower_out(tmp_path: Path) -> None:
    weights = canonical_clip(dict(clip_tower().state_dict()))
    assert infer_clip_config(weights).layers == 2
    torch.save(original_clip(weights), tmp_path / "clip.pth")
    own = load_clip(tmp_path / "clip.pth", torch.float32, "cpu")
    for name, tensor in own.state_dict().items():
        assert torch.equal(tensor, weights[name])
    rows = own.encode(torch.rand(3, 50, 70) * 2 - 1)
    assert rows.shape == (5, 160)


def test_an_encoder_or_tokenizer_that_contradicts_itself_is_one_line(tmp_path: Path) -> None:
    odd = Umt5Encoder(replace(UMT5, heads=UMT5.attention_width - 1))
    save_file(dict(odd.state_dict()), tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="is not 31 heads"):
        load_umt5(tmp_path / "x.safetensors", torch.float32, "cpu")
    tower = {"patch_embedding.weight": torch.ones(100, 3, 2, 2), "transformer.0.x": torch.ones(1)}
    with pytest.raises(UserError, match="100 channels is not heads of 80"):
        infer_clip_config(tower)
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0}, unk_token="<unk>")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="is not a tokenizer"):
        tokenize("b", tmp_path)


def test_the_tokenizer_of_another_encoder_is_one_line() -> None:
    encoder = umt5()
    with pytest.raises(UserError, match="tokenizer is of another text encoder: it makes token 99"):
        encoder.encode([1, 99])


def test_other_weights_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    for load in (load_umt5, load_clip):
        with pytest.raises(UserError, match="not the weights"):
            load(tmp_path, torch.float32, "cpu")
