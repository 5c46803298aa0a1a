"""Write sections of tables and pictures as one HTML page that stands alone, and as Markdown."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure

from mtl.report.compare import Comparison
from mtl.report.grid import Entry, Published, written_grid
from mtl.report.tables import explanation, markdown, markdown_table

_DPI = 120  # of figures in a page
_SHORT = 24  # characters of a text that is aligned as numbers are
_SHRUNK = 0.8  # pictures of runs, so that two stand beside each other
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --faint: #5f6368; --rule: #c9ccd1; --paper: #fff; --tint: #eef3f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --faint: #a3a8ae; --rule: #464b52; --paper: #16181b; --tint: #22303d; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 72rem;
       margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; line-height: 1.2; } h3 { font-size: 1.05rem; margin: 1.5rem 0 .5rem; }
h2 { font-size: 1.3rem; margin-top: 2.5rem; border-top: 1px solid var(--rule); padding-top: 1rem; }
h1, h2, h3, th, td { overflow-wrap: break-word; } th { max-width: 18rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .35rem .8rem .35rem 0; vertical-align: top; text-align: right; border-bottom: 1px solid var(--rule); }
th { font-weight: 600; } th:first-child { text-align: left; min-width: 8rem; } td.text, th.text { text-align: left; }
td { max-width: 16rem; } td.text { max-width: 34rem; } td .value { white-space: nowrap; }
td .below { display: block; color: var(--faint); font-size: .89em; }
td.published, tr.published th { background: var(--tint); font-style: italic; }
ul.notes { color: var(--faint); font-size: .88em; padding-left: 1.2rem; }
.pictures { display: flex; flex-wrap: wrap; gap: 1.25rem; align-items: flex-start; }
figure { margin: 0; max-width: 100%; break-inside: avoid; }
figure img { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
figcaption { color: var(--faint); font-size: .88em; }
@media print {
  :root { color-scheme: light; --ink: #000; --faint: #444; --rule: #bbb; --paper: #fff; --tint: #eee; }
  body { font-size: 10pt; max-width: none; margin: 0; } table { font-size: 7.5pt; } .wide { overflow: visible; }
  td .value { white-space: normal; } th, td { padding: .2rem .4rem .2rem 0; }
  tr, li, h2, h3 { break-inside: avoid; } h2, h3 { break-after: avoid; }
}
"""


@dataclass(frozen=True)
class Picture:
    """A PNG with its ``caption``; ``width`` in CSS pixels. ``of_run``: a run drew it, not the report."""

    caption: str
    png: bytes = field(repr=False)
    width: int
    of_run: bool = False


