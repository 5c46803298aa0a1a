"""Omniglot: each alphabet is a task (Meyerson & Miikkulainen 2018; Maziarz et al. 2019, section 6.2)."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from mtl.checks import InputError
from mtl.options import Address, FilePath, Some, TaskName, validated
from mtl.types import Batch, DataSpec, Image, TaskSpec

from .files import omniglot as omniglot_files
from .files.images import pixel_scale
from .splits import SPLITS, proportional
from .task_batches import TasksDataModule

logger = logging.getLogger(__name__)

# The first 20 alphabets in the order that both papers use
NAMES = """
    Gujarati Sylheti Arcadian Tibetan Old_Church_Slavonic_(Cyrillic) Angelic Malay_(Jawi_-_Arabic) Sanskrit Cyrillic
    Anglo-Saxon_Futhorc Syriac_(Estrangelo) Ge_ez Japanese_(katakana) Keble Manipuri Alphabet_of_the_Magi Gurmukhi
    Korean Early_Aramaic Atemayar_Qelisayer
"""
ALPHABETS = tuple(NAMES.split())
SHARES = (10, 4, 6)  # train, val and test drawings of the 20 of each character


class OmniglotDataModule(TasksDataModule):
    """Serve alphabets as tasks, named like their folders: which character of the alphabet does a drawing show?

    ``alphabets`` may be from both parts of Omniglot; None takes the 20 of the papers. The 20 drawings of each character
    are split at random into 10 / 4 / 6; the split depends on ``seed`` and the alphabet only. Input: ``image``
    ``[B, 1, side, side]`` (uint8), bright strokes on 0. The drawings have 105 x 105 pixels; for a smaller ``side`` they
    are averaged over areas.
    """

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        alphabets: Some[TaskName] | None = None,
        side: Annotated[int, Field(ge=1, le=omniglot_files.SIDE)] = omniglot_files.SIDE,  # pixels
        download: bool = True,
        base_url: Address | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.names = list(ALPHABETS) if alphabets is None else alphabets
        self.folder, self.cache = data_dir / "omniglot-py", data_dir / "cache"
        self.side, self.download, self.base_url = side, download, base_url

    def prepare_data(self) -> None:
        omniglot_files.prepare(self.folder, self.names, self.download, self.base_url)
        for name in self.names:
            self._read(name)

    def _read(self, name: str) -> tuple[Tensor, Tensor]:
        folder = omniglot_files.alphabets(self.folder).get(name)
        if folder is None:
            raise InputError(f"{self.folder} has no alphabet {name}; prepare_data() fetches it")
        return omniglot_files.read(folder, self.side, self.cache)

    def load_tasks(self) -> tuple[DataSpec, dict[str, dict[str, Batch]]]:
        specs, odd = [], []
        tasks: dict[str, dict[str, Batch]] = {split: {} for split in SPLITS}
        for name in self.names:
            image, character = self._read(name)
            counts = character.bincount()
            specs.append(TaskSpec(name, "multiclass", len(counts), metrics=("accuracy",)))
            odd += [f"{name} has {count}" for count in counts.tolist() if count != sum(SHARES)]
            rows = Batch({"image": image}, {name: character})
            for split, index in zip(SPLITS, resplit(name, character, self.generator(name)), strict=True):
                tasks[split][name] = rows.select(index)
        if odd:
            text = "%d characters do not have %d drawings (%s of one); split in the same proportions"
            logger.warning(text, len(odd), sum(SHARES), odd[0])
        mean, std = pixel_scale(torch.cat([rows.inputs["image"] for rows in tasks["train"].values()]))
        return DataSpec({"image": Image(1, self.side, self.side, mean, std)}, specs), tasks


def resplit(name: str, character: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Split the rows of each character at random in the proportions ``SHARES``; return train, val and test indices.

    ``character [N]`` is the character of each row, ``name`` the alphabet that messages name. Raises InputError if a
    character has too few drawings.
    """
    parts: list[list[Tensor]] = [[], [], []]
    for number in range(int(character.max()) + 1):
        rows = (character == number).nonzero()[:, 0]
        sizes = proportional(len(rows), SHARES, f"{name}, drawings of a character")
        order = rows[torch.randperm(len(rows), generator=generator)]
        for part, chosen in zip(parts, order.split(sizes), strict=True):
            part.append(chosen)
    return [torch.cat(part) for part in parts]
