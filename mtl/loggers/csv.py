"""Log to a CSV file that a resumed run continues."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities import rank_zero_only

from mtl.files.run_files import checked_file
from mtl.files.writing import reported, write_csv
from mtl.loggers.base import RunLogger
from mtl.options import LargeCount, Name, validated

Row = dict[str, Any]


class CSVLog(RunLogger, CSVLogger):
    """Write the logged values to ``<save_dir>/<name>/metrics.csv``, one row for each call.

    A resumed run keeps the rows of the steps before the one at which it resumes, and appends to them. Rows are written
    to the file at every ``flush_logs_every_n_steps``-th step, and at the end of an epoch, a test or the run.
    """

    takes_all_tasks = True

    @validated
    def __init__(self, save_dir: Name, name: str = "csv", flush_logs_every_n_steps: LargeCount = 100) -> None:
        super().__init__(save_dir, name, version="", flush_logs_every_n_steps=flush_logs_every_n_steps)
        self._table = Table(Path(self.log_dir) / "metrics.csv")

    @property
    def experiment(self) -> Any:
        """The table, with the methods that ``CSVLogger`` calls."""
        return self._table

    @rank_zero_only
    def resume_at(self, step: int) -> None:
        """Drop the rows of the file from ``step`` on, since they will be computed again; a new run starts at 0."""
        self._table.keep_before(step)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``config.yaml`` in the run folder holds all options."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._table.save()


class Table:
    """Rows of named values in a CSV file; the columns are sorted, and new ones may come at any time.

    The file is always intact: rows are appended, and a file with new columns is written beside it and then renamed. A
    kill in the middle of a row leaves half a line, which ``keep_before`` drops.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics: list[Row] = []  # rows to be written
        self.columns: set[str] = set()  # columns of the file, as far as known

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Add a row."""
        row = {name: getattr(value, "item", lambda v=value: v)() for name, value in metrics.items()}
        self.metrics.append(row | {"step": step})

    def keep_before(self, step: int) -> None:
        """Keep only the rows of the file with a smaller step than ``step``."""
        if self.path.exists():
            self._write([row for row in self._read() if int(row["step"]) < step])

    def save(self) -> None:
        """Write the added rows to the file."""
        rows, self.metrics = self.metrics, []
        if not set().union(*rows) <= self.columns:
            self._write([*self._read(), *rows])
        elif rows:
            with reported(self.path), self.path.open("a", newline="") as file:
                csv.DictWriter(file, sorted(self.columns)).writerows(rows)

    def _read(self) -> list[Row]:
        """Return the complete rows of the file, without empty cells."""
        if not self.path.is_file():
            return []
        text = checked_file(self.path, self.path.parent, math.inf).read_text(errors="replace")
        *lines, _ = text.split("\n")  # what follows the last line break is half a line
        rows = csv.DictReader(line for line in lines if "\0" not in line)
        whole = [row for row in rows if None not in row and str(row.get("step")).isdigit()]
        return [{name: value for name, value in row.items() if value} for row in whole if None not in row.values()]

    def _write(self, rows: Sequence[Row]) -> None:
        """Replace the file by one with ``rows``."""
        self.columns = set().union(*rows)
        names = sorted(self.columns)
        write_csv(self.path, names, [[row.get(name, "") for name in names] for row in rows])