@dataclass(frozen=True)
class Listing:
    """A table of texts, of which the first column names the rows; ``notes``: sentences below it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """A part of a page: paragraphs, the comparison with what is published beside it, further tables, and pictures.

    ``text``: paragraphs, which blank lines separate. ``notes``: sentences below the table, as on runs that failed.
    """

    title: str
    text: str = ""
    comparison: Comparison | None = None
    published: Sequence[Published] = ()
    listings: Sequence[Listing] = ()
    figures: Sequence[Picture] = ()
    notes: Sequence[str] = ()


def picture(figure: Figure, caption: str) -> Picture:
    """Return ``figure`` as a picture of a page."""
    data = BytesIO()
    figure.savefig(data, format="png", dpi=_DPI, metadata={"Software": None})
    return Picture(caption, data.getvalue(), round(96 * figure.get_figwidth()))


def picture_of(path: Path, caption: str) -> Picture:
    """Return the PNG in a file as a picture of a page."""
    png = path.read_bytes()
    width = int.from_bytes(png[16:20])  # from its header
    return Picture(caption, png, round(96 / _DPI * _SHRUNK * width), of_run=True)


def render(title: str, intro: str, sections: Sequence[Section]) -> str:
    """Return the HTML page: it has no scripts, loads nothing, and follows the reader's choice of light or dark.

    All texts are escaped: they are shown as they are.
    """
    head = [
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>",
    ]
    body = [f"<h1>{escape(title)}</h1>", *_paragraphs(intro)]
    for section in sections:
        body += _section(section)
    page = ['<!doctype html>\n<html lang="en">\n<head>', *head, "</head>\n<body>", *body, "</body>\n</html>\n"]
    return "\n".join(page)


def pictures_beside(name: str, sections: Sequence[Section]) -> dict[str, Picture]:
    """Return the pictures that the report drew, by the file names ``NAME_1.png`` and so on."""
    drawn = [each for section in sections for each in section.figures if not each.of_run]
    return {f"{name}_{number}.png": each for number, each in enumerate(drawn, 1)}


def render_markdown(title: str, intro: str, sections: Sequence[Section], name: str | None = None) -> str:
    """Return the sections in Markdown; with ``name``, it links the files that ``pictures_beside(name, ...)`` names."""
    parts, files = [f"# {title}", intro], iter(pictures_beside(name or "", sections))
    for section in sections:
        parts += [f"## {section.title}", section.text]
        if section.comparison:
            parts.append(markdown(section.comparison, section.published))
        for listing in section.listings:
            parts += [f"### {listing.title}", markdown_table(listing.header, listing.rows), _bullets(listing.notes)]
        parts.append(_bullets(section.notes))
        if name:
            parts += [f"![{each.caption}]({next(files)})" for each in section.figures if not each.of_run]
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def _bullets(notes: Sequence[str]) -> str:
    return "\n".join(f"* {note}" for note in notes)


def _section(section: Section) -> list[str]:
    lines = [f"<section>\n<h2>{escape(section.title)}</h2>", *_paragraphs(section.text)]
    notes = list(section.notes)
    if section.comparison:
        lines.append(_comparison(section.comparison, section.published))
        notes = [*explanation(section.comparison, "in bold", True, section.published), *notes]
    lines += _notes(notes)
    for listing in section.listings:
        lines += [
            f"<h3>{escape(listing.title)}</h3>",
            _listing(listing),
            *_notes(listing.notes),
        ]
    if section.figures:
        lines += ['<div class="pictures">', *map(_figure, section.figures), "</div>"]
    return [*lines, "</section>"]


def _comparison(comparison: Comparison, published: Sequence[Published]) -> str:
    shown = written_grid(comparison, published)
    rows = []
    for name, row in zip(shown.rows, shown.cells, strict=True):
        whole = ' class="published"' if all(entry.published for entry in row) else ""
        rows.append(f'<tr{whole}><th scope="row">{escape(name)}</th>{"".join(map(_cell, row))}</tr>')
    return _table([shown.corner, *shown.columns], rows)


def _cell(entry: Entry) -> str:
    value = escape(entry.value) + ("*" if entry.significant else "")
    value = f"<b>{value}</b>" if entry.best else value
    below = "".join(f'<span class="below">{escape(line)}</span>' for line in entry.below.split("\n") if line)
    return f'<td{" class=published" if entry.published else ""}><span class="value">{value}</span>{below}</td>'


def _listing(listing: Listing) -> str:
    marks = [" class=text" if any(map(_is_text, texts)) else "" for texts in zip(*listing.rows, strict=True)]
    rows = []
    for name, *texts in listing.rows:
        cells = "".join(f"<td{mark}>{escape(text)}</td>" for mark, text in zip(marks[1:], texts, strict=True))
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    return _table(listing.header, rows, marks)


def _is_text(text: str) -> bool:
    """Return whether a cell is aligned as words are, and not as numbers."""
    return len(text) > _SHORT or text[:1].isalpha()


def _table(header: Sequence[str], rows: Sequence[str], marks: Sequence[str] = ()) -> str:
    marks = marks or [""] * len(header)
    heads = "".join(f'<th scope="col"{mark}>{escape(text)}</th>' for mark, text in zip(marks, header, strict=True))
    return "\n".join(
        [f'<div class="wide"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>', *rows, "</tbody></table></div>"]
    )


def _figure(shown: Picture) -> str:
    data, text, width = base64.b64encode(shown.png).decode(), escape(shown.caption), shown.width
    image = f'<img src="data:image/png;base64,{data}" alt="{text}" width="{width}">'
    return f'<figure>{image}<figcaption style="max-width: {width}px">{text}</figcaption></figure>'


def _paragraphs(text: str) -> list[str]:
    return [f"<p>{escape(part)}</p>" for part in text.split("\n\n") if part.strip()]


def _notes(notes: Sequence[str]) -> list[str]:
    return ['<ul class="notes">', *(f"<li>{escape(note)}</li>" for note in notes), "</ul>"] if notes else []
