"""Decode CelebA's images; apart from the lists, as the processes that decode have less to import then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mtl.types import InputError

HEIGHT, WIDTH = 218, 178
CHUNK = 16  # images that a worker hands over at a time: containers have little shared memory
FEW = 20_000  # images that are decoded sooner than the workers have started


def reduced(scale: int) -> tuple[int, int]:
    """Return height and width of the images at 1/``scale`` of their size, rounded up, as JPEG decoders do."""
    return -(-HEIGHT // scale), -(-WIDTH // scale)


def decode(file: Path, scale: int) -> Tensor:
    """Return ``[3, height, width]`` of uint8: an image at 1/``scale`` of its size. Raises ``InputError``."""
    height, width = reduced(scale)
    try:
        with Image.open(file) as image:
            size = image.size
            if size == (WIDTH, HEIGHT):
                image.draft("RGB", (WIDTH // scale, HEIGHT // scale))  # decoded small: less work, and no aliasing
                pixels = np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BOX))
                return torch.from_numpy(pixels.transpose(2, 0, 1).copy())
    except FileNotFoundError as error:
        raise InputError(
            f"{file} is missing: get img_align_celeba.zip again, delete {file.parent} and start again"
        ) from error
    except Exception as error:  # damaged bytes make the decoder raise nearly anything
        raise InputError(f"{file} is damaged ({error}): take it from img_align_celeba.zip again") from error
    raise InputError(f"{file} has {size[1]} x {size[0]} pixels: aligned images of CelebA have {HEIGHT} x {WIDTH}")


class Chunks(Dataset[Tensor | str]):
    """Serve the images of some files at a time, ``[<= CHUNK, 3, height, width]``, or what is wrong with one of them."""

    def __init__(self, files: Sequence[Path], scale: int) -> None:
        self.files, self.scale = [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)], scale

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> Tensor | str:
        try:
            # tensors, which pass through shared memory: a full pipe would hold a worker whose parent is gone
            return torch.stack([decode(file, self.scale) for file in self.files[place]])
        except InputError as error:
            return str(error)  # an exception comes out of a worker with a traceback in its message


def decoded(files: Sequence[Path], scale: int, workers: int) -> Iterator[Tensor]:
    """Yield the images of ``files`` in their order, in tensors ``[<= CHUNK, 3, height, width]`` of uint8."""
    loader = DataLoader(
        Chunks(files, scale),
        batch_size=None,
        num_workers=workers,
        generator=torch.Generator(),  # of its own: a loader draws a number, by default from the stream of the training
        multiprocessing_context="spawn" if workers else None,  # a fork of a process with threads may hang
    )
    try:
        for images in loader:
            if isinstance(images, str):
                raise InputError(images)
            yield images
    except RuntimeError as error:
        raise InputError(f"data.workers={workers}: {error}; try data.workers=0") from error


def decode_all(files: Sequence[Path], scale: int, workers: int) -> Tensor:
    """Return ``[N, 3, height, width]`` of uint8: the images of ``files`` in their order; ``workers`` decode them."""
    images, done = torch.empty(len(files), 3, *reduced(scale), dtype=torch.uint8), 0
    columns = (TextColumn("decoding CelebA"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(files))
        for chunk in decoded(files, scale, workers if len(files) > FEW else 0):
            images[done : done + len(chunk)] = chunk
            done += len(chunk)
            bar.update(task, completed=done)
    return images
