"""Fetch the tasks of GLUE if they are missing."""

from __future__ import annotations

from pathlib import Path

from mtl.checks import require
from mtl.writing import write_text

from .cache import locked
from .download import fetch, place, unpacked
from .glue_tasks import SITE, SOURCES, Source
from .reading import read_lines

UTF8 = "utf-8-sig"
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
        fetch(f"{site.replace(SITE, base_url or SITE)}/{name}", root / name, sha256, download)
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
    with unpacked(root / source.archive) as content:
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
