"""Every real configuration, on the meta device, has the published names, shapes and counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quantwm.worlds.wan.backbone import CausalWan
from quantwm.worlds.wan.config import PRESETS
from quantwm.worlds.wan.loading import on_meta
from quantwm.worlds.wan.names import canonical, family, infer_config

KEYS = Path(__file__).parent / "keys"
FAMILIES = {
    "causal_forcing_1p3b": "causal_forcing",
    "lingbot_v2_14b": "lingbot_world_v2",
    "lingbot_v2_1p3b": "lingbot_world_v2",
}


def published(name: str) -> dict[str, torch.Tensor]:
    """The published state dict of a preset, on the meta device, under its own names."""
    table = json.loads((KEYS / f"{name}.json").read_text())
    out = {}
    for pattern, shape, count in table["patterns"]:
        for index in range(count):
            key = pattern.replace("blocks.N.", f"blocks.{index}.")
            out[key] = torch.empty(shape, device="meta")
    assert len(out) == table["tensors"]
    return out


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_matches_the_published_key_table(name: str) -> None:
    expected = {key: tuple(t.shape) for key, t in canonical(published(name)).items()}
    model = on_meta(lambda: CausalWan(PRESETS[name]))
    found = {key: tuple(t.shape) for key, t in model.state_dict().items()}
    assert found == expected
    table = json.loads((KEYS / f"{name}.json").read_text())
    assert sum(p.numel() for p in model.parameters()) == table["params"]
    assert all(p.is_meta for p in model.parameters()) and not list(model.buffers())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_sizes_and_family_are_inferred_from_the_published_names(name: str) -> None:
    weights = canonical(published(name))
    assert family(weights) == FAMILIES.get(name, name)
    assert infer_config(weights) == PRESETS[name]


def test_every_table_has_a_preset() -> None:
    assert {path.stem for path in KEYS.glob("*.json")} == set(PRESETS)
