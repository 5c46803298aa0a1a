"""Decode CelebA's images. This is a module of its own so that the worker processes import little."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mtl.checks import InputError

HEIGHT, WIDTH = 218, 178
CHUNK = 16  # images per tensor sent by a worker: containers have little shared memory
FEW = 20_000  # up to this many images are decoded before workers would have started


def reduced(scale: int) -> tuple[int, int]:
    """Return height and width of the images at 1/``scale`` of full size, rounded up as in JPEG decoders."""
    return -(-HEIGHT // scale), -(-WIDTH // scale)


def decode(file: Path, scale: int) -> Tensor:
    """Return the image at 1/``scale`` of full size, ``[3, height, width]`` uint8. Raises InputError."""
    height, width = reduced(scale)
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise OSError("it is not a regular file")  # reading a pipe would never end
        with Image.open(file) as image:
            size = image.size
            if size == (WIDTH, HEIGHT):
                image.draft("RGB", (WIDTH // scale, HEIGHT // scale))  # scaled by the decoder: fast, no aliasing
                pixels = np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BOX))
                return torch.from_numpy(pixels.transpose(2, 0, 1).copy())
    except FileNotFoundError as error:
        raise InputError(
            f"{file} is missing: get img_align_celeba.zip again, delete {file.parent} and start again"
        ) from error
    except Exception as error:  # on damaged bytes the decoder can raise almost any exception
        raise InputError(f"{file} is damaged ({error}): unpack it from img_align_celeba.zip again") from error
    raise InputError(f"{file} has {size[1]} x {size[0]} pixels: aligned images of CelebA have {HEIGHT} x {WIDTH}")


class Chunks(Dataset[Tensor | str]):
    """Serve chunks of images, ``[<= CHUNK, 3, height, width]``, or the error message for a chunk with a bad image."""

    def __init__(self, files: Sequence[Path], scale: int) -> None:
        self.files, self.scale = [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)], scale

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor | str:
        try:
            # Tensors pass through shared memory; with arrays, a worker whose parent died would block on a full pipe
            return torch.stack([decode(file, self.scale) for file in self.files[index]])
        except InputError as error:
            return str(error)  # an exception raised in a worker would arrive with a traceback in its message


def decoded(files: Sequence[Path], scale: int, workers: int) -> Iterator[Tensor]:
    """Yield the images of ``files`` in order, as uint8 tensors ``[<= CHUNK, 3, height, width]``. Raises InputError."""
    loader = DataLoader(
        Chunks(files, scale),
        batch_size=None,
        num_workers=workers,
        generator=torch.Generator(),  # otherwise the loader would draw from the global generator
        multiprocessing_context="spawn" if workers else None,  # forking a process with threads can deadlock
    )
    try:
        for images in loader:
            if isinstance(images, str):
                raise InputError(images)
            yield images
    except RuntimeError as error:
        raise InputError(f"data.workers={workers}: {error}; try data.workers=0") from error


def decode_all(files: Sequence[Path], scale: int, workers: int) -> Tensor:
    """Return the images of ``files`` in order, ``[N, 3, height, width]`` uint8, decoded by ``workers`` processes."""
    images, done = torch.empty(len(files), 3, *reduced(scale), dtype=torch.uint8), 0
    columns = (TextColumn("decoding CelebA"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(files))
        for chunk in decoded(files, scale, workers if len(files) > FEW else 0):
            images[done : done + len(chunk)] = chunk
            done += len(chunk)
            bar.update(task, completed=done)
    return images
