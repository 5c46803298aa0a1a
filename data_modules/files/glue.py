"""Fetch the tasks of GLUE if they are missing, and read their files of tab-separated cells."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import torch
from torch import Tensor

from mtl.checks import require
from mtl.writing import write_text

from .cache import locked
from .download import fetch, place, unpacked
from .glue_tasks import SITE, SOURCES, Source
from .reading import parsing, read_lines

UTF8 = "utf-8-sig"
MAX_BYTES = 4_000_000_000  # largest unpacked archive; MNLI's, the largest official one, has about 1.3 GB
MRPC_TRAIN = ("msr_paraphrase_train.txt", "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89")
MRPC_DEV_IDS = ("mrpc_dev_ids.tsv", "971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7")


def prepare(root: Path, task: str, download: bool, base_url: str | None = None) -> None:
    """Put the files of ``task`` into its folder in ``root``; do nothing if they are there. Raises InputError."""
    source, addresses, missing = SOURCES[task], _addresses(task), _missing(root, SOURCES[task])
    if not missing:
        return
    by_hand = f"{missing[0]} is missing: get {source.archive} from {source.site}, and unpack it in {root}"
    require(bool(addresses), by_hand)
    for site, name, sha256 in addresses:
        otherwise = "" if missing[0] == root / name else f", or put {' and '.join(map(str, missing))} there"
        url = f"{site.replace(SITE, base_url or SITE)}/{name}"
        fetch(url, root / name, sha256, download, missing[0], otherwise, MAX_BYTES)
    with locked(root / ".fetch.lock", f"unpacking GLUE in {root}"):
        if _missing(root, source):
            _split_mrpc(root) if task == "mrpc" else _unpack(root, source)


def _missing(root: Path, source: Source) -> list[Path]:
    return [root / path for path in source.paths() if not (root / path).exists()]


def _addresses(task: str) -> list[tuple[str, str, str]]:
    """Return the site, the name and the sha256 of each official file of ``task``; none if no sha256 is known."""
    if task == "mrpc":  # GLUE may not redistribute its rows
        return [(f"{SITE}/senteval/senteval_data", *MRPC_TRAIN), (SOURCES[task].site, *MRPC_DEV_IDS)]
    source = SOURCES[task]
    return [(source.site, source.archive, source.sha256)] if source.sha256 else []


def _unpack(root: Path, source: Source) -> None:
    """Unpack the archive, and move its files into place where they are missing."""
    with unpacked(root / source.archive, MAX_BYTES) as content:
        for path in source.paths():
            # Only at the same depth: GLUE's archives also have the original files that its own were made from
            found = [
                file for file in sorted(content.glob(str(Path("[!_.]*", *Path(path).parts[1:])))) if file.is_file()
            ]
            require(bool(found), f"{root / source.archive} contains no {Path(path).name}: delete it and start again")
            place(found[0], root / path)


def _split_mrpc(root: Path) -> None:
    """Write train.tsv and dev.tsv from Microsoft's training rows and GLUE's list of the development pairs."""
    rows, dev_ids = root / MRPC_TRAIN[0], root / MRPC_DEV_IDS[0]
    header, *lines = read_lines(rows, UTF8)["line"]
    pairs = {tuple(line.split("\t")[:2]) for line in read_lines(dev_ids, UTF8)["line"]}
    parts: dict[str, list[str]] = {"train": [header], "dev": [header]}
    for line in lines:
        parts["dev" if tuple(line.split("\t")[1:3]) in pairs else "train"].append(line)
    folder = root / SOURCES["mrpc"].folder
    for stem, content in parts.items():
        if not (folder / f"{stem}.tsv").exists():
            write_text(folder / f"{stem}.tsv", "\n".join(content) + "\n")


def read(file: Path, task: str) -> tuple[list[list[str]], Tensor]:
    """Return the one or two columns of texts of a file, and its labels ``[N]`` (int64 classes, or float32).

    Tabs separate cells, and quotes mean nothing. Raises InputError.
    """
    source = SOURCES[task]
    with parsing(file):
        lines = read_lines(file, UTF8)["line"]
        header = list(source.columns) or lines[0].split("\t")
        places = [header.index(name) for name in (*source.texts, source.label)]
        cells = lines[not source.columns :].str.split("\t").list
        rows = pl.DataFrame([cells.get(at, null_on_oob=source.skip_short).alias(f"{at}") for at in places])
        *texts, labels = rows.drop_nulls().get_columns()
        labels = labels.str.strip_chars()
        if source.classes:
            labels = labels.replace_strict(source.classes, range(len(source.classes)))
        kind = torch.int64 if source.kind == "multiclass" else torch.float32
        return [column.to_list() for column in texts], torch.tensor(labels.cast(pl.Float64).to_list(), dtype=kind)
