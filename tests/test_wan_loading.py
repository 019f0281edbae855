"""Published files to a loaded transformer: formats, wrappers, prefixes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from wan_helpers import TINY, make_model, tiny_action, upstream_weights

from quantwm.errors import UserError
from quantwm.worlds.wan.checkpoint import open_weights
from quantwm.worlds.wan.config import WanConfig
from quantwm.worlds.wan.loading import load_transformer

CONFIGS: dict[str, WanConfig] = {
    "causal_forcing": TINY,
    "lingbot_world_v2": replace(
        TINY, in_channels=36, camera=True, precision="fp32_residual", heads=1
    ),
    "matrix_game2_universal": replace(
        TINY, in_channels=36, context="image", context_len=257, action=tiny_action()
    ),
    "matrix_game2_templerun": replace(
        TINY, in_channels=36, context="image", context_len=257, action=tiny_action(False, 7)
    ),
    "hy_worldplay_wan5b": replace(TINY, prope=True, precision="fp32_modulation"),
}


def load(path: Path, **options):
    return load_transformer(path, torch.float32, "cpu", **options)


def same(model, other) -> bool:
    a, b = model.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("prefix", ["", "model.", "model._fsdp_wrapped_module.", "module.model."])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_upstream_names_load_under_every_prefix(tmp_path: Path, name: str, prefix: str) -> None:
    model = make_model(CONFIGS[name])
    save_file(upstream_weights(model, prefix), tmp_path / "any name.safetensors")
    loaded = load(tmp_path, expect=name)
    assert same(loaded, model)
    inferred = replace(loaded.config, context_len=model.config.context_len)
    assert inferred == model.config


@pytest.mark.parametrize("wrapper", ["generator", "state_dict", "model", None])
def test_pickles_load_through_wrappers(tmp_path: Path, wrapper: str | None) -> None:
    model = make_model()
    weights = upstream_weights(model)
    torch.save({wrapper: weights, "step": 3} if wrapper else weights, tmp_path / "x.pt")
    assert same(load(tmp_path / "x.pt"), model)


def test_ema_is_taken_when_asked_for(tmp_path: Path) -> None:
    plain, ema = make_model(seed=1), make_model(seed=2)
    both = {"generator": upstream_weights(plain), "generator_ema": upstream_weights(ema)}
    torch.save(both, tmp_path / "x.pt")
    assert same(load(tmp_path / "x.pt"), plain)
    assert same(load(tmp_path / "x.pt", prefer_ema=True), ema)
    torch.save({"generator_ema": upstream_weights(ema)}, tmp_path / "x.pt")
    assert same(load(tmp_path / "x.pt"), ema)


def shards(folder: Path) -> dict[str, torch.Tensor]:
    weights = upstream_weights(make_model(), "")
    names = sorted(weights)
    parts = {
        "m-00001-of-00002.safetensors": names[::2],
        "m-00002-of-00002.safetensors": names[1::2],
    }
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file)
    where = {name: file for file, held in parts.items() for name in held}
    (folder / "m.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return weights


def test_shards_load_with_and_without_their_index(tmp_path: Path) -> None:
    shards(tmp_path)
    assert same(load(tmp_path), make_model())
    (tmp_path / "m.safetensors.index.json").unlink()
    assert same(load(tmp_path), make_model())


@pytest.mark.parametrize("index", [True, False])
def test_half_downloaded_shards_are_refused(tmp_path: Path, index: bool) -> None:
    shards(tmp_path)
    (tmp_path / "m-00002-of-00002.safetensors").unlink()
    if not index:
        (tmp_path / "m.safetensors.index.json").unlink()
    with pytest.raises(UserError, match="half downloaded"):
        load(tmp_path)


def test_an_index_must_not_leave_its_folder(tmp_path: Path) -> None:
    (tmp_path / "m.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(UserError, match="outside"):
        load(tmp_path)


class _Code:
    def __reduce__(self):
        return (print, ("code ran",))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, capsys) -> None:
    torch.save({"generator": {"x": _Code()}}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="not run"):
        open_weights(tmp_path / "x.pt")
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_truncated_files_are_refused(tmp_path: Path, name: str) -> None:
    weights = upstream_weights(make_model())
    path = tmp_path / name
    if name.endswith("pt"):
        torch.save(weights, path)
    else:
        save_file(weights, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match="not a whole"):
        load(path)


def changed(change) -> dict[str, torch.Tensor]:
    weights = upstream_weights(make_model())
    change(weights)
    return weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.blocks.1.self_attn.q.bias"), "attn1.to_q.bias is missing"),
        (lambda w: w.update({"model.extra": torch.ones(1)}), "extra is not expected"),
        (
            lambda w: w.update({"model.blocks.0.norm3.bias": torch.ones(7)}),
            r"norm2.bias has shape \[7\], expected \[256\]",
        ),
        (lambda w: w.pop("model.patch_embedding.weight"), "not the weights of a known"),
        (lambda w: w.pop("model.head.head.weight"), "proj_out.weight is missing"),
        (
            lambda w: [w.pop(n) for n in list(w) if ".blocks.0." in n or ".1.ffn" in n],
            "blocks are not|is missing",
        ),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path, change, message: str) -> None:
    save_file(changed(change), tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path / "x.safetensors")
    assert "\n" not in str(caught.value)


def test_only_the_first_differences_are_named(tmp_path: Path) -> None:
    weights = changed(lambda w: [w.pop(n) for n in list(w) if ".1.cross_attn." in n])
    save_file(weights, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"and 7 more"):
        load(tmp_path / "x.safetensors")


def test_another_model_is_named(tmp_path: Path) -> None:
    save_file(upstream_weights(make_model()), tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="is causal_forcing, not lingbot_world_v2"):
        load(tmp_path / "x.safetensors", expect="lingbot_world_v2")


def test_empty_and_ambiguous_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no weights"):
        load(tmp_path / "absent")
    with pytest.raises(UserError, match="no weight file"):
        load(tmp_path)
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UserError, match=r"a\.safetensors, b\.safetensors"):
        load(tmp_path)


def test_progress_reaches_the_whole(tmp_path: Path) -> None:
    save_file(upstream_weights(make_model()), tmp_path / "x.safetensors")
    seen: list[tuple[int, int]] = []
    load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(p.numel() for p in make_model().parameters()) * 4
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def own_bytes() -> int:
    """Memory of this process that no file stands behind; mapped pages can be taken back."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux' /proc")
@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_never_held_twice(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """49 MB in FP32: the loaded copy, one tensor on its way, and nothing else."""
    config = replace(TINY, layers=4, heads=4, ffn_dim=1024, context_dim=64)
    weights = upstream_weights(make_model(config))
    size = sum(t.numel() for t in weights.values()) * dtype.itemsize
    largest = max(t.numel() for t in weights.values()) * dtype.itemsize
    if name.endswith("pt"):
        torch.save({"generator": weights, "generator_ema": weights}, tmp_path / name)
    else:
        save_file(weights, tmp_path / name)
    del weights
    before, peak = own_bytes(), 0

    def look(done: int, total: int) -> None:
        nonlocal peak
        peak = max(peak, own_bytes() - before - done)

    model = load_transformer(tmp_path / name, dtype, "cpu", progress=look)
    assert sum(p.nbytes for p in model.parameters()) == size > 20e6
    assert peak < 2 * largest + 3e6, f"{peak / 1e6:.1f} MB beside the model of {size / 1e6:.1f}"
