"""What tables in memory and streamed tables have in common: options, files and columns."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import polars as pl
from torch import Tensor

from mtl.checks import InputError, require
from mtl.types import RANKING, DataSpec, TaskSpec, metric_family

from . import options
from .base import TensorDataModule
from .options import refused, shown
from .splits import SPLITS, check_shares
from .tables.columns import as_text, cell
from .tables.encoder import TableEncoder, listing
from .tables.kinds import Given, check_type
from .tables.labels import Labels
from .tables.learning import Blocks, learn

OPTION = {"train": "path", "val": "val_path", "test": "test_path"}  # the option that names the file of a split
EXAMPLE = "as in 'data.tasks.click={column: clicked, kind: binary}'"


class TableBase(TensorDataModule):
    """Check the options that all tables of a user have; subclasses read the rows.

    ``tasks`` maps names to the options of ``Labels``, ``{column, kind, ...}``; kind: binary, multiclass or regression.
    An empty cell is a missing label. All other columns are inputs, except those in ``ignore`` and free text. The kind
    of an input is inferred, see ``kind_of``, unless ``categorical`` or ``numeric`` names it. Categories become ids;
    unknown ones and those with fewer than ``min_count`` training rows share id 0. Numbers are scaled to mean 0 and
    standard deviation 1. ``dates`` and ``lists`` name columns of these kinds. Dates become month, day, weekday, hour
    and age, see ``parts_of``. Of a list the first ``max_length`` elements, None: all, become ids as categories do;
    ``lists`` maps columns to what separates the elements, such as "|". Kinds, categories, means and classes come from
    the training rows only.

    A cell of a numeric or date input that cannot be read raises InputError. With ``on_bad="missing"`` it counts as
    empty, and a warning gives the number of such cells. A bad label or weight always raises InputError.

    Rows are split at random by ``split``, the shares of train, val and test; or by ``split_column``, whose cells are
    train, val or test; or by the files ``val_path`` and ``test_path``, where the shares apply to the splits without a
    file. ``group_column`` says for ``ndcg@K``, ``hit_rate@K`` and ``mrr`` which rows are ranked together, such as those
    of a user, see ``Ranking``; rows with an empty cell are left out of these metrics. It is also an input, unless
    ``ignore`` names it.
    """

    weight_column: str | None = None

    def __init__(
        self,
        path: str | None = None,
        tasks: Mapping[str, Mapping[str, Any]] | None = None,
        categorical: Sequence[str] = (),
        numeric: Sequence[str] = (),
        dates: Sequence[str] = (),
        lists: Mapping[str, str | None] | None = None,
        max_length: int | None = None,
        on_bad: Literal["error", "missing"] = "error",
        ignore: Sequence[str] = (),
        split: Sequence[float] = (0.8, 0.1, 0.1),
        split_column: str | None = None,
        group_column: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        min_count: int = 1,
        separator: str = ",",
        null_values: Sequence[str] = ("", "NA", "NaN", "nan", "null", "None"),
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if tasks is not None and not isinstance(tasks, Mapping):
            raise refused("tasks", tasks, f"a mapping from names to columns and kinds, {EXAMPLE}")
        require(path is not None, "data.path is not given: set it to your table, as in data.path=rows.csv")
        require(bool(tasks), f"data.tasks is empty: give at least one task, {EXAMPLE}")
        self.labels = [Labels.of(name, entry, EXAMPLE) for name, entry in (tasks or {}).items()]
        files = {"train": path, "val": val_path, "test": test_path}
        self.paths = {
            name: options.path(OPTION[name], file, "a table") for name, file in files.items() if file is not None
        }
        own_files = [name for name in self.paths if name != "train"]
        self.shares = dict(zip(SPLITS, check_shares(split, own_files), strict=True))
        self.split_column = name_of_column("split_column", split_column)
        self.group_column = name_of_column("group_column", group_column)
        require(
            split_column is None or not own_files,
            f"data.split_column={shown(split_column)} with data.val_path or data.test_path: give one or the other",
        )
        self.given = Given(
            options.names("categorical", categorical, "[city,user]"),
            options.names("numeric", numeric, "[age]"),
            options.names("dates", dates, "[signup]"),
            separators(lists),
            options.whole("min_count", min_count, 1),
            None if max_length is None else options.whole("max_length", max_length, 1),
            "missing" if options.choice("on_bad", on_bad, ("error", "missing")) == "missing" else "error",
        )
        self.separator, self.null_values = separator, options.names("null_values", null_values, '["","NA"]')
        self.ignore = options.names("ignore", ignore, "[comment]")
        good = isinstance(separator, str) and len(separator) == 1 and separator.isascii()
        require(
            good and separator not in '"\r\n\0',
            f"data.separator={shown(separator)}: must be one ASCII character, neither a double quote nor a line break",
        )
        self._check_listed()

    def _check_listed(self) -> None:
        """Raise InputError if a column is given two roles."""
        listed = [*self.given.columns, *self.ignore]
        twice = sorted({name for name in listed if listed.count(name) > 1})
        require(
            not twice,
            f"data.{', data.'.join((*Given.NAMING, 'ignore'))}: {', '.join(map(shown, twice))} is named more than once",
        )
        for task in self.labels:
            require(
                task.column not in self.given.columns,
                f"data.tasks.{task.name}: its column {task.column!r} is also named as an input",
            )
            ranking = [name for name in task.metrics if metric_family(name) in RANKING]
            require(
                not ranking or self.group_column is not None,
                f"data.tasks.{task.name}.metrics: {', '.join(ranking)} ranks the rows of each group; name its column, "
                "as in data.group_column=user",
            )

    def source_files(self) -> dict[str, Path]:
        """Return the files that are read, by the options that name them."""
        return {f"data.{OPTION[name]}": path for name, path in self._files().items()}

    def _files(self) -> dict[str, Path]:
        """Return the file of each split that has one of its own, and is wanted."""
        rest = [name for name in self.wanted if name not in self.paths]
        return {name: path for name, path in self.paths.items() if name in self.wanted or (rest and name == "train")}

    def encoder_of(self, state: Mapping[str, Any]) -> TableEncoder:
        return TableEncoder.from_state(state)

    def learn(self, blocks: Blocks, rows: int, columns: Sequence[str], from_text: bool) -> DataSpec:
        """Set ``row_encoder`` to what the training rows teach, and return the inputs and tasks. Raises InputError."""
        inputs, where = self._input_columns(columns), str(self.paths["train"])
        reading = {"separator": self.separator, "null_values": self.null_values, "from_text": from_text}
        self.row_encoder, tasks = learn(blocks, rows, inputs, self.labels, where, self.given, **reading)
        return DataSpec(self.row_encoder.inputs, tasks)

    def targets(self, frame: pl.DataFrame, tasks: Sequence[TaskSpec], where: str) -> dict[str, Tensor]:
        """Return the labels ``[N]`` of each task. Raises InputError, which names the first bad cell."""
        pairs = zip(self.labels, tasks, strict=True)
        return {task.name: task.targets(known, frame, where) for task, known in pairs}

    def _input_columns(self, columns: Sequence[str]) -> list[str]:
        """Return those of ``columns`` that are inputs, unless they turn out to be constant or free text."""
        used = {*self.ignore, self.split_column, self.weight_column, *(task.column for task in self.labels)}
        return [name for name in columns if name not in used]

    def _check_named(self, columns: Sequence[str], path: Path) -> None:
        """Raise InputError if a column named in an option is not among the ``columns`` of ``path``."""
        wanted = {f"data.tasks.{task.name}": [task.column] for task in self.labels}
        for option in ("split_column", "weight_column", "group_column"):
            wanted[f"data.{option}"] = [getattr(self, option)] if getattr(self, option) is not None else []
        if self.row_encoder is None:  # which else knows its columns
            wanted |= {f"data.{option}": [*getattr(self.given, option)] for option in Given.NAMING}
            wanted["data.ignore"] = self.ignore
        for option, names in wanted.items():
            for column in names:
                near = difflib.get_close_matches(column, columns, 1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                require(
                    column in columns,
                    f"{option}: {path} has no column {column!r}{hint}; it has {listing(columns)}",
                )


def separators(lists: Any) -> dict[str, str]:
    """Return the separator of each column of the option ``data.lists``, "" for null. Raises InputError."""
    good = lists is None or isinstance(lists, Mapping)
    good = good and all(
        isinstance(name, str) and (text is None or isinstance(text, str)) for name, text in (lists or {}).items()
    )
    if not good:
        raise refused(
            "lists", lists, "a mapping from columns to separators, as in {genres: '|'}; null if cells are lists"
        )
    return {name: text or "" for name, text in (lists or {}).items()}


def name_of_column(option: str, column: Any) -> str | None:
    """Return the name of a column, or None; raise InputError for anything else."""
    good = column is None or (isinstance(column, str) and bool(column))
    require(good, f"data.{option}={shown(column)}: must be the name of a column, or null")
    return column


def split_names(rows: pl.DataFrame, column: str, where: str) -> pl.Series:
    """Return the split that the cells of ``column`` name; raise InputError for the first bad one."""
    check_type(rows[column], where, f" to {', '.join(SPLITS)}")
    split = as_text(rows[column])
    bad = (split.is_null() | ~split.is_in(SPLITS)).arg_true()
    if len(bad):
        raise InputError(f"{cell(rows, column, bad[0], where)}; accepted are {', '.join(SPLITS)}")
    return split
