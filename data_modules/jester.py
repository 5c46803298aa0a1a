"""Jester as two tasks on all (user, joke) pairs: was the joke rated, and how?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from mtl.options import Address, FilePath, Fraction, Positive, validated
from mtl.types import Batch

from .files.reading import parsing, read_lines
from .interactions import InteractionsDataModule
from .tables.options import Fractions

JOKES = 100
NOT_RATED = 99.0
SUFFIXES = (".csv", ".csv.gz", ".xls")  # if a part exists in several formats, the first one is read
# The sha256 of each part's archive. The authors publish none; these are the ones that several public loaders use
ARCHIVE_SHA256 = {
    "jester-data-1": "cb7841756ded125b15f3d95c9f8241224065e96354c132a46ae4214deeab7615",
    "jester-data-2": "4d312fd824d8c8cb2c9c952a7b1fb7c00d1f5fd3ece370f7285aa701d371748b",
    "jester-data-3": "7f548d3762d3506cf7cd37d8cb9e3adb67984a7da7aa2d2096d5e0b1b884758d",
}


class JesterDataModule(InteractionsDataModule):
    """Serve all pairs of Jester dataset 1 (Goldberg et al. 2001), 73,421 users x 100 jokes.

    Tasks: ``rated`` (binary, weight ``alpha``) and ``rating`` (regression in [-10, 10] / ``rating_unit``, weight
    1 - ``alpha``, NaN if missing). Inputs: ``user`` and ``joke``, int64 ids from 0. The split is stratified by
    ``rated`` and depends on ``seed`` only. All files ``jester/jester-data-*`` with the suffix .csv, .csv.gz or .xls are
    read, sorted by name. If a part exists with several suffixes, the first in this list is read. Missing published
    parts are fetched, unless there is a file that is not a published part.
    """

    task, input, item = "rated", "joke", "joke"

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        alpha: Fraction = 0.5,
        split: Fractions = (0.7, 0.15, 0.15),
        download: bool = True,
        base_url: Address = "https://eigentaste.berkeley.edu/dataset",
        rating_unit: Positive = 1.0,
        **common: Any,
    ) -> None:
        super().__init__(data_dir, alpha, split, download, base_url, **common)
        self.folder = self.source = self.data_dir / "jester"
        self.rating_unit = rating_unit

    def fetch_files(self) -> None:
        names = set(self.parts())
        if names <= ARCHIVE_SHA256.keys():  # otherwise the user chose the files
            for name, sha256 in ARCHIVE_SHA256.items():
                archive = self.folder / f"jester_dataset_1_{name[-1]}.zip"
                if name not in names and (self.download or archive.exists() or not names):
                    self.fetch_archive(self.folder / f"{name}.xls", archive, sha256)

    def parts(self) -> dict[str, Path]:
        files = [path for path in self.folder.glob("jester-data-*.*") if path.name.endswith(SUFFIXES)]
        files_by_part = {path.name.split(".")[0]: path for path in sorted(files, reverse=True)}
        return dict(sorted(files_by_part.items()))

    def source_files(self) -> dict[str, Path]:
        return {file.name: file for file in self.parts().values()}

    def parse(self) -> dict[str, Tensor]:
        return {"ratings": torch.cat([read_part(file) for file in self.parts().values()])}

    def pairs(self, generator: torch.Generator) -> tuple[Batch, Tensor, int, int]:
        ratings = self.parsed()["ratings"]
        users, jokes = ratings.shape
        user, joke = torch.arange(users).repeat_interleave(jokes), torch.arange(jokes).repeat(users)
        rated = ratings.isnan().logical_not().flatten()
        targets = {"rated": rated.float(), "rating": ratings.flatten() / self.rating_unit}
        rows = Batch({"user": user, "joke": joke}, targets)
        return rows, rated.long(), users, jokes


def read_part(file: Path) -> Tensor:
    """Parse a file, whose lines are the number of a user's ratings and 100 cells, to ratings ``[users, 100]``."""
    with parsing(file):
        lines = _read_excel(file) if file.suffix == ".xls" else read_lines(file)
        cells = lines["line"].str.split(",").list.slice(1).list.eval(pl.element().str.strip_chars().cast(pl.Float64))
        values = torch.from_numpy(cells.list.to_array(JOKES).to_numpy(writable=True))
        return values.masked_fill(values == NOT_RATED, torch.nan).float()


def _read_excel(file: Path) -> pl.DataFrame:
    """Return the rows of the first sheet as lines, with commas between the cells."""
    options: dict[str, Any] = {"has_header": False, "drop_empty_rows": False, "drop_empty_cols": False}
    frame = pl.read_excel(file, read_options={"dtypes": "string"}, **options)
    return frame.select(line=pl.concat_str(pl.all().fill_null(""), separator=","))
