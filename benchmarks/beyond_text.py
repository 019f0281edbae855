"""The tables of `beyond`: for a terminal, and for the measured part of docs/beyond.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.beyond_study import ABLATION, BUDGETS, HALF_MEASURES, by_method
from quantwm.errors import UserError
from quantwm.report.numbers import Figure
from quantwm.report.variants import title_of
from quantwm.study import COLD_TOKENS

BEGIN = "<!-- measured: begin (python -m benchmarks beyond --read beyond.json --docs THIS PAGE) -->"
END = "<!-- measured: end -->"
COMPARED = ("quantwm", "qtc:small", "qtc", "qtc:large")
"""In what is told by the length of the history."""
ERRORS = ("logit_mse", "token_shift", "attention_output_rel_mse", "corrected_output_rel_mse")


def markdown(result: Mapping[str, Any]) -> str:
    """All that was measured, in the order of docs/beyond.md."""
    parts = [_head(result)]
    if result["free"] or result["taught"]:
        parts.append(_wanted(result))
    for name, rows in result["study"].items():
        parts += _study(name, by_method(rows))
    for mode, title in (("free", "Free-running"), ("taught", "Teacher-forced")):
        if result[mode]:
            parts.append(_fidelity(title, result[mode]))
    if result["recall"]:
        parts.append(_recall(result["recall"]))
    parts += _where_not(result)
    return "\n\n".join(parts) + "\n"


def table(result: Mapping[str, Any]) -> str:
    """The same for a terminal."""
    return markdown(result).rstrip()


def put_into(page: Path, result: Mapping[str, Any]) -> None:
    """Write the tables between the page's markers. UserError where it has none."""
    try:
        text = page.read_text()
        before, begin, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise UserError(f"{page} has no lines {BEGIN!r} and {END!r} to write between")
        page.write_text(f"{before}{BEGIN}\n{markdown(result)}{END}{after}")
    except OSError as error:
        raise UserError(f"cannot write {page}: {error.strerror or error}") from error


def _head(result: Mapping[str, Any]) -> str:
    hardware = result["hardware"]
    rows = [
        f"Measured on {hardware['device']}, torch {hardware['torch']}, weights "
        f"{result['weights'][:12]}, {result['steps']} steps, in {result['seconds']:.0f} s."
    ]
    if result["together"] > 1:
        rows.append(
            f"Rollouts ran {result['together']} side by side, in one cache a lane: when a new "
            "basis pays is then asked of all of them together."
        )
    if result["missing_methods"] or result["not_begun"]:
        rows.append(
            f"**Not whole**: methods that this version has not: "
            f"{', '.join(result['missing_methods']) or 'none'}; tasks that failed or had not begun "
            f"when the time was over: {result['not_begun']}."
        )
    return "\n".join(rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["-"] * len(head), *rows]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


# What was wanted.


def _wanted(result: Mapping[str, Any]) -> str:
    """The thresholds for qtc, with what was found of each."""
    rows = []
    for mode, window, lane, least, what in (
        ("taught", "whole", "qtc", 6.0, "teacher-forced, all frames: at least +6 dB"),
        ("free", "early", "qtc", 5.0, "free-running, first window: at least +5 dB"),
        ("taught", "whole", "qtc-large", 6.0, "large, teacher-forced, all frames: the same"),
        ("free", "early", "qtc-large", 5.0, "large, free-running, first window: the same"),
        ("free", "early", "qtc-small", 0.0, "small, free-running, first window: no worse"),
        ("free", "whole", "qtc-small", 0.0, "small, free-running, all frames: no worse"),
    ):
        lanes = result[mode]
        gain = lanes.get(lane, {}).get("over_quantwm", {}).get(window)
        if gain is None or gain["mean"] is None:
            continue
        ours, theirs = lanes[lane]["held"], lanes["quantwm"]["held"]
        held = [ours[end] / theirs[end] for end in dict.fromkeys((window, "whole"))]
        reached = gain["mean"] >= least and max(held) <= 1.0
        cell = ", ".join(f"{part:.2f}" for part in held)
        rows.append([what, f"{_interval(gain)} dB", cell, "yes" if reached else "no"])
    title = "**Wanted against QuantWM, scene by scene, at no more than its resident bytes**"
    head = ["wanted", "found, 95 % over scenes"]
    head += ["bytes held over QuantWM's: as these frames end, at the end", "reached"]
    return f"{title}\n\n{_table(head, rows)}"


# Recordings.


