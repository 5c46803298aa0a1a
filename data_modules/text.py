"""A user's own texts: tasks of one text or of pairs of texts, each from a TSV, CSV or Parquet file."""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import torch
from pydantic import Field

from mtl.annotations import shown
from mtl.checks import require
from mtl.options import FilePath, Name, Names, TaskName, validated
from mtl.types import RANKING, TaskSpec, metric_family

from .files.reading import regular_size
from .splits import SPLITS, Shares, by_split, divided
from .table_base import Separator
from .tables.columns import as_text
from .tables.labels import LabelOptions, Labels, Reading
from .tables.reading import read_table
from .text_tasks import SMALL, TextTasksDataModule
from .texts.example import NAME, TASKS, write_example
from .texts.rows import Texts

logger = logging.getLogger(__name__)

PATHS = {"train": "path", "val": "val_path", "test": "test_path"}  # the option that names the file of a split


class TextOptions(Reading):
    """The options of a task: its file, the one or two columns of texts, the column of the labels and how to read it."""

    path: FilePath
    text: Name | Annotated[Names, Field(min_length=1, max_length=2, description="a list of one or two of them")]
    label: Name | int
    gate_from: Name | None = None
    val_path: FilePath | None = None
    test_path: FilePath | None = None


@dataclass(frozen=True)
class Source:
    """The source of a task's rows: its files, its one or two columns of texts, its labels and other options."""

    paths: dict[str, Path]
    text: list[str]
    labels: Labels
    gate_from: str | None

    @staticmethod
    def of(name: str, given: TextOptions) -> Source:
        """Return the Source of one entry of ``data.tasks``; raise InputError if options do not fit together."""
        paths = {split: getattr(given, key) for split, key in PATHS.items() if getattr(given, key) is not None}
        labels = LabelOptions(**{key: getattr(given, key) for key in Reading.model_fields}, column=given.label)
        found = Labels.of(name, labels)
        ranking = ", ".join(metric for metric in found.metrics if metric_family(metric) in RANKING)
        require(not ranking, f"data.tasks.{name}.metrics: {ranking} ranks the rows of groups, which texts have not")
        text = [given.text] if isinstance(given.text, str) else given.text
        return Source(paths, text, found, given.gate_from)


class TextDataModule(TextTasksDataModule):
    """Serve ``tasks``, which map names to ``{path, text, label, kind}`` and further options.

    ``path``: a ``.tsv``, ``.csv``, ``.csv.gz`` or ``.parquet`` file with a header. ``text``: one column, or two for
    pairs. ``label``, ``kind`` and the options of ``Labels``: the column of the labels, and how to read it, as for
    ``data=table``; rows without a label are left out. ``gate_from``: with ``start_from``, the task of that run whose
    gate this task starts with, or "random". ``val_path``, ``test_path``: files of their own for val and test.

    The rows of the other splits are drawn from ``path`` with ``seed``; ``split`` has the shares of train, val and test.
    Without ``tasks``, an example is written to ``data_dir`` and served.
    """

    @validated
    def __init__(
        self,
        tasks: dict[TaskName, TextOptions] | None = None,
        split: Shares = (0.8, 0.1, 0.1),
        separator: Separator = ",",
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.example = not tasks
        if self.example:
            tasks = {name: TextOptions(**entry, path=self.data_dir / NAME) for name, entry in TASKS.items()}
        self.sources = {name: Source.of(name, entry) for name, entry in (tasks or {}).items()}
        self.separator = separator
        own = [set(source.paths) for source in self.sources.values()]
        self.shares = by_split(split, set.intersection(*own) - {"train"})

    def prepare_data(self) -> None:
        """Write the example if there are no tasks; raise InputError if a file is missing."""
        if self.example:
            write_example(self.data_dir)
        for name, source in self.sources.items():
            for split, file in self._files(source).items():
                regular_size(file, f"data.tasks.{name}.{PATHS[split]}")

    def source_files(self) -> dict[str, Path]:
        """Return the files that are read, by the options that name them."""
        return {
            f"data.tasks.{name}.{PATHS[split]}": file
            for name, source in self.sources.items()
            for split, file in self._files(source).items()
        }

    def _files(self, source: Source) -> dict[str, Path]:
        """Return the file of each wanted split of a task that has its own file."""
        rest = [split for split in self.wanted if split not in source.paths]
        own = source.paths.items()
        return {split: file for split, file in own if split in self.wanted or (rest and split == "train")}

    def text_columns(self) -> dict[str, Sequence[str]]:
        return {name: source.text for name, source in self.sources.items()}

    def read_tasks(self) -> tuple[list[TaskSpec], dict[str, dict[str, Texts]]]:
        """Return the tasks and their rows; each row is in exactly one split."""
        if self.example:
            logger.warning("data.tasks is not given: using the made-up rows of %s", self.data_dir / NAME)
        known = {} if self._spec is None else {task.name: task for task in self._spec.tasks}  # of a checkpoint
        specs, splits = [], {split: dict[str, Texts]() for split in self.wanted}
        for name, source in self.sources.items():
            frames = {split: self._read(name, source, split) for split in self._files(source)}
            frames = self._split(name, source, frames) if "train" in frames else frames
            where = {split: str(source.paths.get(split, source.paths["train"])) for split in SPLITS}
            if name not in known:
                small = len(frames["train"]) <= SMALL
                spec = source.labels.learnt(frames["train"], where["train"])
                known[name] = dataclasses.replace(spec, small=small, gate_from=source.gate_from)
            specs.append(known[name])
            for split in self.wanted:
                columns = [frames[split][column].fill_null("").to_list() for column in source.text]
                labels = source.labels.targets(known[name], frames[split], where[split])
                splits[split][name] = Texts.of(columns, labels)
        return specs, splits

    def _read(self, name: str, source: Source, split: str) -> pl.DataFrame:
        """Return the labelled rows of one file. Raises InputError."""
        file, here = source.paths[split], f"data.tasks.{name}"
        frame = read_table(file, self.separator, [""], f"{here}.{PATHS[split]}")
        for column in (*source.text, source.labels.column):
            near = difflib.get_close_matches(column, frame.columns, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            names = ", ".join(map(shown, frame.columns[1:]))
            require(column in frame.columns, f"{here}: {file} has no column {column!r}{hint}; it has {names}")
        for column in source.text:
            kind = frame[column].dtype
            require(kind == pl.String, f"{here}: column {column!r} of {file} holds {kind}, not texts")
        labelled = frame.filter(as_text(frame[source.labels.column]).is_not_null())
        require(len(labelled) > 0, f"{file}, column {source.labels.column!r}: no row has a label for task {name!r}")
        if len(labelled) < len(frame):
            logger.info("task %s: %d rows of %s have no label", name, len(frame) - len(labelled), file)
        return labelled

    def _split(self, name: str, source: Source, frames: dict[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
        """Divide the rows of ``path`` among the splits that have no file of their own."""
        rest = frames.pop("train")
        own = source.paths.keys() - {"train"}
        shares = {split: self.shares[split] for split in SPLITS if split not in own}
        order = torch.randperm(len(rest), generator=self.generator(name))
        parts = divided(order, shares, f"{source.paths['train']}: of its {len(rest)} rows with labels")
        frames |= {split: rest[part.sort().values.numpy()] for split, part in parts.items()}
        return frames
