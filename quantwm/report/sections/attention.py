"""Sections 1, 3 and 4: keys or values, token selection, ablation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quantwm.report import paper
from quantwm.report.document import (
    LEAST_SCENES,
    Section,
    Table,
    Verdict,
    both,
    cell,
    compared,
    counted,
    judge,
    plain,
)
from quantwm.report.numbers import Figure
from quantwm.report.sections.curves import ablation_by_frame, errors_by_layer, shift_by_layer
from quantwm.report.variants import ALL, title_of

SHIFT = (
    "Token-selection shift: for the queries of a chunk's clean pass (every head of the recorded "
    "layers: first, middle and last), the share whose highest-scoring historical token, argmax of "
    "q.k over all tokens of earlier chunks, is another one with the decoded keys than with the "
    "exact keys. The chunk's own tokens are no candidates. Everything is compressed, each chunk "
    "encoded from the statistics of earlier chunks only; averaged over chunks, heads and layers. "
    "The paper does not say over which layers, heads and steps it averages."
)

FEWER = "QuantWM changes fewer selections than QVG"


def roles(numbers: Mapping[str, Any]) -> Section:
    """(1) K-only against V-only: Tables 1 and 2."""
    attention, short = numbers["attention"]["variants"], numbers["roles"]
    section = Section(
        "1. Keys or values: which quantization hurts",
        [
            "Only keys (K2V16) or only values (K16V2) are quantized; the other stays BF16. Errors "
            "are squared error over squared size, so keys and values can be compared.",
        ],
    )
    rows = [["format", "K error", "V error", "output, K2V16", "output, K16V2"]]
    for name in ("qvg", "quantwm"):
        if name in attention:
            keys, values = attention[f"{name}-keys"], attention[f"{name}-values"]
            rows.append(
                [
                    title_of(name),
                    cell(keys["k_rel"], 4),
                    cell(values["v_rel"], 4),
                    cell(keys["output_rel"], 4),
                    cell(values["output_rel"], 4),
                ]
            )
    rows += [
        [f"paper: QVG, {model} (absolute)", *(f"{value:.4f}" for value in errors)]
        for model, errors in paper.TABLE_1.items()
    ]
    section.tables.append(
        Table(
            "Attention errors (Table 1), "
            + counted(numbers["attention"]["recordings"], "recording"),
            rows,
        )
    )
    section.tables.append(_by_layer(attention))
    section.plots += errors_by_layer(attention)
    rows = [["lane", "PSNR, dB", "SSIM", "paper: PSNR of Matrix-Game-2, LingBot-v2", "paper: SSIM"]]
    for name in ("qvg-keys", "qvg-values", "qvg", "quantwm-keys", "quantwm-values", "quantwm"):
        if name in short["rows"]:
            row = short["rows"][name]
            theirs = _both_models(paper.TABLE_2, name, 2), _both_models(paper.TABLE_2_SSIM, name, 3)
            rows.append([title_of(name), cell(row["psnr"]), cell(row["ssim"], 4), *theirs])
    section.tables.append(
        Table(
            f"Free runs against BF16, first {short['frames']} frames, "
            f"{counted(short['scenes'], 'scene')} "
            "(Table 2)",
            rows,
        )
    )
    section.verdicts.append(_keys_matter(attention, short))
    return section


def _both_models(table: Mapping[str, Sequence[float]], name: str, digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in table[name]) if name in table else "-"


def _by_layer(attention: Mapping[str, Any]) -> Table:
    rows = [["format, layer", "K error", "V error", "output, K2V16", "output, K16V2", "shift"]]
    for name in ("qvg", "quantwm"):
        if name not in attention:
            continue
        for layer, errors in attention[name]["by_layer"].items():
            keys = attention[f"{name}-keys"]["by_layer"][layer]
            values = attention[f"{name}-values"]["by_layer"][layer]
            rows.append(
                [
                    f"{title_of(name)}, layer {layer}",
                    f"{errors['k_rel']:.4f}",
                    f"{errors['v_rel']:.4f}",
                    f"{keys['output_rel']:.4f}",
                    f"{values['output_rel']:.4f}",
                    f"{errors['shift']:.3f}",
                ]
            )
    return Table("The same by layer", rows)


def _keys_matter(attention: Mapping[str, Any], short: Mapping[str, Any]) -> Verdict:
    claim = (
        "Keys are quantized with less error than values, yet quantizing them hurts the output more"
    )
    if "qvg-keys" not in attention:
        return Verdict(claim, "not measured", "no recording was studied")
    keys, values = attention["qvg-keys"], attention["qvg-values"]
    smaller = compared(
        "QVG's relative error of keys", keys["k_rel"], "of values", values["v_rel"], less=True
    )
    worse = compared(
        "the output's error with K2V16", keys["output_rel"], "with K16V2", values["output_rel"]
    )
    pixels = judge(claim, short["between"].get("qvg"), "dB", "PSNR of K16V2 less that of K2V16")
    layers = attention["qvg"]["by_layer"] if "qvg" in attention else {}
    other = [layer for layer, errors in layers.items() if errors["k_rel"] > errors["v_rel"]]
    if other:
        told = f"layer by layer, keys' is the larger in {', '.join(other)} of {', '.join(layers)}"
        smaller = replace(smaller, because=f"{smaller.because} ({told})")
    return both(claim, [smaller, worse, pixels])


def selection(numbers: Mapping[str, Any]) -> Section:
    """(3) Token-selection shift: Table 4."""
    found = numbers["attention"]
    section = Section("3. Which historical token a query selects", [SHIFT])
    rows = [["format", "shift", "logit MSE", "output error", "paper: mean shift of 5 models"]]
    for name, errors in found["variants"].items():
        if ALL[name].role == "both":
            rows.append(
                [
                    title_of(name),
                    cell(errors["shift"], 3),
                    cell(errors["logit_mse"], 3),
                    cell(errors["output_rel"], 5),
                    plain(paper.mean(paper.TABLE_4, name), 3),
                ]
            )
    section.tables.append(
        Table(f"{counted(found['recordings'], 'recording')}, layers {found.get('layers')}", rows)
    )
    variants = found["variants"]
    section.plots += shift_by_layer(variants)
    if "qvg" in variants:
        section.verdicts.append(_fewer(variants["quantwm"]["shift"], variants["qvg"]["shift"]))
    else:
        section.verdicts.append(Verdict(FEWER, "not measured", "no recording was studied"))
    return section


def _fewer(ours: Figure, theirs: Figure) -> Verdict:
    """Whether selections change less often, and how much less beside the paper's."""
    decided = compared("QuantWM's shift", ours, "QVG's", theirs, less=True)
    less, paper_less = (
        1 - a / b if a and b else 0.0
        for a, b in (
            (ours["mean"], theirs["mean"]),
            (paper.mean(paper.TABLE_4, "quantwm"), paper.mean(paper.TABLE_4, "qvg")),
        )
    )
    because = f"{decided.because}: {less:.0%} fewer, the paper's {paper_less:.0%}"
    return Verdict(FEWER, decided.word, because)


