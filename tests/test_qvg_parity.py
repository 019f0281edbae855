"""Our qvg format against what QVG's public code stored for the same tensors and centroids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quantwm.cache import reference
from quantwm.cache.formats import QueryGuide, make_format
from quantwm.cache.pack import pack, unpack

GROUP, TOKENS = 64, 3072


@pytest.fixture(scope="module", params=["k", "v"])
def stored(request: pytest.FixtureRequest, shared_dir: Path) -> dict[str, Tensor]:
    path = shared_dir / "formats" / "qvg_layer5.safetensors"
    if not path.is_file():
        pytest.skip(f"{path} not found")
    recorded = load_file(shared_dir / "tensors" / "doom_rooms_a.safetensors")
    found = {
        name.removeprefix(f"{request.param}."): tensor.squeeze(0)
        for name, tensor in load_file(path).items()
        if name.startswith(f"{request.param}.")
    }
    found["x"] = recorded[f"layer5.{request.param}"][:, :TOKENS]
    codes, scales = reference.encode_qvg(found["x"], found["ids.0"], found["centroids.0"], GROUP)
    return {**found, "codes": unpack(codes, 128), "own_scales": scales, "own_packed": codes}


def _theirs(stored: dict[str, Tensor]) -> Tensor:
    """Their codes in our order: channel 4i in the top two bits, stored as code + 1 like ours."""
    packed = stored["packed"]
    return torch.stack([(packed >> shift) & 3 for shift in (6, 4, 2, 0)], dim=-1).flatten(-2)


def test_scales_are_equal(stored: dict[str, Tensor]) -> None:
    assert torch.equal(stored["own_scales"].float(), stored["scales"].float())


def test_codes_are_equal_wherever_the_scale_is_not_zero(stored: dict[str, Tensor]) -> None:
    """Where it is 0 (a token alone in its cluster), theirs is the rounding of 0 / 0."""
    has_scale = (stored["scales"] > 0).repeat_interleave(GROUP, dim=-1)
    assert torch.equal(_theirs(stored)[has_scale], stored["codes"][has_scale])
    assert float(has_scale.float().mean()) > 0.999


def test_decoded_values_are_equal_within_bf16(stored: dict[str, Tensor]) -> None:
    codes = _theirs(stored)
    out = torch.empty(3, TOKENS, 128, dtype=torch.bfloat16)
    reference.decode_qvg_into(
        out,
        0,
        pack(codes.contiguous()),
        stored["ids.0"],
        stored["centroids.0"],
        stored["scales"].to(torch.float8_e4m3fn),
        GROUP,
        0,
        TOKENS,
    )
    difference = (out.float() - stored["decoded"].float()).abs()
    assert float(difference.max()) <= 0.032 and float(difference.mean()) < 0.001


def test_our_centroids_are_as_good_as_theirs(stored: dict[str, Tensor]) -> None:
    """Relative error with our own k-means, at the settings of the file."""
    fmt = make_format("qvg", centroids=64)
    x = stored["x"].contiguous()
    book = fmt.fit(x, torch.Generator().manual_seed(0), None)
    out = torch.empty(3, TOKENS, 128)
    fmt.decode_into(fmt.encode(x, book, "values", QueryGuide()), out, 0, 0, TOKENS)
    energy = x.float().square().sum()
    ours = (out - x.float()).square().sum() / energy
    theirs = (stored["decoded"].float() - x.float()).square().sum() / energy
    assert float(ours) < 1.03 * float(theirs)
