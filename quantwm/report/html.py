"""The report as one HTML file: no script, nothing fetched, light and dark."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from quantwm.report.document import Section, Sheet, Table, Verdict, counted, sentence
from quantwm.report.plots import to_svg

MARKS = {"holds": "yes", "does not hold": "no", "undecided": "open", "not measured": "none"}

NUMBER = re.compile(r"(\S+)(?: (\[[^\]]*\]))?(?: \((.*)\))?")
"""A figure as `document.cell` writes it: its mean, its interval, a remark."""
LONG = 28
"""Characters from which on a cell breaks into lines."""

STYLE = """
:root{color-scheme:light dark;--ink:#1c1e22;--paper:#fff;--soft:#5b6270;--line:#d9dde4;
--band:#f4f6f9;--yes:#0a7a4b;--no:#b3261e;--open:#8a6100;--none:#5b6270}
@media(prefers-color-scheme:dark){:root{--ink:#e8eaee;--paper:#14161a;--soft:#a3abb8;--line:#343a45;
--band:#1c2027;--yes:#4cc38a;--no:#ff8a80;--open:#e0b355;--none:#a3abb8}}
body{margin:0 auto;max-width:1080px;padding:24px 20px 80px;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:28px;line-height:1.2}
h2{margin-top:48px;font-size:21px;border-top:1px solid var(--line);padding-top:20px}
p{max-width:76ch}.soft{color:var(--soft);font-size:14px}
.caption{color:var(--soft);font-size:14px;margin:20px 0 6px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:5px 14px 5px 0;text-align:left;border-bottom:1px solid var(--line);
vertical-align:top;background:var(--paper);line-height:1.35}
thead th{font-weight:600;vertical-align:bottom;max-width:15ch}
td{white-space:nowrap}td.words{white-space:normal;min-width:12ch}
td small{display:block;font-size:12px;color:var(--soft)}
th:first-child{position:sticky;left:0}tbody th{font-weight:400;max-width:44ch}
tbody tr:nth-child(even)>*{background:var(--band)}
.verdict{border-left:4px solid var(--mark);padding:4px 0 4px 14px;margin:14px 0;max-width:80ch}
.verdict b,td.word{color:var(--mark);font-weight:600}td a{color:inherit}
.yes{--mark:var(--yes)}.no{--mark:var(--no)}.open{--mark:var(--open)}
.none{--mark:var(--none)}
svg{width:100%;max-width:760px;height:auto;margin:14px 0}svg text{font:12px system-ui,sans-serif;
fill:var(--soft)}svg text.head{fill:var(--ink);font-weight:600}svg .end{text-anchor:end}
svg .mid{text-anchor:middle}svg line{stroke:var(--line)}
figure{margin:18px 0}figcaption{color:var(--soft);font-size:14px;margin-bottom:6px}
figure img{max-width:100%;image-rendering:pixelated}
@media(max-width:640px){body{padding:16px 14px 60px}tbody th{min-width:28vw;max-width:40vw}
svg{min-width:600px}figure img{max-width:none;width:760px;image-rendering:auto}}
"""


def to_html(numbers: Mapping[str, Any], sections: Sequence[Section]) -> str:
    """The whole file."""
    about = numbers["report"]
    body = [
        f"<h1>QuantWM: the paper's evidence on {escape(world_name(about))}</h1>",
        f"<p>{escape(about_line(about))}</p>",
        f'<p class="soft">{escape(how_line(about))}</p>',
        _claims(sections),
        *(f'<section id="part{n}">{_section(part)}</section>' for n, part in enumerate(sections)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>QuantWM evidence</title><style>{STYLE}</style></head><body>"
        + "".join(body)
        + "</body></html>\n"
    )


def world_name(about: Mapping[str, Any]) -> str:
    """For titles: the world by its name, the one that ships as ours."""
    return "the embedded world" if about["world"] == "embedded" else str(about["world"])


def about_line(about: Mapping[str, Any]) -> str:
    """World, weights and hardware in a sentence or two."""
    machine = about["hardware"].get("gpu") or about["hardware"].get("cpu")
    versions = about["versions"]
    return (
        f"{about['title']}, weights {about['weights_sha256'][:12]}, {about['steps']} denoising "
        "steps, "
        f"{about['dtype']}; {machine}, torch {versions['torch']}, Python {versions['python']}; "
        f"{about['time']}, {about.get('seconds', 0):.0f} s with the preset {about['scale']!r}. "
        f"Kernels: {about['kernels']}."
    )


def how_line(about: Mapping[str, Any]) -> str:
    """Scenes, seeds, what was left out."""
    counts = ", ".join(_of_planned(about, name) for name in about["planned"])
    policy = ", ".join(f"{k} {v}" for k, v in about["policy"].items())
    text = (
        "A scene is a start scene, a seed of the noise and a walk; all are fixed. Rollouts by "
        f"experiment: {counts}. Policy of every lane: {policy}. Intervals are 95% percentile "
        "bootstraps over scenes (2,000 draws, seed 0)."
    )
    text += (
        f" {counted(about['processes'], 'process', 'es')} on {', '.join(about['devices'])}, up to "
        f"{counted(about['together'], 'rollout')} in one pass."
    )
    if about["together"] > 1:
        text += (
            " Rollouts in one pass have their heads side by side in one cache, each as it would be "
            "alone but for the rounding of larger products; QTC decides for all together when a "
            "new basis is worth its bytes."
        )
    if not about.get("complete", True):
        text += " THE RUN HAD NOT ENDED when this was written: what follows is what it had so far."
    if about["scale"] != "full":
        text += " This is the reduced form of the report: so few scenes decide little."
    if about["rollouts_skipped"]:
        text += f" Left out, for want of time or failed: {about['rollouts_skipped']} rollouts."
    if about.get("failures"):
        text += f" Failures (rollouts in one pass then ran alone): {'; '.join(about['failures'])}."
    if about["missing"]:
        text += f" Not in this version: {', '.join(about['missing'])}."
    return text


def _of_planned(about: Mapping[str, Any], name: str) -> str:
    """An experiment's rollouts, "main 32" or "minute 24 of 32"."""
    planned = about["planned"][name]
    done = about["rollouts"].get(name, 0)
    return f"{name} {done}" if done == planned else f"{name} {done} of {planned}"


def _section(section: Section) -> str:
    return "".join(
        [
            f"<h2>{escape(section.title)}</h2>",
            *(f"<p>{escape(text)}</p>" for text in section.text if text),
            *(_verdict(verdict) for verdict in section.verdicts),
            *(_table(table) for table in section.tables),
            *(f'<div class="wide">{svg}</div>' for svg in map(to_svg, section.plots) if svg),
            *(_figure(sheet) for sheet in section.sheets),
        ]
    )


def _verdict(verdict: Verdict) -> str:
    return (
        f'<div class="verdict {MARKS[verdict.word]}">{escape(verdict.claim)}: '
        f"<b>{escape(verdict.word)}</b>. {escape(sentence(verdict.because))}</div>"
    )


def _claims(sections: Sequence[Section]) -> str:
    """Every claim with its verdict, coloured as in the section that says why, and a link there."""
    found = [(place, v) for place, section in enumerate(sections) for v in section.verdicts]
    lines = [
        [
            escape(v.claim),
            f'<td class="word {MARKS[v.word]}">{escape(v.word)}</td>'
            f'<td class="words"><a href="#part{place}">{escape(sections[place].title)}</a></td>',
        ]
        for place, v in found
    ]
    return _box("Claims and whether they hold here", ["claim of the paper", "here", "why"], lines)


def _table(table: Table) -> str:
    head, *rows = table.rows
    return _box(
        table.caption,
        head,
        [[escape(str(first)), "".join(map(_cell, others))] for first, *others in rows],
    )


def _box(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in a box that scrolls sideways where the window is narrow; its first column stays.

    rows: the first cell's HTML without its tag, and that of the others with theirs.
    """
    cells = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    lines = [f'<tr><th scope="row">{first}</th>{others}</tr>' for first, others in rows]
    caption = escape(title)
    return (
        f'<p class="caption">{caption}</p><div class="wide" role="region" tabindex="0" '
        f'aria-label="{caption}"><table aria-label="{caption}">'
        f"<thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cell(text: object) -> str:
    """A number stands over its interval and remark, so that a table of many columns fits."""
    number = NUMBER.fullmatch(str(text))
    if number is None:
        words = ' class="words"' if len(str(text)) > LONG else ""
        return f"<td{words}>{escape(str(text))}</td>"
    first, interval, remark = (escape(part or "") for part in number.groups())
    below = "".join(f"<small>{part}</small>" for part in (interval, remark) if part)
    return f"<td>{first}{below}</td>"


def _figure(sheet: Sheet) -> str:
    data = base64.b64encode(to_png(sheet)).decode()
    names = ", ".join(name for name, _ in sheet.rows)
    return (
        f"<figure><figcaption>{escape(sheet.title)}; rows: {escape(names)}</figcaption>"
        f'<div class="wide"><img alt="{escape(sheet.title)}" src="data:image/png;base64,{data}">'
        "</div></figure>"
    )


def to_png(sheet: Sheet) -> bytes:
    """Rows of pictures below one another, each with its lane's name."""
    from PIL import Image, ImageDraw, ImageFont

    label, gap = 84, 2
    height, width = sheet.rows[0][1].shape[1:3]
    columns = max(len(frames) for _, frames in sheet.rows)
    size = (label + columns * (width + gap), len(sheet.rows) * (height + gap))
    canvas = np.full((size[1], size[0], 3), 24, np.uint8)
    for row, (_, frames) in enumerate(sheet.rows):
        for column, frame in enumerate(frames):
            y, x = row * (height + gap), label + column * (width + gap)
            canvas[y : y + height, x : x + width] = frame
    picture = Image.fromarray(canvas)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(size=13)
    for row, (name, _) in enumerate(sheet.rows):
        draw.text((6, row * (height + gap) + 6), name, fill=(235, 238, 242), font=font)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
