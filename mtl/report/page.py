"""Pages of tables and pictures: as Markdown, and as HTML that stands alone."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import polars as pl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from mtl.files.escaping import escape_control, markdown
from mtl.files.run_files import checked_file
from mtl.files.tables import Table, bullets, inline
from mtl.files.writing import write_text
from mtl.report.comparison import ComparisonTable

CSV, MARKDOWN, LATEX, PAGE = "summary.csv", "summary.md", "summary.tex", "report.html"
_DPI = 120  # of figures in a page
_TEMPLATES = Environment(  # texts of others are never markup: they are escaped, and control characters too
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
    finalize=lambda value: escape_control(value) if type(value) is str else value,
)
_TEMPLATES.filters["base64"] = lambda png: base64.b64encode(png).decode()


@dataclass(frozen=True)
class Picture:
    """A PNG of ``width`` CSS pixels; ``caption``: what the picture itself does not say, "" for nothing.

    ``alt``: what it shows, by default the caption. ``beside``: whether Markdown links it as a file.
    """

    caption: str
    png: bytes = field(repr=False)
    width: int = 0
    beside: bool = True
    alt: str = ""


class Link(NamedTuple):
    """A text that is a link to a file beside the page."""

    text: str
    file: str

    def __html__(self) -> str:
        return f'<a href="{escape(self.file)}">{escape(escape_control(self.text))}</a>'

    def markdown(self) -> str:
        """Return the link in Markdown."""
        return f"[{markdown(self.text)}]({self.file})"


@dataclass(frozen=True)
class Section:
    """A part of a page: sentences, a command to copy, tables with sentences below them, and pictures.

    ``comparison``: what a table compares, of which the page begins with a sentence. ``notes``: sentences below the
    tables, such as on failed runs. ``costs``: a table for the end of the page. ``stored``: the Markdown of an earlier
    page in place of all this, for a page that is drawn again.
    """

    title: str
    lines: Sequence[str] = ()
    command: str = ""
    comparison: ComparisonTable | None = None
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    figures: Sequence[Picture] = ()
    costs: Table | None = None
    stored: str = ""

    @property
    def has_content(self) -> bool:
        """Whether there is anything below the title."""
        return bool(self.lines or self.command or self.tables or self.notes or self.figures or self.stored)


@dataclass(frozen=True)
class Page:
    """What each comparison shows, the sections, and at the end costs and where the numbers come from.

    ``runs``: the table for the CSV beside the page. ``provenance``: sentences on them. ``lead``: paragraphs for the
    beginning, each of texts that follow each other. ``reload_s``: the seconds after which a browser reads it again.
    """

    title: str
    sections: Sequence[Section]
    runs: pl.DataFrame
    provenance: Sequence[str] = ()
    lead: Sequence[Sequence[str | Link]] = ()
    reload_s: int = 0

    @property
    def findings(self) -> list[tuple[str, str]]:
        """The title of each section that compares settings, and a sentence on what it shows."""
        sentences = [(part.title, part.comparison.sentence()) for part in self.sections if part.comparison]
        return [(title, sentence) for title, sentence in sentences if sentence]

    @property
    def parts(self) -> list[Section]:
        """The sections, and one with the costs of all."""
        costs = [replace(section.costs, title=section.title) for section in self.sections if section.costs]
        return [*self.sections, *([Section("Costs", tables=costs)] if costs else [])]

    @property
    def csv_title(self) -> str:
        """What the CSV has."""
        return "All numbers of the run:" if len(self.runs) == 1 else "All runs:"

    def markdown(self, csv: str = CSV, pictures: Mapping[str, Picture] | None = None) -> str:
        """Return the page in Markdown. ``csv``: the name of the CSV; ``pictures``: those to link, by file name."""
        files = {id(figure): name for name, figure in (pictures or {}).items()}
        findings = [f"* **{markdown(title)}**, {markdown(sentence)}" for title, sentence in self.findings]
        lead = [" ".join(t.markdown() if isinstance(t, Link) else inline(t) for t in texts) for texts in self.lead]
        parts = [f"# {markdown(self.title)}", *lead, "\n".join(findings)]
        parts += ["In brackets: 95 % intervals."] if findings else []
        for section in self.parts:
            command = f"```\n{escape_control(section.command)}\n```" if section.command else ""
            tables = [table.markdown() for table in section.tables]
            content = [section.stored, bullets(section.lines), command, *tables, bullets(section.notes)]
            content += [f"![{markdown(p.alt or p.caption)}]({files[id(p)]})" for p in section.figures if id(p) in files]
            parts += [f"## {markdown(section.title)}", *content] if any(content) else []
        end = f"{bullets(self.provenance)}\n* {self.csv_title} {Link(csv, csv).markdown()}"
        parts += ["## Where the numbers come from", end]
        return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"

    def html(self) -> str:
        """Return the page as HTML that loads nothing and whose tables can be sorted; light or dark as the reader's."""
        return _TEMPLATES.get_template("page.html").render(page=self, csv=Link(CSV, CSV))

    def write(self, folder: Path) -> None:
        """Write ``report.html``, ``summary.md`` without pictures, and ``summary.csv``."""
        write_text(folder / CSV, self.runs.write_csv())
        write_text(folder / MARKDOWN, self.markdown())
        write_text(folder / PAGE, self.html())


def picture(figure: Figure, caption: str, alt: str = "") -> Picture:
    """Return ``figure``, including legends beside its panels, as a picture of a page."""
    data = BytesIO()
    figure.savefig(data, format="png", dpi=_DPI, bbox_inches="tight", metadata={"Software": None})
    return Picture(caption, data.getvalue(), round(96 / _DPI * _width(data.getvalue())), alt=alt)


def picture_of(path: Path, run: Path, caption: str, beside: bool, alt: str) -> Picture:
    """Return the PNG in a file, which ``run`` drew, as a picture of a page. Raises InputError."""
    png = checked_file(path, run).read_bytes()
    return Picture(caption, png, round(96 / _DPI * _width(png)), beside, alt)


def _width(png: bytes) -> int:
    return int.from_bytes(png[16:20])  # from its header


def linked(sections: Sequence[Section], name: str) -> dict[str, Picture]:
    """Return the pictures that Markdown links, by their file names ``NAME_1.png`` and so on."""
    drawn = [figure for section in sections for figure in section.figures if figure.beside]
    return {f"{name}_{number}.png": figure for number, figure in enumerate(drawn, 1)}
