"""A user's own texts: tasks of one text or of pairs of texts, each from a TSV, CSV or Parquet file."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from mtl.checks import require
from mtl.options import TaskName, validated
from mtl.types import RANKING, TaskSpec, metric_family

from .files.reading import regular_size
from .splits import SPLITS, by_split, files_to_read, random_split, require_rows
from .table import OPTION
from .tables.cells import as_text, data_columns
from .tables.encoder import check_columns
from .tables.label_options import LabelOptions, LabelRules, TextTaskOptions
from .tables.labels import TargetOptions
from .tables.options import Fractions, Separator
from .tables.row_source import read_blocks
from .text_tasks import MAX_SMALL_ROWS, TextTasksDataModule
from .texts.rows import Texts

logger = logging.getLogger(__name__)

EXAMPLE = "as in 'data.tasks.spam={path: mails.tsv, text: [subject,body], label: spam, kind: binary}'"


class TextOptions(TextTaskOptions):
    """The options of a task, and the labels that follow from them."""

    @property
    def paths(self) -> dict[str, Path]:
        """The file of each split that has its own."""
        return {split: file for split, key in OPTION.items() if (file := getattr(self, key)) is not None}

    @property
    def columns(self) -> list[str]:
        return [self.text] if isinstance(self.text, str) else list(self.text)

    def labels(self, name: str) -> TargetOptions:
        """Return the labels of task ``name``; raise InputError if options do not fit together."""
        shared = {key: getattr(self, key) for key in LabelRules.model_fields}
        options = TargetOptions.of(name, LabelOptions(**shared, column=self.label))
        ranking = ", ".join(metric for metric in options.metrics if metric_family(metric) in RANKING)
        require(not ranking, f"data.tasks.{name}.metrics: {ranking} ranks the rows of groups, which texts have not")
        return options


class TextDataModule(TextTasksDataModule):
    """Serve ``tasks``, which map names to ``{path, text, label, kind}`` and further options.

    ``path``: a ``.tsv``, ``.csv``, ``.csv.gz`` or ``.parquet`` file with a header. ``text``: one column, or two for
    pairs. ``label``: the column of the labels; ``kind`` and the other options of ``LabelRules`` say how to read it, as
    for ``data=table``. Rows without a label are left out. ``val_path``, ``test_path``: files of their own for val and
    test.

    The rows of the other splits are drawn from ``path`` with ``seed``; ``split``: the fractions of train, val and test.
    """

    @validated
    def __init__(
        self,
        tasks: dict[TaskName, TextOptions] | None = None,
        split: Fractions = (0.8, 0.1, 0.1),
        separator: Separator = ",",
        **common: Any,
    ) -> None:
        super().__init__(**common)
        require(bool(tasks), f"data.tasks is empty: give at least one task, {EXAMPLE}")
        self.sources = tasks or {}
        self.labels = {name: source.labels(name) for name, source in self.sources.items()}
        self.separator = separator
        splits_with_files = [set(source.paths) for source in self.sources.values()]
        self.fractions = by_split(split, set.intersection(*splits_with_files) - {"train"})
        self.random_split = not any("test" in paths for paths in splits_with_files)

    def prepare_data(self) -> None:
        for option, file in self.source_files().items():
            regular_size(file, option)

    def source_files(self) -> dict[str, Path]:
        return {
            f"data.tasks.{name}.{OPTION[split]}": file
            for name, source in self.sources.items()
            for split, file in files_to_read(source.paths, self.wanted).items()
        }

    def text_columns(self) -> dict[str, Sequence[str]]:
        return {name: source.columns for name, source in self.sources.items()}

    def read_tasks(self) -> tuple[list[TaskSpec], dict[str, dict[str, Texts]]]:
        specs_by_name = {} if self._spec is None else {task.name: task for task in self._spec.tasks}  # of a checkpoint
        specs, splits = [], {split: dict[str, Texts]() for split in self.wanted}
        for name, source in self.sources.items():
            frames = {split: self._read(name, source, split) for split in files_to_read(source.paths, self.wanted)}
            frames = self._split(name, source, frames) if "train" in frames else frames
            where = {split: str(source.paths.get(split, source.paths["train"])) for split in SPLITS}
            if name not in specs_by_name:
                spec = self.labels[name].learn(frames["train"], where["train"])
                specs_by_name[name] = dataclasses.replace(spec, small=len(frames["train"]) <= MAX_SMALL_ROWS)
            specs.append(specs_by_name[name])
            for split in self.wanted:
                columns = [frames[split][column].fill_null("").to_list() for column in source.columns]
                labels = self.labels[name].targets(specs_by_name[name], frames[split], where[split])
                splits[split][name] = Texts.of(columns, labels)
        return specs, splits

    def _read(self, name: str, source: TextOptions, split: str) -> pl.DataFrame:
        """Return the labelled rows of one file. Raises InputError."""
        file, location, label = source.paths[split], f"data.tasks.{name}", self.labels[name].column
        reading: dict[str, Any] = {"separator": self.separator, "null_values": [""], "in_memory": True}
        frame = pl.concat([block for block, _ in read_blocks(file, f"{location}.{OPTION[split]}", **reading)])
        check_columns(data_columns(frame), [*source.columns, label], f"{location}: {file}", "")
        for column in source.columns:
            kind = frame[column].dtype
            require(kind == pl.String, f"{location}: column {column!r} of {file} holds {kind}, not texts")
        labelled = frame.filter(as_text(frame[label]).is_not_null())
        require(len(labelled) > 0, f"{file}, column {label!r}: no row has a label for task {name!r}")
        if len(labelled) < len(frame):
            logger.info("task %s: %d rows of %s have no label", name, len(frame) - len(labelled), file)
        return labelled

    def _split(self, name: str, source: TextOptions, frames: dict[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
        """Divide the rows of ``path`` among the splits that have no file of their own."""
        frame = frames.pop("train")
        with_files = source.paths.keys() - {"train"}
        fractions = {split: self.fractions[split] for split in SPLITS if split not in with_files}
        parts = random_split(len(frame), fractions, self.generator(name))
        none_left = f"of its {len(frame)} rows with labels, data.split leaves none for"
        require_rows(parts, f"{source.paths['train']}: {none_left}")
        return frames | {split: frame[part.sort().values.numpy()] for split, part in parts.items()}
