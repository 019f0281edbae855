"""Plots of the sections that have no curve over frames of their own: layers, settings, episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quantwm.report import paper
from quantwm.report.document import Plot
from quantwm.report.variants import LANES, METHODS, title_of

REMEMBERED = ("bf16", "kivi", "qvg", "quantwm", "qtc")
"""Lanes in the plot of recall, with BF16's short history: more lines cannot be told apart."""


def errors_by_layer(attention: Mapping[str, Any]) -> list[Plot]:
    """QVG's errors of keys and values and of the outputs with either: Table 1 as lines."""
    if "qvg-keys" not in attention:
        return []
    both, keys, values = (attention[n]["by_layer"] for n in ("qvg", "qvg-keys", "qvg-values"))
    lines = {
        "keys": [layer["k_rel"] for layer in both.values()],
        "values": [layer["v_rel"] for layer in both.values()],
        "output, K2V16": [layer["output_rel"] for layer in keys.values()],
        "output, K16V2": [layer["output_rel"] for layer in values.values()],
    }
    return [Plot("QVG by layer", "layer", "relative error", [int(n) for n in both], lines)]


def shift_by_layer(attention: Mapping[str, Any]) -> list[Plot]:
    """Token-selection shift of every method, layer by layer."""
    found = {m.name: attention[m.name]["by_layer"] for m in METHODS if m.name in attention}
    if not found:
        return []
    layers = [int(n) for n in next(iter(found.values()))]
    lines = {
        title_of(name): [layer["shift"] for layer in row.values()] for name, row in found.items()
    }
    return [Plot("Token-selection shift by layer", "layer", "share of queries", layers, lines)]


def ablation_by_frame(found: Mapping[str, Any], fps: float) -> list[Plot]:
    """PSNR of Table 5's rows over the run."""
    names = ("qvg", "affine", "qsac", "psac", "quantwm")
    curves = {n: found["rows"][n].get("curve") for n in names if n in found["rows"]}
    lines = {title_of(name): curve for name, curve in curves.items() if curve}
    if not lines:
        return []
    x = [i / fps for i in range(max(map(len, lines.values())))]
    return [Plot("Ablation: PSNR to BF16 over scenes", "seconds", "dB", x, lines)]


def sweeps(rows: Mapping[str, Any]) -> list[Plot]:
    """PSNR of ranks and of numbers of candidates less the published setting's, here and there."""
    plots = []
    for title, stem, values, own in (
        ("rank", "rank", (2, 4, 8, 16, 32), 8),
        ("candidates M", "top", (1, 2, 4, 16, 64), 4),
    ):
        names = ["quantwm" if v == own else f"{stem}{v}" for v in values]
        here = [_difference(rows, name) for name in names]
        there = [paper.SWEEP[name][0] - paper.SWEEP["quantwm"][0] for name in names]
        if sum(value is not None for value in here) > 1:
            lines = {"here": here, "paper: HY": there}
            heading, label = (
                f"{title[0].upper()}{title[1:]} against {own}: PSNR",
                f"log2 of {title}",
            )
            plots.append(Plot(heading, label, "dB", [math.log2(v) for v in values], lines))
    return plots


def _difference(rows: Mapping[str, Any], name: str) -> float | None:
    if name == "quantwm":
        return 0.0
    difference = rows[name]["difference"] if name in rows else None
    return None if difference is None else difference["mean"]


def recall(rows: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Per task the PSNR of every episode, from the worst to the best."""
    plots = []
    for task in dict.fromkeys(row["task"] for row in rows):
        found = {(r["history"], r["lane"]): sorted(r["values"]) for r in rows if r["task"] == task}
        picked = [("whole", name) for name in REMEMBERED] + [("short", "bf16")]
        lines = {
            title_of(lane) + (", short" if history == "short" else ""): found[history, lane]
            for history, lane in picked
            if (history, lane) in found
        }
        longest = max(map(len, lines.values()), default=0)
        if longest > 1:
            x = list(range(1, longest + 1))
            plots.append(Plot(f"{task}: PSNR to truth", "episodes, worst first", "dB", x, lines))
    return plots


def over_stretches(lanes: Mapping[str, Any], key: str, title: str, unit: str) -> list[Plot]:
    """One figure of the long run over its ten-second stretches; the noise floor is in its table."""
    names = [v.name for v in LANES if v.name in lanes and v.name != "floor"]
    found = {name: [s for s in lanes[name]["stretches"] if s[key]] for name in names}
    found = {name: row for name, row in found.items() if len(row) > 1}
    if not found:
        return []
    x = [sum(s["seconds"]) / 2 for s in next(iter(found.values()))]
    lines = {title_of(name): [s[key]["mean"] for s in row] for name, row in found.items()}
    return [Plot(title, "seconds, middle of each stretch", unit, x, lines)]
