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
    "free_energy_late": "the same of the last 64",
    "free_change": "change from frame to frame over the truth's",
    "still_change": "change a frame while no key is held, grey levels",
    "free_grid": "unevenness of gradients at the latents' grid",
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
NOT_TOLD_OF_DECODER = NOT_TOLD | {"--episodes", "--unseen", "--count"}
"""Of `train_decoder`, whose --episodes is a folder; a run's is a number, an ingredient."""


def one_run(manifest: Manifest) -> list[str]:
    """Stages and measures of one run."""
    facts: Mapping[str, Any] = manifest.training
    metrics, hardware = facts["metrics"], facts["hardware"]
    lines = [
        f"Weights {manifest.sha256[:12]}, {manifest.bytes_total / 1e6:.1f} MB. {hardware['gpu']}, "
        f"{hardware['cpu_cores']} CPU cores, torch {facts['versions']['torch']}, "
        f"seed {facts['seed']}, {facts['minutes']['total']} minutes.",
        "",
        "```",
        str(facts["command"]),
        "```",
        "",
        "| stage | minutes | |",
        "|---|---|---|",
        *stage_rows(facts),
        "",
        measured_on(metrics),
        "",
        "| | |",
        "|---|---|",
    ]
    lines += [
        f"| {words} | {was_and_is(metrics, name)} |"
        for name, words in WORDS.items()
        if name in metrics
    ]
    return [*lines, *earlier_runs(facts)]


def stage_rows(facts: Mapping[str, Any]) -> list[str]:
    """Stages and their minutes; `train_decoder` has its own alone, and the steps are the
    decoder's."""
    metrics, minutes = facts["metrics"], facts["minutes"]
    steps = f"{facts['steps']:,} steps"
    if "before" in metrics:
        what = f"{facts['frames']:,} frames, {steps}, {grown(metrics)}"
        return [f"| decoder on rollouts | {minutes['decoder']} | {what} |"]
    rows = [
        f"| first frames | {minutes.get('first_frames', '-')} | of {facts['frames']:,} |",
        f"| autoencoder | {minutes.get('autoencoder', '-')} | "
        f"{metrics.get('autoencoder_steps', 0):,} steps |",
        f"| frames to latents | {minutes.get('encode', '-')} | |",
        f"| transformer | {minutes.get('transformer', '-')} | {steps} |",
    ]
    if "decoder" in minutes:
        what = grown(metrics["decoder"])
        rows.append(f"| decoder on rollouts | {minutes['decoder']} | {what} |")
    return rows


def grown(found: Mapping[str, Any]) -> str:
    """What the decoder's own stage did."""
    before = found["before"]
    return (
        f"energy of free frames {before['free_energy']} to {found['free_energy']} of the truth's, "
        f"autoencoder {before['autoencoder_psnr']} to {found['autoencoder_psnr']} dB"
    )


def measured_on(metrics: Mapping[str, Any]) -> str:
    """How much was measured; the first manifests of the decoder's stage do not say."""
    if "episodes" not in metrics:
        return "On unseen maps:"
    return (
        f"{metrics['episodes']} unseen maps, {metrics.get('steps', '-')} steps, "
        f"{metrics.get('rollout_frames', '-')} free frames:"
    )


def was_and_is(metrics: Mapping[str, Any], name: str) -> str:
    """A measure, after the one before the decoder's stage where that was all."""
    before = metrics.get("before", {})
    return f"{before[name]} to {metrics[name]}" if name in before else str(metrics[name])


def earlier_runs(facts: Mapping[str, Any]) -> list[str]:
    """The runs that these weights went on from, the newest first; a mean of two ends the line."""
    lines: list[str] = []
    earlier = facts.get("continued_from")
    while earlier:
        of = f" ({earlier['minutes']['total']} minutes)" if "minutes" in earlier else ""
        lines.append(f"* `{earlier['command']}`{of}")
        earlier = earlier.get("continued_from")
    return ["", "Went on from, the newest first:", "", *lines] if lines else []


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
    words = command.split()
    decoder = words[2:3] == ["training.train_decoder"]
    hidden = NOT_TOLD_OF_DECODER if decoder else NOT_TOLD
    kept, skip = ["decoder alone"] if decoder else [], False
    for word in words[3:]:
        if word.startswith("--"):
            skip = word.split("=")[0] in hidden
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
