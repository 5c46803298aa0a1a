"""Tables of texts, on the console and in Markdown: one look for all commands and pages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate
from typing import Any

from rich import box, table
from rich.text import Text

from mtl.files.escaping import escape_control, markdown

# Also "12 of 40", an interval behind the number, and what stands for an undefined number
NUMBER = re.compile(r"[+-]?\d(?:(?: of |[^a-df-zA-Z_]){0,19}|[\d.,]* \[.*\])|-?")
_LATEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {letter: f"${letter}$" for letter in "<>|"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
_LATEX |= {"↓": r"$\downarrow$", "↑": r"$\uparrow$", "→": r"$\to$", "×": r"$\times$"}
_LATEX["["] = "{[}"  # at the start of a row it would be a length for the end of the row before
_GAP = 3  # characters between columns
_WHOLE_HEADER = 14  # longer headers may take several lines
_WIDEST_NAME = 28  # characters of the first column; longer names take several lines


class Bold(str):
    """A text in bold type."""

    def __html__(self) -> str:
        return f"<strong>{escape(escape_control(self))}</strong>"


@dataclass(frozen=True)
class Table:
    """A table whose first column names the rows; ``notes``: sentences below it. Texts are never markup.

    ``folded``: whether pages show only its title until the reader opens it.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()
    folded: bool = False

    @property
    def numeric(self) -> list[bool]:
        """Whether each column has numbers, which are aligned on the right."""
        return [all(NUMBER.fullmatch(row[index]) for row in self.rows) for index in range(len(self.header))]

    @property
    def widths(self) -> list[int]:
        """The width of each column in characters, if long headers are broken between words."""
        heads = [len(name) if len(name) <= _WHOLE_HEADER else max(map(len, name.split(" "))) for name in self.header]
        return [max(head, *(len(row[index]) for row in self.rows), 0) for index, head in enumerate(heads)]

    def fitting(self, width: int) -> Table:
        """Return a table of at most ``width`` characters: rows as columns if all fit only so, else fewer columns."""
        names, *columns = zip(self.header, *self.rows, strict=True)
        turned = replace(self, header=[f"{names[0]} →", *names[1:]], rows=columns)
        for candidate in (self, turned):
            if candidate._ends()[-1] <= width:
                return candidate
        return self.narrowed(width)

    def narrowed(self, width: int) -> Table:
        """Return a table of the first columns, at most ``width`` characters, with a note that names the others."""
        num_columns = max(2, sum(end <= width for end in self._ends()))
        notes = [*self.notes, *(f"Not shown here: {', '.join(left)}." for left in [self.header[num_columns:]] if left)]
        header, rows = self.header[:num_columns], [row[:num_columns] for row in self.rows]
        return replace(self, header=header, rows=rows, notes=notes)

    def _ends(self) -> list[int]:
        """Return how far each column reaches, if long names in the first one take several lines."""
        first, *others = self.widths
        return list(accumulate((_GAP + other for other in others), initial=min(first, _WIDEST_NAME)))

    def __rich__(self) -> table.Table:
        """Return the table, without its notes, as ``rich`` prints it."""
        rich_table = table.Table(
            title=self.title or None, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
        )
        for name, numeric, width in zip(self.header, self.numeric, self.widths, strict=True):
            style: dict[str, Any] = {"justify": "right", "width": width} if numeric and width else {}
            rich_table.add_column(Text(escape_control(name)), overflow="fold", **style)
        for row in self.rows:
            rich_table.add_row(*(Text(escape_control(cell), "bold" if isinstance(cell, Bold) else "") for cell in row))
        return rich_table

    def markdown(self) -> str:
        """Return the table in Markdown, below its title and above its notes."""
        lines = [[inline(cell).replace("|", "\\|") for cell in row] for row in (self.header, *self.rows)]
        lines.insert(1, ["--:" if numeric else "---" for numeric in self.numeric])
        cells = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        title = f"### {markdown(self.title)}" if self.title else ""
        if self.folded:  # Markdown takes this HTML as it is
            title, cells = f"<details><summary>{escape(escape_control(self.title))}</summary>", f"{cells}\n\n</details>"
        return "\n\n".join(part for part in (title, cells, bullets(self.notes)) if part)

    def latex(self) -> str:
        """Return the table in LaTeX with the package booktabs, below its title and above its notes."""
        head, *rows = (" & ".join(map(_latex_cell, row)) + r" \\" for row in (self.header, *self.rows))
        columns = "".join("r" if numeric else "l" for numeric in self.numeric)
        caption = [rf"\caption{{{latex(self.title)}}}"] if self.title else []
        start = [r"\begin{table}", r"\centering", *caption, rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
        end = [r"\bottomrule", r"\end{tabular}", *(rf"\par {latex(note)}" for note in self.notes), r"\end{table}", ""]
        return "\n".join([*start, head, r"\midrule", *rows, *end])


def latex(text: str) -> str:
    """Return ``text`` in one line of LaTeX, where nothing in it is a command."""
    return "".join(_LATEX.get(letter, letter) for letter in escape_control(text))


def bullets(notes: Sequence[str]) -> str:
    """Return sentences as a list in Markdown."""
    return "\n".join(f"* {markdown(note)}" for note in notes)


def inline(text: str) -> str:
    """Return ``text`` in one line of Markdown."""
    return f"**{markdown(text)}**" if isinstance(text, Bold) else markdown(text)


def _latex_cell(text: str) -> str:
    return rf"\textbf{{{latex(text)}}}" if isinstance(text, Bold) else latex(text)
