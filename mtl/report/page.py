"""Write sections of tables and pictures as Markdown, and that as one self-contained HTML page."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from io import BytesIO
from pathlib import Path
from string import Template
from typing import Any

from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from mtl.files.literals import escape_control, markdown
from mtl.files.records import checked_file
from mtl.files.tables import Table, bullets
from mtl.report.comparison import ComparisonTable

_DPI = 120  # of figures in a page
LARGE = 520  # CSS pixels: a wider picture, mostly of several panels, keeps its size on a phone and scrolls
_BRACKETS = "In brackets: 95 % intervals."


@dataclass(frozen=True)
class Picture:
    """A PNG with its ``caption``; ``width`` in CSS pixels. ``beside``: whether Markdown links it as a file.

    ``drawn_by_run``: whether it is a run's picture of its experts. In HTML these begin a line of their own.
    """

    caption: str
    png: bytes = field(repr=False)
    width: int = 0
    beside: bool = True
    drawn_by_run: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a page: paragraphs, tables with sentences below them, and pictures.

    ``text``: paragraphs in Markdown. ``settings``: what a table compares, of which the page begins with a sentence.
    ``notes``: sentences below the tables, such as on failed runs. ``costs``: a table for the end of the page.
    """

    title: str
    text: str = ""
    settings: ComparisonTable | None = None
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    figures: Sequence[Picture] = ()
    costs: Table | None = None


def picture(figure: Figure, caption: str) -> Picture:
    """Return ``figure``, including legends beside its panels, as a picture of a page."""
    data = BytesIO()
    figure.savefig(data, format="png", dpi=_DPI, bbox_inches="tight", metadata={"Software": None})
    return Picture(caption, data.getvalue(), round(96 / _DPI * _width(data.getvalue())))


def picture_of(path: Path, run: Path, caption: str, beside: bool) -> Picture:
    """Return the PNG in a file, which ``run`` drew, as a picture of a page. Raises InputError."""
    png = checked_file(path, run).read_bytes()
    return Picture(caption, png, round(96 / _DPI * _width(png)), beside, drawn_by_run=True)


def _width(png: bytes) -> int:
    return int.from_bytes(png[16:20])  # from its header


def linked(sections: Sequence[Section], name: str, every: bool = False) -> dict[str, Picture]:
    """Return the pictures that Markdown links, or all of them, by their file names ``NAME_1.png`` and so on."""
    drawn = [figure for section in sections for figure in section.figures if every or figure.beside]
    return {f"{name}_{number}.png": figure for number, figure in enumerate(drawn, 1)}


def write_page(
    title: str,
    sections: Sequence[Section],
    introduction: str = "",
    end: str = "",
    pictures: Mapping[str, Picture] | None = None,
) -> str:
    """Return a page in Markdown: what each comparison shows, the sections, and at the end costs and ``end``.

    ``introduction``, ``end``: Markdown. ``pictures``: those that are linked, by the names of their files.
    """
    files = {id(figure): name for name, figure in (pictures or {}).items()}
    sentences = [(section, section.settings.sentence()) for section in sections if section.settings]
    findings = [f"* **{markdown(section.title)}**, {markdown(sentence)}" for section, sentence in sentences if sentence]
    costs = [replace(section.costs, title=section.title) for section in sections if section.costs]
    parts = [f"# {markdown(title)}", introduction, "\n".join(findings), _BRACKETS if findings else ""]
    for section in [*sections, *([Section("Costs", tables=costs)] if costs else [])]:
        content = [section.text, *(table.markdown() for table in section.tables), bullets(section.notes)]
        content += [f"![{markdown(p.caption)}]({files[id(p)]})" for p in section.figures if id(p) in files]
        parts += [f"## {markdown(section.title)}", *content] if any(content) else []
    return "\n\n".join(part.strip("\n") for part in [*parts, end] if part.strip()) + "\n"


def with_verdicts(page: str) -> str:
    """Give the cells of an HTML page that are verdicts on claims a class, which has a colour."""
    return re.sub(r"<td>(?=(?:<strong>)?(holds|contradicted)<)", r'<td class="\1">', page)


def html(title: str, text: str, pictures: Mapping[str, Picture], summary: str = "", folded: str = "") -> str:
    """Return a text in Markdown as a page of HTML, without scripts, that loads nothing; light or dark as the reader's.

    Tags in ``text`` are text. ``pictures``: those that it links, by the names of their files. ``folded``:
    Markdown for the end of the page, which a click on ``summary`` unfolds.
    """

    curves = list[Picture]()

    def image(self: Any, tokens: Any, index: int, *_: Any) -> str:
        figure = pictures[tokens[index].attrs["src"]]
        line = "<div></div>" if figure.drawn_by_run and curves else ""
        curves[:] = [] if figure.drawn_by_run else [figure]
        data, caption = base64.b64encode(figure.png).decode(), escape(escape_control(figure.caption))
        size = "large" if figure.width > LARGE else "small"
        return (
            f'{line}<figure class="{size}" style="width: {figure.width}px">'
            f'<img src="data:image/png;base64,{data}" alt="{caption}" '
            f'width="{figure.width}"><figcaption>{caption}</figcaption></figure>'
        )

    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    reader.add_render_rule("image", image)
    reader.add_render_rule("table_open", lambda *_: '<div class="wide"><table>\n')
    reader.add_render_rule("table_close", lambda *_: "</table></div>\n")
    template = Template(Path(__file__).with_name("page.html").read_text())
    body = with_verdicts(reader.render(text))
    if folded:
        body += f"<details><summary>{escape(escape_control(summary))}</summary>\n{reader.render(folded)}</details>"
    return template.substitute(title=escape(escape_control(title)), body=body)
