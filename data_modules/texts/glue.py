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

from mtl.checks import InputError, require

from ..files import glue as tables
from ..files.glue_tasks import SOURCES, Source
from ..files.reading import quote, read_lines, regular_size, repair
from .rows import Texts

QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}  # in COPA's own words
BOUNDS = {"train": (0.0, 0.8), "dev": (0.8, 0.9)}  # parts of Rotten Tomatoes, as shares of the lines of a file


@dataclass(frozen=True)
class Row:
    """A row: its one or two texts and its label; ``marks``: begin and end of the marked word in each text."""

    texts: Sequence[str]
    label: Any
    marks: Sequence[Sequence[int]] = ()


Found = tuple[Path, int, Row]  # with the file and the number of the line


def read_part(root: Path, task: str, part: str) -> Texts:
    """Return the rows of a part of ``task``. Raises InputError, which names the file and the first bad line.

    The rows of one line, such as the choices of a question, are a group.
    """
    source, columns, ids, groups, marks = SOURCES[task], [], [], [], []
    files = [root / path for path in source.paths(part)]
    if files[0].suffix == ".tsv":
        return Texts.of(*tables.read(files[0], task))
    for file, line, row in READERS[Path(source.files[0]).suffix](task, source, files, part):
        label = str(row.label).lower()  # true and false are truth values in JSON
        if label not in source.classes or not all(isinstance(text, str) for text in row.texts):
            raise _damaged(file, line, source, label)
        columns.append(row.texts)
        ids.append(source.classes.index(label))
        groups.append(line)
        marks.append(row.marks)
    require(bool(ids), f"{files[0]} has no rows of {part}. {repair(files[0])}")
    labels = torch.tensor(ids, dtype=torch.int64 if source.kind == "multiclass" else torch.float32)
    texts = [list(column) for column in zip(*columns, strict=True)]
    grouped = torch.tensor(groups) if len(set(groups)) < len(groups) and task in EXPANDED else None
    return Texts.of(texts, labels, grouped, torch.tensor(marks) if source.marked else None)


def _damaged(file: Path, line: int, source: Source, found: str) -> InputError:
    wanted = f"the texts {', '.join(source.texts)}, and {source.label} one of {', '.join(source.classes)}"
    return InputError(f"{file}, line {line}: {quote(found)} is damaged. Expected {wanted}. {repair(file)}")


def _json_lines(task: str, source: Source, files: Sequence[Path], part: str) -> Iterator[Found]:
    """Read SuperGLUE's files: an object of JSON a line."""
    for number, line in read_lines(files[0], "utf-8-sig").rows():
        try:
            entry = json.loads(line)
            plain = [] if task in EXPANDED else [Row([entry[name] for name in source.texts], entry["label"])]
            rows = EXPANDED[task](entry) if task in EXPANDED else plain
        except (ValueError, LookupError, TypeError, AttributeError):
            raise _damaged(files[0], number, source, line) from None
        yield from ((files[0], number, row) for row in rows)


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
    regular_size(files[0])
    try:
        with tarfile.open(files[0]) as archive:
            for number, member in enumerate(archive, 1):
                _, own, label, *_ = [*Path(member.name).parts, "", "", ""]
                if own == part and label in source.classes and member.isfile():
                    content = archive.extractfile(member)
                    assert content is not None
                    yield files[0], number, Row((content.read().decode(),), label)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise InputError(f"{files[0]} is damaged ({error}). {repair(files[0])}") from None


def _lines_of_classes(task: str, source: Source, files: Sequence[Path], part: str) -> Iterator[Found]:
    """Read the files of Rotten Tomatoes, a text a line and a file for each class."""
    for file, label in zip(files, source.classes, strict=True):
        lines = read_lines(file).rows()
        first, end = (int(share * len(lines) + 0.5) for share in BOUNDS[part])
        yield from ((file, number, Row((line.strip(),), label)) for number, line in lines[first:end])


def _csv(task: str, source: Source, files: Sequence[Path], part: str) -> Iterator[Found]:
    """Read Yelp's files: class and text, in quotes; a line break is written as a backslash and n."""
    regular_size(files[0])
    try:
        frame = pl.read_csv(files[0], has_header=False, new_columns=["label", "text"], infer_schema=False)
    except pl.exceptions.PolarsError as error:
        raise InputError(f"{files[0]} is damaged ({error}). {repair(files[0])}") from None
    clean = pl.col("text").str.replace_all("\\n", " ", literal=True).str.replace_all('\\"', '"', literal=True)
    for number, (label, text) in enumerate(frame.select("label", clean).iter_rows(), 1):
        yield files[0], number, Row((text,), label)


READERS = {".jsonl": _json_lines, ".gz": _archive, ".csv": _csv, ".neg": _lines_of_classes}
