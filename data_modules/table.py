"""A user's own CSV or Parquet table: its columns become inputs and tasks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from mtl.checks import format_value, join_names, require
from mtl.nn.seeds import make_generator
from mtl.options import FilePath, LargeCount, Name, Names, validated
from mtl.types import RANKING, Batch, DataSpec, TaskSpec, has_label, metric_family

from .base import TensorDataModule
from .files.reading import files_of
from .split_rows import SplitRows, assign_rows, read_groups, read_rare_classes, read_splits, read_times
from .splits import by_split, files_to_read, group_split, random_split, scaffold_split, time_split
from .state import reading_state, spec_of
from .stream import WINDOW_BLOCKS, StreamedRows, concat_batches
from .tables.cells import Cells, as_text, digest_of
from .tables.chain_labels import fill_chains, find_filled_tasks
from .tables.encoder import TableEncoder, check_columns
from .tables.example import NAME, TASKS, write_example
from .tables.formats import DATE_FORMATS
from .tables.label_options import MAX_WEIGHT
from .tables.labels import RARE_CLASS_FRACTION, TargetOptions, mask_by_conditions
from .tables.learning import learn
from .tables.options import ELEMENT_KINDS, Columns, CsvOptions, OnInvalid, SplitOptions, TableOptions, VocabularyOptions
from .tables.row_source import RowSource, check_parquet
from .tables.vocabulary_growth import check_kept, extend_encoder, learn_tasks

logger = logging.getLogger(__name__)

OPTION = {"train": "path", "val": "val_path", "test": "test_path"}  # the option that names the file of a split
EXAMPLE = "as in 'data.tasks.click={column: clicked, kind: binary}'"


class TableDataModule(TensorDataModule):
    """Serve the rows of ``path``: a ``.csv``, ``.csv.gz``, ``.tsv`` or ``.parquet`` file, or a folder or a pattern.

    ``tasks`` maps names to a kind, binary, multiclass or regression, or to ``LabelOptions``, with a kind. An empty cell
    is a missing label. All other columns are inputs, except those in ``ignore``, identifiers, and free text. The kind
    of an input is inferred, see ``infer_kind``, unless ``columns`` gives it, by name: category, number, date, list,
    text or molecule, or ``ColumnOptions``. Categories become ids, see ``VocabularyOptions``. Numbers are scaled to mean
    0 and standard deviation 1. Dates become month, day, weekday, hour and age, see ``split_dates``. The elements of a
    list, the words and letter groups of a text (see ``words_and_groups``), and the bits of a molecule (see
    ``tables.molecules``) become ids, as categories do. Kinds, categories, means and classes come from the training rows
    only.

    A cell of a number, date or molecule that cannot be read raises InputError. With ``on_invalid="missing"`` it counts
    as empty, and a warning gives the number of such cells. A bad label or weight always raises InputError.

    Rows are split as ``split`` says, see ``SplitOptions``, or by the files ``val_path`` and ``test_path``, where the
    fractions apply to the splits without a file.

    ``window_rows``: Parquet files that do not fit into memory are read in blocks of ``window_rows`` / 16 rows, in
    memory that grows by a byte for each row. An epoch takes the blocks in random order and mixes the rows of about 16
    of them, a window. Neighbours in a file are thus spread over a window, not over the epoch: if files are sorted,
    write their rows in random order first. One window is in memory as tensors while the next one is read. Validation
    and test read the files in order, block by block. Before the training, the training rows are read to learn from
    them; memory then holds the distinct values of the columns that may be categorical, and while the rows are split,
    the column that splits them and a number for each row. None: all rows are in memory.

    The metrics ``gauc``, ``ndcg@K``, ``hit_rate@K`` and ``mrr`` rank the rows with the same cell of ``group_column``,
    such as the rows of a user (see ``mtl.training.metrics``), and leave out rows with an empty cell. The column is also
    an input, unless ``ignore`` names it.

    ``slices`` names columns by whose values the metrics of the test are compared, see ``mtl.use.slices``; they are
    also inputs, unless ``ignore`` names them.

    ``normalize_losses``: see ``TargetOptions``.

    A run that starts from the weights of another one (``start_from``) on a table goes on with its encoding: columns,
    scales, classes and ids stay, and new categories get new ids (see ``tables/vocabulary_growth.py``). With
    ``keep_encoding=False`` all is learnt anew, and the weights of embeddings then stand for other categories.

    ``weight_column`` holds a weight of at least 0 for each row, which multiplies its losses; the loss of a split is the
    weighted mean. Metrics ignore the weights. The column is not an input. A task may name one of its own. Rows that are
    read by window have no weights.

    With neither ``path`` nor ``tasks``, an example table is written to ``data_dir`` and served.
    """

    encoder_kind = TableEncoder
    row_encoder: TableEncoder | None
    earlier: tuple[TableEncoder, list[TaskSpec]] | None = None

    @validated
    def __init__(
        self,
        path: FilePath | None = None,
        tasks: Any = None,
        data_dir: FilePath = Path("data"),
        columns: Columns | None = None,
        ignore: Names = (),
        split: SplitOptions | None = None,
        val_path: FilePath | None = None,
        test_path: FilePath | None = None,
        vocabulary: VocabularyOptions | None = None,
        csv: CsvOptions | None = None,
        on_invalid: OnInvalid = "error",
        weight_column: Name | None = None,
        group_column: Name | None = None,
        slices: Names = (),
        window_rows: LargeCount | None = None,
        normalize_losses: bool = False,
        keep_encoding: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.example = data_dir if path is None and not tasks else None
        if self.example is not None:
            path, tasks = self.example / NAME, TASKS
        require(path is not None, "data.path is not given: set it to your table, as in data.path=rows.csv")
        require(bool(tasks), f"data.tasks is empty: give at least one task, {EXAMPLE}")
        self.options = TableOptions(columns or {}, vocabulary or VocabularyOptions(), on_invalid)
        self.split, self.csv, self.ignore = split or SplitOptions(), csv or CsvOptions(), ignore
        self.normalize_losses = normalize_losses
        self.labels = self.make_labels(tasks)
        self.weight_column, self.group_column = weight_column, group_column
        weights = [*(task.weight_column for task in self.labels), weight_column]
        self.weight_columns = [column for column in weights if column is not None]
        self.slices = list(slices)  # columns by whose values the test has metrics
        files = {"train": path, "val": val_path, "test": test_path}
        self.paths = {name: file for name, file in files.items() if file is not None}
        own_files = [name for name in self.paths if name != "train"]
        both = "data.split.by=column with data.val_path or data.test_path: give one or the other"
        require(self.split.by != "column" or not own_files, both)
        self.fractions = by_split(self.split.fractions, own_files, "data.split.fractions")
        self.fractions["train"] += sum(self.fractions[name] for name in own_files)  # test stays a tenth of the rows
        self.random_split = self.split.by in ("random", "group") and test_path is None
        self.window_rows = window_rows
        # How many rows are read at a time; None: all rows of a file
        self.block_rows = None if window_rows is None else -(-window_rows // WINDOW_BLOCKS)
        streamed = "weight_column: rows that are read by data.window_rows have no weights; use data.window_rows=null"
        require(window_rows is None or not self.weight_columns, streamed)
        self.keep_encoding = keep_encoding
        self._row_info: dict[str, pl.DataFrame | SplitRows] = {}  # of rows that are streamed, where to read it
        self._check_roles()

    def make_labels(self, tasks: Any) -> list[TargetOptions]:
        """Return the labels of ``data.tasks``. Raises InputError."""
        labels, same = TargetOptions.from_tasks(tasks), {"normalize_loss": self.normalize_losses}
        return [x.model_copy(update={**same, "format": self.options.of(x.column).format or ""}) for x in labels]

    def _check_roles(self) -> None:
        """Raise InputError if a column is given two roles.

        ``ignore`` may name a column whose kind is inferred too, since ``mtl columns`` writes them.
        """
        inputs, kinds = self.options.named, self.options.columns
        by_hand = {name for name in inputs if name not in kinds or kinds[name].kind in ELEMENT_KINDS}
        twice = sorted(by_hand.intersection(self.ignore))
        require(not twice, f"data.columns, data.ignore: {', '.join(map(format_value, twice))} is named in both")
        for name, target in self.options.targets.items():
            is_category = target not in kinds or kinds[target].kind in (None, "category")
            require(is_category, f"data.columns.{target}: {name} is compared with it, so its kind is category")
        both = f"data.weight_column={format_value(self.weight_column)}: this column is also named as an input"
        require(self.weight_column not in inputs, both)
        for task in self.labels:
            location = f"data.tasks.{task.name}"
            ranking = [name for name in task.metrics if metric_family(name) in RANKING]
            for column in (task.column, task.weight_column):
                require(column not in inputs, f"{location}: its column {column!r} is also named as an input")
            both = f"{location}: its column {task.column!r} is also named as a weight_column"
            require(task.column not in self.weight_columns, both)
            hint = "ranks the rows of each group; name its column, as in data.group_column=user"
            require(not ranking or self.group_column is not None, f"{location}.metrics: {', '.join(ranking)} {hint}")
            date = f"data.columns.{task.column}.format={task.format}: the labels of task {task.name!r} are no dates"
            require(task.format not in DATE_FORMATS, date)

    def source_files(self) -> dict[str, Path]:
        return {f"data.{OPTION[name]}": path for name, path in self._files().items() if name not in self.frames}

    def _files(self) -> dict[str, Path]:
        """Return the file of each wanted split that has its own file."""
        return files_to_read(self.paths, self.wanted)

    def prepare_data(self) -> None:
        if self.example is not None:
            write_example(self.example)
        for option, path in self.source_files().items():
            files_of(path, option) if self.window_rows is None else check_parquet(path, option)

    def load(self) -> tuple[DataSpec, dict[str, Batch | StreamedRows]]:
        """Return the DataSpec and the wanted splits; only training rows, or a checkpoint's state, teach the encoder."""
        if self.example is not None and "train" in self._files():
            logger.warning("data.path is not given: using the made-up rows of %s", self.paths["train"])
        rows = self.split_rows()
        spec = self._learn(rows["train"]) if self.row_encoder is None else self.spec
        self._keep_labels(spec)
        assert self.row_encoder is not None
        if self.window_rows is None:
            self.row_encoder.remarks.invalid.clear()  # encoding the rows of all splits counts them again
        splits = {name: self._served(rows[name], spec.tasks, name != "train") for name in self.wanted}
        streamed, evaluated = self.window_rows is not None, [name for name in self.wanted if name != "train"]
        self._row_info = {n: rows[n] if streamed else rows[n].row_info(self.slices) for n in evaluated}
        self.row_encoder.remarks.report_invalid()
        self.warn_of_trained_file()
        sources = {name: rows[name].source.location for name in splits}
        for location in dict.fromkeys(sources.values()):
            counts = (f"{len(rows)} {name}" for name, rows in splits.items() if sources[name] == location)
            logger.info("%s: %s", location, ", ".join(counts))
        return spec, splits

    def _served(self, rows: SplitRows, tasks: Sequence[TaskSpec], grouped: bool) -> Batch | StreamedRows:
        """Return all rows of a split as tensors, or what reads them as they are needed."""
        if self.window_rows is None:
            return self._tensors(rows, tasks, grouped)
        columns = self._columns(grouped)

        def read(block: int, index: Tensor) -> Batch:
            return self._batch(rows.read(block, columns, index), tasks, rows.blocks[block].file, grouped)

        return StreamedRows(rows.counts, read, self.window_rows)

    def warn_of_trained_file(self) -> None:
        """Warn if the test rows are in a file, or files, that the network of the checkpoint was trained on."""
        trained, tested = (
            (files or {}).get(f"data.{option}", {}).get("sha256")
            for files, option in ((self._files_then, "path"), (self.file_digests, "test_path"))
        )
        if trained == tested is not None:
            warning = "%s: the network was trained on rows of this file: what it gets right says little about new ones"
            logger.warning(warning, self.paths["test"])

    def load_state_dict(self, state: Mapping[str, Any], test_only: bool = False) -> None:
        super().load_state_dict(state, test_only)
        if state:
            self._keep_labels(self.spec)

    def _keep_labels(self, spec: DataSpec) -> None:
        """Forget the tasks that were left out when ``spec`` was learnt, see ``finish_labels``."""
        names = {*spec.task_names}
        self.labels = [task for task in self.labels if task.name in names]

    def continue_from(self, state: Mapping[str, Any]) -> None:
        if self.keep_encoding and "columns_by_name" in (state.get("encoder") or {}):  # that of a table
            with reading_state():
                encoder, spec = TableEncoder.from_state(state["encoder"]), spec_of(state["spec"])
            self.earlier = encoder, list(spec.tasks)

    def labelled(self, frame: pl.DataFrame, where: str) -> Batch:
        """Return other rows with their labels; InputError, with ``where``, for a missing column or invalid cell."""
        encoder, columns = self.row_encoder, [task.column for task in self.labels]
        assert encoder is not None
        read = [task.column for task in self.labels if encoder.from_text or task.kind == "regression"]  # as inputs are
        texts = pl.selectors.by_name(read, require_all=False) & pl.selectors.string()
        source = RowSource.of_frames({where: frame.with_columns(texts.replace(list(encoder.null_values), None))})
        grouped = [] if self.group_column is None else [self.group_column]
        check_columns(source.columns, [*columns, *self.weight_columns, *grouped], where, "")
        return self._tensors(SplitRows.every(source), self.spec.tasks, grouped=True)

    def row_info(self, split: str) -> pl.DataFrame:
        rows = self._row_info[split]
        return rows.row_info(self.slices) if isinstance(rows, SplitRows) else rows

    def _row_sources(self, split: str) -> Any:
        digests, name = super()._row_sources(split), split if split in self.paths else "train"
        files = digests.get(f"data.{OPTION[name]}", digests)
        if name in self.frames:
            files = digest_of(self.frames[name])
        return [files, *((self.split.model_dump(), self.fractions) if name == "train" else ())]

    def sample(self, split: str, max_rows: int) -> Batch | None:
        if split not in self.splits:
            return None
        rows, generator = self.splits[split], self.generator("sample")
        if isinstance(rows, StreamedRows):
            return rows.sample(max_rows, generator)
        return rows.select(torch.randperm(len(rows), generator=generator)[:max_rows])

    def open(self, split: str) -> RowSource:
        """Return the rows that ``path``, ``val_path`` or ``test_path`` names. Raises InputError."""
        if split in self.frames:
            return RowSource.of_frames({str(self.paths[split]): self.frames[split]})
        if self.window_rows is not None:
            check_parquet(self.paths[split], f"data.{OPTION[split]}")
        reading = self.csv.separator, self.csv.null_values, self.window_rows is None
        return RowSource.open(self.paths[split], f"data.{OPTION[split]}", *reading)

    def split_rows(self) -> dict[str, SplitRows]:
        """Return the rows of each split, from one file or several. Raises InputError, also for missing columns."""
        sources = {name: self.open(name) for name in self._files()}
        for name, source in sources.items():
            self._check_named(source.columns, self.paths[name])
            lists = [column for column in self.slices if source.schema[column].is_nested()]
            require(not lists, f"data.slices: {self.paths[name]} has lists in {join_names(lists)}; give single values")
            needed = sources["train"].columns if "train" in sources and self.row_encoder is None else []
            missing = [column for column in needed if column not in (*source.columns, *self.ignore)]
            require(not missing, f"{self.paths[name]} lacks columns of {self.paths['train']}: {join_names(missing)}")
        rows = {name: SplitRows.every(source, self.block_rows) for name, source in sources.items() if name != "train"}
        return rows | (self._divided(sources["train"]) if "train" in sources else {})

    def _divided(self, source: RowSource) -> dict[str, SplitRows]:
        """Return the splits that share the rows of ``data.path``."""
        by, column = self.split.by, self.split.column
        fractions = {n: fraction for n, fraction in self.fractions.items() if n == "train" or n not in self.paths}
        reason = f"{source.location}, of its {source.count} rows, data.split.fractions leaves none for"
        require(source.count > 0, f"{reason} {', '.join(fractions)}")
        if by == "column" and column is not None:
            parts = read_splits(source, column)
            reason = f"{source.location}, column {column!r}: no row is marked"
        elif by == "time" and column is not None:
            parts = time_split(read_times(source, column, self.options), fractions, self.split.gap)
        elif by == "group" and column is not None:
            parts = group_split(read_groups(source, column), fractions, self.generator())
        elif by == "scaffold" and column is not None:
            parts = scaffold_split(read_groups(source, column, by), fractions)
        else:
            parts = self.random_parts(source, fractions)
        return assign_rows(source, parts, self.block_rows, reason)

    def random_parts(self, source: RowSource, fractions: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the indices of the rows of each split, drawn with ``seed``; rare classes are spread evenly."""
        binary = [task.column for task in self.labels if task.kind == "binary"]
        strata = read_rare_classes(source, binary, RARE_CLASS_FRACTION)
        return random_split(source.count if strata is None else strata, fractions, self.generator())

    def _learn(self, train: SplitRows) -> DataSpec:
        """Learn ``row_encoder`` from the training rows, and return the inputs and tasks. Raises InputError."""
        inputs, where = self._input_columns(train.source.columns), str(self.paths["train"])
        reading: dict[str, Any] = {"separator": self.csv.separator, "null_values": self.csv.null_values}
        reading["from_text"] = train.source.from_text
        if self.earlier is not None:
            encoder, earlier_tasks = self.earlier
            encoder = replace(encoder, on_invalid=self.options.on_invalid, **reading)
            check_columns(train.source.columns, encoder.columns, where)
            check_kept(encoder, self.options, inputs)
            self.row_encoder, added = extend_encoder(encoder, train.frames, self.options)
            new = join_names(f"{name} {count:,}" for name, count in added.items())
            logger.info("the encoding is that of start_from; new categories: %s", new or "none")
            tasks = learn_tasks(self.labels, earlier_tasks, train.frames, where)
            earlier_names = {task.name for task in earlier_tasks}
            filled = find_filled_tasks(self.labels, tasks, train.frames)
            self.row_encoder.filled_after.extend(name for name in filled if name not in earlier_names)
        else:
            rows = train.frames, len(train)
            self.row_encoder, tasks = learn(*rows, inputs, self.labels, where, self.options, **reading)
        return DataSpec(self.row_encoder.inputs, tasks)

    def _tensors(self, rows: SplitRows, tasks: Sequence[TaskSpec], grouped: bool) -> Batch:
        """Return all rows of a split, with weights whose mean over the labels of each task is 1."""
        frames = rows.frames(self._columns(grouped))
        batch = concat_batches([self._batch(frame, tasks, file, grouped) for frame, file in frames])
        for task in tasks if batch.weights else ():
            weights = batch.weights[task.name]
            labelled_weights = weights[has_label(task, batch.targets[task.name])]
            mean = float(labelled_weights.mean()) if len(labelled_weights) else 1.0
            column = self._weight_columns_by_task()[task.name]
            location = f"{rows.source.location}, column {column!r}"
            require(mean > 0, f"{location}: all labels of task {task.name!r} have weight 0")
            batch.weights = {**batch.weights, task.name: (weights / mean).float()}
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
        """Hide ``unknown_rate`` of the ids of a training batch, see ``VocabularyOptions``.

        Which ones depends on ``shuffle_seed``, the epoch and the place of the batch in it, so a resumed run hides the
        same, and several processes together hide what one would.
        """
        rate = self.options.vocabulary.unknown_rate
        if not rate or self.trainer is None or not self.trainer.training:
            return batch
        assert self.row_encoder is not None
        plan, (epoch, number) = self.training_plan(), self._position()
        low, high = (end - number * plan.size for end in plan.bounds(number))  # of this process in the global batch
        generator, inputs = make_generator(self.shuffle_seed, epoch, number, 0), dict(batch.inputs)
        for name, unknown in self.row_encoder.unknown.items():
            ids = inputs[name]
            drawn = torch.rand(plan.size, *ids.shape[1:], generator=generator)[low:high].to(ids.device)
            inputs[name] = ids.masked_fill((drawn < rate) & (ids > unknown), unknown)
        return Batch(inputs, batch.targets, batch.weights, batch.groups)

    def targets(self, frame: pl.DataFrame, tasks: Sequence[TaskSpec], where: str) -> dict[str, Tensor]:
        """Return the labels ``[N]`` of each task. Raises InputError, which names the first invalid cell."""
        assert self.row_encoder is not None
        pairs = zip(self.labels, tasks, strict=True)
        targets = {task.name: task.targets(spec, frame, where) for task, spec in pairs}
        targets = fill_chains(self.labels, targets, self.row_encoder.filled_after, frame, where)
        return mask_by_conditions(self.labels, targets)

    def groups(self, frame: pl.DataFrame, where: str) -> Tensor | None:
        """Return a number for each row's group ``[N]``, int64 from 0, a hash of its name; -1 for an empty cell.

        Raises InputError for a column of lists.
        """
        if self.group_column is None:
            return None
        assert self.row_encoder is not None
        Cells(frame, self.group_column, where).check_type(" to single values", "date")
        text = as_text(frame[self.group_column]).replace(list({"", *self.row_encoder.empty}), None)
        numbers = pl.when(text.is_null()).then(-1).otherwise((text.hash(seed=0) // 2).cast(pl.Int64))
        return torch.from_numpy(pl.select(numbers).to_series().to_numpy(writable=True))

    def _input_columns(self, columns: Sequence[str]) -> list[str]:
        """Return the ``columns`` that may be inputs; constant ones and free text are left out later."""
        split_column = self.split.column if self.split.by == "column" else None
        used = {*self.ignore, split_column, *self.weight_columns, *(task.column for task in self.labels)}
        return [name for name in columns if name not in used]

    def _check_named(self, columns: Sequence[str], path: Path) -> None:
        """Raise InputError if a column named in an option is not among the ``columns`` of ``path``."""
        names = [*(task.column for task in self.labels), self.group_column, *self.weight_columns, *self.slices]
        if path == self.paths.get("train"):
            names.append(self.split.column)
        if self.row_encoder is None:  # a restored encoder knows its columns
            names += [*self.options.named, *self.options.columns, *self.ignore]
        check_columns(columns, [name for name in dict.fromkeys(names) if name is not None], str(path), "")

    def _weights(self, frame: pl.DataFrame, where: str) -> dict[str, Tensor]:
        """Return the weight of each row for each task ``[N]``, as the columns have it, else 1. Raises InputError."""
        formats = {name: self.options.of(name).format or "" for name in self.weight_columns}
        read = {name: read_weights(frame, name, where, text) for name, text in formats.items()}
        columns = self._weight_columns_by_task()
        return {name: torch.ones(len(frame)) if not column else read[column] for name, column in columns.items()}

    def _weight_columns_by_task(self) -> dict[str, str | None]:
        return {task.name: task.weight_column or self.weight_column for task in self.labels}


def read_weights(frame: pl.DataFrame, name: str, where: str, number_format: str) -> Tensor:
    """Return a column of weights ``[N]``, float64. Raises InputError, which names the first invalid cell."""
    cells = Cells(frame, name, where)
    cells.check_type(" to weights")
    column = cells.numbers(number_format)
    is_weight = column.is_not_nan() & (column >= 0) & (column <= MAX_WEIGHT)
    cells.refuse(~is_weight, f" is not a weight, a number from 0 to {MAX_WEIGHT:g}")
    return torch.from_numpy(column.to_numpy(writable=True))
