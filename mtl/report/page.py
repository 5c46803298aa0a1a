"""Write sections of tables and pictures as one self-contained HTML page, and as Markdown."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from mtl.files.literals import markdown, printable
from mtl.files.records import own_file
from mtl.report.compare import Comparison
from mtl.report.grid import Listing
from mtl.report.tables import bullets, in_markdown

_DPI = 120  # of figures in a page
_SHORT = 24  # characters of a text that is aligned like a number
_SHRUNK = 0.8  # pictures of runs, so that two stand beside each other


@dataclass(frozen=True)
class Picture:
    """A PNG with its ``caption``; ``width`` in CSS pixels. ``beside``: whether Markdown links it as a file."""

    caption: str
    png: bytes = field(repr=False)
    width: int
    beside: bool = True


@dataclass(frozen=True)
class Section:
    """A part of a page: paragraphs, the comparison and its table, further tables, and pictures.

    ``text``: paragraphs, separated by blank lines. ``notes``: sentences below the table, such as on failed runs.
    """

    title: str
    text: str = ""
    comparison: Comparison | None = None
    table: Listing | None = None
    listings: Sequence[Listing] = ()
    figures: Sequence[Picture] = ()
    notes: Sequence[str] = ()


def picture(figure: Figure, caption: str) -> Picture:
    """Return ``figure``, including legends beside its panels, as a picture of a page."""
    data = BytesIO()
    figure.savefig(data, format="png", dpi=_DPI, bbox_inches="tight", metadata={"Software": None})
    return Picture(caption, data.getvalue(), round(96 / _DPI * _width(data.getvalue())))


def picture_of(path: Path, run: Path, caption: str, beside: bool) -> Picture:
    """Return the PNG in a file, which ``run`` drew, as a picture of a page. Raises InputError."""
    png = own_file(path, run).read_bytes()
    return Picture(caption, png, round(96 / _DPI * _SHRUNK * _width(png)), beside)


def _width(png: bytes) -> int:
    return int.from_bytes(png[16:20])  # from its header


def render(title: str, intro: str, sections: Sequence[Section]) -> str:
    """Return the HTML page: it has no scripts, loads nothing, and follows the reader's choice of light or dark.

    All texts are escaped.
    """
    return _template().render(title=title, intro=intro, sections=sections)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else printable(value),
    )
    environment.globals["classes"] = _classes
    environment.globals["encoded"] = lambda png: base64.b64encode(png).decode()
    return environment.get_template("page.html")


def _classes(listing: Listing) -> list[Markup]:
    """Return the HTML attribute of each column's cells, which aligns texts and numbers differently."""
    columns = [[entry.value for entry in column] for column in zip(*listing.rows, strict=True)]
    wordy = [any(len(text) > _SHORT or text[:1].isalpha() for text in texts) for texts in columns]
    return [Markup(' class="text"' if words else "") for words in wordy or [False] * len(listing.header)]


def pictures_beside(name: str, sections: Sequence[Section]) -> dict[str, Picture]:
    """Return the pictures that Markdown links, by their file names ``NAME_1.png`` and so on."""
    drawn = [each for section in sections for each in section.figures if each.beside]
    return {f"{name}_{number}.png": each for number, each in enumerate(drawn, 1)}


def render_markdown(title: str, intro: str, sections: Sequence[Section], name: str | None = None) -> str:
    """Return the sections in Markdown; with ``name``, link the pictures that ``pictures_beside(name, ...)`` names."""
    parts, files = [f"# {markdown(title)}", _paragraphs(intro)], iter(pictures_beside(name or "", sections))
    for section in sections:
        parts += [f"## {markdown(section.title)}", _paragraphs(section.text)]
        for listing in [*([section.table] if section.table else []), *section.listings]:
            parts.append(in_markdown(listing))
        parts.append(bullets(section.notes))
        if name:
            parts += [f"![{markdown(each.caption)}]({next(files)})" for each in section.figures if each.beside]
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def _paragraphs(text: str) -> str:
    return "\n\n".join(map(markdown, text.split("\n\n")))
