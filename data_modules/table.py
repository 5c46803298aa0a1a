"""A user's own CSV or Parquet table: its columns become inputs and tasks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import polars as pl
import torch
from torch import Tensor

from mtl.checks import InputError, format_value, join_names, require
from mtl.nn.seeds import make_generator
from mtl.options import (
    Count,
    Dropout,
    FilePath,
    Long,
    Name,
    Names,
    NotNegative,
    StrictModel,
    Text,
    matching,
    validated,
)
from mtl.types import RANKING, Batch, DataSpec, TaskSpec, labelled, metric_family

from .base import TensorDataModule
from .files.reading import files_of
from .split_rows import SplitRows, assign_rows, read_groups, read_rare_classes, read_splits, read_times
from .splits import Shares, by_split, files_to_read, group_split, random_split, time_split
from .state import reading_state, spec_of
from .stream import concat_batches
from .tables.chained import chained, tasks_filled_after
from .tables.columns import as_text, cell, numbers
from .tables.encoder import TableEncoder, check_columns
from .tables.example import NAME, TASKS, write_example
from .tables.formats import ACCEPTED, DATES, is_format
from .tables.growing import check_kept, grown, tasks_of
from .tables.kinds import ColumnOptions, check_type
from .tables.labels import HEAVIEST, RARE, TargetOptions, where_positive
from .tables.learning import learn
from .tables.row_source import NULL_VALUES, RowSource

logger = logging.getLogger(__name__)

OPTION = {"train": "path", "val": "val_path", "test": "test_path"}  # the option that names the file of a split
Separator = Annotated[
    str,
    matching(r"[\x01-\x09\x0b\x0c\x0e-!#-\x7f]", "one ASCII character, neither a double quote nor a line break"),
]
EXAMPLE = "as in 'data.tasks.click={column: clicked, kind: binary}'"


class ListOptions(StrictModel):
    """How to read a column of lists, and which column its elements are compared with; see ``ColumnOptions``."""

    separator: str | None = None
    target: Name | None = None


class TableDataModule(TensorDataModule):
    """Serve the rows of ``path``: a ``.csv``, ``.csv.gz``, ``.tsv`` or ``.parquet`` file, or a folder or a pattern.

    ``tasks`` maps names to a kind, binary, multiclass or regression, or to ``TargetOptions``, with a kind. An empty
    cell is a missing label. All other columns are inputs, except those in ``ignore``, identifiers, and free text that
    ``texts`` does not name. The kind of an input is inferred, see ``kind_of``, unless ``categorical`` or ``numeric``
    names it; ``formats`` says how the dates or numbers of a column, also of labels and weights, are written, as in
    {signup: dd/mm/yyyy} (see ``tables/formats.py``). Categories become ids; unknown ones, those with fewer than
    ``min_count`` training rows and all but the ``max_categories`` most frequent ones share id 0. In each training step,
    a random ``unknown_share`` of the known ids become the unknown id, so that its embedding is trained too. Numbers are
    scaled to mean 0 and standard deviation 1. ``dates`` and ``lists`` name columns of these kinds. Dates become month,
    day, weekday, hour and age, see ``parts_of``. The first ``max_length`` elements of a list (None: all) become ids, as
    categories do; ``lists`` maps columns to the separator of their elements, such as "|", or to a separator and a
    ``target``, a column of categories: the list then shares the vocabulary of its target, and networks compare its
    elements with the target's cell. ``texts`` names columns of free text, whose words and letter groups become ids
    likewise, see ``words_and_groups``. Kinds, categories, means and classes come from the training rows only.

    A cell of a numeric or date input that cannot be read raises InputError. With ``on_bad="missing"`` it counts as
    empty, and a warning gives the number of such cells. A bad label or weight always raises InputError.

    Rows are split by ``split``, the shares of train, val and test: at random, or with ``split_by="time"`` in the order
    of ``time_column``, training rows first (see ``time_split``; ``split_gap`` is its gap), or with ``split_by="group"``
    so that all rows with the same cell of ``group_column`` are in one split. Or they are split by ``split_column``,
    whose cells are train, val or test; or by the files ``val_path`` and ``test_path``, where the shares apply to the
    splits without a file.

    ``separator``: of CSV files; None: the one of comma, semicolon, tab and | that their first line has most. The
    metrics ``gauc``, ``ndcg@K``, ``hit_rate@K`` and ``mrr`` rank the rows with the same cell of ``group_column``, such
    as the rows of a user (see ``mtl.training.metrics``), and leave out rows with an empty cell. The column is also an
    input, unless ``ignore`` names it.

    ``slices`` names columns by whose values the metrics of the test are compared, see ``mtl.use.slices``; they are
    also inputs, unless ``ignore`` names them.

    ``relative_losses``: see ``TargetOptions``.

    A run that starts from the weights of another one (``start_from``) on a table goes on with its encoding: columns,
    scales, classes and ids stay, and new categories get new ids (see ``tables/growing.py``). With
    ``keep_encoding=False`` all is learnt anew, and the weights of embeddings then stand for other categories.

    ``weight_column`` holds a weight of at least 0 for each row, which multiplies its losses; the loss of a split is the
    weighted mean. Metrics ignore the weights. The column is not an input. A task may name one of its own.

    With neither ``path`` nor ``tasks``, an example table is written to ``data_dir`` and served.
    """

    encoder_kind = TableEncoder
    row_encoder: TableEncoder | None
    block_rows: int | None = None  # the rows that are read at a time; None: a whole file
    frames: Mapping[str, pl.DataFrame] = MappingProxyType({})  # rows of splits in memory, read instead of ``paths``

    @validated
    def __init__(
        self,
        path: FilePath | None = None,
        tasks: Any = None,
        data_dir: FilePath = Path("data"),
        weight_column: Name | None = None,
        categorical: Names = (),
        numeric: Names = (),
        dates: Names = (),
        lists: Mapping[Name, str | ListOptions | None] | None = None,
        texts: Names = (),
        max_length: Count | None = None,
        on_bad: Literal["error", "missing"] = "error",
        ignore: Names = (),
        split: Shares = (0.8, 0.1, 0.1),
        split_by: Literal["random", "time", "group"] = "random",
        split_column: Name | None = None,
        time_column: Name | None = None,
        split_gap: NotNegative = 0.0,
        group_column: Name | None = None,
        slices: Names = (),
        val_path: FilePath | None = None,
        test_path: FilePath | None = None,
        formats: Mapping[Name, str] | None = None,
        min_count: Long = 1,
        unknown_share: Dropout = 0.0,
        max_categories: Count | None = None,
        separator: Separator | None = None,
        null_values: Sequence[Text] = NULL_VALUES,
        relative_losses: bool = False,
        keep_encoding: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.example = data_dir if path is None and not tasks else None
        if self.example is not None:
            path, tasks = self.example / NAME, TASKS
        require(path is not None, "data.path is not given: set it to your table, as in data.path=rows.csv")
        require(bool(tasks), f"data.tasks is empty: give at least one task, {EXAMPLE}")
        self.labels = [
            task.model_copy(update={"relative": relative_losses, "form": (formats or {}).get(task.column, "")})
            for task in TargetOptions.each(tasks)
        ]
        for task in self.labels:
            no_date = task.form not in DATES
            require(no_date, f"data.formats.{task.column}={task.form}: the labels of task {task.name!r} are no dates")
        self.weight_column = weight_column
        columns = [*(task.weight_column for task in self.labels), weight_column]
        self.weight_columns = [column for column in columns if column is not None]
        files = {"train": path, "val": val_path, "test": test_path}
        self.paths = {name: file for name, file in files.items() if file is not None}
        own_files = [name for name in self.paths if name != "train"]
        self.shares = by_split(split, own_files)
        self.shares["train"] += sum(self.shares[name] for name in own_files)  # test stays a tenth of the rows
        self.random_split = split_column is None and test_path is None and split_by != "time"
        both = split_column is not None and bool(own_files)
        other = "data.split_column with data.val_path or data.test_path"
        require(not both, f"{other}: give one or the other, as by data.split_column=null")
        self.split_column, self.group_column = split_column, group_column
        self.split_by, self.time_column, self.split_gap = split_by, time_column, split_gap
        self.slices = list(slices)  # columns by whose values the test has metrics
        self._check_split()
        separators, targets = dict[str, str](), dict[str, str]()
        for column, one in (lists or {}).items():
            read = one if isinstance(one, ListOptions) else ListOptions(separator=one)
            separators[column] = read.separator or ""
            targets |= {column: read.target} if read.target is not None else {}
        for column, form in (formats or {}).items():
            require(is_format(form), f"data.formats.{column}={format_value(form)}: give {ACCEPTED}")
        self.given = ColumnOptions(
            *(categorical, numeric, dates, separators, targets, min_count, max_categories, max_length, on_bad),
            *(dict(formats or {}), texts),
        )
        self.separator, self.null_values, self.ignore = separator, null_values, ignore
        self.unknown_share, self.keep_encoding = unknown_share, keep_encoding
        self.earlier: tuple[TableEncoder, list[TaskSpec]] | None = None  # of the run that this one starts from
        self._check_listed()

    def _check_split(self) -> None:
        """Raise InputError if an option of the split has no effect, or a column is not named."""
        here, by_time = f"data.split_by={self.split_by}", self.split_by == "time"
        both = "the rows are split in one way: leave out it or data.split_column"
        require(self.split_by == "random" or self.split_column is None, f"{here}: {both}")
        lacks = {"time": self.time_column is None, "group": self.group_column is None}.get(self.split_by, False)
        require(not lacks, f"{here}: name the column, as in data.{self.split_by}_column=NAME")
        for name, given in (("time_column", self.time_column), ("split_gap", self.split_gap)):
            require(by_time or not given, f"data.{name}={format_value(given)}: it needs data.split_by=time")

    def _check_listed(self) -> None:
        """Raise InputError if a column is given two roles.

        ``ignore`` may name what ``categorical``, ``numeric`` and ``dates`` name, since ``mtl columns`` writes them.
        """
        by_hand = {*self.given.texts, *self.given.lists, *self.given.targets.values()}
        named = [*self.given.columns, *(name for name in self.ignore if name in by_hand)]
        for name in {*self.given.categorical} & {*self.given.numeric}:
            named.remove(name)
        twice = sorted({name for name in named if named.count(name) > 1})
        options = ", data.".join((*ColumnOptions.NAMING, "ignore"))
        require(not twice, f"data.{options}: {', '.join(map(format_value, twice))} is named more than once")
        both = f"data.weight_column={format_value(self.weight_column)}: this column is also named as an input"
        require(self.weight_column not in self.given.columns, both)
        for task in self.labels:
            here, ranking = f"data.tasks.{task.name}", [name for name in task.metrics if metric_family(name) in RANKING]
            for column in (task.column, task.weight_column):
                require(column not in self.given.columns, f"{here}: its column {column!r} is also named as an input")
            weighs = task.column not in self.weight_columns
            require(weighs, f"{here}: its column {task.column!r} is also named as a weight_column")
            grouped = (
                f"{', '.join(ranking)} ranks the rows of each group; name its column, as in data.group_column=user"
            )
            require(not ranking or self.group_column is not None, f"{here}.metrics: {grouped}")

    def source_files(self) -> dict[str, Path]:
        return {f"data.{OPTION[name]}": path for name, path in self._files().items() if name not in self.frames}

    def _files(self) -> dict[str, Path]:
        """Return the file of each wanted split that has its own file."""
        return files_to_read(self.paths, self.wanted)

    def prepare_data(self) -> None:
        if self.example is not None:
            write_example(self.example)
        for option, path in self.source_files().items():
            files_of(path, option)

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        """Return the DataSpec and the wanted splits; only training rows, or a checkpoint's state, teach the encoder."""
        if self.example is not None and "train" in self._files():
            logger.warning("data.path is not given: using the made-up rows of %s", self.paths["train"])
        rows = self.split_rows()
        spec = self._learn(rows["train"]) if self.row_encoder is None else self.spec
        assert self.row_encoder is not None
        self.row_encoder.bad.found.clear()  # encoding the rows of all splits counts bad cells again
        splits = {name: self._tensors(rows[name], spec.tasks, name != "train") for name in self.wanted}
        self.row_encoder.bad.report()
        self.warn_of_trained_file()
        sources = {name: rows[name].source.here for name in splits}
        for here in dict.fromkeys(sources.values()):
            counts = (f"{len(batch)} {name}" for name, batch in splits.items() if sources[name] == here)
            logger.info("%s: %s", here, ", ".join(counts))
        return spec, splits

    def warn_of_trained_file(self) -> None:
        """Warn if the test rows are in a file, or files, that the network of the checkpoint was trained on."""
        trained, tested = (
            (files or {}).get(f"data.{option}", {}).get("sha256")
            for files, option in ((self._files_then, "path"), (self.file_digests, "test_path"))
        )
        if trained == tested is not None:
            logger.warning(
                "%s: the network was trained on rows of this file: what it gets right says little about new ones",
                self.paths["test"],
            )

    def continue_from(self, state: Mapping[str, Any]) -> None:
        if self.keep_encoding and "categorical" in (state.get("encoder") or {}):  # that of a table
            with reading_state():
                encoder, spec = TableEncoder.from_state(state["encoder"]), spec_of(state["spec"])
            self.earlier = encoder, list(spec.tasks)

    def labelled(self, frame: pl.DataFrame, where: str) -> Batch:
        """Return other rows with their labels; raise InputError, with ``where``, for a missing column or a bad cell."""
        encoder, columns = self.row_encoder, [task.column for task in self.labels]
        assert encoder is not None
        read = [task.column for task in self.labels if encoder.from_text or task.kind == "regression"]  # as inputs are
        texts = pl.selectors.by_name(read, require_all=False) & pl.selectors.string()
        source = RowSource.of_frame(frame.with_columns(texts.replace(list(encoder.null_values), None)), where)
        grouped = [] if self.group_column is None else [self.group_column]
        check_columns(source.columns, [*columns, *self.weight_columns, *grouped], where, "")
        return self._tensors(SplitRows.every(source), self.spec.tasks, grouped=True)

    def sliced(self) -> Iterator[tuple[Batch, pl.DataFrame]]:
        """Yield the test rows with their labels, block by block, and the cells of ``slices``."""
        columns = dict.fromkeys([*self._columns(grouped=True), *self.slices])
        for frame, file in self.split_rows()["test"].frames(list(columns)):
            yield self._batch(frame, self.spec.tasks, file, grouped=True), frame.select(self.slices)

    def training_sample(self, most: int) -> Batch | None:
        """Return at most ``most`` training rows, drawn with ``seed``; None if they are not loaded."""
        if "train" not in self.splits:
            return None
        rows = self.splits["train"]
        return rows.select(torch.randperm(len(rows), generator=self.generator("sample"))[:most])

    def open(self, split: str) -> RowSource:
        """Return the rows that ``path``, ``val_path`` or ``test_path`` names. Raises InputError."""
        if split in self.frames:
            return RowSource.of_frame(self.frames[split], str(self.paths[split]))
        option = f"data.{OPTION[split]}"
        return RowSource.open(self.paths[split], option, self.separator, self.null_values).loaded()

    def split_rows(self) -> dict[str, SplitRows]:
        """Return the rows of each split, from one file or several. Raises InputError, also for missing columns."""
        sources = {name: self.open(name) for name in self._files()}
        for name, source in sources.items():
            self._check_named(source.columns, self.paths[name])
            lists = [column for column in self.slices if source.schema[column].is_nested()]
            require(not lists, f"data.slices: {self.paths[name]} has lists in {join_names(lists)}; give single values")
            rest = sources["train"].columns if "train" in sources and self.row_encoder is None else []
            missing = [column for column in rest if column not in (*source.columns, *self.ignore)]
            require(not missing, f"{self.paths[name]} lacks columns of {self.paths['train']}: {join_names(missing)}")
        found = {name: SplitRows.every(source, self.block_rows) for name, source in sources.items() if name != "train"}
        return found | (self._divided(sources["train"]) if "train" in sources else {})

    def _divided(self, source: RowSource) -> dict[str, SplitRows]:
        """Return the splits that share the rows of ``data.path``."""
        shares = {name: share for name, share in self.shares.items() if name == "train" or name not in self.paths}
        reason = f"{source.here}, of its {source.count} rows, data.split leaves none for"
        require(source.count > 0, f"{reason} {', '.join(shares)}")
        if self.split_column is not None:
            parts = read_splits(source, self.split_column)
            reason = f"{source.here}, column {self.split_column!r}: no row is marked"
        elif self.time_column is not None:
            parts = time_split(read_times(source, self.time_column, self.given), shares, self.split_gap)
        elif self.split_by == "group" and self.group_column is not None:
            parts = group_split(read_groups(source, self.group_column), shares, self.generator())
        else:
            parts = self.random_parts(source, shares)
        return assign_rows(source, parts, self.block_rows, reason)

    def random_parts(self, source: RowSource, shares: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the indices of the rows of each split, drawn with ``seed``; rare classes are spread evenly."""
        strata = read_rare_classes(source, [task.column for task in self.labels if task.kind == "binary"], RARE)
        return random_split(source.count if strata is None else strata, shares, self.generator())

    def _learn(self, train: SplitRows) -> DataSpec:
        """Learn ``row_encoder`` from the training rows, and return the inputs and tasks. Raises InputError."""
        inputs, where = self._input_columns(train.source.columns), str(self.paths["train"])
        reading: dict[str, Any] = {"separator": self.separator, "null_values": self.null_values}
        reading["from_text"] = train.source.from_text
        if self.earlier is not None:
            encoder, known = replace(self.earlier[0], on_bad=self.given.on_bad, **reading), self.earlier[1]
            check_columns(train.source.columns, encoder.columns, where)
            check_kept(encoder, self.given, inputs)
            self.row_encoder, added = grown(encoder, train.frames, self.given)
            new = join_names(f"{name} {count:,}" for name, count in added.items())
            logger.info("the encoding is that of start_from; new categories: %s", new or "none")
            tasks = tasks_of(self.labels, known, train.frames, where)
            filled, before = tasks_filled_after(self.labels, tasks, train.frames), {task.name for task in known}
            self.row_encoder.filled_after.extend(name for name in filled if name not in before)
            return DataSpec(self.row_encoder.inputs, tasks)
        self.row_encoder, tasks = learn(train.frames, len(train), inputs, self.labels, where, self.given, **reading)
        return DataSpec(self.row_encoder.inputs, tasks)

    def _tensors(self, rows: SplitRows, tasks: Sequence[TaskSpec], grouped: bool) -> Batch:
        """Return all rows of a split, with weights whose mean over the labels of each task is 1."""
        frames = rows.frames(self._columns(grouped))
        batch = concat_batches([self._batch(frame, tasks, file, grouped) for frame, file in frames])
        for task in tasks if batch.weights else ():
            weights = batch.weights[task.name]
            given = weights[labelled(task, batch.targets[task.name])]
            mean = float(given.mean()) if len(given) else 1.0
            column = self._weight_columns_by_task()[task.name]
            here = f"{rows.source.here}, column {column!r}"
            require(mean > 0, f"{here}: all labels of task {task.name!r} have weight 0")
            batch.weights[task.name] = (weights / mean).float()
        return batch

    def _columns(self, grouped: bool) -> list[str]:
        """Return the columns that a batch is made of."""
        assert self.row_encoder is not None
        columns = [*self.row_encoder.columns, *(task.column for task in self.labels), *self.weight_columns]
        return columns + ([self.group_column] if grouped and self.group_column is not None else [])

    def _batch(self, frame: pl.DataFrame, tasks: Sequence[TaskSpec], where: str, grouped: bool) -> Batch:
        """Return the rows of ``frame`` with their labels, weights and, if ``grouped``, groups. Raises InputError."""
        assert self.row_encoder is not None
        inputs, targets = self.row_encoder.encode(frame, where), self.targets(frame, tasks, where)
        weights = self._weights(frame, where) if self.weight_columns else {}
        return Batch(inputs, targets, weights, self.groups(frame, where) if grouped else None)

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
        generator, inputs = make_generator(self.shuffle_seed, epoch, number, 0), dict(batch.inputs)
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
        targets = chained(self.labels, targets, self.row_encoder.filled_after, frame, where)
        return where_positive(self.labels, targets)

    def groups(self, frame: pl.DataFrame, where: str) -> Tensor | None:
        """Return a number for each row's group ``[N]``, int64 from 0, a hash of its name; -1 for an empty cell.

        Raises InputError for a column of lists.
        """
        if self.group_column is None:
            return None
        assert self.row_encoder is not None
        check_type(frame[self.group_column], where, " to single values", "date")
        text = as_text(frame[self.group_column]).replace(list({"", *self.row_encoder.empty}), None)
        numbers = pl.when(text.is_null()).then(-1).otherwise((text.hash(seed=0) // 2).cast(pl.Int64))
        return torch.from_numpy(pl.select(numbers).to_series().to_numpy(writable=True))

    def _input_columns(self, columns: Sequence[str]) -> list[str]:
        """Return the ``columns`` that may be inputs; constant ones and free text are left out later."""
        used = {*self.ignore, self.split_column, *self.weight_columns, *(task.column for task in self.labels)}
        return [name for name in columns if name not in used]

    def _check_named(self, columns: Sequence[str], path: Path) -> None:
        """Raise InputError if a column named in an option is not among the ``columns`` of ``path``."""
        names = [*(task.column for task in self.labels), self.split_column, self.group_column, *self.weight_columns]
        names += self.slices
        if path == self.paths.get("train"):
            names.append(self.time_column)
        if self.row_encoder is None:  # a restored encoder knows its columns
            names += [*self.given.columns, *self.given.formats, *self.ignore]
        check_columns(columns, [name for name in dict.fromkeys(names) if name is not None], str(path), "")

    def _weights(self, frame: pl.DataFrame, where: str) -> dict[str, Tensor]:
        """Return the weight of each row for each task ``[N]``, as the columns have it, else 1. Raises InputError."""
        forms = self.given.formats
        read = {name: read_weights(frame, name, where, forms.get(name, "")) for name in self.weight_columns}
        columns = self._weight_columns_by_task()
        return {name: torch.ones(len(frame)) if not column else read[column] for name, column in columns.items()}

    def _weight_columns_by_task(self) -> dict[str, str | None]:
        return {task.name: task.weight_column or self.weight_column for task in self.labels}


def read_weights(frame: pl.DataFrame, name: str, where: str, form: str = "") -> Tensor:
    """Return a column of weights ``[N]``, float64. Raises InputError, which names the first bad cell."""
    check_type(frame[name], where, " to weights")
    column = numbers(frame, name, where, form=form)
    bad = (~(column.is_not_nan() & (column >= 0) & (column <= HEAVIEST))).arg_true()
    if len(bad):
        raise InputError(f"{cell(frame, name, bad[0], where)} is not a weight, a number from 0 to {HEAVIEST:g}")
    return torch.from_numpy(column.to_numpy(writable=True))
