"""GLUE: tasks of English texts and pairs of texts (Wang et al. 2019), as in MT-TaG and COMET-BERT."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from mtl.checks import require
from mtl.options import Address, FilePath, Some, validated
from mtl.types import TaskSpec

from .files import glue as glue_files
from .files.glue import SOURCES
from .splits import SPLITS, stratified_split
from .text_tasks import SMALL, TextTasksDataModule
from .texts.rows import Texts

logger = logging.getLogger(__name__)

TASKS = ("rte", "mrpc", "stsb", "cola", "sst2", "qqp", "qnli", "mnli")  # the tasks of MT-TaG
SHARES = (0.9, 0.1)  # shares of the training rows for training and validation
METRICS = {  # the main metric first
    "cola": ("matthews",),
    "stsb": ("spearman", "pearson"),
    "mrpc": ("accuracy", "f1"),
    "qqp": ("accuracy", "f1"),
}


class GlueDataModule(TextTasksDataModule):
    """Serve ``tasks`` of GLUE: rte, mrpc, stsb, cola, sst2, wnli, qqp, qnli, mnli.

    Files are expected in ``data_dir``/glue in their official layout, ``glue/RTE/train.tsv`` and so on. The labels of
    the test files are not public. By default, a tenth of the training rows of each class, drawn with ``seed``,
    validates, and the development rows are the test. With ``published_split``, the development rows both validate and
    test, as in the papers: the result is then selected on the rows it is reported for.

    The development rows of MNLI are the matched and the mismatched ones together. The two kinds are almost equally
    many, so the accuracy on all rows is close to the mean of the two accuracies, which is usually reported.

    ``max_rows[task]`` takes at most that many rows of a task's training file, drawn with ``seed``. With
    ``loss_scale``, the loss of a task with C classes has weight 1 / ln C, as in MT-TaG, and that of a regression 1.
    """

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        tasks: Some[glue_files.Task] = TASKS,
        max_rows: dict[glue_files.Task, Annotated[int, Field(ge=2, le=10**9)]] | None = None,
        published_split: bool = False,
        loss_scale: bool = True,
        download: bool = True,
        base_url: Address | None = None,
        **common: Any,
    ) -> None:
        super().__init__(data_dir, **common)
        self.names, self.limits = tasks, max_rows or {}
        self.published_split, self.loss_scale = published_split, loss_scale
        self.download, self.base_url = download, base_url
        self.folder = self.data_dir / "glue"

    def prepare_data(self) -> None:
        """Fetch and unpack what is missing. Safe to kill, and to run in several processes at once."""
        for name in self.names:
            glue_files.prepare(self.folder, name, self.download, self.base_url)

    def source_files(self) -> dict[str, Path]:
        """Return the files of the tasks, by their paths in the folder of GLUE."""
        paths = [f"{SOURCES[name].folder}/{stem}.tsv" for name in self.names for stem in SOURCES[name].rows]
        return {path: self.folder / path for path in paths}

    def text_columns(self) -> dict[str, Sequence[str]]:
        return {name: SOURCES[name].texts for name in self.names}

    def read_tasks(self) -> tuple[list[TaskSpec], dict[str, dict[str, Texts]]]:
        """Return the tasks and their rows; the splits share rows only if ``published_split``."""
        splits: dict[str, dict[str, Texts]] = {split: {} for split in SPLITS}
        odd: list[str] = []
        for name in self.names:
            train, test = self._rows(name, ["train"], odd), self._rows(name, SOURCES[name].dev, odd)
            generator = self.generator(name)
            train = train.select(torch.randperm(len(train), generator=generator)[: self.limits.get(name)].sort().values)
            val = test
            if not self.published_split:
                classes = train.labels.long() if SOURCES[name].classes else torch.zeros(len(train), dtype=torch.int64)
                parts = stratified_split(classes, SHARES, generator)
                require(all(map(len, parts)), f"task {name}: {len(train)} training rows are too few for train and val")
                train, val = (train.select(part.sort().values) for part in parts)
            for split, rows in zip(SPLITS, (train, val, test), strict=True):
                splits[split][name] = rows
        if odd:
            logger.warning("results are not comparable with published ones: %s", "; ".join(odd))
        return [self._spec_of(name) for name in self.names], splits

    def _rows(self, name: str, stems: Sequence[str], odd: list[str]) -> Texts:
        """Return the rows of one or several files; add files with an unofficial number of rows to ``odd``."""
        source = SOURCES[name]
        columns: list[list[str]] = [[] for _ in source.texts]
        labels = []
        for stem in stems:
            file = self.folder / source.folder / f"{stem}.tsv"
            texts, values = glue_files.read(file, name)
            if len(values) != source.rows[stem]:
                odd.append(f"{source.folder}/{stem}.tsv has {len(values)} rows instead of {source.rows[stem]}")
            for column, more in zip(columns, texts, strict=True):
                column += more
            labels.append(values)
        return Texts.of(columns, torch.cat(labels))

    def _spec_of(self, name: str) -> TaskSpec:
        source = SOURCES[name]
        weight = 1 / math.log(len(source.classes)) if self.loss_scale and source.classes else 1.0
        classes = len(source.classes) if source.kind == "multiclass" else 1
        small = source.rows["train"] <= SMALL
        metrics = METRICS.get(name, ("accuracy",))
        return TaskSpec(name, source.kind, classes, weight, metrics, small, classes=source.classes)
