"""GLUE and GLUE++: tasks of English texts and pairs of texts, as in MT-TaG and COMET-BERT."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from mtl.options import Address, FilePath, NonEmpty, validated
from mtl.types import TaskSpec

from .files.glue import SOURCES, Task, prepare
from .splits import SPLITS, group_split, random_split, require_rows, sample_rows
from .text_tasks import MAX_SMALL_ROWS, PhaseLength, TextTasksDataModule
from .texts.glue import read_part
from .texts.rows import Texts

logger = logging.getLogger(__name__)

TASKS: tuple[Task, ...] = ("rte", "mrpc", "stsb", "cola", "sst2", "qqp", "qnli", "mnli")  # the tasks of MT-TaG
FRACTIONS = {"train": 0.9, "val": 0.1}  # of the training rows for training and validation


class GlueDataModule(TextTasksDataModule):
    """Serve ``tasks`` of GLUE (rte, mrpc, stsb, cola, sst2, wnli, qqp, qnli, mnli) and others that MT-TaG has.

    These are cb, copa, multirc, boolq and wic of SuperGLUE, imdb, rt (Rotten Tomatoes) and yelp, which together with
    GLUE's are GLUE++, and scitail. A row of copa is one of the two choices of a question; the metric ``hit_rate@1`` is
    the fraction of questions whose right choice is the more probable one. The head of wic also reads the two words.

    Files are expected in ``data_dir``/glue in their official layout, ``glue/RTE/train.tsv`` and so on. The labels of
    the test files are not public. By default, a tenth of the training rows of each class, drawn with ``seed``,
    validates, and the development rows are the test. With ``published_split``, the development rows both validate and
    test, as in the papers: the result is then selected on the rows it is reported for.

    The development rows of MNLI are the matched and the mismatched ones together. The two kinds are almost equally
    many, so the accuracy on all rows is close to the mean of the two accuracies, which is usually reported.

    ``max_rows[task]`` takes at most that many rows of a task's training file, drawn with ``seed``. Rows of one question
    or passage stay together. ``max_lengths[task]`` is used in place of ``max_length``. With ``loss_scale``, the loss of
    a task with C classes has weight 1 / ln C, as in MT-TaG, and that of a regression 1.
    """

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        tasks: NonEmpty[Task] = TASKS,
        max_rows: dict[Task, Annotated[int, Field(ge=2, le=10**9)]] | None = None,
        max_lengths: dict[Task, PhaseLength] | None = None,
        published_split: bool = False,
        loss_scale: bool = True,
        download: bool = True,
        base_url: Address | None = None,
        **common: Any,
    ) -> None:
        super().__init__(data_dir, **common)
        self.names, self.limits = tasks, max_rows or {}
        self.lengths: Mapping[str, int] = {str(task): length for task, length in (max_lengths or {}).items()}
        self.published_split, self.loss_scale = published_split, loss_scale
        self.download, self.base_url = download, base_url
        self.folder = self.data_dir / "glue"

    def prepare_data(self) -> None:
        for name in self.names:
            prepare(self.folder, name, self.download, self.base_url)

    def source_files(self) -> dict[str, Path]:
        return {path: self.folder / path for name in self.names for path in SOURCES[name].paths()}

    def text_columns(self) -> dict[str, Sequence[str]]:
        return {name: SOURCES[name].texts for name in self.names}

    def length_of(self, task: str) -> int:
        return self.lengths.get(task, self.max_length)

    def read_tasks(self) -> tuple[list[TaskSpec], dict[str, dict[str, Texts]]]:
        splits: dict[str, dict[str, Texts]] = {split: {} for split in SPLITS}
        unofficial: list[str] = []
        for name in self.names:
            train, test = self._rows(name, ["train"], unofficial), self._rows(name, SOURCES[name].dev, unofficial)
            generator = self.generator(name)
            train = sample_texts(train, self.limits.get(name), generator)
            val = test
            if not self.published_split:
                if train.groups is not None:
                    parts = group_split(train.groups, FRACTIONS, generator)
                else:
                    strata = train.labels.long() if SOURCES[name].classes else len(train)
                    parts = random_split(strata, FRACTIONS, generator)
                require_rows(parts, f"task {name}: its {len(train)} training rows leave none for")
                train, val = (train.select(part.sort().values) for part in parts.values())
            for split, rows in zip(SPLITS, (train, val, test), strict=True):
                splits[split][name] = rows
        if unofficial:
            logger.warning("results are not comparable with published ones: %s", "; ".join(unofficial))
        return [self._spec_of(name) for name in self.names], splits

    def _rows(self, name: str, parts: Sequence[str], unofficial: list[str]) -> Texts:
        """Return the rows of one or several parts; note unofficial numbers of rows in ``unofficial``."""
        source, texts = SOURCES[name], []
        for part in parts:
            texts.append(read_part(self.folder, name, part))
            if len(texts[-1]) != source.rows[part]:
                files = " and ".join(source.paths(part))
                unofficial.append(f"{files} has {len(texts[-1])} rows instead of {source.rows[part]}")
        if len(texts) == 1:
            return texts[0]
        first = [text for rows in texts for text in rows.first]
        second = [text for rows in texts for text in rows.second or ()]
        return Texts(first, second or None, torch.cat([rows.labels for rows in texts]))

    def _spec_of(self, name: str) -> TaskSpec:
        source = SOURCES[name]
        weight = 1 / math.log(len(source.classes)) if self.loss_scale and source.classes else 1.0
        classes = len(source.classes) if source.kind == "multiclass" else 1
        named: dict[str, Any] = {"classes": source.classes, "marked": source.marked}
        small = source.rows["train"] <= MAX_SMALL_ROWS
        return TaskSpec(name, source.kind, classes, weight, source.metrics, small, **named)


def sample_texts(rows: Texts, limit: int | None, generator: torch.Generator) -> Texts:
    """Return at most ``limit`` of the rows, drawn at random, in their order; groups stay whole."""
    if rows.groups is None:
        return rows.select(sample_rows(len(rows), limit, generator))
    numbers, index, sizes = rows.groups.unique(return_inverse=True, return_counts=True)
    order = torch.randperm(len(numbers), generator=generator)
    kept = order[sizes[order].cumsum(0) <= (limit or len(rows))]
    return rows.select(torch.isin(index, kept).nonzero()[:, 0])
