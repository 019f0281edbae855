"""Sections 2 and 5: fidelity with true bytes, and what a cache costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quantwm.report import paper
from quantwm.report.document import (
    LEAST_SCENES,
    Plot,
    Section,
    Table,
    Verdict,
    cell,
    counted,
    judge,
    plain,
)
from quantwm.report.sections.curves import sweeps
from quantwm.report.variants import title_of

PAPER_OVERHEAD = 0.065
"""The paper's 5.4% and 5.9%, rounded up."""
LEAST_CHUNKS = 4
"""Timed chunks below which a latency decides nothing."""


def fidelity(numbers: Mapping[str, Any]) -> Section:
    """(2) Fidelity at equal policies and with true bytes: Table 3."""
    found, about = numbers["fidelity"], numbers["report"]
    section = Section(
        "2. Fidelity to BF16 at equal policies, with true bytes",
        [
            "Every lane has the same policy, seed, noise and keys. Bytes are what the cache holds "
            "at the end, all of it counted; the nominal ratio is the papers' (compressed tokens "
            "over their packed bytes, codebooks in), the resident one counts query statistics too.",
            "PSNR is pooled over a window's frames, then averaged over scenes; brackets are 95% "
            "bootstrap intervals over scenes. A free-running lane parts from BF16 after some "
            "seconds: where more than half of the scenes have parted (four frames in a row below "
            "20 dB), PSNR is marked as divergence: it says that the content differs, not how good "
            "it is. Teacher-forced lanes are given the BF16 lane's past, so they cannot part.",
        ],
    )
    section.tables += [
        _fidelity_table(found, "free", "Free-running lanes"),
        _fidelity_table(found, "taught", "Teacher-forced lanes"),
        _whole_table(found),
        _bytes_table(found),
    ]
    section.plots += _fidelity_plots(found, about["fps"])
    best = [
        judge(
            f"QuantWM is nearer to BF16 than {title_of(name)}",
            found["paired"].get(name),
            "dB",
            f"its PSNR less {title_of(name)}'s in the first two seconds",
        )
        for name in ("qvg", "kivi")
    ]
    section.verdicts += best
    section.verdicts.append(_ratio_verdict(found, about["policy"]["span_tokens"]))
    return section


def _fidelity_table(found: Mapping[str, Any], mode: str, title: str) -> Table:
    lanes = {n: lane for n, lane in found["lanes"].items() if n != "bf16" and lane[mode]}
    windows = next(iter(lanes.values()))[mode] if lanes else []
    head = [
        "lane",
        *(f"PSNR {w['label']}" for w in windows),
        *(f"SSIM {w['label']}" for w in windows),
    ]
    rows = [head]
    for name, lane in lanes.items():
        psnr = [cell(w["psnr"]) + _marked(w["parted"]) for w in lane[mode]]
        ssim = [cell(w["ssim"], 3) for w in lane[mode]]
        rows.append([title_of(name), *psnr, *ssim])
    counts = (w["psnr"]["count"] for lane in lanes.values() for w in lane[mode])
    scenes = max(counts, default=0)
    return Table(f"{title}, {counted(scenes, 'scene')}, PSNR in dB (Table 3, by windows)", rows)


def _whole_table(found: Mapping[str, Any]) -> Table:
    """All frames at once, as the paper has them, beside the paper's own."""
    heads = [f"{name}, mean of {len(paper.MODELS)} models" for name in ("PSNR", "SSIM", "LPIPS")]
    rows = [["lane", "PSNR, dB", "SSIM", "LPIPS", *(f"paper: {head}" for head in heads)]]
    lanes = {name: lane for name, lane in found["lanes"].items() if name != "bf16"}
    for name, lane in lanes.items():
        whole = lane["whole"]
        rows.append(
            [
                title_of(name),
                cell(whole["psnr"]),
                cell(whole["ssim"], 4),
                cell(whole["lpips"], 4),
                plain(paper.mean(paper.TABLE_3_PSNR, name)),
                plain(paper.mean(paper.TABLE_3_SSIM, name), 4),
                plain(paper.mean(paper.TABLE_3_LPIPS, name), 4),
            ]
        )
    scenes = max((lane["scenes"] for lane in lanes.values()), default=0)
    caption = f"Free-running lanes, all frames, {counted(scenes, 'scene')} (Table 3)"
    if not any(lane["whole"]["lpips"] for lane in lanes.values()):
        caption += "; no LPIPS of ours: its weights are not on this machine (docs/metrics.md)"
    return Table(caption, rows)


