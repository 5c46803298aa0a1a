"""Omniglot: each alphabet is a task (Meyerson & Miikkulainen 2018; Maziarz et al. 2019, section 6.2)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torchvision.datasets import Omniglot

from mtl.checks import require
from mtl.options import Address, FilePath, NonEmpty, TaskName, validated
from mtl.types import Batch, DataSpec, Image, TaskSpec

from .files.cache import cached
from .files.download import fetch_archive
from .files.identity import stamp
from .files.images import decode_image, pixel_scale
from .splits import SPLITS, random_split, require_rows
from .task_batches import TasksDataModule

CACHE_VERSION = 1  # of the cache; increase it when the content changes
SIDE = 105
ALPHABET_SETS = ("images_background", "images_evaluation")
# The first 20 alphabets in the order that both papers use
ALPHABET_NAMES = """
    Gujarati Sylheti Arcadian Tibetan Old_Church_Slavonic_(Cyrillic) Angelic Malay_(Jawi_-_Arabic) Sanskrit Cyrillic
    Anglo-Saxon_Futhorc Syriac_(Estrangelo) Ge_ez Japanese_(katakana) Keble Manipuri Alphabet_of_the_Magi Gurmukhi
    Korean Early_Aramaic Atemayar_Qelisayer
"""
ALPHABETS = tuple(ALPHABET_NAMES.split())
DRAWINGS_PER_SPLIT = {"train": 10, "val": 4, "test": 6}  # of the 20 drawings of each character


class OmniglotDataModule(TasksDataModule):
    """Serve alphabets as tasks, named like their folders: which character of the alphabet does a drawing show?

    ``alphabets`` may be from both parts of Omniglot; None takes the 20 of the papers. The 20 drawings of each character
    are split at random into 10 / 4 / 6; the split depends on ``seed`` and the alphabet only. Input: ``image``
    ``[B, 1, side, side]`` (uint8), bright strokes on 0. The drawings have 105 x 105 pixels; for a smaller ``side`` they
    are averaged over areas.
    """

    random_split = True

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        alphabets: NonEmpty[TaskName] | None = None,
        side: Annotated[int, Field(ge=1, le=SIDE)] = SIDE,  # pixels
        download: bool = True,
        base_url: Address | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.names = list(ALPHABETS) if alphabets is None else alphabets
        self.folder, self.cache = data_dir / "omniglot-py", data_dir / "cache"
        self.side, self.download, self.base_url = side, download, base_url

    def prepare_data(self) -> None:
        for part in sorted(ALPHABET_SETS, key=lambda part: not (self.folder / f"{part}.zip").exists()):
            archive, alphabets = self.folder / f"{part}.zip", find_alphabets(self.folder)
            if not alphabets.keys() >= {*self.names} and (self.download or archive.exists() or not alphabets):
                site, md5 = self.base_url or Omniglot.download_url_prefix, f"md5:{Omniglot.zips_md5[part]}"
                fetch_archive(self.folder / part, archive, site, md5, self.download)
        for name in self.names:
            self._read(name)

    def _read(self, name: str) -> tuple[Tensor, Tensor]:
        """Return drawings ``[N, 1, side, side]`` (uint8) and characters ``[N]`` (int64), from the cache if possible."""
        alphabets = find_alphabets(self.folder)
        require(name in alphabets, f"data.alphabets: {self.folder} has no {name}; choose among {', '.join(alphabets)}")
        files = list_drawings(alphabets[name])
        named = [f"{file.parent.name}/{file.name}" for file in files]
        key: list[str | int] = [CACHE_VERSION, self.side, *named, *stamp(*files)]
        content = cached(self.cache / f"omniglot-{name}.pt", lambda: parse(alphabets[name], self.side), key)
        return content["image"], content["character"]

    def load_tasks(self) -> tuple[DataSpec, dict[str, dict[str, Batch]]]:
        specs = []
        tasks: dict[str, dict[str, Batch]] = {split: {} for split in SPLITS}
        for name in self.names:
            image, character = self._read(name)
            specs.append(TaskSpec(name, "multiclass", int(character.max()) + 1, metrics=("accuracy",)))
            rows = Batch({"image": image}, {name: character})
            for split, index in split_drawings(name, character, self.generator(name)).items():
                tasks[split][name] = rows.select(index)
        mean, std = pixel_scale(torch.cat([rows.inputs["image"] for rows in tasks["train"].values()]))
        return DataSpec({"image": Image(1, self.side, self.side, mean, std)}, specs), tasks


def split_drawings(name: str, character: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the indices of train, val and test: DRAWINGS_PER_SPLIT of the drawings of each character, at random.

    ``character [N]`` is the character of each row, ``name`` the alphabet that messages name. Raises InputError if a
    character has too few drawings.
    """
    parts: dict[str, list[Tensor]] = {split: [] for split in DRAWINGS_PER_SPLIT}
    for number in range(int(character.max()) + 1):
        rows = (character == number).nonzero()[:, 0]
        drawn = random_split(len(rows), DRAWINGS_PER_SPLIT, generator)
        require_rows(drawn, f"{name}: the {len(rows)} drawings of a character leave none for")
        for split, index in drawn.items():
            parts[split].append(rows[index])
    return {split: torch.cat(part) for split, part in parts.items()}


def find_alphabets(folder: Path) -> dict[str, Path]:
    """Return the name and folder of each alphabet in ``folder``, sorted by name."""
    folders = [path for part in ALPHABET_SETS for path in (folder / part).glob("[!.]*") if path.is_dir()]
    return {path.name: path for path in sorted(folders, key=lambda path: path.name)}


def parse(alphabet: Path, side: int) -> dict[str, Tensor]:
    """Return ``image [N, 1, side, side]`` (uint8) and ``character [N]`` (int64), ordered by file name.

    The files show black strokes on white. The result is inverted, 255 - value: bright strokes on 0. Raises InputError.
    """
    names = sorted(path.name for path in alphabet.glob("character*"))
    require(len(names) >= 2, f"{alphabet} has {len(names)} characters (folders character01, ...): it needs at least 2")
    files = list_drawings(alphabet)
    character = torch.tensor([names.index(file.parent.name) for file in files], dtype=torch.int64)
    again = f"Delete {alphabet} and start again"
    image = torch.stack([255 - decode_image(file, (SIDE, SIDE), "L", again) for file in files])
    return {"image": reduce_images(image, side)[:, None], "character": character}


def list_drawings(alphabet: Path) -> list[Path]:
    return sorted(alphabet.glob("character*/[!.]*.png"))


def reduce_images(images: Tensor, side: int) -> Tensor:
    """Resize ``images [N, 105, 105]`` to ``[N, side, side]`` (uint8): a new pixel is the mean of the area it covers."""
    if side == SIDE:
        return images
    # weight [side, 105]: how much of new pixel i lies on old pixel j; rows sum to 1
    edges = torch.arange(side + 1, dtype=torch.float64) * SIDE / side
    begin, end = edges[:-1, None], edges[1:, None]
    pixel = torch.arange(SIDE, dtype=torch.float64)
    overlap = (torch.minimum(end, pixel + 1) - torch.maximum(begin, pixel)).clamp(min=0)
    weight = (overlap * side / SIDE).float()
    return (weight @ images.float() @ weight.T).round().to(torch.uint8)
