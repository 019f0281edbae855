"""Tables of finished runs, as Markdown: python -m training.report RUN [RUN ...].

One run gives its stages and what it reached; several give one row each, for a table of what was
changed and what it did. RUN is a folder with a manifest. Nothing is measured here.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantwm.errors import UserError
from quantwm.worlds.embedded.weights import Manifest, read_manifest
from training.inputs import in_one_line

WORDS = {
    "autoencoder_psnr": "autoencoder alone, dB",
    "next_chunk_psnr": "next chunk, history of true frames, dB",
    "memory_gain": "what all of the history brings over its last 16 frames, dB",
    "return_psnr": "coming back to what was seen 64 or more frames before, free running, dB",
    "return_gain": "what all of the history brings there over its last 16 frames, dB",
    "free_8_psnr": "free running, first 8 frames, dB",
    "free_32_psnr": "free running, first 32 frames, dB",
    "free_all_psnr": "free running, all frames, dB",
    "free_sharpness": "edges of the last 16 free frames over the truth's",
    "free_energy": "squared gradients of all free frames over the truth's",
    "free_contrast": "contrast of all free frames over the truth's",
    "follows_keys": "free chunks that turn and step as the keys say, share",
    "follows_keys_late": "the same in the second half of the free frames",
    "free_colour": "distance of their mean colour from the truth's, of 255",
}
SHORT = {
    "autoencoder_psnr": "autoencoder",
    "next_chunk_psnr": "next chunk",
    "memory_gain": "memory gain",
    "return_psnr": "return",
    "return_gain": "return gain",
    "free_8_psnr": "free 8",
    "free_32_psnr": "free 32",
    "free_sharpness": "edges",
    "free_energy": "energy",
    "follows_keys": "keys",
    "follows_keys_late": "late keys",
    "free_colour": "colour",
}
NOT_TOLD = {"--out", "--work", "--processes", "--weights", "--plan", "--minutes", "--teacher"}


def one_run(manifest: Manifest) -> list[str]:
    """Stages and measures of one run."""
    facts: Mapping[str, Any] = manifest.training
    metrics, hardware = facts["metrics"], facts["hardware"]
    minutes = facts["minutes"]
    lines = [
        f"Weights {manifest.sha256[:12]}, {manifest.bytes_total / 1e6:.1f} MB. {hardware['gpu']}, "
        f"{hardware['cpu_cores']} CPU cores, torch {facts['versions']['torch']}, "
        f"seed {facts['seed']}, {minutes['total']} minutes.",
        "",
        "```",
        str(facts["command"]),
        "```",
        "",
        "| stage | minutes | |",
        "|---|---|---|",
        f"| first frames | {minutes.get('first_frames', '-')} | of {facts['frames']:,} |",
        f"| autoencoder | {minutes.get('autoencoder', '-')} | "
        f"{metrics.get('autoencoder_steps', 0):,} steps |",
        f"| frames to latents | {minutes.get('encode', '-')} | |",
        *last_rows(minutes, metrics, f"{facts['steps']:,} steps"),
        "",
        f"{metrics.get('episodes', '-')} unseen maps, {metrics.get('steps', '-')} steps, "
        f"{metrics.get('rollout_frames', '-')} free frames:",
        "",
        "| | |",
        "|---|---|",
    ]
    lines += [f"| {words} | {metrics[name]} |" for name, words in WORDS.items() if name in metrics]
    return lines


def last_rows(minutes: Mapping[str, Any], metrics: Mapping[str, Any], steps: str) -> list[str]:
    """The transformer, and the decoder's own stage where the run had one; `train_decoder` has that
    alone, and the steps are its own."""
    alone = "before" in metrics
    transformer = f"| transformer | {minutes.get('transformer', '-')} | {steps} |"
    if "decoder" not in minutes:
        return [transformer]
    found = metrics if alone else metrics["decoder"]
    before, own = found["before"], f"{steps}, " if alone else ""
    return [
        *([] if alone else [transformer]),
        f"| decoder on rollouts | {minutes['decoder']} | {own}energy of free frames "
        f"{before['free_energy']} to {found['free_energy']} of the truth's, autoencoder "
        f"{before['autoencoder_psnr']} to {found['autoencoder_psnr']} dB |",
    ]


def several_runs(manifests: list[Manifest]) -> list[str]:
    """One row per run: its switches and what it reached."""
    lines = [
        "| run | switches | minutes | " + " | ".join(SHORT.values()) + " |",
        "|---" * (3 + len(SHORT)) + "|",
    ]
    for manifest in manifests:
        facts = manifest.training
        values = [str(facts["metrics"].get(name, "-")) for name in SHORT]
        row = [manifest.folder.name, switches(str(facts["command"])), facts["minutes"]["total"]]
        lines.append("| " + " | ".join([*(str(cell) for cell in row), *values]) + " |")
    return lines


def switches(command: str) -> str:
    """What a command says about ingredients; folders, sizes and minutes are left out."""
    kept, skip = [], False
    for word in command.split()[3:]:
        if word.startswith("--"):
            skip = word.split("=")[0] in NOT_TOLD
        if not skip:
            kept.append(word)
    return "`" + " ".join(kept) + "`" if kept else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders with a manifest")
    args = parser.parse_args()
    manifests = [read_manifest(folder) for folder in args.runs]
    try:
        lines = one_run(manifests[0]) if len(manifests) == 1 else several_runs(manifests)
    except KeyError as error:
        raise UserError(
            f"the manifest of a run lacks {error}; was it trained by run_all?"
        ) from error
    print("\n".join(lines))


if __name__ == "__main__":
    raise SystemExit(in_one_line(main))