def _marked(parted: float) -> str:
    return f" (divergence: {parted:.0%} parted)" if parted > 0.5 else ""


def _bytes_table(found: Mapping[str, Any]) -> Table:
    rows = [["lane", "KV bytes held", "bytes a token", "ratio, nominal", "ratio, resident"]]
    for name, lane in found["lanes"].items():
        each = lane["kv_bytes"] / lane["tokens"] if lane["tokens"] else None
        rows.append(
            [
                title_of(name),
                f"{lane['kv_bytes']:,.0f}",
                "-" if each is None else f"{each:,.0f}",
                plain(lane["ratio"], 2, "x"),
                plain(lane["resident_ratio"], 2, "x"),
            ]
        )
    return Table("Bytes at the end of the run", rows)


def _fidelity_plots(found: Mapping[str, Any], fps: float) -> list[Plot]:
    lanes = {n: lane for n, lane in found["lanes"].items() if n != "bf16"}
    plots = []
    for title, key in (("Free runs", "curve"), ("Teacher-forced", "curve_taught")):
        lines = {title_of(name): lane[key] for name, lane in lanes.items() if lane[key]}
        longest = max(map(len, lines.values()), default=0)
        x = [i / fps for i in range(longest)]
        if longest:
            plots.append(Plot(f"{title}: PSNR to BF16 over scenes", "seconds", "dB", x, lines))
    return plots


def _ratio_verdict(found: Mapping[str, Any], span: int) -> Verdict:
    """span: tokens that share centroids, before which a ratio still grows."""
    claim = f"The cache shrinks up to {paper.RATIO:.2f}x"
    lane = found["lanes"].get("quantwm")
    if lane is None or lane["ratio"] is None:
        return Verdict(claim, "not measured", "no QuantWM lane ran")
    because = (
        f"nominal {lane['ratio']:.2f}x and resident {lane['resident_ratio']:.2f}x at "
        f"{lane['tokens']:,.0f} tokens; the paper's number needs 17,600 tokens to share 256 "
        "centroids, and counts no statistics"
    )
    if lane["ratio"] < paper.RATIO and lane["tokens"] < span:
        return Verdict(claim, "undecided", f"{because}; not one span of {span:,} was full")
    return Verdict(claim, "holds" if lane["ratio"] >= paper.RATIO else "does not hold", because)


def cost(numbers: Mapping[str, Any]) -> Section:
    """(5) Latency, rank, candidates, diagonal or full: Tables 6 and 9 to 11."""
    section = Section(
        "5. Latency, rank, candidates, diagonal or full moment",
        [
            f"Device: {numbers['report']['device']}, {_hardware(numbers['report'])}. Latency is of "
            "one lane's chunk, denoising and clean pass, measured when every other process of the "
            "report has ended: the median over the chunks of the second half of each round, in "
            "brackets the 10th to 90th percentile of single chunks; over BF16, the median of the "
            "ratios to BF16's same chunks, with a 95% bootstrap interval over chunks. A small "
            "world spends little on attention, so a cache weighs more here than in a large one.",
        ],
    )
    rows = [["lane", "ms a chunk", "over BF16", "tokens", "paper"]]
    timed = numbers["latency"].values()
    theirs = ", ".join(f"{model} {value:+.1%}" for model, value in paper.TABLE_6.items())
    for name, lane in numbers["latency"].items():
        rows.append(
            [
                title_of(name),
                "{:.1f} [{:.1f}, {:.1f}]".format(lane["ms"], *lane["spread"]),
                cell(lane["overhead"], 1, 100.0, "%"),
                f"{lane['tokens']:,}",
                theirs if name == "quantwm" else "-",
            ]
        )
    if len(rows) > 1:
        chunks, rounds = (max(lane[key] for lane in timed) for key in ("chunks", "rounds"))
        caption = (
            f"Latency (Table 6), {counted(chunks, 'chunk')} a lane in {counted(rounds, 'round')}"
        )
        section.tables.append(Table(caption, rows))
    else:
        section.text.append(
            "Latency was not measured: it comes last, and nothing was left of the time."
        )
    section.tables.append(_sweep_table(numbers["sweep"]))
    section.plots += sweeps(numbers["sweep"]["rows"])
    section.verdicts += _cost_verdicts(numbers)
    return section


