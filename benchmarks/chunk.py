"""`chunk`: a whole chunk of a full-size world in each format, over BF16: attention, cache, rest."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks import wan
from quantwm.errors import UserError
from quantwm.worlds.wan.catalog import ENTRIES

BASELINE = "bf16"
PARTS = {
    "attention": ("attention",),
    "cache": ("cache: decode history", "cache: encode", "cache: commit"),
}
"""What is added up of `wan`'s parts; the rest is what the transformer computes beside."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", default="lingbot_v2_14b", choices=ENTRIES)
    parser.add_argument("--lanes", default="bf16,qvg,quantwm", help="formats, bf16 among them")
    parser.add_argument("--frames", type=int, default=69, help="video frames to fill: the window")
    parser.add_argument("--latent", help="height,width of a latent frame, e.g. 90,160 for 720p")
    parser.add_argument("--chunks", type=int, default=3, help="chunks timed after that")
    parser.add_argument("--no-graphs", action="store_true", help="launch op by op")
    parser.add_argument("--in-turn", action="store_true", help="encode on the model's own stream")
    parser.add_argument("--alone", action="store_true", help="encode each layer by itself")
    parser.add_argument("--kernels", type=int, default=0, help="name so many of the costliest")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """`wan` lane by lane, read against its bf16 lane."""
    lanes = options.lanes.split(",")
    if BASELINE not in lanes:
        raise UserError(f"--lanes needs {BASELINE} to compare with, got {options.lanes}")
    options.together = options.brief = options.offload = options.op_by_op = False
    options.rounds = 0
    result = wan.run(options)
    parts = {row["lanes"][0]: _parts(row) for row in result["rows"]}
    return result | {
        "benchmark": "chunk",
        "parts_ms": parts,
        "over_bf16": {lane: _over(parts[lane], parts[BASELINE]) for lane in lanes},
    }


def _parts(row: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a chunk: whole as timed, attention and cache as watched."""
    split = row["split_ms"]
    found = {name: sum(split.get(part, 0.0) for part in of) for name, of in PARTS.items()}
    whole = row["ms_per_chunk"][row["lanes"][0]]
    return {"whole": whole, **found, "rest": whole - sum(found.values())}


def _over(parts: dict[str, float], baseline: dict[str, float]) -> dict[str, float]:
    """Part of BF16's time that is added: of the whole chunk, of attention and cache together."""
    both, plain = (p["attention"] + p["cache"] for p in (parts, baseline))
    return {
        "whole": round(parts["whole"] / baseline["whole"] - 1, 4),
        "attention_and_cache": round(both / plain - 1, 4) if plain else 0.0,
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        wan.table(result),
        f"{'ms a chunk':12}{'whole':>10}{'attention':>11}{'cache':>9}{'rest':>10}"
        f"{'over bf16':>12}{'attention and cache':>22}",
    ]
    for lane, parts in result["parts_ms"].items():
        over = result["over_bf16"][lane]
        lines.append(
            f"{lane:12}{parts['whole']:10.1f}{parts['attention']:11.1f}{parts['cache']:9.1f}"
            f"{parts['rest']:10.1f}{over['whole']:+12.1%}{over['attention_and_cache']:+22.1%}"
        )
    return "\n".join(lines)
