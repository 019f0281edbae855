"""Checkpoints that no honest hand made: one line each, nothing is run, nothing is taken in part."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_wan_loading import CONFIGS, load, same
from wan_helpers import make_model, upstream_weights

from quantwm.errors import UserError
from quantwm.worlds.wan.checkpoint import open_weights
from quantwm.worlds.wan.clip import ClipConfig, ClipVision, load_clip
from quantwm.worlds.wan.umt5 import Umt5Config, Umt5Encoder, load_umt5
from quantwm.worlds.wan.vae import VaeConfig, WanVae
from quantwm.worlds.wan.vae_names import load_vae


def refused(call, *args) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700
    return text


def whole_models() -> dict[str, tuple]:
    """Loader and honest weights of every kind of file."""
    out = {name: (load, upstream_weights(make_model(config))) for name, config in CONFIGS.items()}
    text = Umt5Encoder(Umt5Config(20, 16, 16, 24, 2, 2, 8))
    clip = ClipVision(ClipConfig(width=80, heads=1, layers=2, hidden=16, rows=5))
    vae = WanVae(VaeConfig(base=4, decoder_base=4))

    def on_cpu(loader):
        return lambda path: loader(path, torch.float32, "cpu")

    out["umt5"] = on_cpu(load_umt5), dict(text.state_dict())
    out["clip"] = on_cpu(load_clip), {f"visual.{k}": v for k, v in clip.state_dict().items()}
    out["vae"] = on_cpu(load_vae), dict(vae.state_dict())
    return out


MODELS = whole_models()
CHANGES = {
    "dropped": lambda t: None,
    "flat": lambda t: t.flatten(),
    "scalar": lambda t: torch.tensor(1.0),
    "empty": lambda t: t[..., :0],
    "larger": lambda t: torch.zeros([size + 1 for size in t.shape]),
    "one more axis": lambda t: t[None, None],
    "integers": lambda t: t.to(torch.int8),
}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(CHANGES)), st.data())
def test_one_changed_tensor_is_one_line(tmp_path: Path, name: str, change: str, data) -> None:
    loader, weights = MODELS[name]
    # A tower's last block is not read: features are taken before it.
    names = sorted(n for n in weights if "transformer.1." not in n)
    victim = data.draw(st.sampled_from(names))
    changed = {n: t.clone() for n, t in weights.items()}
    honest = changed.pop(victim)
    made = CHANGES[change](honest)
    if made is not None and (made.shape, made.dtype) == (honest.shape, honest.dtype):
        return  # flat already
    if made is not None:
        changed[victim] = made.contiguous()
    save_file(changed, tmp_path / "x.safetensors")
    if name == "clip" and victim.endswith("embedding") and change in ("flat", "one more axis"):
        return  # one row or one table, however it is written down
    refused(loader, tmp_path / "x.safetensors")


@pytest.mark.parametrize("wrapper", ["_fsdp_wrapped_module.", "_checkpoint_wrapped_module.",
                                     "_orig_mod."])  # fmt: skip
def test_wrappers_inside_names_are_taken_off(tmp_path: Path, wrapper: str) -> None:
    model = make_model()
    named = {
        name.replace("model.", f"model.{wrapper}").replace(".0.", f".0.{wrapper}"): tensor
        for name, tensor in upstream_weights(model).items()
    }
    named = {n if "blocks.0." in n else n.replace(f".0.{wrapper}", ".0."): t
             for n, t in named.items()}  # fmt: skip
    torch.save({"generator": {}, "generator_ema": named, "step": 3}, tmp_path / "x.pt")
    assert same(load(tmp_path / "x.pt"), model)


class _Code:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def _tar(path: Path, code: object) -> None:
    """As torch wrote before 0.4."""
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            data = pickle.dumps(code)
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def _foreign_zip(path: Path, code: object) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(code))


WRITERS = {
    "tar": _tar,
    "bare pickle": lambda path, code: path.write_bytes(pickle.dumps(code)),
    "old stream": lambda path, code: torch.save(code, path, _use_new_zipfile_serialization=False),
    "zip": lambda path, code: torch.save({"generator": {"x": code}}, path),
    "foreign zip": _foreign_zip,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_no_pickle_s_code_is_run(tmp_path: Path, writer: str) -> None:
    WRITERS[writer](tmp_path / "x.pth", _Code(tmp_path / "ran"))
    refused(open_weights, tmp_path / "x.pth")
    assert not (tmp_path / "ran").exists()


def test_a_damaged_pickle_is_one_line(tmp_path: Path) -> None:
    """A storage's type where one byte made a call of what was a name."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02ctorch\nFloatStorage\n)R.")
        archive.writestr("archive/version", "3\n")
    assert "is not a whole torch file" in refused(load, tmp_path / "x.pt")


def test_an_honest_file_of_an_old_torch_says_what_to_do(tmp_path: Path) -> None:
    weights = upstream_weights(make_model())
    torch.save(weights, tmp_path / "x.pth", _use_new_zipfile_serialization=False)
    assert "save it anew" in refused(load, tmp_path / "x.pth")


@pytest.mark.parametrize(
    "content",
    [[torch.ones(1)], torch.ones(1), {}, {1: torch.ones(1)}, {"a": torch.ones(1), "epoch": 3},
     {"x": torch.ones(1).to_sparse()}, {"x": torch.empty(2, device="meta")}],
    ids=str,
)  # fmt: skip
def test_what_is_no_state_dict_of_weights_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "x.pt")
    refused(load, tmp_path / "x.pt")


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_tensors_without_numbers_are_named(tmp_path: Path, kind: str) -> None:
    weights = upstream_weights(make_model())
    name = "model.head.head.bias"
    weights[name] = weights[name].to("meta") if kind == "meta" else weights[name].to_sparse()
    torch.save(weights, tmp_path / "x.pt")
    assert "proj_out.bias holds" in refused(load, tmp_path / "x.pt")


def _header(count: int, text: bytes) -> bytes:
    return struct.pack("<Q", count) + text


LIE = b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    "data",
    [b"", b"<html>not found</html>", _header(2**62, b"{}"), _header(50_000_000, b" " * 50_000_000),
     _header(2, b"{}"), _header(len(LIE), LIE + b"0000")],
    ids=["empty", "a page", "huge header", "long header", "no tensors", "a shape that lies"],
)  # fmt: skip
def test_broken_safetensors_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    refused(load, tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ["x"]}}',
     '{"weight_map": {}}', '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": ""}}',
     "[" * 100_000],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_broken_indexes_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.safetensors.index.json").write_text(text)
    refused(load, tmp_path)


def test_names_in_a_file_cannot_break_the_line(tmp_path: Path) -> None:
    save_file({"a\n\x1b[31m" * 400: torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError) as caught:
        load(tmp_path / "x.safetensors")
    assert str(caught.value).isprintable() and len(str(caught.value)) <= 1000


def test_an_index_that_promises_more_than_the_shards_hold(tmp_path: Path) -> None:
    weights = upstream_weights(make_model())
    lost = weights.pop("model.head.head.bias")
    save_file(weights, tmp_path / "m-00001-of-00001.safetensors")
    names = dict.fromkeys((*weights, "model.head.head.bias"), "m-00001-of-00001.safetensors")
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "proj_out.bias is missing" in refused(load, tmp_path)
    assert lost.numel()
