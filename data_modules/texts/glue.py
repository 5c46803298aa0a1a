"""Read the rows of a task: GLUE's tables, and the files of SuperGLUE, IMDB, Yelp and Rotten Tomatoes."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch

from ..files.glue import SOURCES, Source
from ..files.reading import parsing, read_lines
from .rows import Texts

QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}  # in COPA's own words
BOUNDS = {"train": (0.0, 0.8), "dev": (0.8, 0.9)}  # parts of Rotten Tomatoes, as shares of the lines of a file


@dataclass(frozen=True)
class Row:
    """A row: its one or two texts and its label; ``marks``: begin and end of the marked word in each text."""

    texts: Sequence[str]
    label: Any
    marks: Sequence[Sequence[int]] = ()


Found = tuple[int, Row]  # with the number of the line


def read_part(root: Path, task: str, part: str) -> Texts:
    """Return the rows of a part of ``task``. Raises InputError.

    The rows of one line, such as the choices of a question, are a group.
    """
    source = SOURCES[task]
    files = [root / path for path in source.paths(part)]
    with parsing(files[0]):
        groups, rows = zip(*READERS[Path(source.files[0]).suffix](task, source, files, part), strict=True)
        if source.classes:
            values: list[float] = [source.classes.index(str(row.label).lower()) for row in rows]  # JSON: true, false
        else:
            values = [float(row.label) for row in rows]
    labels = torch.tensor(values, dtype=torch.int64 if source.kind == "multiclass" else torch.float32)
    texts = [list(column) for column in zip(*(row.texts for row in rows), strict=True)]
    grouped = torch.tensor(groups) if len(set(groups)) < len(groups) and task in EXPANDED else None
    return Texts.of(texts, labels, grouped, torch.tensor([row.marks for row in rows]) if source.marked else None)


def _tsv(task: str, source: Source, files: Sequence[Path], part: str) -> Iterator[Found]:
    """Read GLUE's tables: tabs separate cells, and quotes mean nothing."""
    lines = read_lines(files[0], "utf-8-sig").rows()
    header = list(source.columns) or lines[0][1].split("\t")
    positions = [header.index(name) for name in (*source.texts, source.label)]
    for number, line in lines[not source.columns :]:
        cells = line.split("\t")
        if len(cells) > max(positions) or not source.skip_short:
            *texts, label = (cells[position] for position in positions)
            yield number, Row(texts, label.strip())


def _json_lines(task: str, source: Source, files: Sequence[Path], part: str) -> Iterator[Found]:
    """Read SuperGLUE's files: an object of JSON a line."""
    for number, line in read_lines(files[0], "utf-8-sig").rows():
        entry = json.loads(line)
        plain = [] if task in EXPANDED else [Row([entry[name] + "" for name in source.texts], entry["label"])]
        yield from ((number, row) for row in (EXPANDED[task](entry) if task in EXPANDED else plain))


def _copa(entry: Mapping[str, Any]) -> list[Row]:
    context = f"{entry['premise']} {QUESTIONS[entry['question']]}"
    return [Row((context, entry[f"choice{n + 1}"]), entry["label"] == n) for n in (0, 1)]


def _multirc(entry: Mapping[str, Any]) -> list[Row]:
    passage = entry["passage"]
    return [
        Row((f"{passage['text']} {asked['question']}", answer["text"]), {0: False, 1: True}[answer["label"]])
        for asked in passage["questions"]
        for answer in asked["answers"]
    ]


def _wic(entry: Mapping[str, Any]) -> list[Row]:
    marks = [(int(entry[f"start{n}"]), int(entry[f"end{n}"])) for n in (1, 2)]
    return [Row((entry["sentence1"], entry["sentence2"]), entry["label"], marks)]


EXPANDED = {"copa": _copa, "multirc": _multirc, "wic": _wic}


def _archive(task: str, source: Source, files: Sequence[Path], part: str) -> Iterator[Found]:
    """Read IMDB's archive, which has the reviews as aclImdb/train/pos/0_9.txt and so on."""
    with tarfile.open(files[0]) as archive:
        for number, member in enumerate(archive, 1):
            _, folder, label, *_ = [*Path(member.name).parts, "", "", ""]
            if folder == part and label in source.classes and member.isfile():
                content = archive.extractfile(member)
                assert content is not None
                yield number, Row((content.read().decode(),), label)


def _lines_of_classes(task: str, source: Source, files: Sequence[Path], part: str) -> Iterator[Found]:
    """Read the files of Rotten Tomatoes, a text a line and a file for each class."""
    for file, label in zip(files, source.classes, strict=True):
        lines = read_lines(file).rows()
        first, end = (int(fraction * len(lines) + 0.5) for fraction in BOUNDS[part])
        yield from ((number, Row((line.strip(),), label)) for number, line in lines[first:end])


def _csv(task: str, source: Source, files: Sequence[Path], part: str) -> Iterator[Found]:
    """Read Yelp's files: class and text, in quotes; a line break is written as a backslash and n."""
    frame = pl.read_csv(files[0], has_header=False, new_columns=["label", "text"], infer_schema=False)
    clean = pl.col("text").str.replace_all("\\n", " ", literal=True).str.replace_all('\\"', '"', literal=True)
    for number, (label, text) in enumerate(frame.select("label", clean).iter_rows(), 1):
        yield number, Row((text,), label)


READERS = {".tsv": _tsv, ".jsonl": _json_lines, ".gz": _archive, ".csv": _csv, ".neg": _lines_of_classes}
