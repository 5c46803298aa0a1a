"""Census-Income (KDD): who earns more than 50,000 dollars, and who has never married? (MMoE, Ma et al. 2018)"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import polars as pl

from mtl.options import Address, FilePath, Names, validated

from .files.download import fetch_archive
from .files.reading import parsing, read_lines
from .split_rows import SplitRows, assign_rows
from .table import TableDataModule
from .tables.options import ColumnOptions, CsvOptions
from .tables.row_source import RowSource

logger = logging.getLogger(__name__)

NUMERIC_COLUMNS = (
    *("age", "wage per hour", "capital gains", "capital losses", "dividends from stocks"),
    *("num persons worked for employer", "weeks worked in year", "instance weight"),
)
COLUMNS = (  # in the order of the file, named as in census-income.names, which leaves out the last one, the label
    *("age", "class of worker", "detailed industry recode", "detailed occupation recode", "education"),
    *("wage per hour", "enroll in edu inst last wk", "marital stat", "major industry code", "major occupation code"),
    *("race", "hispanic origin", "sex", "member of a labor union", "reason for unemployment"),
    *("full or part time employment stat", "capital gains", "capital losses", "dividends from stocks"),
    *("tax filer stat", "region of previous residence", "state of previous residence"),
    *("detailed household and family stat", "detailed household summary in household", "instance weight"),
    *("migration code-change in msa", "migration code-change in reg", "migration code-move within reg"),
    *("live in this house 1 year ago", "migration prev res in sunbelt", "num persons worked for employer"),
    *("family members under 18", "country of birth father", "country of birth mother", "country of birth self"),
    *("citizenship", "own business or self employed", "fill inc questionnaire for veteran's admin"),
    *("veterans benefits", "weeks worked in year", "year", "income"),
)
MARITAL, NEVER = "marital stat", "Never married"
INCOMES = {"- 50000.": "no", "50000+.": "yes"}
TASKS = {name: {"kind": "binary", "positive": "yes"} for name in ("income", "never_married")}
PUBLISHED_ROWS = {"train": 199_523, "test": 99_762}  # of the published files


class CensusIncomeDataModule(TableDataModule):
    """Serve Census-Income (KDD) of UCI, a row for each person, as a table.

    Tasks, both binary: ``income`` (above 50,000 dollars) and ``never_married``. The file .data trains; a random half of
    the rows of the file .test validates, the other half tests. As in the MMoE paper, the labels of its tasks,
    ``education`` and ``marital stat``, are no inputs, and the weight of a row is not used (``ignore``). Columns that
    are no numbers hold categories, of which "?" is one. UCI publishes no checksum, so a download must be
    ``unverified``; every row is checked. For the other options see ``TableDataModule``.
    """

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        ignore: Names = (MARITAL, "education", "instance weight"),
        download: bool = True,
        unverified: bool = False,
        base_url: Address = "https://archive.ics.uci.edu/static/public/117",
        **common: Any,
    ) -> None:
        self.folder = data_dir / "census_income"
        self.download, self.unverified, self.base_url = download, unverified, base_url
        self.files = {"train": self.folder / "census-income.data", "test": self.folder / "census-income.test"}
        categories = [name for name in COLUMNS if name not in (*NUMERIC_COLUMNS, *ignore, "income")]
        numbers = [name for name in NUMERIC_COLUMNS if name not in ignore]
        category, number = ColumnOptions(kind="category"), ColumnOptions(kind="number")
        columns = dict.fromkeys(categories, category) | dict.fromkeys(numbers, number)
        csv = CsvOptions(null_values=())
        super().__init__(self.files["train"], TASKS, data_dir, columns, ignore=ignore, csv=csv, **common)
        self.random_split = False  # the test rows are always half of the official ones

    def prepare_data(self) -> None:
        archive = self.folder / "census+income+kdd.zip"
        for file in self.files.values():
            fetch_archive(file, archive, self.base_url, None, self.download, self.unverified)

    def source_files(self) -> dict[str, Path]:
        return {file.name: file for split, file in self.files.items() if split in (*self.wanted, "test")}

    def split_rows(self) -> dict[str, SplitRows]:
        test = read_people(self.files["test"], PUBLISHED_ROWS["test"])
        parts = self.random_parts(test, {"val": 0.5, "test": 0.5})
        halves = assign_rows(test, parts, None, f"{test.location} has no row for")
        if "train" not in self.wanted:
            return halves
        return halves | {"train": SplitRows.every(read_people(self.files["train"], PUBLISHED_ROWS["train"]))}


def read_people(file: Path, rows: int) -> RowSource:
    """Return the rows of an official file, cells of numbers as float64, others as text; raise InputError.

    ``rows``: how many the published file has.
    """
    with parsing(file):
        cells = read_lines(file)["line"].str.split(",").list.to_array(len(COLUMNS)).to_frame("cells")
        cell = pl.col("cells").arr
        people = cells.select(cell.get(index).str.strip_chars().alias(name) for index, name in enumerate(COLUMNS))
        married = pl.when(pl.col(MARITAL) == NEVER).then(pl.lit("yes")).otherwise(pl.lit("no"))
        income = pl.col("income").replace_strict(INCOMES)
        people = people.with_columns(pl.col(NUMERIC_COLUMNS).cast(pl.Float64), income, never_married=married)
    if len(people) != rows:
        logger.warning("%s has %d rows, the published file %d", file, len(people), rows)
    return RowSource.of_frames({str(file): people})
