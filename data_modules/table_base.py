"""Options, files and columns that tables in memory and streamed tables have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import polars as pl
import torch
from torch import Tensor

from mtl.checks import InputError, require, shown
from mtl.options import Count, Dropout, FilePath, Long, Model, Name, Names, Text, matching, validated
from mtl.types import RANKING, Batch, DataSpec, TaskSpec, metric_family

from .base import TensorDataModule
from .splits import SPLITS, Shares, by_split, files_to_read
from .tables.chained import chained
from .tables.columns import as_text, cell
from .tables.encoder import TableEncoder, check_columns
from .tables.formats import ACCEPTED, is_format
from .tables.inferring import Blocks
from .tables.kinds import Given, check_type
from .tables.labels import Labels
from .tables.learning import learn
from .tables.reading import NULL_VALUES

OPTION = {"train": "path", "val": "val_path", "test": "test_path"}  # the option that names the file of a split
Separator = Annotated[
    str,
    matching(r"[\x01-\x09\x0b\x0c\x0e-!#-\x7f]", "one ASCII character, neither a double quote nor a line break"),
]
SPREAD = 1_000_003
EXAMPLE = "as in 'data.tasks.click={column: clicked, kind: binary}'"


class ListOptions(Model):
    """How to read a column of lists, and the column of categories to compare its elements with; see ``Given``."""

    separator: str | None = None
    target: Name | None = None


class TableBase(TensorDataModule):
    """Check the options that all tables of a user have; subclasses read the rows.

    ``tasks`` maps names to a kind, binary, multiclass or regression, or to the options of ``Labels``, with a kind.
    An empty cell is a missing label. All other columns are inputs, except those in ``ignore``, identifiers and free
    text. The kind of an input is inferred, see ``kind_of``, unless ``categorical`` or ``numeric`` names it; ``formats``
    says how its dates or numbers are written, as in {signup: dd/mm/yyyy} (see ``tables/formats.py``). Categories become
    ids; unknown ones, those with fewer than ``min_count`` training rows and all but the ``max_categories`` most
    frequent ones share id 0. ``unknown_share`` of the ids of a training step are hidden, at random: they become the id
    of unknown ones, whose embedding would otherwise keep its random first value. Numbers are scaled to mean 0 and
    standard deviation 1. ``dates`` and ``lists`` name
    columns of these kinds. Dates become month, day, weekday, hour and age, see ``parts_of``. The first
    ``max_length`` elements of a list (None: all) become ids, as categories do; ``lists`` maps columns to the
    separator of their elements, such as "|", or to a separator and a ``target``, a column of categories: the list
    then shares the vocabulary of its target, and networks compare its elements with the target's cell. Kinds,
    categories, means and classes come from the training rows only.

    A cell of a numeric or date input that cannot be read raises InputError. With ``on_bad="missing"`` it counts as
    empty, and a warning gives the number of such cells. A bad label or weight always raises InputError.

    Rows are split at random by ``split``, the shares of train, val and test; or by ``split_column``, whose cells are
    train, val or test; or by the files ``val_path`` and ``test_path``, where the shares apply to the splits without a
    file. ``separator``: of CSV files; None: the one of comma, semicolon, tab and | that their first line has most. The
    metrics ``ndcg@K``, ``hit_rate@K`` and ``mrr`` rank the rows with the same cell of ``group_column``, such as the
    rows of a user (see ``mtl.training.metrics.ranking``), and leave out rows with an empty cell. The column is also an
    input, unless ``ignore`` names it.
    """

    encoder_kind = TableEncoder
    row_encoder: TableEncoder | None
    frames: Mapping[str, pl.DataFrame] = MappingProxyType({})  # rows of splits in memory, read instead of ``paths``

    @validated
    def __init__(
        self,
        path: FilePath | None = None,
        tasks: Any = None,
        categorical: Names = (),
        numeric: Names = (),
        dates: Names = (),
        lists: Mapping[Name, str | ListOptions | None] | None = None,
        max_length: Count | None = None,
        on_bad: Literal["error", "missing"] = "error",
        ignore: Names = (),
        split: Shares = (0.8, 0.1, 0.1),
        split_column: Name | None = None,
        group_column: Name | None = None,
        val_path: FilePath | None = None,
        test_path: FilePath | None = None,
        formats: Mapping[Name, str] | None = None,
        min_count: Long = 1,
        unknown_share: Dropout = 0.0,
        max_categories: Count | None = None,
        separator: Separator | None = None,
        null_values: Sequence[Text] = NULL_VALUES,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        require(path is not None, "data.path is not given: set it to your table, as in data.path=rows.csv")
        require(bool(tasks), f"data.tasks is empty: give at least one task, {EXAMPLE}")
        self.labels = Labels.each(tasks)
        self.weight_columns = [task.weight_column for task in self.labels if task.weight_column is not None]
        files = {"train": path, "val": val_path, "test": test_path}
        self.paths = {name: file for name, file in files.items() if file is not None}
        own_files = [name for name in self.paths if name != "train"]
        self.shares = by_split(split, own_files)
        self.shares["train"] += sum(self.shares[name] for name in own_files)  # test stays a tenth of the rows
        self.random_split = split_column is None and test_path is None
        both = split_column is not None and bool(own_files)
        other = "data.split_column with data.val_path or data.test_path"
        require(not both, f"{other}: give one or the other, as by data.split_column=null")
        self.split_column, self.group_column = split_column, group_column
        separators, targets = dict[str, str](), dict[str, str]()
        for column, one in (lists or {}).items():
            read = one if isinstance(one, ListOptions) else ListOptions(separator=one)
            separators[column] = read.separator or ""
            targets |= {column: read.target} if read.target is not None else {}
        for column, form in (formats or {}).items():
            require(is_format(form), f"data.formats.{column}={shown(form)}: give {ACCEPTED}")
        self.given = Given(
            *(categorical, numeric, dates, separators, targets, min_count, max_categories, max_length, on_bad),
            dict(formats or {}),
        )
        self.separator, self.null_values, self.ignore = separator, null_values, ignore
        self.unknown_share = unknown_share
        self._check_listed()

    def _check_listed(self) -> None:
        """Raise InputError if a column is given two roles."""
        listed = [*self.given.columns, *self.ignore]
        twice = sorted({name for name in listed if listed.count(name) > 1})
        options = ", data.".join((*Given.NAMING, "ignore"))
        require(not twice, f"data.{options}: {', '.join(map(shown, twice))} is named more than once")
        for task in self.labels:
            here, ranking = f"data.tasks.{task.name}", [name for name in task.metrics if metric_family(name) in RANKING]
            for column in (task.column, task.weight_column):
                require(column not in self.given.columns, f"{here}: its column {column!r} is also named as an input")
            grouped = (
                f"{', '.join(ranking)} ranks the rows of each group; name its column, as in data.group_column=user"
            )
            require(not ranking or self.group_column is not None, f"{here}.metrics: {grouped}")

    def source_files(self) -> dict[str, Path]:
        return {f"data.{OPTION[name]}": path for name, path in self._files().items() if name not in self.frames}

    def _files(self) -> dict[str, Path]:
        """Return the file of each wanted split that has its own file."""
        return files_to_read(self.paths, self.wanted)

    def learn(self, blocks: Blocks, rows: int, columns: Sequence[str], from_text: bool) -> DataSpec:
        """Learn ``row_encoder`` from the training rows, and return the inputs and tasks. Raises InputError."""
        inputs, where = self._input_columns(columns), str(self.paths["train"])
        reading = {"separator": self.separator, "null_values": self.null_values, "from_text": from_text}
        self.row_encoder, tasks = learn(blocks, rows, inputs, self.labels, where, self.given, **reading)
        return DataSpec(self.row_encoder.inputs, tasks)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Hide ``unknown_share`` of the ids of a training batch; see the class.

        Which ones depends on ``shuffle_seed``, the epoch and the place of the batch in it, so a resumed run hides the
        same, and several processes together hide what one would.
        """
        if not self.unknown_share or self.trainer is None or not self.trainer.training:
            return batch
        assert self.row_encoder is not None
        cut, (epoch, number) = self.training_cut(), self._position()
        low, high = (end - number * cut.size for end in cut.bounds(number))  # rows of this process in the global batch
        seed = ((self.shuffle_seed * SPREAD + epoch) * SPREAD + number) * SPREAD
        generator, inputs = torch.Generator().manual_seed(seed % 2**63), dict(batch.inputs)
        for name, unknown in self.row_encoder.unknown.items():
            ids = inputs[name]
            drawn = torch.rand(cut.size, *ids.shape[1:], generator=generator)[low:high].to(ids.device)
            inputs[name] = ids.masked_fill((drawn < self.unknown_share) & (ids > unknown), unknown)
        return Batch(inputs, batch.targets, batch.weights, batch.groups)

    def targets(self, frame: pl.DataFrame, tasks: Sequence[TaskSpec], where: str) -> dict[str, Tensor]:
        """Return the labels ``[N]`` of each task. Raises InputError, which names the first bad cell."""
        assert self.row_encoder is not None
        pairs = zip(self.labels, tasks, strict=True)
        targets = {task.name: task.targets(known, frame, where) for task, known in pairs}
        return chained(self.labels, targets, self.row_encoder.filled_after, frame, where)

    def groups(self, frame: pl.DataFrame) -> Tensor | None:
        """Return a number for each row's group ``[N]``, int64 from 0, a hash of its name; -1 for an empty cell."""
        if self.group_column is None:
            return None
        text = as_text(frame[self.group_column])
        numbers = pl.when(text.is_null()).then(-1).otherwise((text.hash(seed=0) // 2).cast(pl.Int64))
        return torch.from_numpy(pl.select(numbers).to_series().to_numpy(writable=True))

    def _input_columns(self, columns: Sequence[str]) -> list[str]:
        """Return the ``columns`` that may be inputs; constant ones and free text are left out later."""
        used = {*self.ignore, self.split_column, *self.weight_columns, *(task.column for task in self.labels)}
        return [name for name in columns if name not in used]

    def _check_named(self, columns: Sequence[str], path: Path) -> None:
        """Raise InputError if a column named in an option is not among the ``columns`` of ``path``."""
        names = [*(task.column for task in self.labels), self.split_column, self.group_column, *self.weight_columns]
        if self.row_encoder is None:  # a restored encoder knows its columns
            names += [*self.given.columns, *self.given.formats, *self.ignore]
        check_columns(columns, [name for name in dict.fromkeys(names) if name is not None], str(path), "")


def split_names(rows: pl.DataFrame, column: str, where: str) -> pl.Series:
    """Return the split that the cells of ``column`` name; raise InputError for the first bad one."""
    check_type(rows[column], where, f" to {', '.join(SPLITS)}")
    split = as_text(rows[column])
    bad = (split.is_null() | ~split.is_in(SPLITS)).arg_true()
    if len(bad):
        raise InputError(f"{cell(rows, column, bad[0], where)}; accepted are {', '.join(SPLITS)}")
    return split