def ablation(numbers: Mapping[str, Any]) -> Section:
    """(4) QSAC and PSAC, with the affine quantizer by itself: Table 5."""
    found, attention = numbers["ablation"], numbers["attention"]["variants"]
    section = Section(
        "4. What QSAC and PSAC add",
        [
            "The paper's row without QSAC and PSAC is QVG itself, whose residual has three levels. "
            "QuantWM's has four, affine. The row that the paper lacks is QVG's centroids with that "
            "quantizer and nothing else: it says how much of the gain is the quantizer's.",
        ],
    )
    theirs = "paper: HY, PSNR, SSIM, shift"
    rows = [["row", "PSNR, dB", "SSIM", "shift", "QuantWM less this, dB", theirs]]
    for name in ("qvg", "affine", "qsac", "psac", "quantwm"):
        if name not in found["rows"]:
            continue
        row, published = found["rows"][name], paper.TABLE_5.get(name)
        shift = attention[name]["shift"] if name in attention else None
        title = {"qsac": "affine + QSAC", "psac": "affine + PSAC", "quantwm": "both (QuantWM)"}
        rows.append(
            [
                title.get(name, title_of(name)),
                cell(row["psnr"]),
                cell(row["ssim"], 4),
                cell(shift, 3),
                "-" if name == "quantwm" else cell(found["paired"][name]),
                "no such row" if published is None else "{:.2f}, {:.3f}, {:.3f}".format(*published),
            ]
        )
    section.tables.append(
        Table(
            f"First {found['frames']} frames, {counted(found['scenes'], 'scene')} (Table 5)", rows
        )
    )
    section.plots += ablation_by_frame(found, numbers["report"]["fps"])
    pairs = found["paired"]
    section.verdicts += [
        judge("PSAC helps on top of QSAC", pairs.get("qsac"), "dB", "QuantWM's PSNR less QSAC's"),
        judge("QSAC helps on top of PSAC", pairs.get("psac"), "dB", "QuantWM's PSNR less PSAC's"),
        _share_of_quantizer(found),
    ]
    return section


def _share_of_quantizer(found: Mapping[str, Any]) -> Verdict:
    claim = "QSAC and PSAC, not the affine quantizer, bring most of the gain over QVG"
    alone, whole = found["between"].get("affine"), found["paired"].get("qvg")
    if not alone or not whole or whole["mean"] is None or whole["mean"] <= 0:
        return Verdict(claim, "not measured", "there is no gain over QVG to share out in this run")
    share, over = alone["mean"] / whole["mean"], found["between"]["half"]
    because = (
        f"the affine quantizer alone brings {cell(alone)} dB of QuantWM's {cell(whole)} dB over "
        f"QVG, {share:.0%}, which is {cell(over)} dB more than half"
    )
    if whole["count"] < LEAST_SCENES or over["low"] <= 0 <= over["high"]:
        return Verdict(claim, "undecided", because)
    return Verdict(claim, "holds" if over["high"] < 0 else "does not hold", because)
