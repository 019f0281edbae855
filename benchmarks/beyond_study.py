"""Every method over recorded q, k, v: three budgets, half-measures, one ingredient left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantwm.cache.formats import FORMATS, make_format, split_method
from quantwm.engine import Engine
from quantwm.lanes import lanes_for
from quantwm.report.jobs import script
from quantwm.report.scale import SCRIPTS
from quantwm.study import study
from quantwm.tensor_files import TensorRecorder, load_tensors
from quantwm.worlds.base import World

BUDGETS = {
    "rtn": ("rtn:group_size=128", "rtn", "rtn:group_size=32"),
    "kivi": ("kivi:group_size=128", "kivi:group_size=64", "kivi"),
    "qvg": ("qvg:centroids=16,group_size=128", "qvg:centroids=32", "qvg"),
    "qvg-pro": (
        "qvg-pro:stages=2,centroids=16,group_size=64", "qvg-pro:stages=2,centroids=16", "qvg-pro",
    ),
    "quantwm": (
        "quantwm:centroids=16,rank=2,group_size=128", "quantwm:compact-embedded", "quantwm",
    ),
    "qtc": ("qtc:small", "qtc", "qtc:large"),
}  # fmt: skip
"""Small, medium, large: 1.7, 2.35 and 2.84 bits an element, or as near as a format of 2-bit codes
goes; chosen by their bytes alone. The last of rtn is RTN at KIVI's bytes."""

HALF_MEASURES = (
    "quantwm:keys=unrotated",
    "quantwm:clip=0.7",
    "quantwm:coefficients=int4",
    "quantwm:keys=unrotated,clip=0.7",
    "quantwm:keys=unrotated,clip=0.7,coefficients=int4",
    "quantwm:keys=unrotated,clip=0.7,coefficients=int4,qsac=false",
    "quantwm:keys=unrotated,clip=0.7,psac=false",
    "quantwm:psac=false",
)
"""What of all this can be had within QuantWM's own format."""

ABLATION = {
    "qtc": "(nothing)",
    "qtc:without-unrotation": "un-rotation",
    "qtc:without-queries": "queries (plain squares of keys)",
    "qtc:without-averaging": "averaging over relative positions",
    "qtc:without-bases": "bases (2 bits, Hadamard, LDLQ)",
    "qtc:without-means": "a mean for each chunk",
    "qtc:without-gains": "a gain for each token",
    "qtc:by-attention": "values counted plainly (by attention instead)",
    "qtc:by-output": "values counted plainly (by the output weights instead)",
}
"""qtc without one ingredient -> what is left out."""

METHODS = tuple(
    dict.fromkeys(
        (*(method for three in BUDGETS.values() for method in three), *HALF_MEASURES, *ABLATION)
    )
)

LAYERS = (1, 3, 7, 8)
"""Of the embedded world; none of those that choices were made on (0, 5 and 9)."""


def known_methods(wanted: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those that this version has, and those that it has not."""
    have, missing = [], []
    for method in wanted:
        name, settings = split_method(method)
        try:
            make_format(name, **settings)
        except ValueError:
            missing.append(method)
        else:
            (have if name in FORMATS else missing).append(method)
    return have, missing


def record(world: World, folder: Path, chunks: int, layers: Sequence[int] = LAYERS) -> Path:
    """A BF16 rollout of the world with q, k, v of some layers kept; the file."""
    count = world.spec.cache.layers
    recorder = TensorRecorder(tuple(layer for layer in layers if layer < count) or (0,))
    lanes = lanes_for(world.spec, ["bf16"])
    scenes = [scene.name for scene in world.scenes()]
    scene = scenes[len(scenes) // 2] if scenes else None
    with Engine(world, lanes, seed=5, scene=scene, recorder=recorder) as engine:
        engine.start()
        for action in script(f"{SCRIPTS[1]}, {SCRIPTS[0]}", chunks, world):
            engine.step(action)
    path = folder / "recorded.safetensors"
    recorder.save(path)
    return path


def study_method(world: World, path: Path, method: str, own_layers: bool) -> dict[str, Any]:
    """One method over a recording, strictly causal and all of it compressed: `study.MethodResult`.

    The world's settings for a format hold where a method does not begin with a preset.

    own_layers: the recording is the world's, so that its output weights are those of the layers.
    """
    tensors = load_tensors(path)
    name, own = split_method(method)
    suited = {} if "preset" in own else world.spec.format_settings.get(name, {})
    weights: Any = getattr(world, "value_metric", None) if own_layers else None
    (result,) = study(
        tensors,
        [method],
        chunk=tensors.metadata_int("chunk_tokens") or world.spec.cache.tokens_per_chunk,
        span=world.spec.policy.span_tokens,
        settings={method: suited},
        device=world.device,
        output_weights=None if weights is None else lambda layer: weights(layer, "self"),
    )
    return asdict(result)


def suits(method: str, own_layers: bool) -> bool:
    """Whether a method means anything on a recording whose output weights are (not) known."""
    return own_layers or method != "qtc:by-output"


def by_method(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in rows}