def _hardware(about: Mapping[str, Any]) -> str:
    return str(about["hardware"].get("gpu") or about["hardware"].get("cpu"))


def _sweep_table(found: Mapping[str, Any]) -> Table:
    rows = [
        [
            "setting",
            "PSNR, dB",
            "less the published setting",
            "SSIM",
            "ratio",
            "paper: HY, PSNR, SSIM",
        ]
    ]
    for name in ("quantwm", *(n for n in found["rows"] if n != "quantwm")):
        row = found["rows"].get(name)
        if row is None:
            continue
        theirs = paper.SWEEP.get(name)
        told = " (M = 256, all of theirs)" if name == "top64" else ""
        title = "published: rank 8, M = 4, diagonal" if name == "quantwm" else title_of(name)
        rows.append(
            [
                title,
                cell(row["psnr"]),
                "-" if name == "quantwm" else cell(row["difference"]),
                cell(row["ssim"], 4),
                plain(row["ratio"], 2, "x"),
                "-" if theirs is None else "{:.2f}, {:.3f}".format(*theirs) + told,
            ]
        )
    caption = (
        f"First {found['frames']} frames, {counted(found['scenes'], 'scene')} (Tables 9, 10, 11)"
    )
    return Table(caption, rows)


def _cost_verdicts(numbers: Mapping[str, Any]) -> list[Verdict]:
    found, lane = numbers["sweep"]["rows"], numbers["latency"].get("quantwm")
    verdicts = []
    claim = "QuantWM costs 5 to 6% of latency where the cache stays on the GPU"
    if lane is None:
        verdicts.append(Verdict(claim, "not measured", "no QuantWM lane was timed"))
    else:
        over = lane["overhead"]
        because = (
            f"{cell(over, 1, 100.0, '%')} over BF16's chunk, {lane['ms']:.1f} ms, over "
            f"{counted(over['count'], 'chunk')}"
        )
        inside = [over[end] <= PAPER_OVERHEAD for end in ("low", "high")]
        word = "holds" if all(inside) else "undecided" if any(inside) else "does not hold"
        word = word if over["count"] >= LEAST_CHUNKS else "undecided"
        if not str(numbers["report"]["device"]).startswith("cuda"):
            word, because = "undecided", f"{because}; the claim is of GPUs, this was a CPU"
        verdicts.append(Verdict(claim, word, because))
    tests: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
        ("rank2", "Rank 2 loses next to nothing against rank 8 (0.05 dB)", lambda d: d > -0.25),
        ("full", "The full moment brings nothing over its diagonal", lambda d: d < 0.25),
        ("top1", "The range term (M = 4 against M = 1) brings 0.1 to 0.2 dB", lambda d: d < 0),
    )
    for name, claim, agrees in tests:
        row = found.get(name)
        if row is None or row["difference"] is None or row["difference"]["mean"] is None:
            verdicts.append(Verdict(claim, "not measured", f"{title_of(name)} did not run"))
            continue
        difference = row["difference"]
        because = f"{title_of(name)} less the published setting: {cell(difference)} dB"
        ends = [agrees(difference[end]) for end in ("low", "high")]
        word = "holds" if all(ends) else "undecided" if any(ends) else "does not hold"
        word = "undecided" if difference["count"] < LEAST_SCENES else word
        verdicts.append(Verdict(claim, word, because))
    return verdicts
