"""Fragments of HTML: escaped text, tables, tiles, bars as inline SVG. Pure functions; no scripts, no external resources."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

from mmspeed.page_policy import PAGE_POLICY
from mmspeed.preprocess.sources.rejections import readable

STYLE = """
:root{color-scheme:light dark;--text:#1c2733;--soft:#566575;--line:#d5dde5;--page:#fbfcfd;--card:#fff;--bar:#3b74b8;--over:#d9731f;
--good:#1a6b3c;--warn:#8a5200;--warnback:#fff5e2;--bad:#a3231f;--badback:#fdecea}
@media (prefers-color-scheme:dark){:root{--text:#e3e9ef;--soft:#9fb0c0;--line:#34414e;--page:#12181e;--card:#1a222a;--bar:#5b9be0;
--over:#f0954a;--good:#6fcf97;--warn:#f0b860;--warnback:#33280f;--bad:#ff8f86;--badback:#3a1a18}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;max-width:1120px;margin:2em auto;padding:0 1em;color:var(--text);background:var(--page);
overflow-wrap:anywhere}
h1{font-size:1.6em;margin:0 0 .1em} h2{font-size:1.15em;margin:2.2em 0 .8em;border-bottom:1px solid var(--line);padding-bottom:.2em}
h3{font-size:1em;margin:0 0 .4em} p{margin:.5em 0} .sub{color:var(--soft)} ul{padding-left:1.3em;margin:.4em 0}
.verdict{font-size:1.1em;font-weight:600;margin:1em 0 .6em} .good{color:var(--good)} .bad{color:var(--bad)} .warn{color:var(--warn)}
.box{border-radius:6px;padding:.5em 1em;margin:.8em 0;border-left:4px solid} .box p{margin:.3em 0}
.box.bad{background:var(--badback);color:inherit;border-color:var(--bad)}
.box.warn{background:var(--warnback);color:inherit;border-color:var(--warn)}
.scroll{overflow-x:auto} .scroll+.scroll{margin-top:1.2em} td{overflow-wrap:break-word} bdi{overflow-wrap:anywhere}
table{border-collapse:collapse} td,th{padding:.28em 1.1em .28em 0;text-align:left;vertical-align:top}
th{color:var(--soft);font-weight:600;white-space:nowrap} tbody tr{border-top:1px solid var(--line)} .n{text-align:right;white-space:nowrap}
.words{min-width:12em} td ul{margin:0}
tr.sum td{font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:.7em}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:.6em .9em;min-width:0}
.tile b{display:block;font-size:1.25em;line-height:1.3} .tile span{color:var(--soft);font-size:.92em}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(330px,100%),1fr));gap:.8em}
.card p{font-size:.92em;margin:.2em 0 0} svg{display:block;width:100%;max-width:460px;height:auto}
svg text{font:12px system-ui,sans-serif;fill:var(--text)}
svg .bar{fill:var(--bar)} svg.plot{max-width:760px} svg .over{fill:var(--over)} svg .axis{stroke:var(--line)}
.thumbs{display:grid;grid-template-columns:repeat(auto-fill,minmax(160px,1fr));gap:1em}
figure{margin:0;min-width:0} figure img{display:block;max-width:100%;height:auto;border-radius:4px;background:var(--line)}
figcaption{font-size:.88em;line-height:1.4;margin-top:.3em} figcaption b{display:block}
.none{width:100%;aspect-ratio:16/9;max-width:160px;border:1px dashed var(--line);border-radius:4px;display:grid;place-items:center}
pre{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:1em;overflow:auto;font-size:13px;overflow-wrap:normal}
summary{cursor:pointer;color:var(--soft)}
@media (max-width:520px){body{margin:1em auto;padding:0 .8em} .tiles{grid-template-columns:1fr 1fr} .thumbs{grid-template-columns:1fr 1fr}
td,th{padding-right:.7em}
.stack,.stack tbody,.stack tr,.stack td{display:block;text-align:left;padding-right:0} .stack thead{display:none}
.stack tr{padding:.35em 0} .stack td{padding:.05em 0} .stack td:empty{display:none} .stack td:first-child{font-weight:600}
.stack td:first-child span{font-weight:400} .stack tbody tr:first-child{border-top:0}
.stack .n::before{content:attr(data-label) ": ";color:var(--soft)}}
"""
_LABEL, _WIDTH, _ROW = 104, 330, 19  # of a bar chart, in pixels


def text(value: object) -> str:
    """Escape a value as HTML text; control characters and marks that change the direction of writing are shown as escapes."""
    return html.escape(readable(str(value)), quote=True)


def foreign(value: object) -> str:
    """Escape text from files, so that it does not change the direction of surrounding text."""
    return f"<bdi>{text(value)}</bdi>"


def tile(value: object, label: str, key: str = "") -> str:
    """A number with its label; `key` names it for programs."""
    return f'<div class="tile"><b{_key(key)}>{text(value)}</b><span>{text(label)}</span></div>'


def tiles(parts: Iterable[str]) -> str:
    """Tiles side by side."""
    return f'<div class="tiles">{"".join(parts)}</div>'


def cell(html_value: str, number: bool = False, key: str = "", words: bool = False) -> str:
    """A table's cell from finished HTML; numbers are right-aligned, long `words` get more width."""
    kind = "n" if number else "words" if words else ""
    return f"<td{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}{_key(key)}>{html_value}</td>"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Iterable[int] = (),
    last_is_sum: bool = False,
    stack: bool = False,
) -> str:
    """A table of finished cells; columns `numbers` hold numbers. If it is too wide it scrolls, or, with `stack`, its
    cells are stacked, each number after its column's name.
    """
    right = set(numbers)
    names = "".join(f"<th{' class=n' if i in right else ''}>{text(name)}</th>" for i, name in enumerate(head))
    row_list = list(rows)
    lines = []
    for index, row in enumerate(row_list):
        cells = "".join(f'<td data-label="{text(name)}"{td[3:]}' for name, td in zip(head, row, strict=True))
        lines.append(f"<tr{' class=sum' if last_is_sum and index == len(row_list) - 1 else ''}>{cells}</tr>")
    kind = " class=stack" if stack else ""
    return (
        f'<div class="scroll"><table{kind}><thead><tr>{names}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def box(kind: str, heading: str, lines: Iterable[str]) -> str:
    """A coloured box with a heading that states the colour's meaning in words; empty without lines."""
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return (
        f'<div class="box {kind}"><p><b class="{kind}">{text(heading)}</b></p><ul>{items}</ul></div>' if items else ""
    )


def bars(rows: Sequence[tuple[str, int]], title: str) -> str:
    """A bar for each (label, count), with the count after it, as inline SVG."""
    if not rows:
        return '<p class="sub">none</p>'
    most = max(1, *(count for _, count in rows))
    room = _WIDTH - _LABEL - 12 - 8 * max(len(f"{count:,}") for _, count in rows)
    parts = []
    for number, (label, count) in enumerate(rows):
        length = max(1.0 if count else 0.0, room * count / most)
        y = number * _ROW
        parts.append(
            f'<text x="{_LABEL - 6}" y="{y + 14}" text-anchor="end">{text(label)}</text>'
            f'<rect class="bar" x="{_LABEL}" y="{y + 3}" width="{length:.1f}" height="{_ROW - 6}" rx="2"/>'
            f'<text x="{_LABEL + length + 5:.1f}" y="{y + 14}">{count:,}</text>'
        )
    name = f'role="img" aria-label="{text(title)}"'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {len(rows) * _ROW + 2}" {name}><title>{text(title)}</title>{"".join(parts)}</svg>'
    )


def card(heading: str, body: str, note: str = "") -> str:
    """A chart with its heading and a sentence."""
    return f'<div class="card"><h3>{text(heading)}</h3>{body}{f"<p class=sub>{text(note)}</p>" if note else ""}</div>'


def jpeg_uri(data: bytes) -> str:
    """A data URI that holds a JPEG."""
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"


def document(title: str, body: str) -> str:
    """The complete page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        + PAGE_POLICY
        + '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head>\n<body>{body}</body></html>\n"
    )


def _key(key: str) -> str:
    return f' data-key="{text(key)}"' if key else ""
