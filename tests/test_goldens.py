"""Golden comparison: the reduced set passes, wrong results and missing ones do not."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from quantwm import goldens
from quantwm.cli import main
from quantwm.errors import UserError
from quantwm.goldens import (
    Comparison,
    GoldenSet,
    check_folder,
    check_set,
    find_sets,
    load_tensors,
)
from quantwm.worlds.wan import attention, backbone

GOLDENS = Path(__file__).parent / "goldens"
NAMES = sorted(path.stem for path in GOLDENS.glob("*.json"))
WAN = ("causal_forcing", "causal_forcing_long", "lingbot_world_v2", "matrix_game2_universal",
       "matrix_game2_gta_drive", "matrix_game2_templerun", "hy_worldplay_wan5b", "umt5",
       "wan21_vae", "wan22_vae", "actions_matrix_game2", "actions_hy_worldplay",
       "actions_lingbot_world")  # fmt: skip


pytestmark = pytest.mark.usefixtures("two_threads")


def golden(name: str) -> GoldenSet:
    return next(one for one in find_sets(GOLDENS) if one.name == name)


def test_the_reduced_set_is_small() -> None:
    assert sum(path.stat().st_size for path in GOLDENS.iterdir()) <= 2_200_000


@pytest.mark.parametrize("name", NAMES)
def test_reduced_goldens_pass(name: str) -> None:
    result = check_set(golden(name))
    assert result.ok, result.worst


@pytest.mark.parametrize("name", WAN)
def test_whole_goldens_pass(shared_dir: Path, name: str) -> None:
    document = check_folder(shared_dir / "goldens", [name])
    assert document["ok"], document["families"]


def fp32_only(folder: Path, name: str) -> Path:
    """A copy of one golden set with its FP32 run alone."""
    for path in GOLDENS.glob(f"{name}.*"):
        shutil.copy(path, folder / path.name)
    tensors = load_tensors(folder / f"{name}.safetensors")
    kept = {key: value for key, value in tensors.items() if ".bf16" not in key}
    save_file(kept, folder / f"{name}.safetensors")
    return folder


def test_a_window_one_frame_short_is_not_ok(tmp_path: Path) -> None:
    name = "matrix_game2_universal"
    fp32_only(tmp_path, name)
    sidecar = tmp_path / f"{name}.json"
    info = json.loads(sidecar.read_text())
    place = info["config"]["model"] if "local_attn_size" not in info["config"] else info["config"]
    place["local_attn_size"] -= 1
    sidecar.write_text(json.dumps(info))
    assert not check_folder(tmp_path)["ok"]


def test_a_wrong_rotation_is_not_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp32_only(tmp_path, "matrix_game2_universal")
    right = attention.frame_angles
    monkeypatch.setattr(
        attention, "frame_angles", lambda frames, *rest: right(frames + frames.min() // 4, *rest)
    )
    assert not check_folder(tmp_path)["ok"]


def test_nan_is_not_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp32_only(tmp_path, "matrix_game2_universal")
    leave = backbone.CausalWan.leave
    monkeypatch.setattr(backbone.CausalWan, "leave", lambda *a: leave(*a) * float("nan"))
    assert not check_folder(tmp_path)["ok"]


def test_a_stored_output_that_is_not_produced_is_not_ok(tmp_path: Path) -> None:
    for path in GOLDENS.glob("umt5.*"):
        shutil.copy(path, tmp_path / path.name)
    tensors = load_tensors(tmp_path / "umt5.safetensors")
    save_file({**tensors, "encoder.fp32.more": torch.ones(3)}, tmp_path / "umt5.safetensors")
    result = check_folder(tmp_path)["families"][0]
    assert not result["ok"]
    assert "encoder.fp32.more" in result["worst"]


def test_comparison_is_strict_about_shape_and_tolerance(tmp_path: Path) -> None:
    save_file({"a.b.x": torch.ones(2, 3)}, tmp_path / "one.safetensors")
    one = GoldenSet("one", tmp_path, {"config": {}})
    for produced, ok in (
        (torch.ones(1, 2, 3), True),
        (torch.ones(3, 2), False),
        (torch.ones(2, 3) + 1e-3, False),
        (torch.full((2, 3), float("nan")), False),
    ):
        compare = Comparison(one)
        compare.check("a.b.x", produced)
        assert compare.result().ok == ok


def test_a_family_without_adapter_is_named_and_not_ok(tmp_path: Path) -> None:
    (tmp_path / "new.json").write_text(json.dumps({"family": "new", "config": {}}))
    save_file({"x": torch.ones(1)}, tmp_path / "new.safetensors")
    result = check_folder(tmp_path)
    assert result["families"][0]["family"] == "new"
    assert not result["ok"]


def test_a_set_that_contradicts_itself_is_not_ok_and_the_others_still_run(tmp_path: Path) -> None:
    for name in ("umt5", "actions_matrix_game2"):
        for path in GOLDENS.glob(f"{name}.*"):
            shutil.copy(path, tmp_path / path.name)
    tensors = load_tensors(tmp_path / "umt5.safetensors")
    tensors["in.mask"] = tensors["in.mask"][:, :5].contiguous()
    save_file(tensors, tmp_path / "umt5.safetensors")
    actions, umt5 = check_folder(tmp_path)["families"]
    assert actions["ok"] and not umt5["ok"]
    assert umt5["worst"].startswith("it does not run: RuntimeError") and "\n" not in umt5["worst"]


def test_compressed_files_are_read_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, packed = tmp_path / "a.safetensors", tmp_path / "a.safetensors.xz"
    whole = lzma.compress(save({"x": torch.zeros(1000)}))
    packed.write_bytes(whole)
    assert torch.equal(load_tensors(path)["x"], torch.zeros(1000))
    save_file({"x": torch.ones(1)}, path)
    assert load_tensors(path)["x"].numel() == 1, "a plain file beside it comes first"
    path.unlink()
    for data, text in (
        (whole[:-20], "cut off"),
        (b"no xz" + whole, "not a readable xz file"),
        (lzma.compress(b"other"), "not a whole safetensors file"),
        # a dictionary of 128 MiB: the decompressor itself would hold it
        (lzma.compress(b"x", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 2**27}]), "readable"),
    ):
        packed.write_bytes(data)
        with pytest.raises(UserError, match=text):
            load_tensors(path)
    packed.write_bytes(whole)
    monkeypatch.setattr(goldens, "MAX_UNPACKED_BYTES", 2000)
    with pytest.raises(UserError, match=r"a\.safetensors\.xz"):
        load_tensors(path)


def test_user_errors_name_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        find_sets(tmp_path / "absent")
    with pytest.raises(UserError, match="no golden files"):
        find_sets(tmp_path)
    with pytest.raises(UserError, match="umt5"):
        find_sets(GOLDENS, ["other"])


def test_command_line_ends_with_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-golden", str(GOLDENS), "--families", "umt5,actions_matrix_game2"]) == 0
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert document["ok"] is True
    assert [set(one) for one in document["families"]] == [
        {"family", "ok", "max_abs", "max_rel", "worst"}
    ] * 2
    for listed in (["umt5", "actions_matrix_game2"], ["umt5,actions_matrix_game2"]):
        assert main(["check-golden", "--families", *listed, str(GOLDENS)]) == 0
        again = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        assert again == document
    assert main(["check-golden"]) == 2
    assert "give the folder" in capsys.readouterr().err
    assert main(["check-golden", str(GOLDENS), "--families", ""]) == 2


def test_all_are_all_and_what_is_no_sidecar_is_one_line(tmp_path: Path) -> None:
    assert len(find_sets(GOLDENS, ["all"])) == len(NAMES)
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="is not a JSON sidecar"):
        find_sets(tmp_path)
