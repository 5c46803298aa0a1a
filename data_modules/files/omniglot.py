"""Read Omniglot's drawings (Lake et al. 2015) in their official layout; fetch them if they are missing."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import Omniglot

from mtl.checks import InputError, require

from .cache import cached, locked, versions
from .download import fetch, place, unpacked

FORMAT = 1  # of the cache; increase it when the content changes
SIDE = 105
PARTS = ("images_background", "images_evaluation")


def prepare(folder: Path, wanted: Sequence[str], download: bool, base_url: str | None = None) -> None:
    """Put the alphabets ``wanted`` into ``folder``; do nothing if they are there. Raises InputError.

    Missing alphabets are looked up in one archive after the other, beginning with archives that are in ``folder``.
    """
    if not _missing(folder, wanted):
        return
    with locked(folder / ".fetch.lock", f"fetching Omniglot into {folder}"):
        for part in sorted(PARTS, key=lambda part: not (folder / f"{part}.zip").exists()):
            archive, missing = folder / f"{part}.zip", _missing(folder, wanted)
            if missing:
                url = f"{(base_url or Omniglot.download_url_prefix).rstrip('/')}/{archive.name}"
                md5, otherwise = Omniglot.zips_md5[part], f", or {_choose(folder)}"
                fetch(url, archive, f"md5:{md5}", download, folder / part / missing[0], otherwise)
                with unpacked(archive) as content:
                    require((content / part).is_dir(), f"{archive} contains no folder {part}: delete it, start again")
                    place(content / part, folder / part)
        missing = _missing(folder, wanted)
        require(not missing, f"data.alphabets: Omniglot has no {', '.join(missing)}; {_choose(folder)}")


def alphabets(folder: Path) -> dict[str, Path]:
    """Return the name and folder of each alphabet in ``folder``, sorted by name."""
    found = [path for part in PARTS for path in (folder / part).glob("[!.]*") if path.is_dir()]
    return {path.name: path for path in sorted(found, key=lambda path: path.name)}


def _missing(folder: Path, wanted: Iterable[str]) -> list[str]:
    there = alphabets(folder)
    return [name for name in wanted if name not in there]


def _choose(folder: Path) -> str:
    return f"choose data.alphabets among those in {folder}: {', '.join(alphabets(folder)) or 'none'}"


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
    empty = [name for name, count in zip(names, character.bincount(minlength=len(names)), strict=True) if not count]
    require(not empty, f"{alphabet} has no drawings (*.png) in {', '.join(empty)}: delete it and start again")
    image = torch.stack([255 - decode(file) for file in files])
    return {"image": reduced(image, side)[:, None], "character": character}


def _files(alphabet: Path) -> list[Path]:
    return sorted(alphabet.glob("character*/[!.]*.png"))


def decode(file: Path) -> Tensor:
    """Return the grey levels ``[105, 105]`` (uint8) of a file. Raises InputError."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise OSError("it is not a regular file")  # reading a pipe would never end
        with Image.open(file) as image:
            width, height = image.size
            if (width, height) == (SIDE, SIDE):
                return torch.from_numpy(np.array(image.convert("L")))
    except Exception as error:  # on damaged bytes the decoder can raise almost any exception
        raise InputError(f"{file} is damaged ({error}): delete {file.parents[1]} and start again") from error
    raise InputError(
        f"{file} has {height} x {width} pixels, Omniglot's drawings have {SIDE} x {SIDE}: delete {file.parents[1]} and "
        f"start again"
    )


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
