"""`python -m benchmarks NAME`: a table, then one JSON document as the last line."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from quantwm.errors import UserError

REGISTRY = {
    "codec": ("codec", "encode and decode of one layer, beside QVG's public code"),
    "cache": ("cache", "every method's encode and decode; syncs and compilations of a long run"),
    "attention": ("attention", "a chunk's queries over a long packed history, staged and fused"),
    "low-memory": ("low_memory", "slabs by size and the fused kernel by launch row"),
    "frames": ("frames", "frames per second of the embedded world, and where the time goes"),
    "chunk": ("chunk", "a whole chunk of LingBot's size, packed over BF16"),
    "wan": ("wan", "full-size Wan worlds with random weights: time and bytes per format"),
    "passes": ("passes", "kernels between a Wan pass's products, beside PyTorch's operations"),
    "fidelity": ("fidelity", "PSNR of every lane to BF16 on the start scenes"),
    "tradeoff": ("tradeoff", "bits against error for all methods and spans: a plot and a table"),
    "soak": ("soak", "ten thousand chunks through one cache: nothing may grow"),
    "memory": ("memory", "what plan says a cache takes beside what a run takes"),
    "tune": ("tune", "device time of the launch rows worth trying"),
    "beyond": ("beyond", "the evidence for qtc: recorded tensors, rollouts, recall"),
    "qtc": ("qtc", "qtc's kernels against the PyTorch code, and what they take"),
    "codebooks": ("codebooks", "bytes against quality when codebooks outlive spans"),
    "gpu-check": ("gpu_check", "every kernel against the reference on a GPU, then codec"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=REGISTRY, help="; ".join(
        f"{name}: {text}" for name, (_, text) in REGISTRY.items()
    ))  # fmt: skip
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="options of the benchmark")
    chosen = parser.parse_args()
    # Imported when asked for: the engine behind `frames` needs more than the kernels do.
    module = importlib.import_module(f"benchmarks.{REGISTRY[chosen.name][0]}")
    own = argparse.ArgumentParser(
        prog=f"python -m benchmarks {chosen.name}", description=REGISTRY[chosen.name][1]
    )
    module.arguments(own)
    try:
        result = module.run(own.parse_args(chosen.rest))
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    print(module.table(result))
    print(json.dumps(result))
    return 0 if result.get("ok", True) else 1


if __name__ == "__main__":
    sys.exit(main())
