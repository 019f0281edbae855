"""The mean of the weights of two runs from the same ancestor: python -m training.average A B.

Runs that went on from the same weights may lie in one valley; where they do, their mean is often
better than either. Whether it is has to be measured: nothing is measured here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from quantwm.errors import UserError
from quantwm.worlds.embedded.weights import Manifest, load_models, read_manifest, save_models
from training.inputs import in_one_line


def average_runs(first: Path, second: Path, out: Path, share: float) -> Manifest:
    """Writes (1 - share) of the first and share of the second run's transformer, with their
    autoencoder. UserError when they do not belong together."""
    if not 0 < share < 1:
        raise UserError(f"--share must be between 0 and 1, got {share}")
    if out.resolve() in (first.resolve(), second.resolve()):
        raise UserError(f"--out must be another folder than the runs, got {out}")
    manifests = [read_manifest(folder) for folder in (first, second)]
    if manifests[0].config != manifests[1].config:
        raise UserError(f"{first} and {second} are of models with other sizes")
    ancestors = [manifest.training.get("continued_from") for manifest in manifests]
    if ancestors[0] is None or ancestors[0] != ancestors[1]:
        raise UserError(f"{first} and {second} did not go on from the same weights")
    models = [load_models(manifest, torch.device("cpu"), torch.float32) for manifest in manifests]
    (mean, autoencoder), (other, its_autoencoder) = models
    theirs = its_autoencoder.state_dict()
    if not all(torch.equal(v, theirs[name]) for name, v in autoencoder.state_dict().items()):
        raise UserError(f"{first} and {second} have different autoencoders")
    with torch.no_grad():
        torch._foreach_lerp_(list(mean.parameters()), list(other.parameters()), share)
    facts = {
        "command": f"python -m training.average A B --share {share} --out OUT",
        "averaged": [
            {"sha256": manifest.sha256, "weight": weight, "training": dict(manifest.training)}
            for manifest, weight in zip(manifests, (1 - share, share), strict=True)
        ],
    }
    return save_models(out, manifests[0].config, mean, autoencoder, facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs=2, help="folders of two runs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.5, help="of the second")
    args = parser.parse_args()
    manifest = average_runs(*args.runs, args.out, args.share)
    print(f"{args.out}: {manifest.sha256[:12]}, not measured yet")


if __name__ == "__main__":
    raise SystemExit(in_one_line(main))
