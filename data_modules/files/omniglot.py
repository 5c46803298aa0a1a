"""Read Omniglot's drawings (Lake et al. 2015) in their official layout; fetch them if they are missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import Omniglot

from mtl.checks import require

from .cache import cached, versions
from .download import obtain
from .images import decode

FORMAT = 1  # of the cache; increase it when the content changes
SIDE = 105
PARTS = ("images_background", "images_evaluation")


def prepare(folder: Path, wanted: Sequence[str], download: bool, base_url: str | None = None) -> None:
    """Put the alphabets ``wanted`` into ``folder``; do nothing if they are there. Raises InputError.

    Missing alphabets are looked up in one archive after the other, beginning with archives that are in ``folder``.
    """
    for part in sorted(PARTS, key=lambda part: not (folder / f"{part}.zip").exists()):
        archive, there = folder / f"{part}.zip", alphabets(folder)
        if _missing(folder, wanted) and (download or archive.exists() or not there):
            url = f"{(base_url or Omniglot.download_url_prefix).rstrip('/')}/{archive.name}"
            obtain(folder / part, archive, url, f"md5:{Omniglot.zips_md5[part]}", download)
    missing = ", ".join(_missing(folder, wanted))
    which = (
        f"choose among {', '.join(alphabets(folder))}, or unpack the archives of {Omniglot.download_url_prefix} there"
    )
    require(not missing, f"data.alphabets: {folder} has no {missing}; {which}")


def alphabets(folder: Path) -> dict[str, Path]:
    """Return the name and folder of each alphabet in ``folder``, sorted by name."""
    found = [path for part in PARTS for path in (folder / part).glob("[!.]*") if path.is_dir()]
    return {path.name: path for path in sorted(found, key=lambda path: path.name)}


def _missing(folder: Path, wanted: Iterable[str]) -> list[str]:
    there = alphabets(folder)
    return [name for name in wanted if name not in there]


def read(alphabet: Path, side: int, cache: Path) -> tuple[Tensor, Tensor]:
    """Return drawings ``[N, 1, side, side]`` (uint8) and characters ``[N]`` (int64) of the folder ``alphabet``.

    The result is kept in the folder ``cache`` and used until a file changes. Raises InputError.
    """
    files = _files(alphabet)
    key = (FORMAT, side, *(f"{file.parent.name}/{file.name}" for file in files), *versions(*files))
    content = cached(cache / f"omniglot-{alphabet.name}.pt", lambda: parse(alphabet, side), key)
    return content["image"], content["character"]


def parse(alphabet: Path, side: int) -> dict[str, Tensor]:
    """Return ``image [N, 1, side, side]`` (uint8) and ``character [N]`` (int64), ordered by file name.

    The files show black strokes on white. The result is inverted, 255 - value: bright strokes on 0. Raises InputError.
    """
    names = sorted(path.name for path in alphabet.glob("character*"))
    require(len(names) >= 2, f"{alphabet} has {len(names)} characters (folders character01, ...): it needs at least 2")
    files = _files(alphabet)
    character = torch.tensor([names.index(file.parent.name) for file in files], dtype=torch.int64)
    again = f"Delete {alphabet} and start again"
    image = torch.stack([255 - decode(file, (SIDE, SIDE), "L", again) for file in files])
    return {"image": reduced(image, side)[:, None], "character": character}


def _files(alphabet: Path) -> list[Path]:
    return sorted(alphabet.glob("character*/[!.]*.png"))


def reduced(images: Tensor, side: int) -> Tensor:
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
