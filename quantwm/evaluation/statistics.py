"""Statistics of recorded keys, values and queries that decide whether a result carries over.

A cache format wins or loses on properties of the tensors: channels that stand out, what all tokens
share, where queries look, what stays from frame to frame. Where big models' figures are published,
they stand beside ours.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from quantwm.cache.affine import quantize_ternary
from quantwm.cache.positions import TokenPositions, rotate_, turns
from quantwm.cache.spec import RopeLayout
from quantwm.errors import UserError
from quantwm.evaluation.episodes import Episode
from quantwm.evaluation.rollout import Run
from quantwm.study import relative_error, study
from quantwm.tensor_files import RecordedTensors, TensorRecorder, load_tensors

if TYPE_CHECKING:
    from quantwm.worlds.embedded.adapter import EmbeddedWorld

RECORDED_LAYERS = 5
RECORDED_CHUNKS = 16
RECORDED_MAPS = 4
TOP = 8  # eigenvectors of the query moment, PSAC's rank


@dataclass(frozen=True)
class StatisticSpec:
    """One line: its key, what it is, and the published figures of big models in words."""

    key: str
    title: str
    published: str
    digits: int = 2


STATISTICS = (
    StatisticSpec(
        "key_outlier", "key outliers: largest over median channel", "not published; max|K| ~100", 1
    ),
    StatisticSpec("key_outlier_worst", "  the worst head", "-", 1),
    StatisticSpec("value_outlier", "the same for values", "not published; max|V| ~1000", 1),
    StatisticSpec("key_constant", "share of constant energy, keys as cached", "not published"),
    StatisticSpec("key_constant_unturned", "  keys before RoPE", "not published"),
    StatisticSpec("value_constant", "  values", "not published"),
    StatisticSpec(
        "query_top8", "energy of queries in their top 8 of D directions", "0.71 (one layer)"
    ),
    StatisticSpec(
        "key_redundancy", "change of a key from frame to frame over its variance", "not published"
    ),
    StatisticSpec("value_redundancy", "  of a value", "not published"),
    StatisticSpec("key_gain", "error of 3 levels over the same with centroids, keys", "6.9 (QVG)"),
    StatisticSpec("value_gain", "  values", "2.6 (QVG)"),
    StatisticSpec("qvg_shift", "token shift under QVG", "0.37 to 0.61 (5 models)", 3),
    StatisticSpec("quantwm_shift", "token shift under QuantWM", "0.10 to 0.22 (5 models)", 3),
)


def measure_statistics(
    world: EmbeddedWorld,
    episodes: Sequence[Episode],
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Means over layers, heads and up to four maps, recorded from clean passes over true frames.

    The first turn, or the walk, of each map: 16 chunks. {"statistics": {key: value}, ...}.
    """
    layers = spread_layers(world.spec.cache.layers)
    chosen = _recordable(episodes, world.spec.cache.frames_per_chunk)
    if not chosen:
        raise UserError(
            f"statistics need an episode with {RECORDED_CHUNKS} chunks of truth: a turn or a walk"
        )
    found: list[dict[str, float]] = []
    for number, episode in enumerate(chosen[:RECORDED_MAPS], start=1):
        report(f"recording {number}/{min(len(chosen), RECORDED_MAPS)}")
        tensors = record(world, episode, layers)
        found.append({**tensor_statistics(tensors), **_format_statistics(world, tensors, report)})
    values = {key: fmean(each[key] for each in found) for key in found[0]}
    values["key_outlier_worst"] = max(each["key_outlier_worst"] for each in found)
    return {
        "statistics": {key: round(value, 4) for key, value in values.items()},
        "published": {spec.key: spec.published for spec in STATISTICS},
        "layers": list(layers),
        "recorded_maps": len(found),
    }


def cells(result: dict[str, Any]) -> list[list[str]]:
    """The statistics as a table for people."""
    rows = [["statistic", "embedded world", "big models, published"]]
    for spec in STATISTICS:
        value = result["statistics"][spec.key]
        rows.append([spec.title, f"{value:.{spec.digits}f}", spec.published])
    return rows


def spread_layers(layers: int, count: int = RECORDED_LAYERS) -> tuple[int, ...]:
    """Layers from the first to the last, evenly."""
    if layers <= count:
        return tuple(range(layers))
    return tuple(round(i * (layers - 1) / (count - 1)) for i in range(count))


def record(world: EmbeddedWorld, episode: Episode, layers: Sequence[int]) -> RecordedTensors:
    """q, k, v of the clean passes over an episode's true frames."""
    size = world.spec.cache.frames_per_chunk
    recorder = TensorRecorder(tuple(layers))
    run = Run(world, episode, steps=1, recorder=recorder)
    run.follow(range(_true_chunks(episode, size)))
    with tempfile.TemporaryDirectory(prefix="quantwm-statistics-") as folder:
        path = Path(folder) / "tensors.safetensors"
        recorder.save(path)
        return load_tensors(path)


