"""Write files in Omniglot's layout: black strokes on white, whose lengths encode which drawing it is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from mtl.data_modules.omniglot import SIDE
from PIL import Image

from tests.file_server import zipped

DRAWINGS = 20


def drawing(character: int, drawer: int, alphabet: int = 0) -> np.ndarray:
    """Return one drawing ``[105, 105]``, 0 on 255; three strokes encode the three numbers, each below 60."""
    pixels = np.full((SIDE, SIDE), 255, np.uint8)
    for column, number in enumerate((alphabet, character, drawer)):
        pixels[15 * column : 15 * column + 10, 20 : 21 + number] = 0
    return pixels


def number(strokes: np.ndarray) -> tuple[int, int, int]:
    """Return the alphabet, character and drawer that bright ``strokes [105, 105]`` encode."""
    alphabet, character, drawer = ((strokes[15 * column] > 0).sum() - 1 for column in range(3))
    return int(alphabet), int(character), int(drawer)


def write_omniglot(folder: Path, alphabets: Mapping[str, int], first: int = 0) -> None:
    """Write ``<alphabet>/characterNN/NNNN_MM.png`` (1 bit per pixel); ``alphabets`` maps names to character counts."""
    running = 0
    for index, (name, characters) in enumerate(alphabets.items(), start=first):
        for character in range(characters):
            path = folder / name / f"character{character + 1:02d}"
            path.mkdir(parents=True, exist_ok=True)
            running += 1
            for drawer in range(DRAWINGS):
                image = Image.fromarray(drawing(character, drawer, index)).convert("1")
                image.save(path / f"{running:04d}_{drawer + 1:02d}.png")


def write_archive(folder: Path, part: str, alphabets: Mapping[str, int], first: int = 0) -> str:
    """Write ``part``.zip with the layout of the official archive and return its md5 sum."""
    write_omniglot(folder / "unpacked" / part, alphabets, first=first)
    return hashlib.md5(zipped(folder / f"{part}.zip", folder / "unpacked", part).read_bytes()).hexdigest()
