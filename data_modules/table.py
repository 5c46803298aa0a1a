"""A user's own CSV or Parquet table: its columns become inputs and tasks."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import polars as pl
import torch
from torch import Tensor

from data_modules import options
from data_modules.base import TensorDataModule
from data_modules.files.several import files_of
from data_modules.options import refused, shown
from data_modules.splits import SPLITS, check_shares
from data_modules.tables.bad_cells import CHOICES
from data_modules.tables.columns import as_text, cell, check_kind, named, numbers
from data_modules.tables.encoder import TableEncoder, listing
from data_modules.tables.example import NAME, TASKS, write_example
from data_modules.tables.kinds import Given, separators
from data_modules.tables.labels import HEAVIEST, Labels
from data_modules.tables.reading import read_tables
from mtl.checks import InputError, require
from mtl.types import RANKING, Batch, DataSpec, TaskSpec, labelled, metric_family

logger = logging.getLogger(__name__)

OPTION = {"train": "path", "val": "val_path", "test": "test_path"}  # the option that names the file of a split
EXAMPLE = "as in 'data.tasks.click={column: clicked, kind: binary}'"


class TableDataModule(TensorDataModule):
    """Serve the rows of ``path``: a ``.csv``, ``.csv.gz``, ``.tsv`` or ``.parquet`` file, or a folder or a pattern.

    ``tasks`` maps names to the options of ``Labels``, ``{column, kind, ...}``; kind: binary, multiclass or regression.
    An empty cell is a missing label. All other columns are inputs, except those in ``ignore`` and free text. The kind
    of an input is inferred, see ``kind_of``, unless ``categorical``, ``numeric``, ``dates`` or ``lists`` names it.
    Categories become ids; unknown ones and those with fewer than ``min_count`` training rows share id 0. Numbers are
    scaled to mean 0 and standard deviation 1. Dates become month, day, weekday, hour and age, see ``parts_of``. Of a
    list the first ``max_length`` elements, None: all, become ids as categories do; ``lists`` maps columns to what
    separates the elements, such as "|". Kinds, categories, means and classes come from the training rows only.

    A cell of a numeric or date input that cannot be read raises InputError. With ``on_bad="missing"`` it counts as
    empty, and a warning gives the number of such cells. A bad label or weight always raises InputError.

    ``weight_column`` holds a weight of each row, at least 0, by which its losses are multiplied; the loss of a split is
    the weighted mean. Metrics take all rows alike. It is no input. ``group_column`` says for ``ndcg@K``, ``hit_rate@K``
    and ``mrr`` which rows are ranked together, such as those of a user, see ``Ranking``; rows with an empty cell are
    left out of these metrics. It is also an input, unless ``ignore`` names it.

    Rows are split at random by ``split``, the shares of train, val and test; or by ``split_column``, whose cells are
    train, val or test; or by the files ``val_path`` and ``test_path``, where the shares apply to the splits without a
    file. With neither ``path`` nor ``tasks``, an example table is written to ``data_dir`` and served.

    ``streaming`` makes a ``StreamingTable``, for Parquet files that do not fit into memory.
    """

    def __new__(cls, *_: Any, streaming: bool = False, **__: Any) -> TableDataModule:
        from data_modules.streaming import StreamingTable  # which inherits from this class

        if streaming is not True or issubclass(cls, StreamingTable):
            return super().__new__(cls)
        streams = f"inherit from {StreamingTable.__module__}.{StreamingTable.__name__}"
        require(cls is TableDataModule, f"data.streaming=true: {cls.__name__} does not stream; {streams}")
        return super().__new__(StreamingTable)

    def __init__(
        self,
        path: str | None = None,
        tasks: Mapping[str, Mapping[str, Any]] | None = None,
        data_dir: str = "data",
        categorical: Sequence[str] = (),
        numeric: Sequence[str] = (),
        dates: Sequence[str] = (),
        lists: Mapping[str, str | None] | None = None,
        max_length: int | None = None,
        on_bad: Literal["error", "missing"] = "error",
        ignore: Sequence[str] = (),
        split: Sequence[float] = (0.8, 0.1, 0.1),
        split_column: str | None = None,
        weight_column: str | None = None,
        group_column: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        min_count: int = 1,
        separator: str = ",",
        null_values: Sequence[str] = ("", "NA", "NaN", "nan", "null", "None"),
        streaming: bool = False,
        window_rows: int = 1 << 20,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.streaming = options.flag("streaming", streaming)
        self.window_rows = options.whole("window_rows", window_rows, 1)
        if tasks is not None and not isinstance(tasks, Mapping):
            raise refused("tasks", tasks, f"a mapping from names to columns and kinds, {EXAMPLE}")
        folder = options.path("data_dir", data_dir, "a folder")
        self.example = folder if path is None and not tasks else None
        if self.example is not None:
            path, tasks = str(self.example / NAME), TASKS
        require(path is not None, "data.path is not given: set it to your table, as in data.path=rows.csv")
        require(bool(tasks), f"data.tasks is empty: give at least one task, {EXAMPLE}")
        self.labels = [Labels.of(name, entry, EXAMPLE) for name, entry in (tasks or {}).items()]
        files = {"train": path, "val": val_path, "test": test_path}
        self.paths = {
            name: options.path(OPTION[name], file, "a table") for name, file in files.items() if file is not None
        }
        own_files = [name for name in self.paths if name != "train"]
        self.shares = dict(zip(SPLITS, check_shares(split, own_files), strict=True))
        named = {"split_column": split_column, "weight_column": weight_column, "group_column": group_column}
        for option, column in named.items():
            good = column is None or (isinstance(column, str) and bool(column))
            require(good, f"data.{option}={shown(column)}: must be the name of a column, or null")
        require(
            split_column is None or not own_files,
            f"data.split_column={shown(split_column)} with data.val_path or data.test_path: give one or the other",
        )
        self.split_column, self.weight_column, self.group_column = split_column, weight_column, group_column
        self.given = Given(
            options.names("categorical", categorical, "[city,user]"),
            options.names("numeric", numeric, "[age]"),
            options.names("dates", dates, "[signup]"),
            separators(lists),
            options.whole("min_count", min_count, 1),
            None if max_length is None else options.whole("max_length", max_length, 1),
            options.choice("on_bad", on_bad, CHOICES),
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
        require(
            self.weight_column is None or self.weight_column not in self.given.columns,
            f"data.weight_column={shown(self.weight_column)}: this column is also named as an input",
        )

    def prepare_data(self) -> None:
        """Write the example table if no file is given; raise InputError if a file is missing."""
        if self.example is not None:
            write_example(self.example)
        for name, path in self._files().items():
            files_of(path, f"data.{OPTION[name]}")

    def source_files(self) -> dict[str, Path]:
        """Return the files that are read, by the options that name them."""
        return {f"data.{OPTION[name]}": path for name, path in self._files().items()}

    def _files(self) -> dict[str, Path]:
        """Return the file of each split that has one of its own, and is wanted."""
        rest = [name for name in self.wanted if name not in self.paths]
        return {name: path for name, path in self.paths.items() if name in self.wanted or (rest and name == "train")}

    def encoder_of(self, state: Mapping[str, Any]) -> TableEncoder:
        return TableEncoder.from_state(state)

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        """Return the DataSpec and the wanted splits; all that is learnt comes from the training rows, or the state."""
        if self.example is not None:
            logger.warning("data.path is not given: using the made-up rows of %s", self.paths["train"])
        frames = self._split()
        where = {name: str(self.paths.get(name, self.paths["train"])) for name in SPLITS}
        if self.row_encoder is None:
            specs = [task.learnt(frames["train"], where["train"]) for task in self.labels]
            self.row_encoder = self._learnt(frames["train"], where["train"])
            spec = DataSpec(self.row_encoder.inputs, specs)
        else:
            spec = self.spec
        splits = {}
        for name in self.wanted:
            frame = frames[name]
            inputs = self.row_encoder.encode(frame, where[name])
            tasks = zip(self.labels, spec.tasks, strict=True)
            targets = {task.name: task.targets(known, frame, where[name]) for task, known in tasks}
            weights = self._weights(frame, spec.tasks, targets, where[name])
            splits[name] = Batch(inputs, targets, weights, self._groups(frame) if name != "train" else None)
        self.row_encoder.bad.report()
        for path in dict.fromkeys(where[name] for name in splits):
            counts = (f"{len(rows)} {name}" for name, rows in splits.items() if where[name] == path)
            logger.info("%s: %s", path, ", ".join(counts))
        return spec, splits

    def _learnt(self, train: pl.DataFrame, where: str) -> TableEncoder:
        """Return the encoder that follows from the training rows."""
        return TableEncoder.learnt(
            train,
            where,
            self._input_columns(named(train)),
            self.given,
            separator=self.separator,
            null_values=self.null_values,
            from_text=files_of(self.paths["train"])[0].suffix != ".parquet",
        )

    def _input_columns(self, columns: Sequence[str]) -> list[str]:
        """Return those of ``columns`` that are inputs, unless they turn out to be constant or free text."""
        used = {*self.ignore, self.split_column, self.weight_column, *(task.column for task in self.labels)}
        return [name for name in columns if name not in used]

    def _read(self, split: str) -> pl.DataFrame:
        """Return the rows of the file of ``split``; raise InputError if a column named in an option is missing."""
        path = self.paths[split]
        frame = read_tables(path, self.separator, self.null_values, f"data.{OPTION[split]}")
        self._check_named(named(frame), path)
        return frame

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

    def _split(self) -> dict[str, pl.DataFrame]:
        """Return the rows of each split, from one file or several."""
        frames = {name: self._read(name) for name in self._files()}
        if "train" not in frames:
            return frames
        rest = frames.pop("train")
        for name, frame in frames.items() if self.row_encoder is None else ():
            missing = [column for column in named(rest) if column not in (*frame.columns, *self.ignore)]
            require(not missing, f"{self.paths[name]} lacks columns of {self.paths['train']}: {listing(missing)}")
        if self.split_column is not None:
            return self._by_column(rest, self.split_column)
        shares = {name: share for name, share in self.shares.items() if name == "train" or name not in self.paths}
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(rest), generator=generator)
        bounds = (torch.tensor([*shares.values()], dtype=torch.float64).cumsum(0) / sum(shares.values()))[:-1]
        ends = (bounds * len(rest)).round().long().tolist()
        for name, part in zip(shares, order.tensor_split(ends), strict=True):
            require(len(part) > 0, f"{self.paths['train']}: of its {len(rest)} rows, data.split leaves none for {name}")
            frames[name] = rest[part.sort().values.numpy()]
        return frames

    def _by_column(self, rows: pl.DataFrame, column: str) -> dict[str, pl.DataFrame]:
        split = split_names(rows, column, str(self.paths["train"]))
        frames = {name: rows.filter(split == name) for name in SPLITS}
        for name, frame in frames.items():
            require(len(frame) > 0, f"{self.paths['train']}, column {column!r}: no row is marked {name}")
        return frames

    def _weights(
        self, frame: pl.DataFrame, tasks: Sequence[TaskSpec], targets: Mapping[str, Tensor], where: str
    ) -> dict[str, Tensor]:
        """Return the weight of each row for each task ``[N]``, with a mean of 1 over the rows that have a label.

        Raises InputError, which names the first bad cell of ``weight_column``.
        """
        if self.weight_column is None:
            return {}
        column = numbers(frame, self.weight_column, where)
        bad = (~(column.is_not_nan() & (column >= 0) & (column <= HEAVIEST))).arg_true()
        if len(bad):
            raise InputError(
                f"{cell(frame, self.weight_column, bad[0], where)} is not a weight; data.weight_column takes numbers "
                f"from 0 to {HEAVIEST:g}"
            )
        raw, weights = torch.from_numpy(column.to_numpy(writable=True)), dict[str, Tensor]()
        for task in tasks:
            mask = labelled(task, targets[task.name])
            mean = float(raw[mask].mean()) if bool(mask.any()) else 1.0
            require(mean > 0, f"{where}, column {self.weight_column!r}: all labels of task {task.name!r} have weight 0")
            weights[task.name] = (raw / mean).float()
        return weights

    def _groups(self, frame: pl.DataFrame) -> Tensor | None:
        """Return the number of each row's group ``[N]``, int64 from 0; -1 for an empty cell."""
        if self.group_column is None:
            return None
        numbered = as_text(frame[self.group_column]).rank("dense").cast(pl.Int64) - 1
        return torch.from_numpy(numbered.fill_null(-1).to_numpy(writable=True))


def split_names(rows: pl.DataFrame, column: str, where: str) -> pl.Series:
    """Return the split that the cells of ``column`` name; raise InputError for the first bad one."""
    check_kind(rows, column, where, f" to {', '.join(SPLITS)}")
    split = as_text(rows[column])
    bad = (split.is_null() | ~split.is_in(SPLITS)).arg_true()
    if len(bad):
        raise InputError(f"{cell(rows, column, bad[0], where)}; accepted are {', '.join(SPLITS)}")
    return split