def tensor_statistics(tensors: RecordedTensors) -> dict[str, float]:
    """Outliers, constant energy, query energy and redundancy, means over layers and heads."""
    per_frame = tensors.metadata_int("tokens_per_frame") or 1
    layout = tensors.rope()
    first = (tensors.metadata_int("first_frame") or 0) * per_frame
    values: dict[str, list[float]] = {}
    for layer in tensors.layers.values():
        q, k, v = (layer[part].float() for part in ("q", "k", "v"))
        unturned = k if layout is None else _unturned(k, first, layout)
        measured = {
            "key_outlier": outliers(k),
            "value_outlier": outliers(v),
            "key_constant": constant_share(k),
            "key_constant_unturned": constant_share(unturned),
            "value_constant": constant_share(v),
            "query_top8": top_energy(q, TOP),
            "key_redundancy": frame_change(k, per_frame),
            "value_redundancy": frame_change(v, per_frame),
        }
        for key, heads in measured.items():
            values.setdefault(key, []).extend(heads.tolist())
    means = {key: fmean(heads) for key, heads in values.items()}
    return {**means, "key_outlier_worst": max(values["key_outlier"])}


def outliers(x: torch.Tensor) -> torch.Tensor:
    """Largest over median of the channels' largest magnitudes. x: [heads, tokens, D] -> [heads]."""
    channels = x.abs().amax(dim=1)
    return channels.amax(dim=1) / channels.median(dim=1).values.clamp(min=1e-12)


def constant_share(x: torch.Tensor) -> torch.Tensor:
    """|mean over tokens|^2 over the mean of |token|^2. x: [heads, tokens, D] -> [heads]."""
    return x.mean(dim=1).square().sum(-1) / x.square().sum(-1).mean(1).clamp(min=1e-12)


def top_energy(q: torch.Tensor, count: int) -> torch.Tensor:
    """Share of sum |q|^2 in the `count` leading eigenvectors of sum q q^T. [H, N, D] -> [H]."""
    values = torch.linalg.eigvalsh(torch.bmm(q.transpose(1, 2), q)).clamp(min=0)
    return values[:, -count:].sum(1) / values.sum(1).clamp(min=1e-12)


def frame_change(x: torch.Tensor, per_frame: int) -> torch.Tensor:
    """Mean squared change from a token to that of the same place in the next frame, over twice the
    variance: 0 where nothing changes, 1 where frames have nothing in common. [H, N, D] -> [H]."""
    frames = x.unflatten(1, (-1, per_frame))
    change = (frames[:, 1:] - frames[:, :-1]).square().sum(-1).mean(dim=(1, 2))
    variance = (x - x.mean(dim=1, keepdim=True)).square().sum(-1).mean(1)
    return change / (2 * variance).clamp(min=1e-12)


def ternary_error(x: torch.Tensor, group_size: int = 64) -> float:
    """|x - x^|^2 / |x|^2 of QVG's three levels without its centroids. x: [H, N, D]."""
    x = x.float()
    codes, scales = quantize_ternary(x, group_size)
    steps = scales.float().repeat_interleave(group_size, dim=-1)
    return relative_error(x, (codes.float() - 1) * steps)


def _format_statistics(
    world: EmbeddedWorld, tensors: RecordedTensors, report: Callable[[str], None]
) -> dict[str, float]:
    """What formats do to the recording, with the world's own settings."""
    results = {
        result.method: result
        for result in study(
            tensors,
            ("qvg", "quantwm"),
            chunk=world.spec.cache.tokens_per_chunk,
            span=world.spec.policy.span_tokens,
            settings=world.spec.format_settings,
            device=world.device,
            report=report,
        )
    }
    qvg = results["qvg"]
    plain = {
        part: fmean(ternary_error(layer[part]) for layer in tensors.layers.values())
        for part in ("k", "v")
    }
    return {
        "key_gain": plain["k"] / qvg.k_rel_mse,
        "value_gain": plain["v"] / qvg.v_rel_mse,
        "qvg_shift": qvg.token_shift,
        "quantwm_shift": results["quantwm"].token_shift,
    }


def _recordable(episodes: Sequence[Episode], size: int) -> list[Episode]:
    """One episode a map whose first chunks are all stored, the longest kinds first."""
    chosen: dict[int, Episode] = {}
    for kind in ("walk", "turn"):
        for episode in episodes:
            number = int(episode.origin["map_seed"])
            long_enough = _true_chunks(episode, size) >= RECORDED_CHUNKS
            if episode.kind == kind and long_enough:
                chosen.setdefault(number, episode)
    return list(chosen.values())


def _true_chunks(episode: Episode, size: int) -> int:
    """Chunks from the start whose true frames are all stored, 16 at most."""
    count = 0
    while count < len(episode.index) and episode.index[count] == count:
        count += 1
    return min(count // size, RECORDED_CHUNKS)


def _unturned(k: torch.Tensor, first: int, layout: RopeLayout) -> torch.Tensor:
    """Keys with RoPE undone."""
    places = TokenPositions(first, k.shape[1])
    turn = turns(layout, places, 0, k.shape[1], k.device)
    return rotate_(k.clone(), turn, inverse=True)