def _study(name: str, rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    budgets = [method for three in BUDGETS.values() for method in three]
    ablation = {method: text for method, text in ABLATION.items() if method in rows}
    parts = [
        f"**q, k, v of {name}: every method at three budgets** (cold: up to {COLD_TOKENS:,} tokens "
        "of history, long: more; corrected: output error with scores corrected for noise)",
        _study_table("method", {m: m for m in budgets if m in rows}, rows),
    ]
    halves = {m: m for m in ("quantwm", *HALF_MEASURES) if m in rows}
    if len(halves) > 1:
        parts += [
            f"**{name}: half-measures within QuantWM's own format**",
            _study_table("method", halves, rows),
        ]
    if len(ablation) > 1:
        parts += [
            f"**{name}: qtc at its default without one ingredient**",
            _study_table("without", ablation, rows),
        ]
    return parts


def _study_table(
    first: str, names: Mapping[str, str], rows: Mapping[str, Mapping[str, Any]]
) -> str:
    head = [first, "bits", "held", "K rel", "V rel"]
    head += [f"{part}: logit / shift / output / corrected" for part in ("cold", "long")]
    return _table(head, [_study_row(text, rows[method]) for method, text in names.items()])


def _study_row(text: str, row: Mapping[str, Any]) -> list[str]:
    found = [
        text,
        f"{row['bits_per_element']:.3f}",
        f"{row['resident_bits_per_element']:.3f}",
        _small(row["k_rel_mse"]),
        _small(row["v_rel_mse"]),
    ]
    for part in (row["cold"], row["long"]):
        found.append("-" if part is None else " / ".join(_errors(part)))
    return found


def _errors(part: Mapping[str, float]) -> list[str]:
    return [_small(part[name], digits) for name, digits in zip(ERRORS, (3, 3, 4, 4), strict=True)]


def _small(value: float, digits: int = 3) -> str:
    """Without the zero before the point."""
    return f"{value:.{digits}f}".replace("0.", ".", 1) if value < 1 else f"{value:.{digits}f}"


# Rollouts.


def _fidelity(title: str, lanes: Mapping[str, Any]) -> str:
    rows = []
    for lane, row in lanes.items():
        over = row.get("over_quantwm", {})
        for number, window in enumerate(row["windows"]):
            gain = over.get(window["window"])
            held = f"{row['kv_bytes'] / 1e6:.2f} ({row['resident_ratio']:.2f}x)"
            rows.append(
                [
                    title_of(lane) if number == 0 else "",
                    held if number == 0 else "",
                    window["label"],
                    _interval(window["psnr"], 1),
                    _interval(window["ssim"], 3),
                    _interval(window["excess"], 1),
                    _interval(gain, 1) if gain else "",
                ]
            )
    scenes = max(row["scenes"] for row in lanes.values())
    head = ["lane", "MB held (of BF16)", "window", "PSNR, dB", "SSIM", "excess flicker"]
    head.append("over QuantWM, dB")
    return (
        f"**{title}, {scenes} scenes, to BF16** (mean and 95 % bootstrap interval over scenes)"
        f"\n\n{_table(head, rows)}"
    )


def _recall(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["task", "lane", "PSNR to the truth, dB", "cosine of features", "episodes"]
    found = [
        [
            row["task"],
            title_of(row["lane"]),
            _interval(row["psnr"], 1),
            _interval(row["cosine"], 3),
            str(row["psnr"]["count"]),
        ]
        for row in rows
    ]
    title = "**Revisit recall, whole history** (the last chunk of a walk that comes back)"
    return f"{title}\n\n{_table(head, found)}"


def _interval(found: Figure | None, digits: int = 2) -> str:
    if found is None or found["mean"] is None:
        return "-"
    return f"{found['mean']:.{digits}f} [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"


# Where it does not help.


def _where_not(result: Mapping[str, Any]) -> list[str]:
    parts = []
    for name, rows in result["study"].items():
        methods = by_method(rows)
        if not all("layers" in methods.get(method, {}) for method in ("quantwm", "qtc")):
            continue
        parts.append(_layers(name, methods))
        parts.append(_histories(name, methods))
    if result["motions"]:
        parts.append(_motions(result["motions"]))
    return parts


def _layers(name: str, methods: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for number, ours in methods["qtc"]["layers"].items():
        theirs = methods["quantwm"]["layers"][number]
        logits, outputs = (
            _ratios(theirs[part], ours[part]) for part in ("head_logit_mse", "head_output_rel_mse")
        )
        errors = (theirs["errors"]["logit_mse"], ours["errors"]["logit_mse"])
        rows.append(
            [
                number,
                *(_small(error) for error in errors),
                *(_spread(ratios) for ratios in (logits, outputs)),
                f"{theirs['v_rel_mse'] / max(ours['v_rel_mse'], 1e-30):.1f}",
            ]
        )
    head = ["layer", "logit MSE of QuantWM", "of QTC", "the first over the second: mean (by head)"]
    head += ["the same of output errors", "of values' errors"]
    return f"**{name}: by layer and head**\n\n{_table(head, rows)}"


def _ratios(theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
    return [a / max(b, 1e-30) for a, b in zip(theirs, ours, strict=True)]


def _spread(ratios: Sequence[float]) -> str:
    return f"{fmean(ratios):.1f} ({', '.join(f'{ratio:.1f}' for ratio in sorted(ratios))})"


def _histories(name: str, methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Resident bits an element while the history grows: statistics and bases are not free."""
    lanes = [method for method in COMPARED if method in methods]
    growth = {lane: dict(map(tuple, methods[lane]["resident_bits"])) for lane in lanes}
    lengths = sorted(set.intersection(*(set(own) for own in growth.values())))
    picked = [lengths[i] for i in sorted({min(2**k, len(lengths)) - 1 for k in range(8)})]
    rows = [[f"{n:,}", *(f"{growth[lane][n]:.2f}" for lane in lanes)] for n in picked]
    title = f"**{name}: resident bits an element by tokens held** (all counted, statistics too)"
    return f"{title}\n\n{_table(['tokens', *lanes], rows)}"


def _motions(found: Mapping[str, Any]) -> str:
    lanes = list(next(iter(found.values()))["psnr"])
    head = ["motion", "scenes", *(f"{title_of(lane)}, dB" for lane in lanes)]
    compared = [lane for lane in lanes if lane != "quantwm"]
    head += [f"{title_of(lane)} over QuantWM" for lane in compared]
    rows = [
        [
            motion,
            str(row["scenes"]),
            *(_interval(row["psnr"][lane], 1) for lane in lanes),
            *(_interval(row["over_quantwm"].get(lane), 1) for lane in compared),
        ]
        for motion, row in found.items()
    ]
    frames = next(iter(found.values()))["frames"]
    return f"**By motion, teacher-forced, {frames} frames**\n\n{_table(head, rows)}"
