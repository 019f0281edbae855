"""What quantized keys and values do to attention: errors, and which token a query selects.

One BF16 rollout is recorded (queries, keys and values of clean passes, after RoPE, all layers
chosen); each format then encodes it causally, chunk by chunk, everything compressed. For every
chunk after the first, its queries meet the decoded keys of all earlier chunks.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from quantwm.cache.kv_cache import KVCache
from quantwm.cache.spec import CachePolicy
from quantwm.engine import Engine
from quantwm.report.jobs import Job
from quantwm.report.schedule import check_time
from quantwm.report.variants import ALL
from quantwm.study import compare_reads, relative_error, study_spec
from quantwm.tensor_files import (
    PARTS,
    RecordedTensors,
    TensorRecorder,
    default_layers,
    load_tensors,
)
from quantwm.worlds.base import World


@dataclass(frozen=True)
class LayerErrors:
    """Of one layer, one format, one recording; means over chunks and heads.

    k_mse, v_mse: mean squared error of an element; k_rel, v_rel: over the mean square.
    logit_mse: of q.k/sqrt(D), each query's mean change taken out. output_rel: relative error of
    the attention's output. shift: share of (head, query) whose highest-scoring historical token
    changes.
    """

    k_mse: float
    v_mse: float
    k_rel: float
    v_rel: float
    logit_mse: float
    shift: float
    output_rel: float


def study_attention(
    world: World, job: Job, variants: tuple[str, ...], deadline: float = float("inf")
) -> dict[str, dict[int, LayerErrors]]:
    """Variant -> layer -> errors, of one rollout in the BF16 cache.

    deadline: seconds since the epoch, OutOfTime when it has not ended by then.
    """
    recorded = _record(world, job, deadline)
    return {name: _study(world, recorded, name, deadline) for name in variants}


def _record(world: World, job: Job, deadline: float) -> RecordedTensors:
    recorder = TensorRecorder(default_layers(world.spec.cache.layers))
    lanes = [ALL["bf16"].lane(world.spec)]
    with Engine(
        world, lanes, seed=job.seed, scene=job.scene, image=job.picture, recorder=recorder
    ) as engine:
        engine.start()
        for action in job.actions:
            check_time(deadline, time.time())
            engine.step(action)
    with tempfile.TemporaryDirectory(prefix="quantwm-report-") as folder:
        path = Path(folder) / "recorded.safetensors"
        recorder.save(path)
        return load_tensors(path)


@torch.no_grad()
def _study(
    world: World, tensors: RecordedTensors, name: str, deadline: float
) -> dict[int, LayerErrors]:
    spec = study_spec(tensors, world.spec.cache.tokens_per_chunk)
    policy = CachePolicy(span_tokens=world.spec.policy.span_tokens)
    cache = KVCache(spec, ALL[name].format(world.spec), policy, device=world.device)
    size, first = spec.tokens_per_chunk, tensors.metadata_int("first_frame") or 0
    layers = {
        number: [layer[part].to(world.device) for part in PARTS]
        for number, layer in tensors.layers.items()
    }
    found: dict[int, list[tuple[float, float, float]]] = {number: [] for number in layers}
    for chunk in range(tensors.shape[1] // size):
        check_time(deadline, time.time())
        start, stop = chunk * size, (chunk + 1) * size
        cache.begin_chunk(first + chunk * spec.frames_per_chunk, spec.frames_per_chunk)
        for slot, (number, parts) in enumerate(layers.items()):
            q, k, v = (part[:, start:stop] for part in parts)
            if chunk:
                past = [part[:, :start] for part in parts[1:]]
                found[number].append(compare_reads(q, (k, v), past, cache.history(slot)))
            cache.attend(slot, q, k, v, clean=True)
        cache.finalize_chunk()
    return {
        number: _errors(parts, cache.history(slot), found[number])
        for slot, (number, parts) in enumerate(layers.items())
    }


def _errors(
    parts: list[torch.Tensor],
    decoded: tuple[torch.Tensor, torch.Tensor],
    reads: list[tuple[float, float, float]],
) -> LayerErrors:
    relative = [relative_error(x, y) for x, y in zip(parts[1:], decoded, strict=True)]
    power = [float(x.float().square().mean(dtype=torch.float64)) for x in parts[1:]]
    logit, shift, output = (fmean(values) for values in zip(*reads, strict=True))
    return LayerErrors(
        k_mse=relative[0] * power[0],
        v_mse=relative[1] * power[1],
        k_rel=relative[0],
        v_rel=relative[1],
        logit_mse=logit,
        shift=shift,
        output_rel=output,
    )
