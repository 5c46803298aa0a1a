"""Read CelebA's lists in their official layout; fetch lists and images if they are missing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import CelebA
from torchvision.datasets.utils import download_file_from_google_drive

from mtl.checks import InputError, require

from .archive import extract_zip
from .cache import locked
from .download import clean
from .reading import read_bytes

IMAGES, ARCHIVE = "img_align_celeba", "img_align_celeba.zip"
ATTRIBUTES_FILE, PARTITION_FILE = "list_attr_celeba.txt", "list_eval_partition.txt"
MAX_BYTES = 4_000_000_000  # of all images; the official ones have 1.4 GB
SITE = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
NAMES = """
    5_o_Clock_Shadow Arched_Eyebrows Attractive Bags_Under_Eyes Bald Bangs Big_Lips Big_Nose Black_Hair Blond_Hair
    Blurry Brown_Hair Bushy_Eyebrows Chubby Double_Chin Eyeglasses Goatee Gray_Hair Heavy_Makeup High_Cheekbones Male
    Mouth_Slightly_Open Mustache Narrow_Eyes No_Beard Oval_Face Pale_Skin Pointy_Nose Receding_Hairline Rosy_Cheeks
    Sideburns Smiling Straight_Hair Wavy_Hair Wearing_Earrings Wearing_Hat Wearing_Lipstick Wearing_Necklace
    Wearing_Necktie Young
"""
ATTRIBUTES = tuple(NAMES.split())


def prepare(folder: Path, download: bool) -> None:
    """Put the lists and the unpacked images into ``folder``; do nothing if they are there. Raises InputError."""
    if _complete(folder):
        return
    with locked(folder / ".fetch.lock", f"fetching CelebA into {folder}"):
        for name in (ATTRIBUTES_FILE, PARTITION_FILE, ARCHIVE):
            there = (folder / name).exists() or (name == ARCHIVE and (folder / IMAGES).is_dir())
            if not there:
                require(download, f"{folder / name} is missing and data.download=false: {_by_hand(folder)}")
                _fetch(folder, name)
        if not (folder / IMAGES).is_dir():
            extract_zip(folder / ARCHIVE, folder, MAX_BYTES)
        require(_complete(folder), f"{folder / ARCHIVE} contains no folder {IMAGES}: {_by_hand(folder)}")


def _complete(folder: Path) -> bool:
    return (folder / IMAGES).is_dir() and all((folder / name).exists() for name in (ATTRIBUTES_FILE, PARTITION_FILE))


def _fetch(folder: Path, name: str) -> None:
    """Fetch the official file ``name`` from Google Drive and check its md5; keep nothing if that fails."""
    try:
        import_module("gdown")  # torchvision uses it
    except ImportError:
        message = f"cannot download {name} from Google Drive without gdown: pip install gdown, or {_by_hand(folder)}"
        raise InputError(message) from None
    [(identity, md5)] = [(identity, md5) for identity, md5, file in CelebA.file_list if file == name]
    part = folder / f"{name}.part"
    try:
        download_file_from_google_drive(identity, folder, part.name, md5)
        os.replace(part, folder / name)
    except Exception as error:  # no network, daily quota of the file exceeded, wrong checksum
        reason = clean(str(error)).rstrip(".")
        raise InputError(f"cannot download {name} from Google Drive: {reason}; {_by_hand(folder)}") from error
    finally:
        part.unlink(missing_ok=True)


def _by_hand(folder: Path) -> str:
    return (
        f"get {ARCHIVE}, {ATTRIBUTES_FILE} and {PARTITION_FILE} from {SITE} (Align&Cropped Images, Anno, Eval) and put "
        f"them into {folder}; the images may also be unpacked already, in {folder / IMAGES}"
    )


def source_key(folder: Path) -> list[int]:
    """Return the number of images, and size and time of each list: the cache depends on them. Raises InputError."""
    try:
        stats = [(folder / name).stat() for name in (ATTRIBUTES_FILE, PARTITION_FILE)]
        images = sum(entry.name.endswith(".jpg") for entry in os.scandir(folder / IMAGES))
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}; prepare_data() fetches it") from error
    return [images, *(number for stat in stats for number in (stat.st_size, stat.st_mtime_ns))]


def read_partition(file: Path) -> dict[str, int]:
    """Return the split of each image: 0 train, 1 val, 2 test. Raises InputError, which names the damaged line."""
    parts: dict[str, int] = {}
    for number, line in enumerate(_lines(file), start=1):
        row = re.fullmatch(r"([\w-]+\.jpg)\s+([012])\s*", line, re.ASCII)
        if row is None or row[1] in parts:
            raise _damaged(file, number, line, "NAME.jpg and 0, 1 or 2 (train, val, test), each image once")
        parts[row[1]] = int(row[2])
    return parts


def read_attributes(file: Path, names: Iterable[str]) -> Tensor:
    """Return the attributes ``[N, 40]`` of the images ``names``, in their order: uint8, 1 if an image has it, else 0.

    Raises InputError, which names the damaged line.
    """
    lines = [*_lines(file), "", ""]
    if not re.fullmatch(r"\d{1,9}\s*", lines[0], re.ASCII):
        raise _damaged(file, 1, lines[0], "the number of images")
    if tuple(lines[1].split()) != ATTRIBUTES:
        raise _damaged(file, 2, lines[1], f"the {len(ATTRIBUTES)} official attribute names")
    rows, marks = lines[2:-2], {"-1": 0, "1": 1}
    names = list(names)
    require(
        int(lines[0]) == len(rows) == len(names),
        f"{file} states {lines[0].strip()} images in its first line and lists {len(rows)}, {PARTITION_FILE} lists "
        f"{len(names)}: get the official files again",
    )
    values = []
    for number, (line, wanted) in enumerate(zip(rows, names, strict=True), start=3):
        name, *row = line.split() or [""]
        if name != wanted or len(row) != len(ATTRIBUTES) or not marks.keys() >= set(row):
            raise _damaged(file, number, line, f"{wanted}, as in {PARTITION_FILE}, and {len(ATTRIBUTES)} times 1 or -1")
        values.append([marks[mark] for mark in row])
    return torch.tensor(values, dtype=torch.uint8)


def _lines(file: Path) -> list[str]:
    text = read_bytes(file).decode("ascii", errors="replace").rstrip()
    require(bool(text), f"{file} is empty: get the official file again")
    return text.split("\n")


def _damaged(file: Path, number: int, line: str, expected: str) -> InputError:
    shown = repr(line if len(line) <= 60 else line[:60] + "...")
    return InputError(f"{file}, line {number}: {shown} is damaged. Expected {expected}; get the official file again")
