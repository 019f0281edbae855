"""Sections 6 to 8: flicker that scores do not see, revisit recall, one minute and resolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from quantwm.report import paper
from quantwm.report.document import (
    LEAST_SCENES,
    Plot,
    Section,
    Table,
    Verdict,
    Word,
    cell,
    counted,
    judge,
    plain,
)
from quantwm.report.numbers import Figure, figure
from quantwm.report.revisit import TASKS
from quantwm.report.sections.curves import over_stretches, recall
from quantwm.report.variants import title_of

CLIPS = {"still": "Standing still", "turn": "A slow turn"}

SCORE_STEP = 0.01
"""A score that changes by less than 1% of itself "hardly moves": the paper's VBench averages of
QVG and BF16 differ by 0.1 to 2.2%."""

REMEMBERS = "the world remembers what it saw"

AS_WELL = 0.5
"""dB that a cache may lose and still count as remembering as well: a convention of this report."""

VISIBLE = 0.5
"""Grey levels of excess flicker, mean over the picture, that can be seen: half a level everywhere
is five levels in a tenth of the picture."""


def flicker(numbers: Mapping[str, Any]) -> Section:
    """(6) Flicker where PSNR and consistency scores do not see it."""
    section = Section(
        "6. Flicker where scores do not see it",
        [
            "Two clips on which flicker can be told from motion: nothing is pressed for the whole "
            "clip, or the camera turns 7.5 degrees a frame. Consistency is VBench's formula, the "
            "mean of (cosine to the first frame + cosine to the frame before) / 2, on features of "
            "the world's own autoencoder (VBench's DINO weights are not needed, and its numbers "
            "cannot be compared). Temporal flickering is VBench's, (255 - mean change) / 255, "
            "meant for static clips: on the turn it measures motion. Excess flicker is the mean "
            "over pixels of | |x_t - x_(t-1)| - |r_t - r_(t-1)| |, r the BF16 lane, grey levels.",
        ],
    )
    for name, title in CLIPS.items():
        found = numbers["flicker"][name]
        section.tables.append(_flicker_table(found, title))
        lanes = {n: lane for n, lane in found["lanes"].items() if n != "bf16"}
        if lanes:
            lines = {title_of(n): lane["curve"] for n, lane in lanes.items()}
            longest = max(map(len, lines.values()))
            x = [i / numbers["report"]["fps"] for i in range(longest)]
            section.plots.append(
                Plot(f"{title}: excess flicker", "seconds", "grey levels", x, lines)
            )
        section.verdicts.append(_unseen(found, title))
    return section


def _flicker_table(found: Mapping[str, Any], title: str) -> Table:
    rows = [
        [
            "lane", "PSNR, dB", "consistency", "temporal flickering", "change a frame",
            "excess flicker", "sharpness kept", "paper: mean subject consistency",
        ]
    ]  # fmt: skip
    for name, lane in found["lanes"].items():
        exact = name == "bf16"
        rows.append(
            [
                title_of(name),
                "-" if exact else cell(lane["psnr"]),
                cell(lane["consistency"], 4),
                cell(lane["flickering"], 4),
                cell(lane["temporal"], 2),
                "-" if exact else cell(lane["excess"], 2),
                "-" if exact else cell(lane["retained"], 2),
                plain(paper.mean(paper.TABLE_3_CONSISTENCY, name), 4),
            ]
        )
    return Table(f"{title}, {counted(found['scenes'], 'scene')}", rows)


def _unseen(found: Mapping[str, Any], title: str) -> Verdict:
    """Whether a lane flickers visibly while its consistency score hardly moves."""
    claim = f"{title}: scores hardly move, yet the picture flickers (QVG)"
    lane, exact = found["lanes"].get("qvg"), found["lanes"].get("bf16")
    if not lane or not exact or not lane["moved"] or lane["moved"]["mean"] is None:
        return Verdict(claim, "not measured", "no consistency score in this run")
    moved, excess = lane["moved"], lane["excess"]
    because = (
        f"consistency is {cell(moved, 2, 100.0, '%')} off BF16's "
        f"{exact['consistency']['mean']:.4f}, up to {SCORE_STEP:.0%} hardly moves; excess flicker "
        f"is {cell(excess, 2)} grey levels where BF16 itself changes by "
        f"{exact['temporal']['mean']:.2f} a frame"
    )
    if found["scenes"] < LEAST_SCENES:
        return Verdict(claim, "undecided", because)
    if min(moved["high"], -moved["low"]) < -SCORE_STEP or excess["high"] <= VISIBLE:
        return Verdict(claim, "does not hold", because)
    still = max(moved["high"], -moved["low"]) <= SCORE_STEP
    return Verdict(claim, "holds" if still and excess["low"] > VISIBLE else "undecided", because)


def revisits(numbers: Mapping[str, Any]) -> Section:
    """(7) Revisit recall against truth, per cache and history length."""
    section = Section(
        "7. Revisit recall against truth",
        [
            "In the manner of CMBench: the world is given 16 true frames and the true keys of a "
            "ViZDoom walk on a map that it was not trained on. In a Reappear task the camera turns "
            "once round, in a Revisit task it goes through a door and comes back; the last four "
            "frames stand where the first ones stood and are compared with the truth. With the "
            "short history (24 frames) the place has left the cache: that row is what a world "
            "shows that cannot remember.",
        ],
    )
    if not numbers["revisit"]:
        planned = any(name.startswith("revisit-") for name in numbers["report"]["planned"])
        section.text.append(
            "Not measured here: the time was over before a rollout of it was through."
            if planned
            else "Not measured here: no truth episodes of this world's picture size were found. "
            "python -m training.truth --out DIR makes the embedded world's; give DIR to the report "
            "with --truth."
        )
        missing = "no rollout was through" if planned else "there were no truth episodes"
        section.verdicts += [
            Verdict(f"{task.split(':')[0]}: {REMEMBERS}", "not measured", missing)
            for task in TASKS.values()
        ]
        return section
    rows = [["task", "history", "lane", "episodes", "PSNR to truth, dB", "feature cosine to truth"]]
    for row in numbers["revisit"]:
        rows.append(
            [
                row["task"],
                row["history"],
                title_of(row["lane"]),
                str(row["psnr"]["count"]),
                cell(row["psnr"]),
                cell(row["cosine"], 4),
            ]
        )
    section.tables.append(Table("Recall by task, history and cache", rows))
    section.text.append(
        "Paper: CMBench's own scores are 0.680 with the full cache and 0.670 with 85% of it pruned "
        "(DINOv2 cosine, LingBot-v2); QuantWM does not report revisits."
    )
    section.plots += recall(numbers["revisit"])
    section.verdicts += _recall_verdicts(numbers["revisit"])
    return section


def _recall_verdicts(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    found = {(r["task"], r["history"], r["lane"]): r for r in rows}
    verdicts = []
    for task in dict.fromkeys(r["task"] for r in rows):
        whole, short = (found.get((task, h, "bf16")) for h in ("whole", "short"))
        packed = found.get((task, "whole", "quantwm"))
        name = task.split(":")[0]
        claim = f"{name}: {REMEMBERS}"
        if whole and short:
            what = "BF16's PSNR less that of a short history"
            verdicts.append(judge(claim, _less(whole, short), "dB", what, "episode"))
        if whole and packed:
            lost = _less(whole, packed)
            inside = [lost[end] <= AS_WELL for end in ("low", "high")]
            word: Word = "holds" if all(inside) else "undecided" if any(inside) else "does not hold"
            verdicts.append(
                Verdict(
                    f"{name}: QuantWM's cache remembers as well as BF16's",
                    "undecided" if lost["count"] < 2 else word,
                    f"BF16's PSNR less QuantWM's is {cell(lost)} dB over "
                    f"{counted(lost['count'], 'episode')}; up to {AS_WELL} dB count as well",
                )
            )
    return verdicts


def _less(first: Mapping[str, Any], second: Mapping[str, Any]) -> Figure:
    """A difference of paired figures, kept by `revisit.recall` in the same order of episodes."""
    pairs = zip(first["values"], second["values"], strict=False)
    return figure([a - b for a, b in pairs]) or {}


def minute(numbers: Mapping[str, Any]) -> Section:
    """(8) One minute of generation, and resolutions."""
    found = numbers["minute"]
    section = Section(
        "8. One minute, and the larger resolution",
        [
            f"{found['seconds']:.0f} seconds, {counted(found['scenes'], 'scene')}. After so long "
            "there is no reference: a lane is judged by whether it stays sharp, calm and "
            "consistent. The paper's Table 8 gives VBench averages, whose models are not here.",
            _resolutions(numbers["resolutions"], numbers["larger"]["size"]),
        ],
    )
    stretches = next(iter(found["lanes"].values()))["stretches"] if found["lanes"] else []
    labels = ["{}-{} s".format(*s["seconds"]) for s in stretches]
    for key, name, unit, digits in (
        ("sharpness", "Sharpness", "gradient energy", 0),
        ("temporal", "Change a frame", "grey levels", 2),
        ("consistency", "Consistency", "autoencoder features", 3),
    ):
        rows = [["lane", *labels]]
        for lane_name, lane in found["lanes"].items():
            rows.append([title_of(lane_name), *(cell(s[key], digits) for s in lane["stretches"])])
        section.tables.append(Table(f"{name} ({unit})", rows))
        section.plots += over_stretches(found["lanes"], key, name, unit)
    rows = [["lane", "consistency, whole", "KV bytes at the end", "paper: mean VBench average"]]
    for name, lane in found["lanes"].items():
        theirs = plain(paper.mean(paper.TABLE_8, name), 4)
        rows.append(
            [title_of(name), cell(lane["consistency"], 4), f"{lane['kv_bytes']:,.0f}", theirs]
        )
    section.tables.append(Table("The whole run (Table 8)", rows))
    section.verdicts.append(_minute_verdict(found["lanes"], found["seconds"]))
    if numbers["larger"]["lanes"]:
        _add_larger(section, numbers["larger"])
    return section


def _add_larger(section: Section, found: Mapping[str, Any]) -> None:
    """Fidelity at the larger resolution, beside the paper's at 720p."""
    name = "{} x {}".format(*found["size"])
    heads = ("paper: PSNR at 720p, mean of 5 models", "paper: SSIM")
    rows = [["lane", "PSNR, dB", "SSIM", "KV bytes", "ratio, nominal", *heads]]
    for lane, row in found["lanes"].items():
        theirs = [fmean(values) for values in paper.TABLE_7.get(lane, ())] or [None, None]
        rows.append(
            [
                title_of(lane),
                "-" if lane == "bf16" else cell(row["psnr"]),
                "-" if lane == "bf16" else cell(row["ssim"], 4),
                f"{row['kv_bytes']:,.0f}",
                plain(row["ratio"], 2, "x"),
                plain(theirs[0]),
                plain(theirs[1], 4),
            ]
        )
    scenes = max(row["scenes"] for row in found["lanes"].values())
    section.tables.append(Table(f"Free runs at {name}, {counted(scenes, 'scene')} (Table 7)", rows))
    claim = f"At {name} QuantWM is nearer to BF16 than QVG"
    what = "its PSNR less QVG's in the first two seconds"
    section.verdicts.append(judge(claim, found["over_qvg"], "dB", what))


