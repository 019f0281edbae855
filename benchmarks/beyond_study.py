"""What every method does to recorded q, k, v, chunk by chunk: cold start and long run apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quantwm.cache import CachePolicy, KVCache, make_format
from quantwm.cache.formats import FORMATS, split_method
from quantwm.cache.score_correction import ScoreCorrection
from quantwm.engine import Engine
from quantwm.lanes import lanes_for
from quantwm.report.jobs import script
from quantwm.report.numbers import mean_of
from quantwm.report.scale import SCRIPTS
from quantwm.study import compare_reads, relative_error, study_spec
from quantwm.tensor_files import PARTS, TensorRecorder, load_tensors
from quantwm.worlds.base import World

METHODS = (
    "rtn", "kivi", "qvg", "qvg-pro", "quantwm", "qtc:small", "qtc", "qtc:large",
    "quantwm:psac=false", "quantwm:clip=0.7",
    "qtc:without-unrotation", "qtc:without-queries", "qtc:without-averaging", "qtc:without-bases",
    "rtn+bias", "qvg+bias", "quantwm+bias", "qtc+bias",
    "qtc:without-gains", "qtc:without-means", "qtc:by-attention", "qtc:by-output",
)  # fmt: skip
"""All caches at their budgets; what of QuantWM can be had alone; scores corrected for noise
("+bias"); qtc without one ingredient."""
BIAS = "+bias"

COLD_TOKENS = 1536
"""What lies in the history up to here is the cold start: 8 chunks of the embedded world."""

LAYERS = (1, 3, 7, 8)
Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, [H, N, D]."""


def known_methods(wanted: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those that this version has, and those that it has not."""
    have, missing = [], []
    for method in wanted:
        name, settings = split_method(method.removesuffix(BIAS))
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


@torch.no_grad()
def study_method(world: World, path: Path, method: str) -> dict[str, Any]:
    """One method over a recording, strictly causal and with all of it compressed.

    Returns bits and, for the cold start, the long run and both, logit error, token shift and
    output error; by layer for all of it.
    """
    tensors = load_tensors(path)
    size = tensors.metadata_int("chunk_tokens") or world.spec.cache.tokens_per_chunk
    spec = study_spec(tensors, size)
    name, settings = split_method(method.removesuffix(BIAS))
    correction = ScoreCorrection() if method.endswith(BIAS) else None
    settings = {**world.spec.format_settings.get(name, {}), **settings}
    policy = CachePolicy(span_tokens=world.spec.policy.span_tokens)
    cache = KVCache(spec, make_format(name, **settings), policy, device=world.device)
    layers = [[x[part].to(world.device) for part in PARTS] for x in tensors.layers.values()]
    first, reads = tensors.metadata_int("first_frame") or 0, [[] for _ in layers]  # type: ignore[var-annotated]
    for start in range(0, tensors.shape[1] // size * size, size):
        cache.begin_chunk(first + start // spec.tokens_per_frame, spec.frames_per_chunk)
        for slot, (q, k, v) in enumerate(layers):
            now = slice(start, start + size)
            if start:
                current, past = (k[:, now], v[:, now]), (k[:, :start], v[:, :start])
                decoded = cache.history(slot)
                logit, shift, output = compare_reads(q[:, now], current, past, decoded)
                if correction is not None:
                    bias = correction(slot, "self", q[:, now].float(), start)
                    output = _output_error(q[:, now], current, past, decoded, bias)
                reads[slot].append((start, logit, shift, output))
            cache.attend(slot, q[:, now], k[:, now], v[:, now], clean=True)
        cache.finalize_chunk()
        if correction is not None:
            for slot, (_, k, _) in enumerate(layers):
                correction.learn(slot, "self", k[:, now], cache.history(slot)[0][:, -size:])
    return _summary(method, cache, layers, list(tensors.layers), reads)


def _output_error(
    q: torch.Tensor, current: Pair, past: Pair, decoded: Pair, bias: torch.Tensor
) -> float:
    """Relative error of the attention's output with the scores of decoded keys corrected."""
    scale = q.shape[-1] ** -0.5
    own = q.float() @ current[0].float().mT * scale
    outputs = []
    for (keys, values), added in ((past, 0.0), (decoded, bias)):
        scores = torch.cat((q.float() @ keys.float().mT * scale + added, own), -1)
        everything = torch.cat((values.float(), current[1].float()), 1)
        outputs.append(torch.softmax(scores, -1) @ everything)
    return relative_error(*outputs)


def _summary(
    method: str,
    cache: KVCache,
    layers: Sequence[Sequence[torch.Tensor]],
    numbers: Sequence[int],
    reads: Sequence[Sequence[tuple[float, ...]]],
) -> dict[str, Any]:
    ledger, spec = cache.ledger(), cache.spec
    elements = 2 * cache.tokens * spec.layers * spec.heads * spec.head_dim
    errors = []
    for slot, (_, k, v) in enumerate(layers):
        decoded = cache.history(slot)
        pairs = zip((k, v), decoded, strict=True)
        errors.append([relative_error(x[:, : y.shape[1]], y) for x, y in pairs])
    every = [read for layer in reads for read in layer]
    return {
        "method": method,
        "bits": (ledger.total - ledger.parts.get("statistics", 0)) * 8 / elements,
        "resident_bits": ledger.total * 8 / elements,
        "k_rel": mean_of([k for k, _ in errors]),
        "v_rel": mean_of([v for _, v in errors]),
        "cold": _means([read for read in every if read[0] <= COLD_TOKENS]),
        "long": _means([read for read in every if read[0] > COLD_TOKENS]),
        "all": _means(every),
        "layers": {
            number: _means(layer) | {"k_rel": error[0], "v_rel": error[1]}
            for number, layer, error in zip(numbers, reads, errors, strict=True)
        },
    }


def _means(reads: Sequence[tuple[float, ...]]) -> dict[str, float]:
    names = ("logit_mse", "shift", "output_rel")
    return {name: mean_of([read[i + 1] for read in reads]) for i, name in enumerate(names)}


def study_table(title: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        title,
        f"  {'method':26} {'bits':>6} {'resident':>8} {'K rel':>7} {'V rel':>7} | cold: "
        f"{'logit':>8} {'shift':>6} {'output':>8} | long: {'logit':>8} {'shift':>6} {'output':>8}",
    ]
    for row in rows:
        parts = (
            f"{row[part]['logit_mse']:>8.4f} {row[part]['shift']:>6.3f} "
            f"{row[part]['output_rel']:>8.5f}"
            for part in ("cold", "long")
        )
        lines.append(
            f"  {row['method']:26} {row['bits']:>6.3f} {row['resident_bits']:>8.3f} "
            f"{row['k_rel']:>7.4f} {row['v_rel']:>7.4f} |       " + " |       ".join(parts)
        )
    return lines
