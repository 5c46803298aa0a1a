"""Read GLUE's tasks (Wang et al. 2019) in their official layout; fetch them if they are missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import polars as pl
import torch
from torch import Tensor

from mtl.checks import require
from mtl.types import TaskKind
from mtl.writing import write_text

from .cache import locked
from .download import fetch, place, unpacked
from .reading import checked, read_lines, repair

UTF8 = "utf-8-sig"
SITE = "https://dl.fbaipublicfiles.com"
MAX_BYTES = 4_000_000_000  # largest unpacked archive; MNLI's, the largest official one, has about 1.3 GB
SENTENCES = ("sentence1", "sentence2")
LOWEST, HIGHEST = 0.0, 5.0  # similarity of two sentences in STS-B
MRPC_TRAIN = ("msr_paraphrase_train.txt", "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89")
MRPC_DEV_IDS = ("mrpc_dev_ids.tsv", "971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7")


@dataclass(frozen=True)
class Source:
    """A task of GLUE: its folder, its archive with sha256, and the columns of its files.

    ``classes``: the labels as written in the files, in the order of their ids; empty for a regression. ``rows``: the
    official number of rows of each file. ``header=False``: the files have no line with the names of ``columns``.
    ``skip_short``: lines with too few cells are left out, as is usual for QQP's older files.
    """

    folder: str
    archive: str
    sha256: str
    texts: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    rows: dict[str, int] = field(repr=False)
    columns: tuple[str, ...] = ()
    skip_short: bool = False

    @property
    def kind(self) -> TaskKind:
        return "multiclass" if len(self.classes) > 2 else "binary" if self.classes else "regression"

    @property
    def dev(self) -> list[str]:
        """The stems of the files of development rows."""
        return [stem for stem in self.rows if stem != "train"]


Task = Literal["rte", "mrpc", "stsb", "cola", "sst2", "wnli", "qqp", "qnli", "mnli"]
SOURCES: dict[Task, Source] = {
    "rte": Source(
        "RTE",
        "RTE.zip",
        "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee",
        SENTENCES,
        "label",
        ("not_entailment", "entailment"),
        {"train": 2490, "dev": 277},
    ),
    "mrpc": Source(
        "MRPC",
        "",
        "",
        ("#1 String", "#2 String"),
        "Quality",
        ("0", "1"),
        {"train": 3668, "dev": 408},
    ),
    "stsb": Source(
        "STS-B",
        "STS-B.zip",
        "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85",
        SENTENCES,
        "score",
        (),
        {"train": 5749, "dev": 1500},
    ),
    "cola": Source(
        "CoLA",
        "CoLA.zip",
        "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff",
        ("sentence",),
        "label",
        ("0", "1"),
        {"train": 8551, "dev": 1043},
        columns=("source", "label", "mark", "sentence"),
    ),
    "sst2": Source(
        "SST-2",
        "SST-2.zip",
        "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa",
        ("sentence",),
        "label",
        ("0", "1"),
        {"train": 67349, "dev": 872},
    ),
    "wnli": Source(
        "WNLI",
        "WNLI.zip",
        "ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46",
        SENTENCES,
        "label",
        ("0", "1"),
        {"train": 635, "dev": 71},
    ),
    "qqp": Source(
        "QQP",
        "QQP-clean.zip",
        "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0",
        ("question1", "question2"),
        "is_duplicate",
        ("0", "1"),
        {"train": 363846, "dev": 40430},
        skip_short=True,
    ),
    "qnli": Source(
        "QNLI",
        "QNLIv2.zip",
        "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5",
        ("question", "sentence"),
        "label",
        ("not_entailment", "entailment"),
        {"train": 104743, "dev": 5463},
    ),
    "mnli": Source(
        "MNLI",
        "MNLI.zip",
        "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633",
        SENTENCES,
        "gold_label",
        ("entailment", "neutral", "contradiction"),
        {"train": 392702, "dev_matched": 9815, "dev_mismatched": 9832},
    ),
}


def prepare(root: Path, task: str, download: bool, base_url: str | None = None) -> None:
    """Put the files of ``task`` into its folder in ``root``; do nothing if they are there. Raises InputError.

    If the folder has some of the files, nothing is fetched, since the fetched files might not belong to them.
    """
    source = SOURCES[task]
    if not _missing(root, source):
        return
    with locked(root / ".fetch.lock", f"fetching GLUE into {root}"):
        missing = [root / source.folder / f"{stem}.tsv" for stem in _missing(root, source)]
        if missing and not all((root / name).exists() for _, name, _ in _addresses(task)):
            some = len(missing) < len(source.rows)
            files = " and ".join(map(str, missing))
            require(not some, f"task {task}: only {files} is missing: add it, or delete the folder to have it fetched")
            for site, name, sha256 in _addresses(task):
                otherwise = f", or put {files} there"
                fetch(
                    f"{base_url or SITE}/{site}/{name}", root / name, sha256, download, missing[0], otherwise, MAX_BYTES
                )
        if missing:
            _split_mrpc(root) if task == "mrpc" else _unpack(root, source)


def _missing(root: Path, source: Source) -> list[str]:
    return [stem for stem in source.rows if not (root / source.folder / f"{stem}.tsv").exists()]


def _addresses(task: str) -> list[tuple[str, str, str]]:
    """Return the path on the site, the name and the sha256 of each official file of ``task``."""
    if task == "mrpc":  # GLUE may not redistribute its rows
        return [("senteval/senteval_data", *MRPC_TRAIN), ("glue/data", *MRPC_DEV_IDS)]
    return [("glue/data", SOURCES[task].archive, SOURCES[task].sha256)]


def _unpack(root: Path, source: Source) -> None:
    """Unpack the archive, and move its files into place where they are missing."""
    with unpacked(root / source.archive, MAX_BYTES) as content:
        for stem in source.rows:
            # Not in subfolders: the archive also has the original files that GLUE's were made from
            found = [path for path in sorted(content.glob(f"[!_.]*/{stem}.tsv")) if path.is_file()]
            require(bool(found), f"{root / source.archive} contains no {stem}.tsv: delete it and start again")
            place(found[0], root / source.folder / found[0].name)


def _split_mrpc(root: Path) -> None:
    """Write train.tsv and dev.tsv from Microsoft's training rows and GLUE's list of the development pairs."""
    rows, dev_ids = root / MRPC_TRAIN[0], root / MRPC_DEV_IDS[0]
    header, *lines = read_lines(rows, UTF8)["line"]
    pairs = {tuple(line.split("\t")[:2]) for line in read_lines(dev_ids, UTF8)["line"]}
    parts: dict[str, list[str]] = {"train": [header], "dev": [header]}
    for line in lines:
        parts["dev" if tuple(line.split("\t")[1:3]) in pairs else "train"].append(line)
    require(len(parts["dev"]) > 1, f"{rows} has none of the pairs in {dev_ids}: delete both and start again")
    folder = root / SOURCES["mrpc"].folder
    for stem, content in parts.items():
        if not (folder / f"{stem}.tsv").exists():
            write_text(folder / f"{stem}.tsv", "\n".join(content) + "\n")


def read(file: Path, task: str) -> tuple[list[list[str]], Tensor]:
    """Return the one or two columns of texts of a file, and its labels ``[N]`` (int64 classes, or float32).

    Tabs separate cells, and quotes mean nothing. Raises InputError, which names the first bad line.
    """
    source, lines = SOURCES[task], read_lines(file, UTF8)
    header = list(source.columns) or lines["line"][0].split("\t")
    wanted = [*source.texts, source.label]
    missing = [name for name in wanted if name not in header]
    require(not missing, f"{file}, line 1: task {task} needs the columns {', '.join(wanted)}, but has no {missing}")
    places = [header.index(name) for name in wanted]
    cells = pl.col("line").str.split("\t").list
    rows = lines[not source.columns :].with_columns(cells.get(at, null_on_oob=True).alias(f"{at}") for at in places)
    label = pl.col(f"{places[-1]}").str.strip_chars()
    if source.skip_short:  # except the last one, which would mean that the file is cut off
        rows = rows.filter((cells.len() > max(places)) | (pl.col("number") == lines["number"][-1]))
    if source.classes:
        labels, accepted = (
            label.replace_strict(source.classes, range(len(source.classes)), default=None),
            source.classes,
        )
    else:
        labels, accepted = label.cast(pl.Float64, strict=False), (f"numbers from {LOWEST:g} to {HIGHEST:g}",)
    rows = rows.with_columns(labels.alias("label"))
    good = (cells.len() > max(places)) & pl.col("label").is_between(LOWEST, HIGHEST)
    expected = f"{1 + max(places)} cells separated by tabs, {source.label} one of {', '.join(accepted)}"
    rows = checked(rows, good, file, expected)
    require(len(rows) > 0, f"{file} has no rows. {repair(file)}")
    values = torch.tensor(rows["label"].to_list(), dtype=torch.int64 if source.kind == "multiclass" else torch.float32)
    return [rows[f"{at}"].to_list() for at in places[:-1]], values