def _resolutions(sizes: Sequence[Sequence[int]], larger: Sequence[int] | None) -> str:
    first, *others = ("{} x {}".format(*size) for size in sizes)
    if not others:
        return f"This world has one resolution, {first}; there is no larger one to run."
    if larger is None:
        return f"All runs are at {first}; its weights also know {', '.join(others)}, not run here."
    wide, high = larger
    return f"All runs above are at {first}; the last table is of runs at {wide} x {high}."


LEAST_SECONDS = 45.0
"""Of generation below which nothing is said of a minute: the reduced forms have a few seconds."""


def _minute_verdict(lanes: Mapping[str, Any], seconds: float) -> Verdict:
    claim = "Over a minute QuantWM stays with BF16 where QVG falls behind"
    if lanes and seconds < LEAST_SECONDS:
        return Verdict(claim, "not measured", f"this run generated {seconds:.0f} seconds")
    if not {"bf16", "qvg", "quantwm"} <= lanes.keys():
        return Verdict(claim, "not measured", "a lane is missing")
    scores = {n: lanes[n]["consistency"] for n in ("bf16", "qvg", "quantwm")}
    if any(score is None or score["mean"] is None for score in scores.values()):
        return Verdict(claim, "not measured", "this world has no features to compare")
    exact, theirs, ours = (scores[n]["mean"] for n in ("bf16", "qvg", "quantwm"))
    because = (
        f"consistency {exact:.4f} for BF16, {ours:.4f} for QuantWM, {theirs:.4f} for QVG, "
        f"over {counted(scores['bf16']['count'], 'scene')}"
    )
    agrees = abs(ours - exact) < abs(theirs - exact)
    open_ = scores["bf16"]["count"] < LEAST_SCENES
    if not open_ and _overlap(scores["qvg"], scores["quantwm"]):
        open_, because = True, because + ": the intervals of QuantWM and QVG overlap"
    return Verdict(claim, "undecided" if open_ else "holds" if agrees else "does not hold", because)


def _overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one["low"] <= other["high"] and other["low"] <= one["high"]
