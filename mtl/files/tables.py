"""Tables of texts on the console: one look for all commands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from mtl.files.literals import printable

NUMBER = re.compile(r"[+-]?\d.{0,19}|-?")  # also "12 of 40", and what stands for an undefined number


def console_table(header: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> Table:
    """Return a table whose cells are texts, not markup; columns of numbers are aligned on the right."""
    cells = [[printable(cell) for cell in row] for row in rows]
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, name in enumerate(header):
        numeric = all(NUMBER.fullmatch(row[number]) for row in cells)
        table.add_column(Text(printable(name)), justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    return table
